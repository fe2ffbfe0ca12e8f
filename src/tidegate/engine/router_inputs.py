"""Records what the routers of a model see over given tokens, in a temporary file.

T tokens, L MoE layers, K experts per token, D hidden, I = L + 1 inputs: the embedded tokens, then one a layer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.backends.base import F32Array, I32Array
from tidegate.engine.build import Runtime
from tidegate.engine.model import Model
from tidegate.models.decoder import Decoder
from tidegate.models.guesses import IdArray
from tidegate.models.weights import moe_weights

Array = NDArray[Any]
_LARGEST = 65504.0


class RouterInputs:
    """``input(i)`` is float32 [T, D]: for i = 0 the embedded tokens under the norm of the first router, for i = l + 1 what the
    router of MoE layer l saw. ``starts``: the row at which each piece of text begins."""

    def __init__(self, decoder: Decoder[Any], num_layers: int, width: int, folder: Path) -> None:
        self._decoder, self._num_layers, self._width = decoder, num_layers, width
        self._first_norm = moe_weights(decoder.weights)[0].norm
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by whoever made this)
        self._ids: list[Array] = []
        self._layers: list[tuple[F32Array, Array]] = []
        self._sequence = -1
        self._map: Array | None = None
        self.starts: list[int] = []
        self.num_rows = 0

    wants_hidden, wants_guesses = True, False

    def begin_step(self, sequence_T: I32Array, position_T: I32Array, token_T: I32Array) -> None:
        """As TraceWriter; one sequence at a time."""
        self._layers = []
        if sequence_T[0] != self._sequence:
            self._sequence = int(sequence_T[0])
            self.starts.append(self.num_rows)

    def record(self, topk_expert_ids_TK: I32Array, topk_weights_TK: F32Array, hidden_TD: F32Array | None) -> None:
        """As TraceWriter."""
        assert hidden_TD is not None
        self._layers.append((hidden_TD, topk_expert_ids_TK.astype(np.uint16)))

    def record_guess(self, layer: int, distance: int, ranked_TG: IdArray, margins_TG: F32Array | None) -> None:
        """Nobody wants them."""
        raise AssertionError

    def end_step(self) -> None:
        """The step went well."""
        hidden, ids = zip(*self._layers, strict=True)
        inputs_TID = np.stack([self._embedded(), *hidden], axis=1)
        np.clip(inputs_TID, -_LARGEST, _LARGEST).astype(np.float16).tofile(self._file)
        self._ids.append(np.stack(ids, axis=1))
        self.num_rows += len(inputs_TID)

    def chosen(self) -> Array:
        """uint16 [T, L, K]: what the routers chose."""
        return np.concatenate(self._ids)

    def input(self, index: int, rows: slice = slice(None)) -> F32Array:
        """See the class."""
        if self._map is None:
            self._file.flush()
            shape = (self.num_rows, self._num_layers + 1, self._width)
            self._map = np.memmap(self._file, np.float16, "r", shape=shape)
        found: F32Array = self._map[rows, index].astype(np.float32)
        return found

    def close(self) -> None:
        """The file is gone afterwards."""
        self._map = None
        self._file.close()

    def _embedded(self) -> F32Array:
        decoder, backend = self._decoder, self._decoder.backend
        mark = backend.mark()
        x = backend.embed(decoder.weights.embed, decoder.config.embedding_multiplier)
        out = backend.numpy(backend.norm(x, self._first_norm))
        backend.release(mark)
        return out


def record_inputs(model: Model, pieces: Sequence[list[int]], folder: Path) -> RouterInputs:
    """Compute every piece of text as a prompt of its own. The spool file is in ``folder``."""
    runtime: Runtime = model.runtime
    assert runtime.experts is not None
    config = runtime.config
    inputs = RouterInputs(runtime.decoder, config.num_moe_layers, config.hidden_size, folder)
    runtime.experts.trace = runtime.engine.trace = inputs
    try:
        for piece in pieces:
            model.generate(piece, max_tokens=1, ignore_eos=True)
    except BaseException:
        inputs.close()
        raise
    finally:
        runtime.experts.trace = runtime.engine.trace = None
    return inputs

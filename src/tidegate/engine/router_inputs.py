"""Records what gates see over given tokens, in a temporary file.

T tokens, L MoE layers, K experts per token, D hidden, I = 2 L inputs: two a layer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.backends.base import Backend
from tidegate.backends.operands import F32Array, I32Array
from tidegate.checkpoint.convert import Progress
from tidegate.engine.build import Runtime
from tidegate.engine.model import Model
from tidegate.models.guesses import Guess
from tidegate.models.weights import MoeWeights, moe_weights

Array = NDArray[Any]
_LARGEST = 65504.0


class RouterInputs:
    """``input(i)`` is float32 [T, D]: for i = 2 l the state at the start of MoE layer l, under the norm of its router, for
    i = 2 l + 1 what its router saw. ``starts``: the row at which each piece of text begins. It takes the places of the trace and
    of the guesser."""

    def __init__(self, backend: Backend[Any], layers: Sequence[MoeWeights], hidden_size: int, folder: Path) -> None:
        self._backend, self._layers, self._hidden_size = backend, layers, hidden_size
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by whoever made this)
        self._ids: list[Array] = []
        self._inputs: list[F32Array] = []
        self._chosen: list[Array] = []
        self._sequence = -1
        self._map: Array | None = None
        self.starts: list[int] = []
        self.num_rows = 0

    wants_hidden, wants_guesses = False, True
    width = 0

    def begin_step(self, sequence_T: I32Array, position_T: I32Array, token_T: I32Array) -> None:
        """As TraceWriter; one sequence at a time."""
        self._inputs, self._chosen = [], []
        if sequence_T[0] != self._sequence:
            self._sequence = int(sequence_T[0])
            self.starts.append(self.num_rows)

    def record(self, topk_expert_ids_TK: I32Array, topk_weights_TK: F32Array, hidden_TD: F32Array | None) -> None:
        """As TraceWriter."""
        self._chosen.append(topk_expert_ids_TK.astype(np.uint16))

    def record_guess(self, guess: Guess) -> None:
        """There are none."""
        raise AssertionError

    def at_start(self, layer: int, x: Any) -> None:
        """As Guesser."""
        mark = self._backend.mark()
        self._inputs.append(self._backend.numpy(self._backend.norm(x, self._layers[layer].norm)))
        self._backend.release(mark)

    def after_route(self, layer: int, x: Any, said_E: Any) -> None:
        """As Guesser."""
        self._inputs.append(self._backend.numpy(x))

    def sights(self, odds: Any, caches: Any) -> None:
        """As Guesser."""

    def end_step(self) -> None:
        """The step went well."""
        inputs_TID = np.stack(self._inputs, axis=1)
        np.clip(inputs_TID, -_LARGEST, _LARGEST).astype(np.float16).tofile(self._file)
        self._ids.append(np.stack(self._chosen, axis=1))
        self.num_rows += len(inputs_TID)

    def chosen(self) -> Array:
        """uint16 [T, L, K]: what the routers chose."""
        return np.concatenate(self._ids)

    def input(self, index: int, rows: slice = slice(None)) -> F32Array:
        """See the class."""
        if self._map is None:
            self._file.flush()
            shape = (self.num_rows, 2 * len(self._layers), self._hidden_size)
            self._map = np.memmap(self._file, np.float16, "r", shape=shape)
        found: F32Array = self._map[rows, index].astype(np.float32)
        return found

    def close(self) -> None:
        """The file is gone afterwards."""
        self._map = None
        self._file.close()


def record_inputs(
    model: Model, pieces: Sequence[list[int]], folder: Path, progress: Progress | None = None
) -> RouterInputs:
    """Compute every piece of text as a prompt of its own. The spool file is in ``folder``. ``progress`` is called with tokens
    done, tokens in total and nothing more."""
    runtime: Runtime = model.runtime
    experts, decoder = runtime.experts, runtime.decoder
    assert experts is not None
    inputs = RouterInputs(decoder.backend, moe_weights(decoder.weights), runtime.config.hidden_size, folder)
    guesser, experts.guesser = experts.guesser, inputs
    experts.trace = runtime.engine.trace = inputs
    done, total = 0, sum(map(len, pieces))
    try:
        for piece in pieces:
            model.generate(piece, max_tokens=1, ignore_eos=True)
            done += len(piece)
            if progress is not None:
                progress(done, total, "")
    except BaseException:
        inputs.close()
        raise
    finally:
        experts.trace = runtime.engine.trace = None
        experts.guesser = guesser
    return inputs

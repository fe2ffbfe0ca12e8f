"""Recorded routing: which experts every token used in every MoE layer. Format in docs/trace.md.

Legend: T tokens (rows), L MoE layers, K experts per token, R layers ahead, G guesses. Rows are in the order in which the
engine ran them; rows with the same ``step`` ran in one forward pass, so a layer's experts of a step are one atomic event of
the cache.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tidegate.errors import CorruptFile, UsageError

FORMAT_VERSION = 4
_READABLE = (1, 2, 3, 4)  # 1 has no guesses, those of 2 and 3 were made elsewhere, 1 and 2 have no fingerprint
CHUNK_ROWS, CHUNK_BYTES = 4096, 1 << 20  # whichever comes first
_LARGEST_MEMBER_BYTES = 1 << 30
_BROKEN = (ValueError, EOFError, OSError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error)
Array = NDArray[Any]


@dataclass(frozen=True)
class TraceMeta:
    """What a trace says about itself. ``expert_bytes`` (one packed expert) and ``fixed_bytes`` (all that was in memory beside
    expert slots and predictor) are 0 when unknown; ``sketch_dims`` is the width of the hidden-state sketches, ``guess_reach``
    how many guesses prefetch makes of each layer, both 0 for none; ``guess_width`` how many experts it names each time at most,
    ``guess_curves`` the odds that it started from, as Lookahead takes them; ``fingerprint``, that of the model's routers, is
    empty when unknown."""

    num_layers: int
    num_experts: int
    num_experts_per_tok: int
    source: str = ""
    expert_bytes: int = 0
    fixed_bytes: int = 0
    sketch_dims: int = 0
    guess_reach: int = 0
    guess_width: int = 0
    guess_curves: tuple[tuple[float, float, float], ...] = ()
    fingerprint: str = ""
    version: int = FORMAT_VERSION


@dataclass(frozen=True)
class TraceChunk:
    """Consecutive rows: step, sequence, position, token int32 [T]; experts uint8 or uint16 [T, L, K], in descending gate
    weight; weights float16 [T, L, K]; sketch float16 [T, L, sketch_dims], what each router saw, projected; guesses as experts
    [T, L, R, G], what prefetch took layer l to choose, best first, at its own start (r = 0) and a layer ahead (r = 1); margins
    float16 [T, L, R, G], as Backend.rank, NaN where there is no guess."""

    step: Array
    sequence: Array
    position: Array
    token: Array
    experts: Array
    weights: Array
    sketch: Array
    guesses: Array
    margins: Array


class RecordedGuess(Protocol):
    """models.guesses.Guess, as far as a trace knows it."""

    @property
    def layer(self) -> int: ...
    @property
    def distance(self) -> int: ...
    @property
    def experts_TG(self) -> Sequence[Sequence[int]]: ...  # noqa: N802
    @property
    def margins_TG(self) -> Sequence[Sequence[float]]: ...  # noqa: N802


_MEMBERS = tuple(item.name for item in fields(TraceChunk))
# Arrays that are there only if that number of the meta data is not 0.
_OPTIONAL = {"sketch": "sketch_dims", "guesses": "guess_reach", "margins": "guess_reach"}
_Rows = dict[str, Array]


def sketch_matrix(hidden_size: int, sketch_dims: int) -> NDArray[np.float32]:
    """float32 [D, sketch_dims]: the fixed random projection of every sketch; it keeps inner products on average."""
    values = np.random.default_rng(0).standard_normal((hidden_size, sketch_dims), dtype=np.float32)
    return values / np.float32(sketch_dims**0.5)


class Sketcher:
    """float16 [T, sketch_dims] of float32 [T, D]: what traces keep of a router's input."""

    def __init__(self, sketch_dims: int) -> None:
        self.sketch_dims = sketch_dims
        self._projection: Array | None = None

    def __call__(self, hidden_TD: Array) -> Array:
        if self._projection is None:
            self._projection = sketch_matrix(hidden_TD.shape[1], self.sketch_dims)
        sketch: Array = (hidden_TD @ self._projection).astype(np.float16)
        return sketch


def take_sketch_memory(sketch_dims: int) -> None:
    """What numpy takes once for random numbers and products, now: a plan that is made afterwards finds it in the process."""
    Sketcher(sketch_dims)(np.zeros((256, 1024), np.float32))


class TraceWriter:
    """Streams a trace to ``path``: chunks of CHUNK_ROWS rows or CHUNK_BYTES as members of a zip file, so memory stays bounded; it
    comes out of the plan's headroom.

    Call ``begin_step`` once a forward pass, ``record`` once a MoE layer in order, ``record_guess`` in between, ``end_step``; a
    step that failed is forgotten when the next one begins. The file appears under its name only on ``close``; until then it is
    ``<path>.partial``. ``categories`` may name the kind of text of a sequence.
    """

    def __init__(self, path: Path, meta: TraceMeta) -> None:
        self.path, self.meta = path, meta
        self.categories: dict[int, str] = {}
        self._partial = path.with_name(path.name + ".partial")
        self._zip = zipfile.ZipFile(self._partial, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        self._expert_dtype = np.uint8 if meta.num_experts <= 256 else np.uint16
        self._done: list[_Rows] = []
        self._step: _Rows = {}
        self._num_layers = 0  # that were recorded of the step
        self._sketcher = Sketcher(meta.sketch_dims)
        self._num_rows = self._num_bytes = self._num_steps = self._num_chunks = 0

    @property
    def wants_hidden(self) -> bool:
        """Whether ``record`` needs what the routers see."""
        return self.meta.sketch_dims > 0

    @property
    def wants_guesses(self) -> bool:
        """Whether ``record_guess`` is to be called."""
        return self.meta.guess_reach > 0

    def begin_step(self, sequence_T: Array, position_T: Array, token_T: Array) -> None:
        """Rows of the forward pass that starts now (copied)."""
        columns = {"sequence": sequence_T, "position": position_T, "token": token_T}
        meta, shape = self.meta, (len(token_T), self.meta.num_layers)
        guessed = (*shape, meta.guess_reach, meta.guess_width)
        self._num_layers = 0
        self._step = {
            "step": np.full(len(token_T), self._num_steps, np.int32),
            **{name: np.array(values, np.int32) for name, values in columns.items()},
            "experts": np.empty((*shape, meta.num_experts_per_tok), self._expert_dtype),
            "weights": np.empty((*shape, meta.num_experts_per_tok), np.float16),
            "sketch": np.empty((*shape, meta.sketch_dims), np.float16),
            "guesses": np.zeros(guessed, self._expert_dtype),
            "margins": np.full(guessed, np.nan, np.float16),
        }

    def record(self, topk_expert_ids_TK: Array, topk_weights_TK: Array, hidden_TD: Array | None = None) -> None:
        """Routing of the next MoE layer of the current step, and what its router saw (all copied)."""
        step, layer = self._step, self._num_layers
        step["experts"][:, layer], step["weights"][:, layer] = topk_expert_ids_TK, topk_weights_TK
        if self.wants_hidden:
            assert hidden_TD is not None
            step["sketch"][:, layer] = self._sketcher(hidden_TD)
        self._num_layers += 1

    def record_guess(self, guess: RecordedGuess) -> None:
        """What prefetch takes a layer to choose (copied)."""
        width = len(guess.experts_TG[0])
        self._step["guesses"][:, guess.layer, guess.distance, :width] = guess.experts_TG
        self._step["margins"][:, guess.layer, guess.distance, :width] = guess.margins_TG

    def end_step(self) -> None:
        """Close the step; writes a chunk when enough rows have come together."""
        assert self._num_layers == self.meta.num_layers, (self._num_layers, self.meta.num_layers)
        self._add(self._step)
        self._num_steps += 1

    def extend(self, chunk: TraceChunk) -> None:
        """Rows that are known already, whole steps that number on from the ones before."""
        self._add({name: getattr(chunk, name) for name in _MEMBERS})
        self._num_steps = int(chunk.step[-1]) + 1

    def close(self) -> None:
        """Write what is left and give the file its name."""
        if self._num_rows:
            self._flush()
        data = {**asdict(self.meta), "chunks": self._num_chunks, "categories": self.categories}
        self._zip.writestr("meta.json", json.dumps(data))
        self._zip.close()
        self._partial.replace(self.path)

    def discard(self) -> None:
        """Close without leaving anything behind."""
        self._zip.close()
        self._partial.unlink(missing_ok=True)

    def _add(self, rows: _Rows) -> None:
        self._done.append(rows)
        self._num_rows += len(rows["step"])
        self._num_bytes += sum(values.nbytes for values in rows.values())
        if self._num_rows >= CHUNK_ROWS or self._num_bytes >= CHUNK_BYTES:
            self._flush()

    def _flush(self) -> None:
        for name in _members(self.meta):
            with self._zip.open(f"{self._num_chunks:05d}/{name}.npy", "w") as member:
                parts = [np.ascontiguousarray(rows[name]) for rows in self._done]
                kind, shape = parts[0].dtype, (sum(map(len, parts)), *parts[0].shape[1:])
                header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(member, header)
                for part in parts:  # as write_array would, which makes copies of it all
                    member.write(part.data)
        self._num_chunks += 1
        self._num_rows, self._num_bytes, self._done = 0, 0, []


def _members(meta: TraceMeta) -> list[str]:
    """The arrays of every chunk."""
    return [name for name in _MEMBERS if name not in _OPTIONAL or getattr(meta, _OPTIONAL[name])]


class TraceReader:
    """Reads a trace chunk by chunk. Raises CorruptFile naming the member for anything that is not what it should be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
            data = json.loads(self._zip.read("meta.json"))
            self._num_chunks = int(data.pop("chunks"))
            self.categories = {int(key): str(name) for key, name in data.pop("categories", {}).items()}
            version = data.get("version")
        except FileNotFoundError:
            raise UsageError(f"{path}: no such trace") from None
        except (KeyError, AttributeError, *_BROKEN) as error:
            raise CorruptFile(path, 0, "not a complete trace", "a zip with meta.json", error) from None
        if version not in _READABLE:
            self.close()
            raise CorruptFile(
                path, 0, "trace version", " or ".join(map(str, _READABLE)), f"{version} (written by another Tidegate?)"
            )
        if version in (2, 3):
            data.update(guess_reach=0, guess_width=0, guess_curves=())
        try:
            curves = tuple((float(a), float(b), float(c)) for a, b, c in data.pop("guess_curves", ()))
            self.meta = TraceMeta(**data, guess_curves=curves)
            self._check_meta()
        except (TypeError, ValueError) as error:
            self.close()
            raise CorruptFile(path, 0, "meta.json", [item.name for item in fields(TraceMeta)], error) from None

    def __iter__(self) -> Iterator[TraceChunk]:
        for index in range(self._num_chunks):
            yield self._chunk(index)

    def close(self) -> None:
        self._zip.close()

    def _check_meta(self) -> None:
        """A shape that no model has would make whoever reads on allocate without bound."""
        meta = self.meta
        limits = {
            "num_layers": (1, 1024), "num_experts": (1, 65536), "num_experts_per_tok": (1, meta.num_experts),
            "sketch_dims": (0, 65536), "guess_reach": (0, 8), "guess_width": (0, meta.num_experts),
            "expert_bytes": (0, 1 << 50), "fixed_bytes": (0, 1 << 50),
        }  # fmt: skip
        for name, (low, high) in limits.items():
            value = getattr(meta, name)
            if not isinstance(value, int) or not low <= value <= high:
                self.close()
                raise CorruptFile(self.path, 0, f"{name} in meta.json", f"{low} to {high}", value)

    def _chunk(self, index: int) -> TraceChunk:
        meta = self.meta
        columns = {name: self._member(f"{index:05d}/{name}.npy") for name in _members(meta)}
        rows, layers, top = len(columns["step"]), meta.num_layers, meta.num_experts_per_tok
        shapes: dict[str, tuple[int, ...]] = {
            "experts": (rows, layers, top), "weights": (rows, layers, top), "sketch": (rows, layers, meta.sketch_dims),
            "guesses": (rows, layers, meta.guess_reach, meta.guess_width),
            "margins": (rows, layers, meta.guess_reach, meta.guess_width),
        }  # fmt: skip
        for name, values in columns.items():
            wanted = shapes.get(name, (rows,))
            if values.shape != wanted:
                raise CorruptFile(self.path, 0, f"shape of {index:05d}/{name}", wanted, values.shape)
        for name in ("experts", "guesses"):
            largest = int(columns[name].max(initial=0)) if name in columns else 0
            if largest >= meta.num_experts:
                raise CorruptFile(self.path, 0, f"expert id in {index:05d}/{name}", f"< {meta.num_experts}", largest)
        for name in set(_OPTIONAL).difference(columns):
            columns[name] = np.empty(shapes[name], columns["experts" if name == "guesses" else "weights"].dtype)
        return TraceChunk(**columns)

    def _member(self, name: str) -> Array:
        try:
            info = self._zip.getinfo(name)
            if info.file_size > _LARGEST_MEMBER_BYTES:
                raise CorruptFile(self.path, info.header_offset, name, f"<= {_LARGEST_MEMBER_BYTES}", info.file_size)
            data = io.BytesIO(self._zip.read(info))
            np.lib.format.read_magic(data)
            shape, _, dtype = np.lib.format.read_array_header_1_0(data)
            array: Array = np.frombuffer(data.getbuffer()[data.tell() :], dtype).reshape(shape)
        except (KeyError, *_BROKEN) as error:
            raise CorruptFile(self.path, 0, f"member {name}", "a complete array", error) from None
        return array

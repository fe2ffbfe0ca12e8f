"""Recorded routing: which experts every token used in every MoE layer. Format in docs/trace.md.

Legend: T tokens (rows), L MoE layers, K experts per token. Rows are in the order in which the engine ran them; rows
with the same ``step`` ran in one forward pass, so a layer's experts of a step are one atomic event of the cache.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.errors import CorruptFile, UsageError

FORMAT_VERSION = 1
CHUNK_ROWS = 4096
_LARGEST_MEMBER_BYTES = 1 << 30
_BROKEN = (ValueError, EOFError, OSError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error)
Array = NDArray[Any]


@dataclass(frozen=True)
class TraceMeta:
    """What a trace says about itself: the model's shape and free-form origin."""

    num_layers: int
    num_experts: int
    num_experts_per_tok: int
    source: str = ""
    version: int = FORMAT_VERSION


@dataclass(frozen=True)
class TraceChunk:
    """Consecutive rows: step, sequence, position, token int32 [T]; experts uint8 or uint16 [T, L, K], in descending gate
    weight; weights float16 [T, L, K]."""

    step: Array
    sequence: Array
    position: Array
    token: Array
    experts: Array
    weights: Array


_MEMBERS = tuple(item.name for item in fields(TraceChunk))


@dataclass
class _Buffer:
    """Rows not yet written, as lists of arrays."""

    rows: int = 0
    columns: dict[str, list[Array]] = field(default_factory=lambda: {name: [] for name in _MEMBERS})


class TraceWriter:
    """Streams a trace to ``path``: chunks of CHUNK_ROWS rows as members of a zip file, so memory stays bounded.

    Call ``begin_step`` once a forward pass, ``record`` once a MoE layer in order, ``end_step``. The file appears under its
    name only on ``close``; until then it is ``<path>.partial``.
    """

    def __init__(self, path: Path, meta: TraceMeta) -> None:
        self.path, self.meta = path, meta
        self._partial = path.with_name(path.name + ".partial")
        self._zip = zipfile.ZipFile(self._partial, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        self._buffer = _Buffer()
        self._step = self._chunks = 0
        self._layers: list[tuple[Array, Array]] = []
        self._expert_dtype = np.uint8 if meta.num_experts <= 256 else np.uint16

    def begin_step(self, sequence_T: Array, position_T: Array, token_T: Array) -> None:
        """Rows of the forward pass that starts now."""
        columns = self._buffer.columns
        columns["step"].append(np.full(len(token_T), self._step, np.int32))
        for name, values in (("sequence", sequence_T), ("position", position_T), ("token", token_T)):
            columns[name].append(np.asarray(values, np.int32).copy())
        self._layers.clear()

    def record(self, topk_expert_ids_TK: Array, topk_weights_TK: Array) -> None:
        """Routing of the next MoE layer of the current step (copied)."""
        self._layers.append((topk_expert_ids_TK.astype(self._expert_dtype), topk_weights_TK.astype(np.float16)))

    def end_step(self) -> None:
        """Close the step; writes a chunk when enough rows have come together."""
        assert len(self._layers) == self.meta.num_layers, (len(self._layers), self.meta.num_layers)
        columns = self._buffer.columns
        columns["experts"].append(np.stack([ids for ids, _ in self._layers], axis=1))
        columns["weights"].append(np.stack([weights for _, weights in self._layers], axis=1))
        self._buffer.rows += len(columns["step"][-1])
        self._step += 1
        if self._buffer.rows >= CHUNK_ROWS:
            self._flush()

    def close(self) -> None:
        """Write what is left and give the file its name."""
        if self._buffer.rows:
            self._flush()
        self._zip.writestr("meta.json", json.dumps({**self.meta.__dict__, "chunks": self._chunks}))
        self._zip.close()
        self._partial.replace(self.path)

    def discard(self) -> None:
        """Close without leaving anything behind."""
        self._zip.close()
        self._partial.unlink(missing_ok=True)

    def _flush(self) -> None:
        for name, parts in self._buffer.columns.items():
            with self._zip.open(f"{self._chunks:05d}/{name}.npy", "w") as member:
                np.lib.format.write_array(member, np.concatenate(parts), allow_pickle=False)
        self._chunks += 1
        self._buffer = _Buffer()


class TraceReader:
    """Reads a trace chunk by chunk. Raises CorruptFile naming the member for anything that is not what it should be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
            data = json.loads(self._zip.read("meta.json"))
            self._num_chunks = int(data.pop("chunks"))
            version = data.get("version")
        except FileNotFoundError:
            raise UsageError(f"{path}: no such trace") from None
        except (KeyError, AttributeError, *_BROKEN) as error:
            raise CorruptFile(path, 0, "not a complete trace", "a zip with meta.json", error) from None
        if version != FORMAT_VERSION:
            self.close()
            raise CorruptFile(path, 0, "trace version", FORMAT_VERSION, f"{version} (written by another Tidegate?)")
        try:
            self.meta = TraceMeta(**data)
        except TypeError as error:
            self.close()
            raise CorruptFile(path, 0, "meta.json", [item.name for item in fields(TraceMeta)], error) from None

    def __iter__(self) -> Iterator[TraceChunk]:
        for index in range(self._num_chunks):
            yield self._chunk(index)

    def close(self) -> None:
        self._zip.close()

    def _chunk(self, index: int) -> TraceChunk:
        columns = {name: self._member(f"{index:05d}/{name}.npy") for name in _MEMBERS}
        rows = len(columns["step"])
        shape = (rows, self.meta.num_layers, self.meta.num_experts_per_tok)
        for name, values in columns.items():
            wanted = shape if name in ("experts", "weights") else (rows,)
            if values.shape != wanted:
                raise CorruptFile(self.path, 0, f"shape of {index:05d}/{name}", wanted, values.shape)
        if rows and int(columns["experts"].max()) >= self.meta.num_experts:
            raise CorruptFile(
                self.path, 0, f"expert id in chunk {index}", f"< {self.meta.num_experts}", columns["experts"].max()
            )
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


def import_arrays(
    path: Path, experts_TLK: Array, offsets: Array, num_experts: int, weights_TLK: Array | None = None,
    token_T: Array | None = None, source: str = "",
) -> None:  # fmt: skip
    """Write a trace from plain arrays: one token a step, sequence i = rows offsets[i]:offsets[i+1]."""
    rows, layers, top = experts_TLK.shape
    if offsets[0] != 0 or offsets[-1] != rows or (np.diff(offsets) < 0).any():
        raise UsageError(f"offsets must rise from 0 to the number of rows, {rows:,}")
    writer = TraceWriter(path, TraceMeta(layers, num_experts, top, source))
    sequence = np.repeat(np.arange(len(offsets) - 1, dtype=np.int32), np.diff(offsets))
    position = (np.arange(rows) - np.asarray(offsets)[sequence]).astype(np.int32)
    token = np.zeros(rows, np.int32) if token_T is None else token_T
    weights = np.zeros(experts_TLK.shape, np.float16) if weights_TLK is None else weights_TLK
    for row in range(rows):
        one = slice(row, row + 1)
        writer.begin_step(sequence[one], position[one], token[one])
        for layer in range(layers):
            writer.record(experts_TLK[one, layer], weights[one, layer])
        writer.end_step()
    writer.close()

"""Where a weight comes from: parts of checkpoint tensors, stacked into one matrix [N, K] that can be read by rows.

models/families.py maps every tensor of checkpoint/inventory.py and every expert to a ``Source``; the converter reads
them. N rows (outputs), K columns (inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Protocol, TypeVar

import numpy as np

from tidegate.checkpoint.base import Checkpoint, Codes, F32Array
from tidegate.errors import BadTensor
from tidegate.quant.formats import Format

Span = tuple[int, int | None, int]  # start, stop (None: the end), step
ALL: Span = (0, None, 1)
_Piece = TypeVar("_Piece")


@dataclass(frozen=True)
class Part:
    """A rectangle of one tensor. In this order: ``index`` picks one entry of the first axis (an expert of a stacked
    tensor); what is left is a matrix, its leading axes flattened (a vector [n] is [n, 1]); ``rows`` and ``cols`` cut
    it; ``transpose`` swaps the two.

    Examples:
    gate of a fused [E, 2F, D]                              ``Part(t, index=e, rows=(0, F, 1))``
    gate of gpt-oss's interleaved, transposed [E, D, 2F]    ``Part(t, index=e, cols=(0, None, 2), transpose=True)``
    the same from MXFP4 [E, 2F, D], and its bias [E, 2F]    ``Part(t, index=e, rows=(0, None, 2))``
    k_up of head h from kv_b [H*(nope+v), kv_lora]          ``Part(t, rows=(h*(nope+v), h*(nope+v)+nope, 1), transpose=True)``
    """

    tensor: str
    index: int | None = None
    rows: Span = ALL
    cols: Span = ALL
    transpose: bool = False

    def shape(self, checkpoint: Checkpoint) -> tuple[int, int]:
        """[N, K] of this part. Raises BadTensor if the tensor is missing or smaller than the part."""
        rows, cols = self._ranges(checkpoint)
        return (len(cols), len(rows)) if self.transpose else (len(rows), len(cols))

    def read_f32(self, checkpoint: Checkpoint, start: int, stop: int) -> F32Array:
        """Rows ``start:stop`` of this part, float32 [stop - start, K]."""
        rows, cols = self._ranges(checkpoint)
        if self.transpose:
            cols = cols[start:stop]
        else:
            rows = rows[start:stop]
        first, last = self._base_rows(checkpoint, rows)
        block = checkpoint.read_f32(self.tensor, first, last)
        if self._is_vector_entry(checkpoint):
            block = block.reshape(-1, 1)[rows.start : rows.stop]
        block = block[:: rows.step, cols.start : cols.stop : cols.step]
        return np.ascontiguousarray(block.T if self.transpose else block)

    def native_format(self, checkpoint: Checkpoint) -> Format | None:
        """The format in which the source's own codes can be taken over: whole rows only, not transposed."""
        if self.transpose or self.cols != ALL or self._is_vector_entry(checkpoint):
            return None
        return checkpoint.native_format(self.tensor)

    def read_codes(self, checkpoint: Checkpoint, start: int, stop: int) -> Codes:
        """Rows ``start:stop`` of this part as codes of ``native_format``, which must not be None."""
        rows = self._ranges(checkpoint)[0][start:stop]
        codes, scales, mins = checkpoint.read_codes(self.tensor, *self._base_rows(checkpoint, rows))
        step = rows.step
        return codes[::step], scales[::step], None if mins is None else mins[::step]

    def _is_vector_entry(self, checkpoint: Checkpoint) -> bool:
        return self.index is not None and len(checkpoint.tensors[self.tensor].shape) == 2

    def _ranges(self, checkpoint: Checkpoint) -> tuple[range, range]:
        """Rows and columns of the indexed matrix that the part covers."""
        info = checkpoint.tensors.get(self.tensor)
        if info is None:
            raise BadTensor(f"{checkpoint.path}: tensor {self.tensor} is missing")
        shape = info.shape
        if self.index is not None:
            if len(shape) < 2 or self.index >= shape[0]:
                raise BadTensor(f"{info.path}: {self.tensor} has shape {list(shape)}, entry {self.index} is needed")
            shape = shape[1:]
        n, k = (shape[0], 1) if len(shape) == 1 else (prod(shape[:-1]), shape[-1])
        for axis, (start, stop, _), size in (("rows", self.rows, n), ("columns", self.cols, k)):
            if start > size or (stop is not None and stop > size):
                raise BadTensor(f"{info.path}: {self.tensor} has {size} {axis}, {start}:{stop} are needed")
        return range(n)[slice(*self.rows)], range(k)[slice(*self.cols)]

    def _base_rows(self, checkpoint: Checkpoint, rows: range) -> tuple[int, int]:
        """Rows of the whole tensor, as Checkpoint counts them, from the first to behind the last of ``rows``."""
        if self._is_vector_entry(checkpoint):
            assert self.index is not None
            return self.index, self.index + 1
        base = (self.index or 0) * prod(checkpoint.tensors[self.tensor].shape[1:-1])
        return (base + rows[0], base + rows[-1] + 1) if rows else (base, base)


@dataclass(frozen=True)
class Source:
    """Parts stacked along rows. All parts have the same K."""

    parts: tuple[Part, ...]

    @staticmethod
    def of(*parts: Part | str) -> Source:
        """A source of parts; a plain name is the whole tensor."""
        return Source(tuple(Part(part) if isinstance(part, str) else part for part in parts))

    def shape(self, checkpoint: Checkpoint) -> tuple[int, int]:
        """[N, K]. Raises BadTensor if a tensor is missing, too small, or the parts disagree in K."""
        shapes = [part.shape(checkpoint) for part in self.parts]
        if len({k for _, k in shapes}) != 1:
            names = ", ".join(f"{part.tensor} {list(shape)}" for part, shape in zip(self.parts, shapes, strict=True))
            raise BadTensor(f"{checkpoint.path}: parts of one matrix disagree in their inputs: {names}")
        return sum(n for n, _ in shapes), shapes[0][1]

    def read_f32(self, checkpoint: Checkpoint, start: int = 0, stop: int | None = None) -> F32Array:
        """Rows ``start:stop`` as float32 [stop - start, K]."""
        pieces = list(self._pieces(checkpoint, start, stop, lambda part, i, j: part.read_f32(checkpoint, i, j)))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def native_format(self, checkpoint: Checkpoint) -> Format | None:
        """The one format in which all parts can hand over their own codes, or None."""
        formats = {part.native_format(checkpoint) for part in self.parts}
        return formats.pop() if len(formats) == 1 else None

    def read_codes(self, checkpoint: Checkpoint, start: int = 0, stop: int | None = None) -> Codes:
        """Rows ``start:stop`` as codes, scales, minima of ``native_format``, which must not be None."""
        pieces = list(self._pieces(checkpoint, start, stop, lambda part, i, j: part.read_codes(checkpoint, i, j)))
        if len(pieces) == 1:
            return pieces[0]
        mins = [piece[2] for piece in pieces if piece[2] is not None]
        return (
            np.concatenate([piece[0] for piece in pieces]),
            np.concatenate([piece[1] for piece in pieces]),
            np.concatenate(mins) if mins else None,
        )

    def _pieces(
        self, checkpoint: Checkpoint, start: int, stop: int | None, read: Callable[[Part, int, int], _Piece]
    ) -> Iterator[_Piece]:
        n = self.shape(checkpoint)[0]
        stop = n if stop is None else stop
        assert 0 <= start <= stop <= n
        offset = 0
        for part in self.parts:
            rows = part.shape(checkpoint)[0]
            i, j = max(start - offset, 0), min(stop - offset, rows)
            if i < j:
                yield read(part, i, j)
            offset += rows


@dataclass(frozen=True)
class ExpertSources:
    """One expert: gate [F, D], up [F, D], down [D, F], and its biases [F, 1], [F, 1], [D, 1] where the model has them."""

    gate: Source
    up: Source
    down: Source
    gate_bias: Source | None = None
    up_bias: Source | None = None
    down_bias: Source | None = None


class WeightMap(Protocol):
    """models.families.weight_map(checkpoint, config) makes one. Both methods only build descriptions; nothing is read."""

    def dense(self, name: str) -> Source:
        """The source of a tensor of ``inventory.dense_tensors``. Its [N, K], reshaped, is the inventory's shape."""

    def expert(self, layer: int, expert: int) -> ExpertSources:
        """The sources of one routed expert; ``layer`` counts MoE layers from 0, as in ExpertKey."""

"""From a source to packed bytes, in blocks of rows small enough to bound memory. N rows, K inputs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tidegate.checkpoint.base import ByteArray, Checkpoint
from tidegate.checkpoint.convert.plan import Piece
from tidegate.errors import BadTensor
from tidegate.quant import native
from tidegate.quant.formats import PANEL_ROWS
from tidegate.units import align_up

BLOCK_WEIGHTS = 2 << 20  # weights in flight at a time, in each thread


def row_blocks(piece: Piece, checkpoint: Checkpoint) -> Iterator[tuple[int, int, int]]:
    """(start row, stop row, offset of their bytes in the piece). Blocks are whole panels; a transposed part, which has to
    be read whole, is not cut."""
    rows = max(PANEL_ROWS, BLOCK_WEIGHTS // max(piece.k, 1) // PANEL_ROWS * PANEL_ROWS)
    for part in piece.source.parts:
        if part.transpose:
            rows = max(rows, align_up(part.shape(checkpoint)[0], PANEL_ROWS))
    for start in range(0, piece.n, rows):
        before_bytes = piece.fmt.packed_bytes(start, piece.k) if piece.fmt else 4 * start * piece.k
        yield start, min(start + rows, piece.n), before_bytes


def pack_rows(piece: Piece, checkpoint: Checkpoint, start: int, stop: int) -> ByteArray:
    """Packed bytes of some rows of a piece: the source's own codes where the format is theirs, else quantized from float32.

    Raises BadTensor if a weight is not finite, and what reading raises.
    """
    if piece.fmt is not None and piece.fmt == piece.source.native_format(checkpoint):
        return native.pack_codes(*piece.source.read_codes(checkpoint, start, stop), piece.fmt)
    w_NK = piece.source.read_f32(checkpoint, start, stop)
    if not np.isfinite(w_NK).all():
        tensors = ", ".join(dict.fromkeys(part.tensor for part in piece.source.parts))
        raise BadTensor(f"{checkpoint.path}: {tensors} holds a weight that is not finite, in rows {start}:{stop}")
    if piece.fmt is None:
        return w_NK.reshape(-1).view(np.uint8)
    return native.pack(w_NK, piece.fmt)

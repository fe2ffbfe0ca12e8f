"""GGUF's block formats in numpy: dequantization, and repacking into the formats of quant/formats.py.

Every quantized type is read the same way: a block becomes integer codes, a scale per group of G weights and, for some, a
minimum per group, with the code offset of the target format, so that w = scale * (code - offset) + minimum. That one
decoding serves both uses: ``dequantize`` (float32 arithmetic in ggml's order, bit for bit what ``gguf.quants`` makes) and
``codes`` (the codes unchanged, scales and minima rounded to float16).

| GGUF | target | what is lost |
|---|---|---|
| Q4_0, Q5_0, Q8_0 | int4-g32, int8-g32, int8-g32 | nothing |
| Q4_1, Q5_1 | int4-g32-min, int8-g32-min | nothing |
| MXFP4 | mxfp4-g32 | nothing for scales 2^-24 ... 2^15; smaller ones are rounded (below 2^-24 absolute), larger ones refused |
| Q4_K, Q5_K | int4-g32-min, int8-g32-min | float16 rounding of d*scale and dmin*min |
| Q6_K, Q3_K | int8-g16, int4-g16 | float16 rounding of d*scale |
| Q2_K | int4-g16-min | float16 rounding of d*scale and dmin*min |

B blocks, b bytes of a block, N rows, K columns, G group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidegate.errors import BadTensor
from tidegate.quant.formats import MXFP4_VALUES, Format

ByteArray = NDArray[np.uint8]
F16Array = NDArray[np.float16]
F32Array = NDArray[np.float32]
Decoded = tuple[ByteArray, F32Array, F32Array | None]


@dataclass(frozen=True)
class BlockType:
    """A GGUF tensor type: ``weights`` numbers in ``nbytes`` bytes. ``decode`` and ``fmt`` only for those we repack."""

    weights: int
    nbytes: int
    decode: Callable[[ByteArray], Decoded] | None = None
    fmt: Format | None = None


def _f16(blocks_Bb: ByteArray, start: int, count: int = 1) -> F32Array:
    """float32 [B, count] of the float16 numbers at byte ``start`` of every block."""
    return np.ascontiguousarray(blocks_Bb[:, start : start + 2 * count]).view(np.float16).astype(np.float32)


def _planes(packed_Bb: ByteArray, bits: int, run: int) -> ByteArray:
    """Unpack ``bits``-wide fields: runs of ``run`` bytes hold run*8/bits values, lowest bits first across the run."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    blocks, nbytes = packed_Bb.shape
    runs = packed_Bb.reshape(blocks, nbytes // run, 1, run)
    return ((runs >> shifts) & np.uint8((1 << bits) - 1)).reshape(blocks, nbytes * 8 // bits)


def _fifth_bit(blocks_Bb: ByteArray, start: int) -> ByteArray:
    """[B, 32] of 0 or 16 from 32 bits stored as four little-endian bytes."""
    bits = np.unpackbits(np.ascontiguousarray(blocks_Bb[:, start : start + 4]), axis=1, bitorder="little")
    return bits << np.uint8(4)


def _q4_0(b: ByteArray) -> Decoded:
    return _planes(b[:, 2:], 4, 16), _f16(b, 0), None


def _q4_1(b: ByteArray) -> Decoded:
    return _planes(b[:, 4:], 4, 16), _f16(b, 0), _f16(b, 2)


def _q5_0(b: ByteArray) -> Decoded:
    return (_planes(b[:, 6:], 4, 16) | _fifth_bit(b, 2)) + np.uint8(128 - 16), _f16(b, 0), None


def _q5_1(b: ByteArray) -> Decoded:
    return _planes(b[:, 8:], 4, 16) | _fifth_bit(b, 4), _f16(b, 0), _f16(b, 2)


def _q8_0(b: ByteArray) -> Decoded:
    return b[:, 2:] ^ np.uint8(128), _f16(b, 0), None


def _q2_k(b: ByteArray) -> Decoded:
    scales = _f16(b, 80) * (b[:, :16] & 15).astype(np.float32)
    mins = _f16(b, 82) * (b[:, :16] >> 4).astype(np.float32)
    return _planes(b[:, 16:80], 2, 32), scales, -mins


def _q3_k(b: ByteArray) -> Decoded:
    high_bits, low_bits, packed = _planes(b[:, :32], 1, 32), _planes(b[:, 32:96], 2, 32), b[:, 96:108]
    six_bits = _planes(packed[:, :8], 4, 8) | (_planes(packed[:, 8:], 2, 4) << np.uint8(4))
    scales = _f16(b, 108) * (six_bits.astype(np.float32) - np.float32(32))
    return (low_bits | (high_bits << np.uint8(2))) + np.uint8(8 - 4), scales, None


def _k_scales_mins(packed_B12: ByteArray) -> tuple[F32Array, F32Array]:
    """The eight 6-bit scales and minima of Q4_K and Q5_K: bytes 0-3 and 4-7 hold the low six bits of the first four
    and, in their top two bits, the high bits of the last four, whose low nibbles are in bytes 8-11."""
    first, second, rest = packed_B12[:, :4], packed_B12[:, 4:8], packed_B12[:, 8:]
    scales = np.concatenate([first & 63, (rest & 15) | ((first >> 2) & 48)], axis=1)
    mins = np.concatenate([second & 63, (rest >> 4) | ((second >> 2) & 48)], axis=1)
    return scales.astype(np.float32), mins.astype(np.float32)


def _q4_k(b: ByteArray) -> Decoded:
    scales, mins = _k_scales_mins(b[:, 4:16])
    return _planes(b[:, 16:], 4, 32), _f16(b, 0) * scales, -(_f16(b, 2) * mins)


def _q5_k(b: ByteArray) -> Decoded:
    scales, mins = _k_scales_mins(b[:, 4:16])
    codes = _planes(b[:, 48:], 4, 32) | (_planes(b[:, 16:48], 1, 32) << np.uint8(4))
    return codes, _f16(b, 0) * scales, -(_f16(b, 2) * mins)


def _q6_k(b: ByteArray) -> Decoded:
    codes = _planes(b[:, :128], 4, 64) | (_planes(b[:, 128:192], 2, 32) << np.uint8(4))
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return codes + np.uint8(128 - 32), _f16(b, 208) * scales, None


def _mxfp4(b: ByteArray) -> Decoded:
    return _planes(b[:, 1:], 4, 16), np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128), None


BLOCK_TYPES: dict[str, BlockType] = {
    "F32": BlockType(1, 4),
    "F16": BlockType(1, 2),
    "BF16": BlockType(1, 2),
    "Q4_0": BlockType(32, 18, _q4_0, Format("int4", 32)),
    "Q4_1": BlockType(32, 20, _q4_1, Format("int4", 32, True)),
    "Q5_0": BlockType(32, 22, _q5_0, Format("int8", 32)),
    "Q5_1": BlockType(32, 24, _q5_1, Format("int8", 32, True)),
    "Q8_0": BlockType(32, 34, _q8_0, Format("int8", 32)),
    "Q2_K": BlockType(256, 84, _q2_k, Format("int4", 16, True)),
    "Q3_K": BlockType(256, 110, _q3_k, Format("int4", 16)),
    "Q4_K": BlockType(256, 144, _q4_k, Format("int4", 32, True)),
    "Q5_K": BlockType(256, 176, _q5_k, Format("int8", 32, True)),
    "Q6_K": BlockType(256, 210, _q6_k, Format("int8", 16)),
    "MXFP4": BlockType(32, 17, _mxfp4, Format("mxfp4", 32)),
    # Known by size only: a file that holds them can be listed, their tensors cannot be read.
    "Q8_1": BlockType(32, 40), "Q8_K": BlockType(256, 292), "IQ2_XXS": BlockType(256, 66), "IQ2_XS": BlockType(256, 74),
    "IQ3_XXS": BlockType(256, 98), "IQ1_S": BlockType(256, 50), "IQ4_NL": BlockType(32, 18), "IQ3_S": BlockType(256, 110),
    "IQ2_S": BlockType(256, 82), "IQ4_XS": BlockType(256, 136), "IQ1_M": BlockType(256, 56), "TQ1_0": BlockType(256, 54),
    "TQ2_0": BlockType(256, 66), "NVFP4": BlockType(64, 36), "Q1_0": BlockType(128, 18), "I8": BlockType(1, 1),
    "I16": BlockType(1, 2), "I32": BlockType(1, 4), "I64": BlockType(1, 8), "F64": BlockType(1, 8),
}  # fmt: skip
READABLE = tuple(name for name, kind in BLOCK_TYPES.items() if kind.decode or name in ("F32", "F16", "BF16"))


def native_format(dtype: str) -> Format | None:
    """The packed format ``codes`` makes of this type; None for plain floats and types that cannot be read."""
    kind = BLOCK_TYPES.get(dtype)
    return kind.fmt if kind else None


def dequantize(dtype: str, raw: ByteArray, rows: int, k: int) -> F32Array:
    """float32 [rows, k] of ``raw`` (flat uint8, whole rows). Raises BadTensor for a type that cannot be read."""
    if dtype == "F32":
        return raw.view(np.float32).reshape(rows, k)
    if dtype == "F16":
        return raw.view(np.float16).astype(np.float32).reshape(rows, k)
    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(rows, k)
    codes_Bg, scales, mins, fmt = _decode(dtype, raw)
    if fmt.kind == "mxfp4":
        values = np.array(MXFP4_VALUES, np.float32)[codes_Bg]
    else:
        values = codes_Bg.astype(np.float32)
        if fmt.code_offset:
            values -= np.float32(fmt.code_offset)
    values = values.reshape(-1, fmt.group)
    values *= scales.reshape(-1, 1)
    if mins is not None:
        values += mins.reshape(-1, 1)
    return values.reshape(rows, k)


def codes(dtype: str, raw: ByteArray, rows: int, k: int) -> tuple[ByteArray, F16Array, F16Array | None, Format]:
    """Codes uint8 [rows, k], scales float16 [rows, k/G], minima float16 [rows, k/G] or None, and their format.

    Raises BadTensor for a type that cannot be repacked and for scales or minima that float16 cannot hold.
    """
    codes_Bg, scales, mins, fmt = _decode(dtype, raw)
    if fmt.kind == "mxfp4":
        codes_Bg, scales = _fit_mxfp4(codes_Bg, scales)
    scales_NG = _to_f16(dtype, scales).reshape(rows, k // fmt.group)
    mins_NG = None if mins is None else _to_f16(dtype, mins).reshape(rows, k // fmt.group)
    return codes_Bg.reshape(rows, k), scales_NG, mins_NG, fmt


def _decode(dtype: str, raw: ByteArray) -> tuple[ByteArray, F32Array, F32Array | None, Format]:
    kind = BLOCK_TYPES.get(dtype)
    if kind is None or kind.decode is None or kind.fmt is None:
        raise BadTensor(f"tensor type {dtype} cannot be read; those that can: {', '.join(READABLE)}")
    return *kind.decode(raw.reshape(-1, kind.nbytes)), kind.fmt


def _to_f16(dtype: str, values: F32Array) -> F16Array:
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    if not np.isfinite(rounded).all():
        worst = values.ravel()[int(np.argmin(np.isfinite(rounded)))]
        raise BadTensor(f"{dtype} block with a scale or minimum of {worst}, which float16 cannot hold (at most 65504)")
    return rounded


def _fit_mxfp4(codes_Bg: ByteArray, scales_B1: F32Array) -> tuple[ByteArray, F32Array]:
    """Bring scales into float16's powers of two: blocks below 2^-24 are rounded to multiples of it, all others are
    unchanged. Raises BadTensor for a scale above 2^15 unless the block is all zero."""
    zero = ((codes_Bg & 7) == 0).all(axis=1)
    scales = np.where(zero[:, None], np.float32(0), scales_B1)
    if scales.max(initial=0) > 2.0**15:
        raise BadTensor(f"MXFP4 block with a scale of {scales.max():g}: the largest that can be repacked is 32768")
    small = np.flatnonzero((scales[:, 0] > 0) & (scales[:, 0] < 2.0**-24))
    if small.size:
        table = np.array(MXFP4_VALUES[:8], np.float32)
        steps = table[codes_Bg[small] & 7] * (scales[small] * np.float32(2.0**24))
        nearest = np.abs(steps[:, :, None] - table).argmin(axis=2).astype(np.uint8)
        codes_Bg[small] = np.where(nearest > 0, nearest | (codes_Bg[small] & 8), 0)
        scales[small] = 2.0**-24
    return codes_Bg, scales

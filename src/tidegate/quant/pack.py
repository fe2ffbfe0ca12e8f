"""Quantizing and packing in plain numpy: these functions define, bit for bit, the layouts of quant/formats.py.

The native packer of the C++ core makes the same bytes faster; tests compare the two.

Every step below is one IEEE float32 operation (no fused multiply-add), rounded to nearest even; ``f16`` rounds a float32
to float16 after clamping it to +-65504. Per row and group of G inputs (padding inputs take no part):

``int8``          scale = f16(max|w| / 127);            code = clamp(rint(w * (1/scale)), -128, 127) + 128
``int4``          scale = f16(w_largest / -8), w_largest the first value of largest magnitude, sign kept (as GGUF's Q4_0);
                  code = clamp(rint(w * (1/scale)), -8, 7) + 8
``int8``/``int4`` with minima and L = 255 or 15 (the offset is 0):
                  scale = f16((max - min) / L); min = f16(min); code = clamp(rint((w - min) * (1/scale)), 0, L)
``mxfp4``         OCP MX: scale = 2^(floor(log2(max|w|)) - 3), its exponent clamped to [-24, 15]; nibble = nearest value,
                  ties to the even nibble, saturating, never -0
``int4-..-m8``    row scale = max|w| of the row / 889, 0 if that is below 2^-100; ratio = (w_largest / -8) * (1 / row scale), as
                  for int4. For the factors 1 and -8/7: multiplier = rint(clamp(ratio * factor, -127, 127)), codes as for int4
                  with scale = multiplier * row scale, error = w - row scale * (multiplier * (code - 8)). The second is taken
                  if its error is less, the errors' squares summed in 16 lanes (input i of the group in lane i % 16, in
                  rising order; padding inputs are zeros), then lane j with j + 8, j + 4, j + 2, j + 1
``bf16``          round to nearest even; NaN becomes the quiet NaN of its sign

1/scale is the float32 reciprocal of the rounded scale; where the scale is 0 every code is the offset (mxfp4: nibble 0).

Codes come with scales and one thing more: minima float16 [N, G] (``has_min``), or row scales float32 [N, 1] and scales that
are int8 multipliers (``two_level``), or nothing.

N outputs, K inputs, G groups of a row, P panels of 16 rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.quant.formats import MULTIPLIER_GROUPS, MXFP4_VALUES, PANEL_ROWS, Format

F32Array = NDArray[np.float32]
F16Array = NDArray[np.float16]
ByteArray = NDArray[np.uint8]
ScaleArray = F16Array | NDArray[np.int8]
MoreArray = F16Array | F32Array | None

_F16_MAX = np.float32(65504)
# What a group's scale is multiplied with: its largest weight becomes -8, or 7. Clipping it lowers the error of weights further
# and raises a model's perplexity (docs/log.md).
_FACTORS = (1.0, -8 / 7)
_LEAST_ROW_SCALE = np.float32(2**-100)  # so that the reciprocals of its multiples are finite
_E2M1_BOUNDS = ((0.5, False), (1.5, True), (2.5, False), (3.5, True), (5.0, False), (7.0, True), (10.0, False))


def quantize(w_NK: F32Array, fmt: Format) -> tuple[ByteArray, ScaleArray, MoreArray]:
    """Codes uint8 [N, K], scales float16 [N, ceil(K/G)] and, with ``has_min``, minima of the same shape; with ``two_level``
    multipliers int8 [N, ceil(K/G)] and row scales float32 [N, 1].

    ``w_NK`` must be finite. Only for formats with groups; f32 and bf16 have no codes.
    """
    n, k = w_NK.shape
    groups = -(-k // fmt.group)
    if fmt.two_level:
        padded = np.pad(w_NK.astype(np.float32, copy=False), ((0, 0), (0, groups * fmt.group - k)))
        codes, multipliers_NG, row_scales_N1 = _quantize_two_level(padded.reshape(n, groups, fmt.group))
        return np.ascontiguousarray(codes.reshape(n, -1)[:, :k]), multipliers_NG, row_scales_N1
    w_NGg = np.pad(w_NK.astype(np.float32, copy=False), ((0, 0), (0, groups * fmt.group - k)), mode="edge")
    w_NGg = w_NGg.reshape(n, groups, fmt.group)
    if fmt.kind == "mxfp4":
        codes, scales_NG = _quantize_mxfp4(w_NGg)
        mins_NG = None
    elif fmt.has_min:
        codes, scales_NG, mins_NG = _quantize_affine(w_NGg, 255 if fmt.kind == "int8" else 15)
    else:
        codes, scales_NG = _quantize_symmetric(w_NGg, fmt.code_offset)
        mins_NG = None
    return np.ascontiguousarray(codes.reshape(n, -1)[:, :k]), scales_NG, mins_NG


def dequantize(codes_NK: ByteArray, scales_NG: ScaleArray, more: MoreArray, fmt: Format) -> F32Array:
    """The float32 weights that the codes stand for, exactly as the kernels see them."""
    n, k = codes_NK.shape
    if fmt.kind == "mxfp4":
        values = np.array(MXFP4_VALUES, np.float32)[codes_NK]
    else:
        values = codes_NK.astype(np.float32) - np.float32(fmt.code_offset)
    w_NK: F32Array = values * np.repeat(scales_NG.astype(np.float32), fmt.group, axis=1)[:, :k]
    if more is not None and fmt.two_level:
        w_NK *= more.astype(np.float32)
    elif more is not None:
        w_NK += np.repeat(more.astype(np.float32), fmt.group, axis=1)[:, :k]
    return w_NK.reshape(n, k)


def pack_codes(codes_NK: ByteArray, scales_NG: ScaleArray, more: MoreArray, fmt: Format) -> ByteArray:
    """Flat packed bytes, ``fmt.packed_bytes(N, K)`` of them. Codes as ``quantize`` makes them (4 bits: below 16)."""
    n, k = codes_NK.shape
    rows, inputs = fmt.padded(n, k)
    group, groups, panels = fmt.group, inputs // fmt.group, rows // PANEL_ROWS
    padded = np.full((rows, inputs), fmt.code_offset, np.uint8)
    padded[:n, :k] = codes_NK
    if fmt.kind == "int8":
        body = padded.reshape(panels, PANEL_ROWS, groups, group // 4, 4).transpose(0, 2, 3, 1, 4)
    else:
        halves = padded.reshape(panels, PANEL_ROWS, groups, group // 8, 2, 4).transpose(4, 0, 2, 3, 1, 5)
        body = halves[0] | (halves[1] << 4)
    if fmt.two_level:
        assert more is not None
        row_scales = np.zeros((panels, PANEL_ROWS), np.float32)
        row_scales.reshape(-1)[:n] = more[:, 0]
        blocks = _multiplier_blocks(_group_header(scales_NG, panels, groups), body.reshape(panels, groups, -1))
        return np.concatenate([blocks, row_scales.view(np.uint8)], axis=1).reshape(-1)
    headers = [_group_header(part, panels, groups) for part in (scales_NG, more) if part is not None]
    parts = [*headers, body.reshape(panels, groups, -1)]
    return np.concatenate(parts, axis=2).reshape(-1)


def unpack_codes(packed: ByteArray, fmt: Format, n: int, k: int) -> tuple[ByteArray, ScaleArray, MoreArray]:
    """Inverse of ``pack_codes`` for a matrix [n, k]; padding is dropped."""
    rows, inputs = fmt.padded(n, k)
    group, groups, panels = fmt.group, inputs // fmt.group, rows // PANEL_ROWS
    scales: ScaleArray
    more: MoreArray = None
    if fmt.two_level:
        whole, tail_bytes = packed.reshape(panels, -1), 4 * PANEL_ROWS
        header, body = _from_multiplier_blocks(whole[:, :-tail_bytes], groups, PANEL_ROWS * group // 2)
        scales = _from_group_header(header, np.int8)
        more = np.ascontiguousarray(whole[:, -tail_bytes:]).view(np.float32).reshape(-1, 1)[:n]
    else:
        blocks, header_bytes = packed.reshape(panels, groups, -1), 2 * PANEL_ROWS
        scales = _from_group_header(blocks[:, :, :header_bytes], np.float16)
        if fmt.has_min:
            more = _from_group_header(blocks[:, :, header_bytes : 2 * header_bytes], np.float16)[:n]
            header_bytes *= 2
        body = blocks[:, :, header_bytes:]
    if fmt.kind == "int8":
        codes = body.reshape(panels, groups, group // 4, PANEL_ROWS, 4).transpose(0, 3, 1, 2, 4)
    else:
        steps = body.reshape(panels, groups, group // 8, PANEL_ROWS, 4).transpose(0, 3, 1, 2, 4)
        codes = np.stack([steps & 15, steps >> 4], axis=4)
    return np.ascontiguousarray(codes.reshape(rows, inputs)[:n, :k]), scales[:n], more


def pack(w_NK: F32Array, fmt: Format) -> ByteArray:
    """Quantize where the format says so, and pack: flat uint8, ``fmt.packed_bytes(N, K)`` long."""
    if fmt.is_integer:
        return pack_codes(*quantize(w_NK, fmt), fmt)
    n, k = w_NK.shape
    rows, inputs = fmt.padded(n, k)
    padded = np.zeros((rows, inputs), np.float32)
    padded[:n, :k] = w_NK
    panels = padded.reshape(rows // PANEL_ROWS, PANEL_ROWS, inputs)
    if fmt.kind == "f32":
        return np.ascontiguousarray(panels.transpose(0, 2, 1)).reshape(-1).view(np.uint8)
    pairs = to_bf16(panels).reshape(-1, PANEL_ROWS, inputs // 2, 2).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(pairs).reshape(-1).view(np.uint8)


def unpack(packed: ByteArray, fmt: Format, n: int, k: int) -> F32Array:
    """The float32 matrix [n, k] that packed bytes stand for."""
    if fmt.is_integer:
        return dequantize(*unpack_codes(packed, fmt, n, k), fmt)
    rows, inputs = fmt.padded(n, k)
    panels = rows // PANEL_ROWS
    if fmt.kind == "f32":
        w = packed.view(np.float32).reshape(panels, inputs, PANEL_ROWS).transpose(0, 2, 1)
    else:
        pairs = packed.view(np.uint16).reshape(panels, inputs // 2, PANEL_ROWS, 2).transpose(0, 2, 1, 3)
        w = from_bf16(pairs)
    return np.ascontiguousarray(w.reshape(rows, inputs)[:n, :k])


def to_bf16(x: F32Array) -> NDArray[np.uint16]:
    """The bits of bfloat16(x), rounded to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x7FC0
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, quiet_nan, rounded).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> F32Array:
    """Exact float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_f16(x: F32Array) -> F16Array:
    return np.clip(x, -_F16_MAX, _F16_MAX).astype(np.float16)


def _reciprocal(scales: F16Array | F32Array) -> F32Array:
    wide = scales.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide != 0)


def _quantize_symmetric(w_NGg: F32Array, offset: int) -> tuple[ByteArray, F16Array]:
    if offset == 128:
        scales = _to_f16(np.abs(w_NGg).max(axis=2) / np.float32(127))
    else:
        largest = np.abs(w_NGg).argmax(axis=2)
        scales = _to_f16(np.take_along_axis(w_NGg, largest[:, :, None], axis=2)[:, :, 0] / np.float32(-8))
    codes = np.rint(w_NGg * _reciprocal(scales)[:, :, None])
    return (np.clip(codes, -offset, offset - 1) + offset).astype(np.uint8), scales


def _quantize_two_level(w_NGg: F32Array) -> tuple[ByteArray, NDArray[np.int8], F32Array]:
    row_scales = np.abs(w_NGg).max(axis=(1, 2), keepdims=True) / np.float32(7 * 127)
    row_scales[row_scales < _LEAST_ROW_SCALE] = 0
    largest = np.take_along_axis(w_NGg, np.abs(w_NGg).argmax(axis=2)[:, :, None], axis=2)
    ratios = largest / np.float32(-8) * _reciprocal(row_scales)
    best_codes, best_multipliers = np.zeros(w_NGg.shape, np.float32), np.zeros_like(ratios)
    best_losses = np.full_like(ratios, np.inf)
    for factor in _FACTORS:
        multipliers = np.rint(np.clip(ratios * np.float32(factor), -127, 127))
        codes = np.clip(np.rint(w_NGg * _reciprocal(multipliers * row_scales)), -8, 7)
        errors = w_NGg - row_scales * (multipliers * codes)
        losses = _sum_in_lanes(errors * errors)
        better = losses < best_losses
        best_codes = np.where(better, codes, best_codes)
        best_multipliers = np.where(better, multipliers, best_multipliers)
        best_losses = np.where(better, losses, best_losses)
    return (best_codes + 8).astype(np.uint8), best_multipliers[:, :, 0].astype(np.int8), row_scales[:, :, 0]


def _sum_in_lanes(values_NGg: F32Array) -> F32Array:
    """[N, G, g] -> [N, G, 1]."""
    lanes = np.zeros((*values_NGg.shape[:2], 16), np.float32)
    for start in range(0, values_NGg.shape[2], 16):
        lanes = lanes + values_NGg[:, :, start : start + 16]
    while lanes.shape[2] > 1:
        half = lanes.shape[2] // 2
        lanes = lanes[:, :, :half] + lanes[:, :, half:]
    return lanes


def _quantize_affine(w_NGg: F32Array, levels: int) -> tuple[ByteArray, F16Array, F16Array]:
    low, high = w_NGg.min(axis=2), w_NGg.max(axis=2)
    scales, mins = _to_f16((high - low) / np.float32(levels)), _to_f16(low)
    steps = (w_NGg - mins.astype(np.float32)[:, :, None]) * _reciprocal(scales)[:, :, None]
    return np.clip(np.rint(steps), 0, levels).astype(np.uint8), scales, mins


def _quantize_mxfp4(w_NGg: F32Array) -> tuple[ByteArray, F16Array]:
    largest = np.abs(w_NGg).max(axis=2)
    exponent = np.clip(np.frexp(largest)[1] - 4, -24, 15)
    scales = np.where(largest > 0, np.ldexp(np.float32(1), exponent), np.float32(0)).astype(np.float16)
    x = np.abs(w_NGg) * _reciprocal(scales)[:, :, None]
    codes = np.zeros(x.shape, np.uint8)
    for bound, up in _E2M1_BOUNDS:
        codes += (x >= bound) if up else (x > bound)
    return np.where((w_NGg < 0) & (codes > 0), codes | 8, codes).astype(np.uint8), scales


def _multiplier_blocks(header_PGb: ByteArray, body_PGb: ByteArray) -> ByteArray:
    """A panel's blocks, one behind the other: [P, bytes]."""
    panels, groups, code_bytes = body_PGb.shape
    missing = -groups % MULTIPLIER_GROUPS
    parts = [
        np.pad(part, ((0, 0), (0, missing), (0, 0))).reshape(panels, -1, MULTIPLIER_GROUPS * part.shape[2])
        for part in (header_PGb, body_PGb)
    ]
    whole = np.concatenate(parts, axis=2).reshape(panels, -1)
    return whole[:, : whole.shape[1] - missing * code_bytes]


def _from_multiplier_blocks(blocks_Pb: ByteArray, groups: int, code_bytes: int) -> tuple[ByteArray, ByteArray]:
    """Inverse of ``_multiplier_blocks``: header and body."""
    panels, missing, line = len(blocks_Pb), -groups % MULTIPLIER_GROUPS, MULTIPLIER_GROUPS * PANEL_ROWS
    whole = np.pad(blocks_Pb, ((0, 0), (0, missing * code_bytes)))
    whole = whole.reshape(panels, -1, line + MULTIPLIER_GROUPS * code_bytes)
    header_PGb = whole[:, :, :line].reshape(panels, -1, PANEL_ROWS)
    return header_PGb[:, :groups], whole[:, :, line:].reshape(panels, -1, code_bytes)[:, :groups]


def _group_header(values_NG: NDArray[Any], panels: int, groups: int) -> ByteArray:
    padded = np.zeros((panels * PANEL_ROWS, groups), values_NG.dtype)
    padded[: len(values_NG)] = values_NG
    by_group = padded.reshape(panels, PANEL_ROWS, groups).transpose(0, 2, 1)
    return np.ascontiguousarray(by_group).view(np.uint8)


def _from_group_header(header_PGb: ByteArray, dtype: type[np.float16] | type[np.int8]) -> NDArray[Any]:
    panels, groups, _ = header_PGb.shape
    by_group = np.ascontiguousarray(header_PGb).view(dtype)
    return np.ascontiguousarray(by_group.transpose(0, 2, 1)).reshape(panels * PANEL_ROWS, groups)

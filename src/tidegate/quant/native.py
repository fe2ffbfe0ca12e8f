"""Packing by the native core: the same bytes as quant/pack.py, at the speed of memory.

N outputs, K inputs, G groups of a row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate import _core
from tidegate.quant.formats import Format

F32Array = NDArray[np.float32]
F16Array = NDArray[np.float16]
ByteArray = NDArray[np.uint8]


def native_format(fmt: Format) -> _core.WeightFormat:
    """The same format for native calls."""
    return _core.WeightFormat(fmt.kind, fmt.group, fmt.has_min, fmt.two_level)


def pack(w_NK: F32Array, fmt: Format, threads: int = 1, out: ByteArray | None = None) -> ByteArray:
    """As ``quant.pack.pack``, into ``out`` (flat, exactly ``fmt.packed_bytes(N, K)`` long) if there is one."""
    packed = np.empty(fmt.packed_bytes(*w_NK.shape), np.uint8) if out is None else out
    _core.pack(np.ascontiguousarray(w_NK, np.float32), native_format(fmt), packed, threads)
    return packed


def pack_codes(
    codes_NK: ByteArray,
    scales_NG: F16Array,
    mins_NG: F16Array | None,
    fmt: Format,
    threads: int = 1,
    out: ByteArray | None = None,
) -> ByteArray:
    """As ``quant.pack.pack_codes``, into ``out`` if there is one; not for two-level scales, which no source has."""
    packed = np.empty(fmt.packed_bytes(*codes_NK.shape), np.uint8) if out is None else out
    codes_NK, scales = np.ascontiguousarray(codes_NK), np.ascontiguousarray(scales_NG).view(np.uint16)
    mins = None if mins_NG is None else np.ascontiguousarray(mins_NG).view(np.uint16)
    _core.pack_codes(codes_NK, scales, mins, native_format(fmt), packed, threads)
    return packed


def unpack(packed: ByteArray, fmt: Format, n: int, k: int, threads: int = 1) -> F32Array:
    """As ``quant.pack.unpack``."""
    out = np.empty((n, k), np.float32)
    _core.unpack(_core.PackedMatrix(packed, native_format(fmt), n, k, None), out, threads)
    return out

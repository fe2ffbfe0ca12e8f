"""Headers of safetensors files: 8 bytes little-endian header length, a JSON header, then the tensors without gaps.

Format: https://github.com/huggingface/safetensors. Everything in the header is checked before a byte of data is read.
"""

from __future__ import annotations

from itertools import chain, repeat
from math import prod
from operator import itemgetter, sub
from typing import Any

from tidegate.checkpoint.base import TensorInfo
from tidegate.checkpoint.files import InputFile, parse_json
from tidegate.errors import BadTensor, CorruptFile

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_HEADER_LIMIT_BYTES = 100 << 20
METADATA = "__metadata__"
_INT, _TWO = frozenset((int,)), frozenset((2,))


def read_header(file: InputFile) -> dict[str, TensorInfo]:
    """All tensors of one file, in file order. Raises CorruptFile (a truncated file too) and BadTensor (unknown dtype)."""
    path, size = file.path, file.size_bytes
    header, data_start = _header(file)
    header.pop(METADATA, None)
    usual = _in_order(header, data_start, file)
    if usual is not None:
        return usual
    tensors = [_tensor(name, entry, data_start, file) for name, entry in header.items()]
    tensors.sort(key=lambda info: (info.offset, info.nbytes))
    end = data_start
    for info in tensors:
        if info.offset != end:
            raise CorruptFile(
                path, info.offset, f"start of {info.name} (overlap or gap)", f"{end:,}", f"{info.offset:,}"
            )
        end += info.nbytes
    if end != size:
        what = "size of the file (truncated shard)" if size < end else "size of the file (bytes behind the last tensor)"
        raise CorruptFile(path, min(size, end), what, f"{end:,} bytes", f"{size:,}")
    return {info.name: info for info in tensors}


def read_metadata(file: InputFile) -> dict[str, str]:
    """What the file says about itself; empty if nothing. Raises CorruptFile."""
    found = _header(file)[0].get(METADATA, {})
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise CorruptFile(file.path, 8, METADATA, "texts by name", found)
    return found


def _header(file: InputFile) -> tuple[dict[str, Any], int]:
    """The parsed header, and where the data begins."""
    path, size = file.path, file.size_bytes
    if size < 8:
        raise CorruptFile(path, 0, "safetensors header length", "8 bytes", f"a file of {size} bytes")
    header_bytes = int.from_bytes(file.read(0, 8).tobytes(), "little")
    if header_bytes > min(_HEADER_LIMIT_BYTES, size - 8):
        wanted = f"at most {min(_HEADER_LIMIT_BYTES, size - 8):,}"
        raise CorruptFile(path, 0, "safetensors header length", wanted, f"{header_bytes:,}")
    header = parse_json(file.read(8, header_bytes).tobytes(), path, 8)
    return header, 8 + header_bytes


def _in_order(header: dict[str, Any], data_start: int, file: InputFile) -> dict[str, TensorInfo] | None:
    """The tensors of a file as nearly all are: entries in the order of their data, a few shapes many times. There may be tens of
    thousands, so they are checked column by column. None for any other file, a bad one too: then every entry is looked at by
    itself."""
    entries = header.values()
    try:
        dtypes, shapes, spans = (list(map(itemgetter(key), entries)) for key in ("dtype", "shape", "data_offsets"))
        shapes, numbers = list(map(tuple, shapes)), list(chain.from_iterable(spans))
        starts, stops = numbers[::2], numbers[1::2]
        sizes = list(map(sub, stops, starts))
        usual = all(_has_size(*kind) for kind in set(zip(dtypes, shapes, sizes, strict=True)))
        usual = usual and _TWO.issuperset(map(len, spans))
        usual = usual and _INT.issuperset(map(type, chain(numbers, chain.from_iterable(shapes))))
    except (TypeError, KeyError, ValueError):
        return None
    end = stops[-1] if stops else 0
    if not usual or starts != [0, *stops][: len(starts)] or data_start + end != file.size_bytes:
        return None
    columns = zip(header, shapes, dtypes, repeat(file.path), map(data_start.__add__, starts), sizes, strict=False)
    return dict(zip(header, map(TensorInfo._make, columns), strict=True))


def _has_size(dtype: str, shape: tuple[int, ...], nbytes: int) -> bool:
    """Raises KeyError or TypeError for what cannot be."""
    return min(shape, default=0) >= 0 and prod(shape) * DTYPE_BYTES[dtype] == nbytes


def _tensor(name: str, entry: Any, data_start: int, file: InputFile) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        good = _INT.issuperset(map(type, shape)) and type(begin) is type(end) is int and type(dtype) is str
        good = good and min(begin, end, *shape) >= 0
    except (TypeError, KeyError, ValueError):
        good = False
    if not good:
        raise CorruptFile(file.path, 8, f"header entry of {name}", "dtype, shape, data_offsets", entry)
    if dtype not in DTYPE_BYTES:
        raise BadTensor(f"{file.path}: {name} has dtype {dtype}; known are {', '.join(DTYPE_BYTES)}")
    nbytes = prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != nbytes:
        what = f"size of {name} ({dtype} {list(shape)})"
        raise CorruptFile(file.path, data_start + begin, what, f"{nbytes:,} bytes", f"{end - begin:,}")
    return TensorInfo(name, shape, dtype, file.path, data_start + begin, nbytes)

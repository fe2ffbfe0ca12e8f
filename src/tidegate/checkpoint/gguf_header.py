"""The header of one GGUF file (versions 2 and 3, little endian): metadata and the table of tensors.

Written for speed and for hostile files: strings of an array are skipped with numpy and turned into Python objects only
when asked for (a vocabulary of 150,000 tokens costs milliseconds), every length is checked against the file before it
is used, and memory stays near ``_WINDOW_BYTES`` whatever the file says. Format: ggml's docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from tidegate.checkpoint.base import TensorInfo
from tidegate.checkpoint.files import InputFile
from tidegate.checkpoint.gguf_blocks import BLOCK_TYPES
from tidegate.checkpoint.gguf_strings import string_spans
from tidegate.errors import CorruptFile
from tidegate.units import align_up

_MAGIC = b"GGUF"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<B",
    10: "<Q",
    11: "<q",
    12: "<d",
}  # struct
_TENSOR_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
_WINDOW_BYTES = 1 << 20
_LONGEST_NAME, _LONGEST_STRING, _MOST_STRINGS, _MOST_DIMS = 1 << 10, 1 << 26, 1 << 22, 4


@dataclass(frozen=True)
class LazyArray:
    """A metadata array that stays in the file until ``load``. ``kind`` is the letter of a number's struct
    format, ``"string"`` or ``"bool"``."""

    file: InputFile
    offset: int
    nbytes: int
    count: int
    kind: str

    def load(self) -> list[str] | list[bool] | NDArray[np.generic]:
        """The values. Bytes that are not UTF-8 become U+FFFD. Raises ReadFailed."""
        raw = self.file.read(self.offset, self.nbytes)
        if self.kind == "bool":
            return [bool(value) for value in raw]
        if self.kind != "string":
            return raw.view(np.dtype(self.kind))
        begins, ends = string_spans(raw, self.count)
        if len(begins) != self.count:
            raise CorruptFile(self.file.path, self.offset, "string array", f"{self.count} strings", f"{len(begins)}")
        text = raw.tobytes()
        return [text[a:b].decode(errors="replace") for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]


Value = int | float | bool | str | LazyArray


@dataclass(frozen=True)
class GgufHeader:
    """``tensors`` in file order; ``data_offset`` is where tensor data starts."""

    file: InputFile
    version: int
    metadata: dict[str, Value]
    tensors: list[TensorInfo]
    data_offset: int


def read_header(path: Path) -> GgufHeader:
    """Parse and check. Raises CheckpointError for a file that cannot be opened, CorruptFile (path, offset, wanted, got)
    for anything that contradicts itself or the file's size, ReadFailed for an I/O error."""
    return _Parser(InputFile(path)).parse()


class _Parser:
    """A cursor over the file with one window of it in memory."""

    def __init__(self, file: InputFile) -> None:
        self.file, self.path, self.size, self.at = file, file.path, file.size_bytes, 0
        self._base, self._window = 0, b""

    def parse(self) -> GgufHeader:
        magic = self._take(4, "magic")
        if magic != _MAGIC:
            self._corrupt("magic", _MAGIC, magic, back=4)
        version = self._number("<I", "version")
        if version not in (2, 3):
            big = " (a big-endian file)" if version & 0xFFFF == 0 else ""
            self._corrupt("version", "2 or 3, little endian", f"{version}{big}", back=4)
        tensor_count = self._count("tensor count", 8 + 4 + 4 + 8)
        metadata_count = self._count("metadata count", 8 + 4 + 1)
        metadata: dict[str, Value] = {}
        for _ in range(metadata_count):
            offset = self.at
            key = self._name("metadata key")
            if key in metadata:
                raise CorruptFile(self.path, offset, "metadata key", "each key once", f"{key!r} twice")
            metadata[key] = self._value(key, self._number("<I", f"type of {key}"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 16 or alignment & (alignment - 1):
            self._corrupt("general.alignment", "a power of two up to 65536", alignment)
        tensors = [self._tensor() for _ in range(tensor_count)]
        data_offset = align_up(self.at, alignment)
        placed = self._placed(tensors, data_offset, alignment)
        return GgufHeader(self.file, version, metadata, placed, data_offset)

    def _value(self, key: str, kind: int) -> Value:
        if kind == _STRING:
            return self._string(_LONGEST_STRING, f"value of {key}").decode(errors="replace")
        if kind == _BOOL:
            return bool(self._number("<B", f"value of {key}"))
        if kind in _SCALARS:
            raw = self._take(struct.calcsize(_SCALARS[kind]), f"value of {key}")
            number: int | float = struct.unpack(_SCALARS[kind], raw)[0]
            return number
        if kind != _ARRAY:
            self._corrupt(f"type of {key}", "0 to 12", kind, back=4)
        return self._array(key)

    def _array(self, key: str) -> LazyArray:
        kind = self._number("<I", f"element type of {key}")
        if kind == _STRING:
            count = self._count(f"length of {key}", 8, _MOST_STRINGS)
            start = self.at
            self._skip_strings(count, key)
            return LazyArray(self.file, start, self.at - start, count, "string")
        if kind not in _SCALARS:
            self._corrupt(f"element type of {key}", "a number, bool or string", kind, back=4)
        itemsize = struct.calcsize(_SCALARS[kind])
        count = self._count(f"length of {key}", itemsize)
        start = self.at
        self.at += count * itemsize
        return LazyArray(self.file, start, count * itemsize, count, "bool" if kind == _BOOL else _SCALARS[kind][1])

    def _skip_strings(self, count: int, key: str) -> None:
        wanted = 8
        while count > 0:
            nbytes = max(wanted, min(_WINDOW_BYTES, self.size - self.at))
            begin = self._peek(nbytes, f"strings of {key}")
            ends = string_spans(np.frombuffer(self._window, np.uint8)[begin:], count)[1]
            if len(ends):
                self.at += int(ends[-1])
                count -= len(ends)
                wanted = 8
            else:
                length = self._length(_LONGEST_STRING, f"string of {key}")
                wanted = 8 + length

    def _tensor(self) -> tuple[int, str, tuple[int, ...], str, int]:
        start = self.at
        name = self._name("tensor name")
        num_dims = self._number("<I", f"number of dimensions of {name}")
        if not 1 <= num_dims <= _MOST_DIMS:
            self._corrupt(f"number of dimensions of {name}", f"1 to {_MOST_DIMS}", num_dims, back=4)
        dims = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims, f"shape of {name}"))
        if not 0 < math.prod(dims) < 1 << 50:
            self._corrupt(f"shape of {name}", "dimensions from 1, fewer than 2^50 elements", dims, back=8 * num_dims)
        kind = self._number("<I", f"type of {name}")
        if kind not in _TENSOR_TYPES:
            self._corrupt(f"type of {name}", "a known tensor type", kind, back=4)
        dtype = _TENSOR_TYPES[kind]
        if dims[0] % BLOCK_TYPES[dtype].weights:
            self._corrupt(
                f"row length of {name}", f"a multiple of {BLOCK_TYPES[dtype].weights} ({dtype})", dims[0], back=4
            )
        return start, name, tuple(reversed(dims)), dtype, self._number("<Q", f"offset of {name}")

    def _placed(
        self, rows: list[tuple[int, str, tuple[int, ...], str, int]], data_offset: int, alignment: int
    ) -> list[TensorInfo]:
        """Absolute offsets, checked: aligned, inside the file, no two tensors of one name or on the same bytes."""
        tensors, seen = [], set()
        for start, name, shape, dtype, relative in rows:
            block = BLOCK_TYPES[dtype]
            nbytes = math.prod(shape) // block.weights * block.nbytes
            offset = data_offset + relative
            if name in seen:
                raise CorruptFile(self.path, start, "tensor name", "each name once", f"{name!r} twice")
            if relative % alignment:
                raise CorruptFile(self.path, start, f"offset of {name}", f"a multiple of {alignment}", relative)
            if offset + nbytes > self.size:
                there = max(0, self.size - offset)
                raise CorruptFile(
                    self.path, offset, f"data of {name}", f"{nbytes:,} bytes", f"{there:,} before the file ends"
                )
            seen.add(name)
            tensors.append(TensorInfo(name, shape, dtype, self.path, offset, nbytes))
        in_order = sorted(tensors, key=lambda tensor: tensor.offset)
        for one, two in pairwise(in_order):
            if one.offset + one.nbytes > two.offset:
                raise CorruptFile(
                    self.path, two.offset, f"data of {two.name}", f"after the end of {one.name}", "an overlap"
                )
        return tensors

    def _count(self, what: str, smallest_item_bytes: int, limit: int = 1 << 62) -> int:
        count = self._number("<Q", what)
        most = min(limit, (self.size - self.at) // smallest_item_bytes)
        if count > most:
            self._corrupt(what, f"at most {most:,} in a file of {self.size:,} bytes", f"{count:,}", back=8)
        return count

    def _name(self, what: str) -> str:
        offset = self.at
        raw = self._string(_LONGEST_NAME, what)
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            raise CorruptFile(self.path, offset, what, "UTF-8", raw[:40]) from None
        if not name:
            raise CorruptFile(self.path, offset, what, "a name", "an empty string")
        return name

    def _string(self, longest: int, what: str) -> bytes:
        length = self._length(longest, what)
        self.at += 8
        return self._take(length, what)

    def _length(self, longest: int, what: str) -> int:
        """The checked length of the string at the cursor, which stays where it is."""
        length = self._number("<Q", f"length of {what}")
        self.at -= 8
        most = min(longest, self.size - self.at - 8)
        if length > most:
            self._corrupt(f"length of {what}", f"at most {most:,} bytes", f"{length:,}")
        return length

    def _number(self, layout: str, what: str) -> int:
        nbytes = struct.calcsize(layout)
        value: int = struct.unpack_from(layout, self._window, self._peek(nbytes, what))[0]
        self.at += nbytes
        return value

    def _take(self, nbytes: int, what: str) -> bytes:
        begin = self._peek(nbytes, what)
        self.at += nbytes
        return self._window[begin : begin + nbytes]

    def _peek(self, nbytes: int, what: str) -> int:
        """Where the cursor is in the window, with at least ``nbytes`` bytes after it."""
        if self.at + nbytes > self.size:
            there = max(0, self.size - self.at)
            self._corrupt(what, f"{nbytes:,} bytes", f"{there:,} before the file ends")
        begin = self.at - self._base
        if begin < 0 or begin + nbytes > len(self._window):
            length = min(max(nbytes, _WINDOW_BYTES), self.size - self.at)
            self._window, self._base = self.file.read(self.at, length).tobytes(), self.at
            begin = 0
        return begin

    def _corrupt(self, what: str, wanted: object, got: object, back: int = 0) -> NoReturn:
        raise CorruptFile(self.path, self.at - back, what, wanted, got)

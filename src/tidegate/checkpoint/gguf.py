"""GGUF files as checkpoints: one file or all parts of a split one, read by pread in rows.

A tensor [..., K] is read as rows of K weights; a quantized row is whole blocks, so that any run of rows is a run of bytes.
"""

from __future__ import annotations

import re
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from tidegate.checkpoint import gguf_blocks
from tidegate.checkpoint.base import ByteArray, Checkpoint, Codes, F32Array, TensorInfo
from tidegate.checkpoint.files import InputFile
from tidegate.checkpoint.gguf_config import stop_token_ids, translate
from tidegate.checkpoint.gguf_header import GgufHeader, LazyArray, Value, read_header
from tidegate.checkpoint.gguf_tokenizer import (
    adds_bos,
    build_tokenizer_json,
    end_token_ids,
    token_text,
    tokenizer_kind,
)
from tidegate.errors import BadTensor, CheckpointError, CorruptFile
from tidegate.quant.formats import Format

_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GgufCheckpoint(Checkpoint):
    """One GGUF file, or a split one through any of its parts. Opening reads headers only (and rope factors)."""

    kind = "gguf"

    def __init__(self, path: Path | str) -> None:
        """Raises CorruptFile, UnknownArchitecture, and CheckpointError for parts that are missing or do not belong
        together."""
        self.path = Path(path)
        first = read_header(self.path)
        headers = self._parts(first)
        self.metadata: dict[str, Value] = headers[0].metadata
        self._files: dict[Path, InputFile] = {header.file.path: header.file for header in headers}
        tensors: dict[str, TensorInfo] = {}
        for header in headers:
            for info in header.tensors:
                if info.name in tensors:
                    other = tensors[info.name].path
                    raise BadTensor(f"{info.path}: {info.name} is a duplicate, {other.name} has it too")
                tensors[info.name] = info
        self.tensors = tensors
        self._check_total(first, headers)
        self.config: dict[str, Any] = translate(self.path, self.metadata, tensors, self.read_f32)

    def read_raw(self, name: str, start: int = 0, stop: int | None = None) -> ByteArray:
        info, start, stop = self._rows(name, start, stop)
        row_bytes = info.nbytes // _num_rows(info)
        return self._files[info.path].read(info.offset + start * row_bytes, (stop - start) * row_bytes)

    def read_f32(self, name: str, start: int = 0, stop: int | None = None) -> F32Array:
        info, start, stop = self._rows(name, start, stop)
        return gguf_blocks.dequantize(info.dtype, self.read_raw(name, start, stop), stop - start, _num_columns(info))

    def native_format(self, name: str) -> Format | None:
        info = self._info(name)
        return gguf_blocks.native_format(info.dtype) if len(info.shape) > 1 else None

    def read_codes(self, name: str, start: int = 0, stop: int | None = None) -> Codes:
        """Raises BadTensor for a type without a packed format and for scales that float16 cannot hold."""
        info, start, stop = self._rows(name, start, stop)
        try:
            codes, scales, mins, _ = gguf_blocks.codes(
                info.dtype, self.read_raw(name, start, stop), stop - start, _num_columns(info)
            )
        except BadTensor as error:
            raise BadTensor(f"{info.path}: {name}: {error}") from None
        return codes, scales, mins

    def tokenizer_json(self) -> str | None:
        return build_tokenizer_json(self.path, self.metadata)

    def tokenizer_kind(self) -> str | None:
        return tokenizer_kind(self.metadata)

    def chat_template(self) -> str | None:
        template = self.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    def special_tokens(self) -> dict[str, Any]:
        tokens = self._tokens
        stops = stop_token_ids(self.metadata)
        return {
            "bos_token": token_text(tokens, self.metadata.get("tokenizer.ggml.bos_token_id")),
            "eos_token": token_text(tokens, stops[0] if stops else None),
            "eos_token_ids": list(dict.fromkeys([*stops, *end_token_ids(tokens, self.metadata)])),
            "add_bos": adds_bos(self.metadata),
        }

    @cached_property
    def _tokens(self) -> list[str]:
        value = self.metadata.get("tokenizer.ggml.tokens")
        return [str(token) for token in value.load()] if isinstance(value, LazyArray) else []

    def _parts(self, opened: GgufHeader) -> list[GgufHeader]:
        """Headers of all parts, in order."""
        count = opened.metadata.get("split.count", 1)
        if not isinstance(count, int) or count <= 1:
            return [opened]
        match = _PART_NAME.fullmatch(self.path.name)
        if match is None or int(match[3]) != count:
            raise CheckpointError(
                f"{self.path}: is one of {count} parts, which must be named NAME-00001-of-{count:05}.gguf and so on"
            )
        paths = [self.path.with_name(f"{match[1]}-{n + 1:05}-of-{count:05}.gguf") for n in range(count)]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise CheckpointError(f"{self.path}: {len(missing)} of {count} parts are missing: {', '.join(missing[:5])}")
        headers = [opened if path == self.path else read_header(path) for path in paths]
        for index, header in enumerate(headers):
            for key, wanted in (("split.no", index), ("split.count", count)):
                if header.metadata.get(key) != wanted:
                    raise CorruptFile(header.file.path, 0, key, wanted, header.metadata.get(key))
        return headers

    def _check_total(self, opened: GgufHeader, headers: list[GgufHeader]) -> None:
        total = opened.metadata.get("split.tensors.count")
        if len(headers) > 1 and isinstance(total, int) and total != len(self.tensors):
            raise CorruptFile(opened.file.path, 0, "split.tensors.count", len(self.tensors), total)

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise BadTensor(f"{self.path}: there is no tensor {name}")
        return info

    def _rows(self, name: str, start: int, stop: int | None) -> tuple[TensorInfo, int, int]:
        info = self._info(name)
        rows = _num_rows(info)
        stop = rows if stop is None else stop
        if not 0 <= start <= stop <= rows:
            raise BadTensor(f"{info.path}: {name} has {rows} rows, {start}:{stop} are asked for")
        if info.dtype not in gguf_blocks.READABLE:
            known = ", ".join(gguf_blocks.READABLE)
            raise BadTensor(f"{info.path}: {name} is {info.dtype}, which is not supported; supported are {known}")
        return info, start, stop


def _num_rows(info: TensorInfo) -> int:
    """Rows as Checkpoint counts them. A quantized vector is one row, because its blocks cannot be cut."""
    if len(info.shape) > 1:
        return prod(info.shape[:-1])
    return info.shape[0] if gguf_blocks.BLOCK_TYPES[info.dtype].weights == 1 else 1


def _num_columns(info: TensorInfo) -> int:
    return prod(info.shape) // _num_rows(info)

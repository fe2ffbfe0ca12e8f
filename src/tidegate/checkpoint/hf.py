"""Hugging Face folders: config.json and safetensors, single or sharded, plain, FP8 (block scales) or MXFP4.

Two tensors on disk appear as one: ``X_blocks`` + ``X_scales`` (gpt-oss) as ``X`` of dtype MXFP4 with the logical shape,
``X`` + ``X_scale_inv`` (DeepSeek-V3) as ``X`` of its FP8 dtype. N rows, K columns, G groups of 32 (MXFP4).
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.checkpoint.base import ByteArray, Checkpoint, Codes, F32Array, TensorInfo
from tidegate.checkpoint.files import InputFile, parse_json, read_json, read_text
from tidegate.checkpoint.safetensors import DTYPE_BYTES, read_header
from tidegate.errors import BadTensor, CheckpointError
from tidegate.quant.formats import MXFP4_VALUES, Format
from tidegate.quant.pack import from_bf16

_MXFP4 = Format("mxfp4", 32)
_NUMPY_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "U64": "<u8", "I32": "<i4", "U32": "<u4",
    "I16": "<i2", "U16": "<u2", "I8": "i1", "U8": "u1", "BOOL": "u1",
}  # fmt: skip
_QUANT_METHODS = ("fp8", "mxfp4")


class HfCheckpoint(Checkpoint):
    """A folder as `save_pretrained` writes it. Opening reads JSON and tensor headers only."""

    kind = "hf"

    def __init__(self, path: Path | str) -> None:
        """Raises CheckpointError and its kinds: no config, no safetensors, a shard missing or truncated, a tensor named
        by the index and found nowhere, weights quantized in a way that is not supported."""
        self._describe(Path(path), read_json(Path(path) / "config.json"))
        self._read_shards()
        self.tensors = self._logical_tensors()

    def _describe(self, path: Path, config: dict[str, Any]) -> None:
        """Everything but the tensors."""
        self.path, self.config = path, config
        quantization = self.config.get("quantization_config") or {}
        if not isinstance(quantization, dict):
            raise CheckpointError(f"{self.path}: quantization_config must be a mapping, got {quantization!r}")
        if quantization.get("quant_method") not in (None, *_QUANT_METHODS):
            raise CheckpointError(
                f"{self.path}: weights are quantized with {quantization['quant_method']!r}; "
                f"supported are plain weights, {' and '.join(_QUANT_METHODS)}, and GGUF files"
            )
        block = quantization.get("weight_block_size") or [128, 128]
        if (
            not isinstance(block, list)
            or len(block) != 2
            or not all(isinstance(size, int) and size > 0 for size in block)
        ):
            raise CheckpointError(f"{self.path}: weight_block_size must be two whole numbers, got {block!r}")
        self._scale_block = block[0], block[1]
        self._files: dict[Path, InputFile] = {}
        self._on_disk: dict[str, TensorInfo] = {}

    def read_raw(self, name: str, start: int = 0, stop: int | None = None) -> ByteArray:
        """As in Checkpoint. The halves of an MXFP4 tensor are read under their own names, ``X_blocks`` and ``X_scales``."""
        if name not in self._on_disk and name in self.tensors:
            raise BadTensor(f"{self.path}: {name} is stored as {name}_blocks and {name}_scales; read those")
        info = self._info(name, self._on_disk)
        start, stop = _row_range(info, start, stop)
        row_bytes = _columns(info.shape) * DTYPE_BYTES[info.dtype]
        return self._files[info.path].read(info.offset + start * row_bytes, (stop - start) * row_bytes)

    def read_f32(self, name: str, start: int = 0, stop: int | None = None) -> F32Array:
        info = self._info(name, self.tensors)
        start, stop = _row_range(info, start, stop)
        if info.dtype == "MXFP4":
            return self._read_mxfp4(name, start, stop)
        w_NK = _to_f32(self.read_raw(name, start, stop), info.dtype).reshape(stop - start, _columns(info.shape))
        if info.dtype in ("F8_E4M3", "F8_E5M2"):
            w_NK *= self._fp8_scales(info, start, stop)
        return w_NK

    def stored_bytes(self, name: str) -> int:
        if self._is_plain:
            return self._info(name, self._on_disk).nbytes
        nbytes = self._info(name, self.tensors).nbytes
        scales = self._on_disk.get(f"{name}_scale_inv")
        return nbytes + (scales.nbytes if scales else 0)

    @property
    def total_bytes(self) -> int:
        return sum(map(attrgetter("nbytes"), self._on_disk.values()))

    def native_format(self, name: str) -> Format | None:
        return _MXFP4 if self._info(name, self.tensors).dtype == "MXFP4" else None

    def read_codes(self, name: str, start: int = 0, stop: int | None = None) -> Codes:
        """MXFP4 as it is. A scale below 2^-24, which float16 cannot hold, becomes 0 (weights below 4e-7); one above 2^15
        raises BadTensor."""
        start, stop = _row_range(self._info(name, self.tensors), start, stop)
        codes_NK, exponents_NG = self._mxfp4_parts(name, start, stop)
        if exponents_NG.size and exponents_NG.max() > 15:
            raise BadTensor(f"{self.path}: {name} has a scale of 2^{exponents_NG.max()}; the largest supported is 2^15")
        return codes_NK, np.ldexp(np.float32(1), exponents_NG).astype(np.float16), None

    def tokenizer_json(self) -> str | None:
        return self._text("tokenizer.json")

    def chat_template(self) -> str | None:
        template = self._text("chat_template.jinja")
        if template is None:
            template = self._json("tokenizer_config.json").get("chat_template")
        if template is None:
            template = self._json("chat_template.json").get("chat_template")
        if isinstance(template, list):
            named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
            template = named[0].get("template") if named else None
        if not isinstance(template, str | None):
            raise CheckpointError(f"{self.path}: chat_template must be text, got {template!r}")
        return template

    def special_tokens(self) -> dict[str, Any]:
        try:
            return self._special_tokens()
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            files = "tokenizer_config.json, generation_config.json, config.json and tokenizer.json"
            raise CheckpointError(f"{self.path}: what {files} say of special tokens makes no sense: {error}") from None

    def _special_tokens(self) -> dict[str, Any]:
        tokenizer_config = self._json("tokenizer_config.json")
        bos, eos = (_token_text(tokenizer_config.get(key)) for key in ("bos_token", "eos_token"))
        eos_ids = self._json("generation_config.json").get("eos_token_id", self.config.get("eos_token_id"))
        add_bos = tokenizer_config.get("add_bos_token")
        if add_bos is None or eos_ids is None:
            tokenizer = parse_json(self.tokenizer_json() or "{}", self.path / "tokenizer.json", 0)
            if eos_ids is None:
                eos_ids = [token["id"] for token in tokenizer.get("added_tokens", ()) if token["content"] == eos]
            if add_bos is None:
                add_bos = bos is not None and _first_template_token(tokenizer) == bos
        ids = eos_ids if isinstance(eos_ids, list) else [eos_ids]
        return {"bos_token": bos, "eos_token": eos, "eos_token_ids": [int(i) for i in ids], "add_bos": bool(add_bos)}

    def _read_shards(self) -> None:
        index_path, single = self.path / "model.safetensors.index.json", self.path / "model.safetensors"
        weight_map: dict[str, str] = {}
        if index_path.exists():
            weight_map = read_json(index_path).get("weight_map", {})
            names = sorted(set(weight_map.values()))
            if not names or any(Path(name).name != name for name in names):
                raise CheckpointError(f"{index_path}: weight_map must name files of this folder")
        elif single.exists():
            names = [single.name]
        else:
            names = sorted(p.name for p in self.path.glob("*.safetensors"))
        if not names:
            raise CheckpointError(f"{self.path}: has config.json but no *.safetensors; other weight files are not read")
        missing = [name for name in names if not (self.path / name).exists()]
        if missing:
            raise CheckpointError(
                f"{self.path}: {len(missing)} of {len(names)} shards are missing: {', '.join(missing[:5])}"
            )
        for name in names:
            file = InputFile(self.path / name)
            self._files[file.path] = file
            self._add_shard(name, read_header(file), weight_map)
        for tensor in sorted(weight_map.keys() - self._on_disk.keys()):
            where = self.path / weight_map[tensor]
            raise BadTensor(f"{where}: {tensor} is missing, though {index_path.name} says it is here")

    @cached_property
    def _is_plain(self) -> bool:
        """Whether every tensor on disk is one of the model's, as it is: no scales or blocks of their own."""
        names = "\n".join([*self._on_disk, ""])
        return not any(f"{half}\n" in names for half in ("_blocks", "_scales", "_scale_inv"))

    def _add_shard(self, shard: str, header: dict[str, TensorInfo], weight_map: dict[str, str]) -> None:
        if not {shard, None}.issuperset(map(weight_map.get, header)):
            for name in [name for name in header if weight_map.get(name, shard) != shard]:
                del header[name]  # another shard has the copy that counts
        for name in () if self._on_disk.keys().isdisjoint(header) else sorted(header.keys() & self._on_disk.keys()):
            path, other = header[name].path, self._on_disk[name].path
            raise BadTensor(f"{path}: {name} is a duplicate, {other.name} has it too")
        self._on_disk.update(header)

    def _logical_tensors(self) -> dict[str, TensorInfo]:
        if self._is_plain:
            return self._on_disk
        tensors = {}
        for name, info in self._on_disk.items():
            base = name.removesuffix("_blocks")
            if base != name and f"{base}_scales" in self._on_disk:
                tensors[base] = _mxfp4_info(base, info, self._on_disk[f"{base}_scales"])
            elif name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in self._on_disk:
                continue
            elif not (name.endswith("_scale_inv") and name.removesuffix("_scale_inv") in self._on_disk):
                tensors[name] = info
        return tensors

    def _info(self, name: str, tensors: Any) -> TensorInfo:
        info: TensorInfo | None = tensors.get(name)
        if info is None:
            raise BadTensor(f"{self.path}: there is no tensor {name}")
        return info

    def _fp8_scales(self, info: TensorInfo, start: int, stop: int) -> F32Array:
        """Scales of rows start:stop, [stop - start, K]; one per block of ``weight_block_size``. A tensor without them has
        scale 1, unless the config announces quantization."""
        scale = self._on_disk.get(f"{info.name}_scale_inv")
        if scale is None:
            if self.config.get("quantization_config"):
                raise BadTensor(f"{info.path}: {info.name} is {info.dtype} but {info.name}_scale_inv is missing")
            return np.ones((1, 1), np.float32)
        (block_n, block_k), n, k = self._scale_block, info.shape[-2], info.shape[-1]
        blocks_n = -(-n // block_n)
        wanted = (*info.shape[:-2], blocks_n, -(-k // block_k))
        if scale.shape != wanted:
            raise BadTensor(f"{scale.path}: {scale.name} has shape {list(scale.shape)}, wanted {list(wanted)}")
        if start == stop:
            return np.ones((0, k), np.float32)
        rows = np.arange(start, stop)
        block_rows = (rows // n) * blocks_n + (rows % n) // block_n
        first, last = int(block_rows[0]), int(block_rows[-1]) + 1
        scales = _to_f32(self.read_raw(scale.name, first, last), scale.dtype).reshape(last - first, -1)
        return np.repeat(scales, block_k, axis=1)[block_rows - first, :k]

    def _mxfp4_parts(self, name: str, start: int, stop: int) -> tuple[ByteArray, Any]:
        """Nibbles [N, K] and the exponent of each group's scale in units of MXFP4_VALUES, int32 [N, K/32]."""
        groups = self.tensors[name].shape[-1] // 32
        blocks = self.read_raw(f"{name}_blocks", start * groups, stop * groups).reshape(stop - start, groups, 16)
        scales = self.read_raw(f"{name}_scales", start, stop).reshape(stop - start, groups)
        codes = np.stack([blocks & 15, blocks >> 4], axis=3).reshape(stop - start, groups * 32)
        return codes, scales.astype(np.int32) - 128

    def _read_mxfp4(self, name: str, start: int, stop: int) -> F32Array:
        codes_NK, exponents_NG = self._mxfp4_parts(name, start, stop)
        values = np.array(MXFP4_VALUES, np.float32)[codes_NK].reshape(*exponents_NG.shape, 32)
        w_NGg: F32Array = np.ldexp(values, exponents_NG[:, :, None])
        return w_NGg.reshape(stop - start, self.tensors[name].shape[-1])

    def _text(self, name: str) -> str | None:
        file = self.path / name
        return read_text(file) if file.exists() else None

    def _json(self, name: str) -> dict[str, Any]:
        return read_json(self.path / name) if (self.path / name).exists() else {}


def _columns(shape: tuple[int, ...]) -> int:
    return shape[-1] if len(shape) > 1 else 1


def _row_range(info: TensorInfo, start: int, stop: int | None) -> tuple[int, int]:
    n = prod(info.shape[:-1]) if len(info.shape) > 1 else prod(info.shape)
    stop = n if stop is None else stop
    if not 0 <= start <= stop <= n:
        raise BadTensor(f"{info.path}: {info.name} has {n} rows, {start}:{stop} are asked for")
    return start, stop


def _mxfp4_info(name: str, blocks: TensorInfo, scales: TensorInfo) -> TensorInfo:
    if blocks.dtype != "U8" or scales.dtype != "U8" or blocks.shape != (*scales.shape, 16):
        raise BadTensor(
            f"{blocks.path}: {name} in MXFP4 wants U8 blocks [..., 16] and scales [...], "
            f"got {blocks.dtype} {list(blocks.shape)} and {scales.dtype} {list(scales.shape)}"
        )
    shape = (*scales.shape[:-1], scales.shape[-1] * 32)
    return TensorInfo(name, shape, "MXFP4", blocks.path, blocks.offset, blocks.nbytes + scales.nbytes)


def _to_f32(raw: ByteArray, dtype: str) -> F32Array:
    """Flat float32 of the plain dtypes and of unscaled FP8 (OCP E4M3 and E5M2; E8M0 is 2^(b - 127))."""
    if dtype == "BF16":
        return from_bf16(raw.view("<u2"))
    if dtype == "F8_E4M3":
        return _E4M3[raw]
    if dtype == "F8_E5M2":
        return (raw.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if dtype == "F8_E8M0":
        return np.ldexp(np.float32(1), raw.astype(np.int32) - 127).astype(np.float32)
    values = raw.view(_NUMPY_DTYPES[dtype])
    return values if values.dtype == np.float32 else values.astype(np.float32)


def _e4m3_table() -> F32Array:
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, (bits & 7).astype(np.float32)
    values = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    values[(bits & 0x7F) == 0x7F] = np.nan
    return np.where(bits >= 128, -values, values).astype(np.float32)


_E4M3 = _e4m3_table()


def _token_text(token: Any) -> str | None:
    """Special tokens are strings or {"content": ...}."""
    return token.get("content") if isinstance(token, dict) else token


def _first_template_token(tokenizer: dict[str, Any]) -> str | None:
    """The special token that the tokenizer's own post-processor puts in front, if there is one."""
    processor = tokenizer.get("post_processor") or {}
    for step in processor.get("processors", [processor]):
        single = step.get("single") if step.get("type") == "TemplateProcessing" else None
        if single and "SpecialToken" in single[0]:
            return str(single[0]["SpecialToken"]["id"])
    return None

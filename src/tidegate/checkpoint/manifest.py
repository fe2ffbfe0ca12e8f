"""The store's table of contents: manifest.json, specified in docs/format.md. Made by the converter, checked on opening.

Offsets follow from the config and the formats alone (``lay_out``), so the size of a store is known before a byte is
written, and a manifest whose offsets differ is refused.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from tidegate.checkpoint.files import read_json
from tidegate.checkpoint.inventory import dense_tensors
from tidegate.errors import BadTensor, CheckpointError, CorruptFile, UsageError
from tidegate.model_config import ModelConfig
from tidegate.quant.formats import Format
from tidegate.quant.layout import ExpertLayout
from tidegate.units import align_up

MANIFEST, DENSE_FILE, EXPERTS_FILE = "manifest.json", "dense.bin", "experts.bin"
PREDICTOR_FILE = "predictor.safetensors"  # that tidegate fit-predictor leaves there
KIND, VERSION = "tidegate-store", 1
ALIGNMENT, TENSOR_ALIGNMENT = 4096, 64


@dataclass(frozen=True)
class DenseEntry:
    """One tensor of dense.bin. ``fmt`` None: plain float32 in row-major order; otherwise packed, with shape [n, k]."""

    name: str
    shape: tuple[int, ...]
    fmt: Format | None
    offset: int
    nbytes: int
    crc32: int = 0


@dataclass(frozen=True)
class ExpertLayer:
    """The blobs of one MoE layer: expert e is at ``offset + e * layout.blob_bytes`` of experts.bin."""

    layout: ExpertLayout
    num_experts: int
    offset: int
    crc32s: tuple[int, ...] = ()


@dataclass(frozen=True)
class SideFile:
    """A text file of the store, kept as it came: config.json, tokenizer.json, chat_template.jinja."""

    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """``source`` and ``options`` say where the store came from; nothing in them changes how it is read."""

    config: ModelConfig
    dense: tuple[DenseEntry, ...]
    layers: tuple[ExpertLayer, ...]
    files: Mapping[str, SideFile]
    special_tokens: Mapping[str, Any]
    source: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def dense_bytes(self) -> int:
        """Size of dense.bin."""
        return align_up(self.dense[-1].offset + self.dense[-1].nbytes, ALIGNMENT) if self.dense else 0

    @property
    def expert_bytes(self) -> int:
        """Size of experts.bin."""
        return sum(layer.num_experts * layer.layout.blob_bytes for layer in self.layers)


def lay_out(
    config: ModelConfig, dense_formats: Mapping[str, Format], expert_formats: Sequence[tuple[Format, Format]]
) -> tuple[tuple[DenseEntry, ...], tuple[ExpertLayer, ...]]:
    """Entries without checksums. ``dense_formats`` has a format for every matrix of the inventory, ``expert_formats``
    (gate and up, down) for every MoE layer."""
    dense, offset = [], 0
    for tensor in dense_tensors(config):
        fmt = dense_formats[tensor.name] if tensor.is_matrix else None
        nbytes = fmt.packed_bytes(*tensor.shape) if fmt else 4 * prod(tensor.shape)
        dense.append(DenseEntry(tensor.name, tensor.shape, fmt, offset, nbytes))
        offset = align_up(offset + nbytes, TENSOR_ALIGNMENT)
    layers, offset = [], 0
    for fmt, down_fmt in expert_formats:
        assert config.moe is not None
        moe = config.moe
        layout = ExpertLayout.of(config.hidden_size, moe.expert_dim, fmt, moe.has_expert_bias, down_fmt)
        layers.append(ExpertLayer(layout, moe.num_experts, offset))
        offset += moe.num_experts * layout.blob_bytes
    return tuple(dense), tuple(layers)


def to_json(manifest: Manifest) -> str:
    """The text of manifest.json, its own checksum included. The same manifest gives the same text."""
    data: dict[str, Any] = {
        "kind": KIND,
        "version": VERSION,
        "source": dict(manifest.source),
        "options": dict(manifest.options),
        "config": manifest.config.to_json(),
        "special_tokens": dict(manifest.special_tokens),
        "files": {name: asdict(file) for name, file in manifest.files.items()},
        "dense": {
            "file": DENSE_FILE,
            "nbytes": manifest.dense_bytes,
            "tensors": [{**asdict(e), "fmt": str(e.fmt) if e.fmt else None} for e in manifest.dense],
        },
        "experts": {
            "file": EXPERTS_FILE,
            "nbytes": manifest.expert_bytes,
            "layers": [_layer_to_json(layer) for layer in manifest.layers],
        },
    }
    data["crc32"] = _checksum(data)
    return json.dumps(data, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Parse and check ``folder/manifest.json``. Raises CorruptFile (checksum, layout), CheckpointError (another kind or
    version) or BadTensor (a tensor of the inventory missing or of the wrong shape)."""
    path = folder / MANIFEST
    data = read_json(path)
    if data.get("kind") != KIND:
        raise CheckpointError(
            f"{path}: is not the manifest of an expert store (kind {data.get('kind')!r}, wanted {KIND!r})"
        )
    if data.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: store format version {data.get('version')!r}, this Tidegate reads {VERSION}; convert the source again"
        )
    wanted = data.pop("crc32", None)
    got = _checksum(data)
    if wanted != got:
        raise CorruptFile(path, 0, "checksum of the manifest", wanted, got)
    try:
        manifest = _from_json(data)
    except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
        raise CorruptFile(path, 0, "structure of the manifest", "as in docs/format.md", repr(error)) from None
    _check_layout(path, manifest)
    return manifest


def _checksum(data: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(data, sort_keys=True, separators=(",", ":")).encode())


def _layer_to_json(layer: ExpertLayer) -> dict[str, Any]:
    layout = {**asdict(layer.layout), "fmt": str(layer.layout.fmt), "down_fmt": str(layer.layout.down_fmt)}
    return {"num_experts": layer.num_experts, "offset": layer.offset, "layout": layout, "crc32s": list(layer.crc32s)}


def _layer_from_json(data: Mapping[str, Any]) -> ExpertLayer:
    layout = data["layout"]
    formats = {key: Format.parse(layout[key]) for key in ("fmt", "down_fmt")}
    return ExpertLayer(
        ExpertLayout(**{**layout, **formats}), data["num_experts"], data["offset"], tuple(map(int, data["crc32s"]))
    )


def _from_json(data: Mapping[str, Any]) -> Manifest:
    return Manifest(
        config=ModelConfig.from_json(data["config"]),
        dense=tuple(
            DenseEntry(**{**e, "shape": tuple(e["shape"]), "fmt": Format.parse(e["fmt"]) if e["fmt"] else None})
            for e in data["dense"]["tensors"]
        ),
        layers=tuple(_layer_from_json(layer) for layer in data["experts"]["layers"]),
        files={name: SideFile(**file) for name, file in data["files"].items()},
        special_tokens=data["special_tokens"],
        source=data["source"],
        options=data["options"],
    )


def _check_layout(path: Path, manifest: Manifest) -> None:
    config = manifest.config
    found = {entry.name: entry for entry in manifest.dense}
    for tensor in dense_tensors(config):
        entry = found.pop(tensor.name, None)
        if entry is None:
            raise BadTensor(f"{path}: {tensor.name} is missing")
        if entry.shape != tensor.shape:
            raise BadTensor(
                f"{path}: {tensor.name} has shape {list(entry.shape)}, the config says {list(tensor.shape)}"
            )
        if (entry.fmt is not None) != tensor.is_matrix:
            raise BadTensor(f"{path}: {tensor.name} is {entry.fmt or 'plain'}, which its kind of tensor cannot be")
    if found:
        raise BadTensor(f"{path}: {next(iter(found))} does not belong to a {config.family} model")
    if len(manifest.layers) != config.num_moe_layers:
        raise BadTensor(f"{path}: {len(manifest.layers)} layers of experts, the config says {config.num_moe_layers}")
    dense, layers = lay_out(
        config,
        {entry.name: entry.fmt for entry in manifest.dense if entry.fmt},
        [(layer.layout.fmt, layer.layout.down_fmt) for layer in manifest.layers],
    )
    for entry, want in zip(manifest.dense, dense, strict=True):
        if replace(entry, crc32=0) != want:
            raise CorruptFile(path, 0, f"place of {entry.name}", want, entry)
    for index, (layer, wanted) in enumerate(zip(manifest.layers, layers, strict=True)):
        if replace(layer, crc32s=()) != wanted or len(layer.crc32s) != wanted.num_experts:
            raise CorruptFile(path, 0, f"layout of the experts of MoE layer {index}", wanted, replace(layer, crc32s=()))

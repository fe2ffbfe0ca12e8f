"""What a path says about a model, from its headers: a store, a Hugging Face folder, a GGUF file, a bare config.json, or
the name of a repository on the Hugging Face hub."""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tidegate.checkpoint.base import Checkpoint
from tidegate.checkpoint.convert.options import ConvertOptions
from tidegate.checkpoint.convert.plan import plan_files
from tidegate.checkpoint.files import read_json
from tidegate.checkpoint.inventory import dense_tensors
from tidegate.checkpoint.manifest import ALIGNMENT, DenseEntry, ExpertLayer, lay_out
from tidegate.checkpoint.open import BUILTIN_NAME, detect, open_checkpoint
from tidegate.checkpoint.store import ExpertStore
from tidegate.errors import UsageError
from tidegate.model_config import ModelConfig
from tidegate.models.families import model_config
from tidegate.planner.owners import packed_by_owner, source_by_owner
from tidegate.quant.formats import Format
from tidegate.quant.layout import ExpertLayout
from tidegate.units import align_up

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ModelHeaders:
    """A model without its weights. ``dense`` and ``layers`` are what its store holds, or what a conversion with ``convert``
    would write, to the byte. ``source_bytes`` (by owner) add up to the sizes in the source's headers; None without them.
    ``kind``: store, hf, gguf, config (no weights there) or hub."""

    path: str
    kind: str
    config: ModelConfig
    dense: Mapping[str, DenseEntry]
    layers: tuple[ExpertLayer, ...]
    convert: ConvertOptions | None
    source_bytes: Mapping[str, int] | None

    @cached_property
    def dense_bytes(self) -> int:
        """Size of dense.bin."""
        last = list(self.dense.values())[-1]
        return align_up(last.offset + last.nbytes, ALIGNMENT)

    @property
    def expert_bytes(self) -> int:
        """Size of experts.bin."""
        return sum(layer.num_experts * layer.layout.blob_bytes for layer in self.layers)

    @cached_property
    def layouts(self) -> tuple[ExpertLayout, ...]:
        return tuple(layer.layout for layer in self.layers)

    @cached_property
    def packed_bytes(self) -> dict[str, int]:
        """By owner; adds up to ``dense_bytes + expert_bytes``."""
        return packed_by_owner(self.dense, self.dense_bytes, self.layers)


def read_headers(path: str, convert: ConvertOptions, has_format_flags: bool = False) -> ModelHeaders:
    """Raises CheckpointError and its kinds, and UsageError: format flags (``has_format_flags``) for a finished store, a
    repository that cannot be reached."""
    collects = gc.isenabled()
    gc.disable()  # headers are a hundred thousand objects and no garbage: looking for some takes a fifth of the time
    try:
        return _read(path, convert, has_format_flags)
    finally:
        if collects:
            gc.enable()


def _read(path: str, convert: ConvertOptions, has_format_flags: bool) -> ModelHeaders:
    where = Path(path).expanduser()
    if path == BUILTIN_NAME:
        where = detect(path)[1]
    if where.is_file() and where.suffix == ".json":
        return _from_config(where, convert)
    if (where / "config.json").is_file() and not (where / "manifest.json").exists() and _has_no_weights(where):
        return _from_config(where / "config.json", convert)
    if not where.exists() and _REPOSITORY.fullmatch(path):
        from tidegate.planner.hub import HubCheckpoint  # noqa: PLC0415  (imports a network client)

        return from_checkpoint(HubCheckpoint(path), convert)
    kind, found = detect(where)
    if kind != "store":
        return from_checkpoint(open_checkpoint(found), convert)
    if has_format_flags:
        raise UsageError(f"--experts, --dense, --group: {found} is converted already; plan for its source")
    store = ExpertStore.open(found)
    return ModelHeaders(str(found), "store", store.config, store.dense, store.manifest.layers, None, None)


def from_checkpoint(checkpoint: Checkpoint, convert: ConvertOptions) -> ModelHeaders:
    """What ``convert`` would make of a source. Raises what a conversion would."""
    weights, dense, layers = plan_files(checkpoint, convert)
    config = model_config(checkpoint.config)
    entries = {entry.name: entry for entry in dense}
    source = source_by_owner(checkpoint, config, weights)
    return ModelHeaders(str(checkpoint.path), checkpoint.kind, config, entries, layers, convert, source)


def _from_config(path: Path, convert: ConvertOptions) -> ModelHeaders:
    """A config alone: weights are taken to be plain, or MXFP4 experts where the config says so."""
    keys = read_json(path)
    config = model_config(keys)
    native = Format("mxfp4", 32) if _quant_method(keys) == "mxfp4" else None
    dense_format, expert_format = convert.dense_format(None), convert.expert_format(native)
    formats = {tensor.name: dense_format for tensor in dense_tensors(config) if tensor.is_matrix}
    dense, layers = lay_out(config, formats, [(expert_format, expert_format)] * config.num_moe_layers)
    return ModelHeaders(str(path), "config", config, {entry.name: entry for entry in dense}, layers, convert, None)


def _quant_method(keys: Mapping[str, Any]) -> str | None:
    return (keys.get("quantization_config") or {}).get("quant_method")


def _has_no_weights(folder: Path) -> bool:
    return not any(
        file.suffix in (".safetensors", ".gguf") or file.name.endswith(".index.json") for file in folder.iterdir()
    )

"""What a conversion will write, decided from headers alone: formats, offsets, and the work in file order.

N outputs, K inputs of a matrix; D hidden, F expert width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from tidegate.checkpoint.base import Checkpoint
from tidegate.checkpoint.convert.options import ConvertOptions, source_files
from tidegate.checkpoint.inventory import dense_tensors
from tidegate.checkpoint.manifest import (
    DENSE_FILE,
    EXPERTS_FILE,
    DenseEntry,
    ExpertLayer,
    Manifest,
    SideFile,
    lay_out,
)
from tidegate.checkpoint.sources import ExpertSources, Source, WeightMap
from tidegate.errors import BadTensor, UsageError
from tidegate.model_config import ModelConfig
from tidegate.models.families import model_config, weight_map
from tidegate.models.families_weights import FamilyWeights
from tidegate.quant.formats import Format
from tidegate.units import align_up


@dataclass(frozen=True)
class Piece:
    """One matrix [n, k] at ``offset`` inside its unit; ``fmt`` None: plain float32."""

    source: Source
    fmt: Format | None
    n: int
    k: int
    offset: int


@dataclass(frozen=True)
class Unit:
    """What has one checksum: a dense tensor or an expert's blob, at ``offset`` of ``file``; gaps between pieces are zero."""

    what: str
    file: str
    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class ConvertPlan:
    """``dense`` and ``layers`` have no checksums yet. Units come in file order: all dense tensors, then layer by layer
    all experts."""

    checkpoint: Checkpoint
    options: ConvertOptions
    config: ModelConfig
    weights: WeightMap
    dense: tuple[DenseEntry, ...]
    layers: tuple[ExpertLayer, ...]

    @property
    def num_units(self) -> int:
        return len(self.dense) + sum(layer.num_experts for layer in self.layers)

    def units(self, first: int = 0) -> Iterator[Unit]:
        """Units from number ``first`` on."""
        for entry in self.dense[first:]:
            yield _dense_unit(entry, self.weights.dense(entry.name), self.checkpoint)
        skip = max(0, first - len(self.dense))
        for index, layer in enumerate(self.layers):
            for expert in range(min(skip, layer.num_experts), layer.num_experts):
                yield _expert_unit(index, expert, layer, self.weights.expert(index, expert))
            skip = max(0, skip - layer.num_experts)

    def file_bytes(self) -> dict[str, int]:
        """Size of each data file."""
        empty = self.manifest([0] * self.num_units, {}, {})
        return {DENSE_FILE: empty.dense_bytes, EXPERTS_FILE: empty.expert_bytes}

    def manifest(self, crc32s: list[int], files: dict[str, SideFile], special_tokens: dict[str, Any]) -> Manifest:
        """The store's manifest, from the checksums of all units in order."""
        assert len(crc32s) == self.num_units
        dense = tuple(replace(entry, crc32=crc) for entry, crc in zip(self.dense, crc32s, strict=False))
        layers, at = [], len(dense)
        for layer in self.layers:
            layers.append(replace(layer, crc32s=tuple(crc32s[at : at + layer.num_experts])))
            at += layer.num_experts
        path = self.checkpoint.path
        source = {
            "kind": self.checkpoint.kind,
            "name": path.resolve().name,
            "files": [{"name": file.name, "nbytes": file.stat().st_size} for file in source_files(path)],
        }
        options = asdict(self.options)
        return Manifest(self.config, dense, tuple(layers), files, special_tokens, source, options)


def make_plan(checkpoint: Checkpoint, options: ConvertOptions) -> ConvertPlan:
    """Raises UnknownArchitecture, BadTensor (missing, or a shape that the config does not expect) and UsageError."""
    weights, dense, layers = plan_files(checkpoint, options)
    config = model_config(checkpoint.config)
    eos_ids = (*config.eos_token_ids, *checkpoint.special_tokens()["eos_token_ids"])
    config = replace(config, eos_token_ids=tuple(dict.fromkeys(eos_ids)))
    return ConvertPlan(checkpoint, options, config, weights, dense, layers)


def plan_files(
    checkpoint: Checkpoint, options: ConvertOptions
) -> tuple[FamilyWeights, tuple[DenseEntry, ...], tuple[ExpertLayer, ...]]:
    """Where every weight comes from and where it goes, without reading the tokenizer. Raises as ``make_plan``."""
    config = model_config(checkpoint.config)
    if config.moe is None and options.experts != "auto":
        raise UsageError(f"--experts {options.experts} has no effect: a {config.family} model has no experts")
    weights = weight_map(checkpoint, config)
    dense_formats = {}
    for tensor in dense_tensors(config):
        source = weights.dense(tensor.name)
        n, k = source.shape(checkpoint)
        if (n, k) != tensor.shape if tensor.is_matrix else n * k != prod(tensor.shape):
            raise _wrong_shape(checkpoint, tensor.name, source, tensor.shape)
        if tensor.is_matrix:
            dense_formats[tensor.name] = options.dense_format(source.native_format(checkpoint))
    formats = [_expert_formats(checkpoint, config, weights, layer, options) for layer in range(config.num_moe_layers)]
    return weights, *lay_out(config, dense_formats, formats)


def _expert_formats(
    checkpoint: Checkpoint, config: ModelConfig, weights: FamilyWeights, layer: int, options: ConvertOptions
) -> tuple[Format, Format]:
    """Formats of a layer's gate and up, and of its down; all its experts agree, or their own formats are not kept."""
    assert config.moe is not None
    f, d = config.moe.expert_dim, config.hidden_size
    natives: tuple[set[Format | None], set[Format | None]] = (set(), set())
    for expert in range(1 if weights.are_alike(layer) else config.moe.num_experts):
        sources = weights.expert(layer, expert)
        for name, source, shape in _named(sources, f, d):
            if source.shape(checkpoint) != shape:
                raise _wrong_shape(checkpoint, f"{name} of expert {expert} of MoE layer {layer}", source, shape)
        natives[0].update(source.native_format(checkpoint) for source in (sources.gate, sources.up))
        natives[1].add(sources.down.native_format(checkpoint))
    gate_up, down = (options.expert_format(kinds.pop() if len(kinds) == 1 else None) for kinds in natives)
    return gate_up, down


def _named(sources: ExpertSources, f: int, d: int) -> Iterator[tuple[str, Source, tuple[int, int]]]:
    yield "gate", sources.gate, (f, d)
    yield "up", sources.up, (f, d)
    yield "down", sources.down, (d, f)
    for name, source, n in (
        ("gate bias", sources.gate_bias, f),
        ("up bias", sources.up_bias, f),
        ("down bias", sources.down_bias, d),
    ):
        if source is not None:
            yield name, source, (n, 1)


def _wrong_shape(checkpoint: Checkpoint, what: str, source: Source, wanted: tuple[int, ...]) -> BadTensor:
    tensors = ", ".join(dict.fromkeys(part.tensor for part in source.parts))
    got = list(source.shape(checkpoint))
    return BadTensor(f"{checkpoint.path}: {what} must have shape {list(wanted)}, {tensors} gives {got}")


def _dense_unit(entry: DenseEntry, source: Source, checkpoint: Checkpoint) -> Unit:
    piece = Piece(source, entry.fmt, *source.shape(checkpoint), 0)
    return Unit(entry.name, DENSE_FILE, entry.offset, entry.nbytes, (piece,))


def _expert_unit(index: int, expert: int, layer: ExpertLayer, sources: ExpertSources) -> Unit:
    layout = layer.layout
    f, d, bias_at = layout.expert_dim, layout.hidden_size, layout.bias_offset
    pieces = [
        Piece(sources.gate, layout.fmt, f, d, 0),
        Piece(sources.up, layout.fmt, f, d, layout.up_offset),
        Piece(sources.down, layout.down_fmt, d, f, layout.down_offset),
    ]
    if layout.has_bias:
        for bias, n in ((sources.gate_bias, f), (sources.up_bias, f), (sources.down_bias, d)):
            assert bias is not None
            pieces.append(Piece(bias, None, n, 1, bias_at))
            bias_at += align_up(4 * n, 64)
    offset = layer.offset + expert * layout.blob_bytes
    what = f"expert {expert} of MoE layer {index}"
    return Unit(what, EXPERTS_FILE, offset, layout.blob_bytes, tuple(pieces))

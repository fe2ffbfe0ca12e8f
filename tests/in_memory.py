"""A decoder whose weights are packed in memory straight from a checkpoint's weight map, and sequences to run through it.

For tests of the models and backends: no store on disk, no loader threads, the real cache, real KV pages.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.backends.base import Backend
from tidegate.backends.cpu import CpuBackend
from tidegate.backends.operands import ExpertSlots, KvLayout, StepBatch
from tidegate.backends.reference import ReferenceBackend
from tidegate.checkpoint.base import Checkpoint
from tidegate.checkpoint.hf import HfCheckpoint
from tidegate.checkpoint.inventory import dense_tensors
from tidegate.checkpoint.sources import Source, WeightMap
from tidegate.checkpoint.store import Blob
from tidegate.experts.base import ExpertKey, Loader
from tidegate.experts.cache import ExpertCache
from tidegate.experts.loader import LoaderOptions, NativeLoader
from tidegate.experts.policy import DecayedLfu
from tidegate.model_config import ModelConfig
from tidegate.models.decoder import Decoder
from tidegate.models.families import model_config, weight_map
from tidegate.models.moe import Experts
from tidegate.models.weights import DenseTensors, model_weights
from tidegate.quant.formats import Format
from tidegate.quant.layout import ExpertLayout
from tidegate.quant.pack import pack
from tidegate.units import align_up

F32 = Format("f32")
WORKSPACE_BYTES = 16 << 20


def aligned(nbytes: int) -> np.ndarray:
    """Zeroed uint8 at a multiple of 4096."""
    block = np.zeros(nbytes + 4096, np.uint8)
    start = -block.ctypes.data % 4096
    return block[start : start + nbytes]


BACKENDS: dict[str, Callable[[], Backend[Any]]] = {
    "reference": ReferenceBackend,
    "cpu": lambda: CpuBackend(2, aligned(WORKSPACE_BYTES)),
}


class PackedTensors:
    """DenseTensors of a checkpoint, packed in ``fmt``."""

    def __init__(self, checkpoint: Checkpoint, weights: WeightMap, config: ModelConfig, fmt: Format) -> None:
        self._checkpoint, self._weights, self._fmt = checkpoint, weights, fmt
        self._shapes = {tensor.name: tensor.shape for tensor in dense_tensors(config)}

    def matrix(self, name: str) -> tuple[np.ndarray, Format]:
        packed = pack(self._weights.dense(name).read_f32(self._checkpoint), self._fmt)
        view = aligned(packed.size)
        view[:] = packed
        return view, self._fmt

    def plain(self, name: str) -> np.ndarray:
        return self._weights.dense(name).read_f32(self._checkpoint).reshape(self._shapes[name])


class MemoryExperts(Loader, ExpertSlots):
    """Every expert packed in memory; a load copies a blob into its slot at once."""

    def __init__(self, checkpoint: Checkpoint, weights: WeightMap, layout: ExpertLayout, slots: int) -> None:
        self._checkpoint, self._weights, self._layout = checkpoint, weights, layout
        self._blobs: dict[ExpertKey, np.ndarray] = {}
        self.loads: list[ExpertKey] = []
        block = aligned(slots * layout.blob_bytes)
        self.views = list(block.reshape(slots, layout.blob_bytes))

    def load(self, key: ExpertKey, slot: int, *, demand: bool) -> None:
        self.loads.append(key)
        self.views[slot][:] = self.blob(key)

    def blob(self, key: ExpertKey) -> np.ndarray:
        if key not in self._blobs:
            self._blobs[key] = self._pack(key)
        return self._blobs[key]

    def cancel(self, slot: int) -> bool:
        return False

    def promote(self, slot: int) -> None:
        pass

    def is_ready(self, slot: int) -> bool:
        return True

    def wait(self, slot: int) -> np.ndarray:
        return self.views[slot]

    def _pack(self, key: ExpertKey) -> np.ndarray:
        sources, layout = self._weights.expert(key.layer, key.expert), self._layout
        blob = np.zeros(layout.blob_bytes, np.uint8)

        def put(offset: int, part: np.ndarray) -> None:
            blob[offset : offset + part.size] = part

        put(0, pack(self._read(sources.gate), layout.fmt))
        put(layout.up_offset, pack(self._read(sources.up), layout.fmt))
        put(layout.down_offset, pack(self._read(sources.down), layout.down_fmt))
        if layout.has_bias:
            offset = layout.bias_offset
            for source in (sources.gate_bias, sources.up_bias, sources.down_bias):
                values = self._read(source).reshape(-1)
                put(offset, values.view(np.uint8))
                offset += align_up(values.nbytes, 64)
        return blob

    def _read(self, source: Source | None) -> np.ndarray:
        assert source is not None
        return np.ascontiguousarray(source.read_f32(self._checkpoint))


class FileOfBlobs:
    """Experts of equal size in one file, behind 4096 bytes, for a NativeLoader: layer after layer."""

    def __init__(self, folder: Path, blobs: Sequence[Sequence[np.ndarray]]) -> None:
        self.paths = [folder / "experts.bin"]
        flat = [blob.tobytes() for layer in blobs for blob in layer]
        self.paths[0].write_bytes(bytes(4096) + b"".join(flat))
        self._per_layer, self._nbytes, self._crcs = len(blobs[0]), len(flat[0]), list(map(zlib.crc32, flat))

    def blob(self, key: ExpertKey) -> Blob:
        index = self._per_layer * key.layer + key.expert
        return Blob(0, 4096 + self._nbytes * index, self._nbytes, self._crcs[index])


@dataclass
class TinyModel:
    """A decoder and the pages its sequences live in. ``run`` advances sequences; ``logits`` gives one call's rows."""

    config: ModelConfig
    decoder: Decoder[Any]
    memory: MemoryExperts | None
    kv: KvLayout
    num_pages: int

    def __post_init__(self) -> None:
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._free = list(np.random.default_rng(0).permutation(self.num_pages))

    def run(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> list[np.ndarray]:
        """One step: the next tokens of some sequences (number, token ids). Logits of all their tokens, float32 [t, V] each."""
        for sequence, tokens in chunks:
            pages = self._pages.setdefault(sequence, [])
            start = self._lengths.get(sequence, 0)
            while len(pages) * self.kv.page_tokens < start + len(tokens):
                pages.append(int(self._free.pop()))
        counts = [len(tokens) for _, tokens in chunks]
        width = max(len(self._pages[sequence]) for sequence, _ in chunks)
        tables = np.full((len(chunks), width), -1, np.int32)
        for row, (sequence, _) in enumerate(chunks):
            tables[row, : len(self._pages[sequence])] = self._pages[sequence]
        starts = [self._lengths.get(sequence, 0) for sequence, _ in chunks]
        batch = StepBatch(
            token_ids_T=np.concatenate([np.asarray(tokens, np.int32) for _, tokens in chunks]),
            positions_T=np.concatenate(
                [np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, counts, strict=True)]
            ),
            sequence_T=np.repeat(np.arange(len(chunks), dtype=np.int32), counts),
            block_tables=tables,
            logit_rows_R=np.arange(sum(counts), dtype=np.int32),
        )
        logits = self.decoder.forward(batch).copy()
        for sequence, tokens in chunks:
            self._lengths[sequence] = self._lengths.get(sequence, 0) + len(tokens)
        return np.split(logits, np.cumsum(counts)[:-1])

    def read_natively(self, folder: Path) -> NativeLoader:
        """From here on experts come from a file, by native threads, into the slots that they had; none is in memory yet."""
        experts, memory, config = self.decoder.experts, self.memory, self.config
        assert experts is not None and memory is not None and config.moe is not None
        layers, num_experts = range(config.num_moe_layers), config.moe.num_experts
        blobs = [[memory.blob(ExpertKey(layer, expert)) for expert in range(num_experts)] for layer in layers]
        loader = NativeLoader(FileOfBlobs(folder, blobs), memory.views, LoaderOptions(chunk_bytes=4096))
        capacities = [experts.cache.capacity(layer) for layer in layers]
        experts.cache, experts.slots = ExpertCache(capacities, num_experts, DecayedLfu, loader), loader
        return loader

    def forget(self, sequence: int) -> None:
        """Give the pages back."""
        self._free.extend(self._pages.pop(sequence))
        del self._lengths[sequence]


def tiny_model(
    source: Path | Checkpoint,
    make_backend: Callable[[], Backend[Any]],
    *,
    experts: Format = F32,
    dense: Format = F32,
    kv_dtype: str = "f32",
    capacity: int | None = None,
    context_tokens: int = 128,
    num_pages: int = 32,
) -> TinyModel:
    """The model of a checkpoint or Hugging Face folder. ``capacity``: expert slots of every MoE layer (default: all)."""
    checkpoint = source if isinstance(source, Checkpoint) else HfCheckpoint(source)
    config = model_config(checkpoint.config)
    weights = weight_map(checkpoint, config)
    routed = memory = None
    if config.moe is not None:
        moe = config.moe
        layout = ExpertLayout.of(config.hidden_size, moe.expert_dim, experts, moe.has_expert_bias)
        slots = capacity or moe.num_experts
        memory = MemoryExperts(checkpoint, weights, layout, slots * config.num_moe_layers)
        cache = ExpertCache([slots] * config.num_moe_layers, moe.num_experts, DecayedLfu, memory)
        routed = Experts(cache, memory, [layout] * config.num_moe_layers)
    tensors = PackedTensors(checkpoint, weights, config, dense)
    return assemble(config, tensors, routed, make_backend(), memory, kv_dtype, context_tokens, num_pages)


def assemble(
    config: ModelConfig,
    tensors: DenseTensors,
    routed: Experts | None,
    backend: Backend[Any],
    memory: MemoryExperts | None = None,
    kv_dtype: str = "f32",
    context_tokens: int = 128,
    num_pages: int = 32,
) -> TinyModel:
    """A TinyModel of weights that are in memory already."""
    kv = KvLayout.of(config.attention, config.rope, config.num_layers, kv_dtype)
    backend.bind_kv(kv, aligned(num_pages * kv.page_bytes))
    decoder = Decoder(config, model_weights(config, tensors, context_tokens), backend, routed)
    return TinyModel(config, decoder, memory, kv, num_pages)

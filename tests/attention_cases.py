"""Random attention layers and batches for the tests of the cpu backend: what both backends are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.backends.base import Backend, F32Array, KvLayout, StepBatch
from tidegate.backends.cpu import CpuBackend

PAGE = 16


def aligned(num_bytes: int, fill: int = 0) -> NDArray[np.uint8]:
    """64-byte aligned memory. Fill 0xff makes every float16 and float32 in it not a number."""
    memory = np.full(num_bytes + 64, fill, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes]


def cpu_backend(threads: int = 2, isa: str | None = None, workspace_bytes: int = 64 << 20) -> CpuBackend:
    complete = type("Complete", (CpuBackend,), dict.fromkeys(CpuBackend.__abstractmethods__))
    return complete(threads, aligned(workspace_bytes), isa)  # type: ignore[no-any-return]


@dataclass
class Pages:
    """A KV cache of ``num_pages`` shuffled pages, full of NaN, that hands pages to sequences."""

    layout: KvLayout
    num_pages: int
    seed: int = 0

    def __post_init__(self) -> None:
        self.memory = aligned(self.num_pages * self.layout.page_bytes, fill=0xFF)
        self.free = list(np.random.default_rng(self.seed).permutation(self.num_pages))
        self.tables: dict[int, list[int]] = {}

    def table(self, sequence: int, num_tokens: int) -> list[int]:
        pages = self.tables.setdefault(sequence, [])
        while len(pages) * PAGE < num_tokens:
            pages.append(int(self.free.pop()))
        return pages


def step_batch(pages: Pages, parts: list[tuple[int, int, int]]) -> StepBatch:
    """``parts`` are (sequence, first position, number of tokens)."""
    tables = [pages.table(sequence, start + count) for sequence, start, count in parts]
    block_tables = np.full((len(parts), max(map(len, tables))), -1, np.int32)
    for row, table in enumerate(tables):
        block_tables[row, : len(table)] = table
    positions = np.concatenate([np.arange(start, start + count) for _, start, count in parts]).astype(np.int32)
    rows = np.repeat(np.arange(len(parts)), [count for _, _, count in parts]).astype(np.int32)
    return StepBatch(np.zeros(len(rows), np.int32), positions, rows, block_tables, np.array([len(rows) - 1], np.int32))


def run_step(
    backend: Backend[Any],
    pages: Pages,
    parts: list[tuple[int, int, int]],
    inputs: list[F32Array],
    operation: str,
    weights: Any,
) -> F32Array:
    """One step of ``operation`` (attend or attend_latent) on [T, n] inputs; its result as a numpy array of its own."""
    backend.begin(step_batch(pages, parts))
    if not isinstance(backend, CpuBackend):
        return getattr(backend, operation)(*inputs, weights)  # type: ignore[no-any-return]
    matrices = [backend.compute.from_numpy(np.ascontiguousarray(x)) for x in inputs]
    result = getattr(backend, operation)(*matrices, weights)
    return backend.compute.numpy(result).copy()

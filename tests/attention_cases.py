"""Random attention layers and batches for the tests of the cpu backend: what both backends are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidegate.backends.base import Backend
from tidegate.backends.cpu import CpuBackend
from tidegate.backends.operands import F32Array, KvLayout, StepBatch

PAGE = 16


def aligned(num_bytes: int, fill: int = 0) -> NDArray[np.uint8]:
    """64-byte aligned memory. Fill 0xff makes every float16 and float32 in it not a number."""
    memory = np.full(num_bytes + 64, fill, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes]


def cpu_backend(threads: int = 2, isa: str | None = None, workspace_bytes: int = 64 << 20) -> CpuBackend:
    return CpuBackend(threads, aligned(workspace_bytes), isa)


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


def run_chunks(
    backend: Backend[Any],
    layout: KvLayout,
    operation: str,
    weights: Any,
    inputs: list[F32Array],
    chunks: list[int],
    others: Sequence[list[tuple[int, int]]] = (),
    pages_seed: int = 0,
) -> F32Array:
    """The result [T, n] for one sequence whose tokens come in ``chunks``. Each step it shares with ``others``: a list of
    (sequence, number of random tokens), even ones before it and odd ones behind."""
    generator, starts = np.random.default_rng(99), dict[int, int]()
    total = len(inputs[0]) + sum(count for step in others for _, count in step)
    pages = Pages(layout, total // PAGE + 64 + len(others) * 4, pages_seed)
    backend.bind_kv(layout, pages.memory)
    results, start = [], 0
    for step, count in enumerate(chunks):
        parts, rows, at = [(0, start, count)], [[x[start : start + count] for x in inputs]], 0
        for sequence, more in others[step] if step < len(others) else ():
            first = starts.get(sequence, 0)
            starts[sequence] = first + more
            place = len(parts) if sequence % 2 else 0
            at += 0 if sequence % 2 else more
            parts.insert(place, (sequence, first, more))
            rows.insert(place, [generator.normal(size=(more, x.shape[1])).astype(np.float32) for x in inputs])
        joined = [np.concatenate(columns) for columns in zip(*rows, strict=True)]
        results.append(run_step(backend, pages, parts, joined, operation, weights)[at : at + count])
        start += count
    assert start == len(inputs[0])
    return np.concatenate(results)


@st.composite
def cuts(draw: st.DrawFn, total: int) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Chunks of ``total`` tokens and other sequences for every step, as run_chunks wants them."""
    left, chunks = total, list[int]()
    while left and len(chunks) < 12:
        chunks.append(min(left, draw(st.integers(1, 1 + total // 3))))
        left -= chunks[-1]
    if left:
        chunks.append(left)
    step = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 90)), max_size=3, unique_by=lambda part: part[0])
    return chunks, [draw(step) for _ in chunks]

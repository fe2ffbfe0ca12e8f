"""Replays a trace through the engine's own ExpertCache: demand loads only, no clock, hit counts equal to the engine's.

Legend: T rows, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tidegate.experts.base import CacheCounters, ExpertKey, Loader
from tidegate.experts.cache import ExpertCache
from tidegate.experts.policy import PolicyFactory
from tidegate.experts.trace import TraceChunk


class InstantLoader(Loader):
    """Every load is ready at once; counts nothing, because the cache does."""

    def load(self, key: ExpertKey, slot: int, *, demand: bool) -> None:
        pass

    def cancel(self, slot: int) -> bool:
        return True

    def promote(self, slot: int) -> None:
        pass

    def is_ready(self, slot: int) -> bool:
        return True


def steps(chunks: Iterable[TraceChunk]) -> Iterator[list[list[int]]]:
    """One list a forward pass: for every layer the distinct experts that its tokens need, ascending.

    A step may be cut by a chunk's end; it is put together again.
    """
    pending: list[np.ndarray] = []
    pending_step = -1
    for chunk in chunks:
        cuts = np.flatnonzero(np.diff(chunk.step)) + 1
        for start, stop in zip([0, *cuts], [*cuts, len(chunk.step)], strict=True):
            if pending and chunk.step[start] != pending_step:
                yield _needed(pending)
                pending = []
            pending.append(chunk.experts[start:stop])
            pending_step = int(chunk.step[start])
    if pending:
        yield _needed(pending)


def _needed(parts: Sequence[np.ndarray]) -> list[list[int]]:
    experts_TLK = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if len(experts_TLK) == 1:
        return [sorted(row) for row in experts_TLK[0].tolist()]
    return [np.unique(experts_TLK[:, layer]).tolist() for layer in range(experts_TLK.shape[1])]


def replay(
    chunks: Iterable[TraceChunk], capacities: Sequence[int], num_experts: int, make_policy: PolicyFactory
) -> CacheCounters:
    """Hits and misses of a whole trace with ``capacities[l]`` slots in layer l."""
    cache = ExpertCache(capacities, num_experts, make_policy, InstantLoader())
    for layers in steps(chunks):
        for layer, needed in enumerate(layers):
            for _ in cache.visit(layer, needed):
                pass
    return cache.counters

"""Replays a trace through the engine's own ExpertCache: demand loads only, no clock, hit counts equal to the engine's.

Legend: T rows, L MoE layers, K experts per token, R layers ahead, G guesses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.experts.base import CacheCounters, InstantLoader
from tidegate.experts.cache import ExpertCache
from tidegate.experts.policy import PolicyFactory
from tidegate.experts.trace import TraceChunk

Array = NDArray[Any]


@dataclass(frozen=True)
class Step:
    """One forward pass: its rows, and for every layer the distinct experts that they need, ascending. ``sketch_TLS``,
    ``guesses_TLRG`` and ``margins_TLRG`` are empty for a trace without them."""

    sequence_T: list[int]
    token_T: list[int]
    experts_TLK: Array
    sketch_TLS: Array
    guesses_TLRG: Array
    margins_TLRG: Array
    needed_L: list[list[int]]


def whole_steps(chunks: Iterable[TraceChunk]) -> Iterator[Step]:
    """The forward passes of a trace. A step may be cut by a chunk's end; it is put together again."""
    pending: list[tuple[Array, ...]] = []
    pending_step = -1
    for chunk in chunks:
        cuts = np.flatnonzero(np.diff(chunk.step)) + 1
        for start, stop in zip([0, *cuts], [*cuts, len(chunk.step)], strict=True):
            if pending and chunk.step[start] != pending_step:
                yield _step(pending)
                pending = []
            part = slice(start, stop)
            columns = (chunk.sequence, chunk.token, chunk.experts, chunk.sketch, chunk.guesses, chunk.margins)
            pending.append(tuple(column[part] for column in columns))
            pending_step = int(chunk.step[start])
    if pending:
        yield _step(pending)


def steps(chunks: Iterable[TraceChunk]) -> Iterator[list[list[int]]]:
    """Only what each step needs: a list a layer."""
    return (step.needed_L for step in whole_steps(chunks))


def _step(parts: Sequence[tuple[Array, ...]]) -> Step:
    columns = parts[0] if len(parts) == 1 else [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]
    sequence, token, experts, sketch, guesses, margins = columns
    return Step(sequence.tolist(), token.tolist(), experts, sketch, guesses, margins, needed(experts))


def needed(experts_TLK: Array) -> list[list[int]]:
    """For every layer the distinct experts, ascending."""
    if len(experts_TLK) == 1:
        return [sorted(row) for row in experts_TLK[0].tolist()]
    return [sorted(set(layer)) for layer in experts_TLK.swapaxes(0, 1).reshape(experts_TLK.shape[1], -1).tolist()]


def replay(
    chunks: Iterable[TraceChunk],
    capacities: Sequence[int],
    num_experts: int,
    make_policy: PolicyFactory,
    *,
    share: bool = False,
) -> CacheCounters:
    """Hits and misses of a whole trace with ``capacities[l]`` slots in layer l, shared anew now and then if ``share``."""
    cache = ExpertCache(capacities, num_experts, make_policy, InstantLoader(), share=share)
    for step in whole_steps(chunks):
        for layer, experts in enumerate(step.needed_L):
            for _ in cache.visit(layer, experts, step.experts_TLK[:, layer].tolist()):
                pass
    return cache.counters

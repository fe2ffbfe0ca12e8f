"""The hit rate of a plan from a recorded trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tidegate.errors import UsageError
from tidegate.experts.base import InstantLoader
from tidegate.experts.cache import ExpertCache
from tidegate.experts.policy import policy_factory
from tidegate.experts.trace import TraceReader
from tidegate.planner.routing import HitRates
from tidegate.sim.replay import whole_steps


def replayed_hits(trace: Path, slots: Sequence[int], num_experts: int, policy: str, sequences: int) -> HitRates:
    """By replaying a recorded trace through the engine's own cache; steps of prompts warm it, only those of up to
    ``sequences`` tokens count. Raises UsageError for a trace of another model or without such steps, CorruptFile."""
    reader = TraceReader(trace)
    if (reader.meta.num_layers, reader.meta.num_experts) != (len(slots), num_experts):
        raise UsageError(
            f"--trace {trace}: recorded with {reader.meta.num_layers} layers of {reader.meta.num_experts} experts; "
            f"this model has {len(slots)} of {num_experts}"
        )
    cache = ExpertCache(slots, num_experts, policy_factory(policy), InstantLoader(), share=True)
    visits = misses = events = 0
    for step in whole_steps(reader):
        before = cache.counters.misses
        for layer, needed in enumerate(step.needed_L):
            for _ in cache.visit(layer, needed, step.experts_TLK[:, layer].tolist()):
                pass
        if len(step.experts_TLK) <= sequences:
            events += len(slots)
            visits += sum(map(len, step.needed_L))
            misses += cache.counters.misses - before
    if not visits:
        raise UsageError(f"--trace {trace}: has no step of up to {sequences} tokens; record one with --answer 64")
    rate = 1 - misses / visits
    return HitRates(rate, rate, rate, f"replay of {trace.name}", visits / events)

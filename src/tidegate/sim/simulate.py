"""Runs recorded routing against a clock: the engine's ExpertCache, Policy, Predictor and Lookahead, and a channel.

Per step and layer: the dense part computes, the router's choice becomes one visit of the cache, its loads go to the channel,
and the experts compute in the order in which they arrive. Deterministic: equal inputs give equal numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tidegate.errors import UsageError
from tidegate.experts.base import CacheCounters
from tidegate.experts.cache import ExpertCache
from tidegate.experts.policy import PolicyFactory
from tidegate.sim.ahead import Ahead, Foresight, make_ahead
from tidegate.sim.clock import ClockLoader
from tidegate.sim.prefetcher import PrefetchOptions
from tidegate.sim.replay import Step


@dataclass(frozen=True)
class Profile:
    """A machine and a model in seconds and bytes. ``dense_s``: everything of a layer but its routed experts; ``expert_s``: one
    expert's computation, once a step however many rows use it (decoding reads its weights once); ``token_s``: embedding,
    logits and sampling of a step; ``predict_s``: one call of a predictor, or one gate asked, and ``weigh_s``: each expert that
    a gate names and that is not in memory; ``access_s``: a layer that lacks experts, beyond one that has all. ``wake_s``,
    ``first_read_s``, ``rouse_s``, ``miss_s``, ``ahead_s``, ``strain_s``: see ClockLoader. ``..._beside_ratio``: speed of loads
    and of computation while both go on, of that alone."""

    expert_bytes: int
    bandwidth_bytes_per_s: float
    expert_s: float
    dense_s: float
    token_s: float = 0.0
    wake_s: float = 0.0
    first_read_s: float = 0.0
    rouse_s: float = 0.0
    miss_s: float = 0.0
    ahead_s: float = 0.0
    strain_s: float = 0.0
    predict_s: float = 0.0
    weigh_s: float = 0.0
    access_s: float = 0.0
    load_beside_ratio: float = 1.0
    compute_beside_ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.expert_bytes <= 0 or self.bandwidth_bytes_per_s <= 0:
            raise UsageError(
                "the simulator needs an expert's bytes and a bandwidth above 0; see --expert-bytes and --disk"
            )

    @property
    def load_s(self) -> float:
        return self.wake_s + self.first_read_s + self.expert_bytes / self.bandwidth_bytes_per_s

    def load_ratio(self, num_experts_per_tok: int) -> float:
        """R: time to load one expert / time to compute one layer of one token."""
        return self.load_s / (self.dense_s + num_experts_per_tok * self.expert_s)


@dataclass
class Outcome:
    """What a simulated run came to. ``stall_s`` is the time in which nothing computed because an expert was not there."""

    tokens: int = 0
    steps: int = 0
    elapsed_s: float = 0.0
    stall_s: float = 0.0
    demand_bytes: int = 0
    speculative_bytes: int = 0
    wasted_bytes: int = 0
    channel_busy_s: float = 0.0
    counters: CacheCounters = field(default_factory=CacheCounters)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def hit_ratio(self) -> float:
        """Demand hits and prefetch hits over all expert visits."""
        counters = self.counters
        visits = counters.demand_hits + counters.prefetch_hits + counters.misses
        return (visits - counters.misses) / visits if visits else 0.0

    @property
    def bytes_per_token(self) -> float:
        return (self.demand_bytes + self.speculative_bytes) / self.tokens if self.tokens else 0.0


def simulate(
    steps: Iterable[Step],
    capacities: Sequence[int],
    num_experts: int,
    make_policy: PolicyFactory,
    profile: Profile,
    predictor: Foresight | None = None,
    prefetch: PrefetchOptions | None = None,
    *,
    share: bool = False,
) -> Outcome:
    """Run all steps with ``capacities[l]`` slots in layer l, which is only how it starts with ``share``, and caches that are
    empty at first. Without a predictor there are demand loads only; Gates are the guesses of the trace. Without ``prefetch``
    it works as the engine's."""
    loader = ClockLoader(
        sum(capacities), profile.expert_bytes, profile.bandwidth_bytes_per_s, profile.wake_s,
        first_read_s=profile.first_read_s, rouse_s=profile.rouse_s, miss_s=profile.miss_s, ahead_s=profile.ahead_s,
        strain_s=profile.strain_s,
        load_beside_ratio=profile.load_beside_ratio, compute_beside_ratio=profile.compute_beside_ratio,
    )  # fmt: skip
    cache = ExpertCache(capacities, num_experts, make_policy, loader, share=share)

    def spend(predictions: int, weighed: int = 0) -> None:
        loader.compute(predictions * profile.predict_s + weighed * profile.weigh_s)

    ahead = make_ahead(predictor, cache, loader, prefetch or PrefetchOptions(), spend) if predictor else None
    outcome = Outcome(counters=cache.counters)
    layers = range(len(capacities))
    dense_s = profile.dense_s + (profile.access_s if min(capacities) < num_experts else 0.0)
    for step in steps:
        if cache.is_complete:
            ahead = None  # as in the engine
        if ahead is not None:
            ahead.begin_step(step)
        for layer in layers:
            if ahead is not None:
                ahead.at_start(layer)
            loader.compute(dense_s)
            _visit(cache, loader, layer, step, profile.expert_s, ahead, outcome)
        loader.compute(profile.token_s)
        outcome.tokens += len(step.token_T)
        outcome.steps += 1
    outcome.elapsed_s = loader.now_s
    outcome.demand_bytes, outcome.speculative_bytes = loader.demand_bytes, loader.speculative_bytes
    outcome.channel_busy_s = loader.busy_s
    useful_bytes = (cache.counters.misses + cache.counters.prefetch_hits) * profile.expert_bytes
    outcome.wasted_bytes = max(0, loader.demand_bytes + loader.speculative_bytes - useful_bytes)
    return outcome


def _visit(
    cache: ExpertCache, loader: ClockLoader, layer: int, step: Step, expert_s: float, ahead: Ahead | None, outcome: Outcome
) -> None:  # fmt: skip
    """One layer's experts: compute each when it is there; look ahead once the layer's own loads are queued."""
    for placement in cache.visit(layer, step.needed_L[layer], step.experts_TLK[:, layer].tolist()):
        if ahead is not None:
            ahead.after_route(layer)
            ahead = None
        for slot in sorted(placement.slots, key=loader.ready_s):  # who comes first does not change while they come
            ready_s = loader.ready_s(slot)
            if ready_s > loader.now_s:
                outcome.stall_s += ready_s - loader.now_s
                loader.now_s = ready_s
            loader.compute(expert_s)
    loader.strain()

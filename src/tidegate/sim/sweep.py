"""A grid of simulated configurations, the best of them, and how far each is from the offline bound.

Everything here is deterministic. Expert bytes at other bits: b bits in groups of 32 with a float16 scale are b + 0.5 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tidegate.experts.policy import policy_factory
from tidegate.sim.ahead import Foresight
from tidegate.sim.belady import belady_hits
from tidegate.sim.prefetcher import PrefetchOptions
from tidegate.sim.replay import Step
from tidegate.sim.simulate import Outcome, Profile, simulate

SCALE_BITS = 0.5
NO_FILES = ("none", "gates", "oracle")  # instead of a predictor that the engine could load


@dataclass(frozen=True)
class Configuration:
    """One point of the grid. ``memory_bytes`` is 0 when slots were given instead; ``threshold`` None: the engine's own."""

    memory_bytes: int
    slots: tuple[int, ...]
    policy: str
    predictor: str
    staging: int
    threshold: float | None
    bits: int
    batch: int


@dataclass(frozen=True)
class Result:
    """A simulated configuration. ``gap_closed`` is the share of the misses between LRU and Belady (forced) that it avoids; None
    where there is no gap. ``load_ratio`` is R."""

    configuration: Configuration
    outcome: Outcome
    load_ratio: float
    lru_hit_ratio: float
    belady_hit_ratio: float
    bypass_hit_ratio: float

    @property
    def gap_closed(self) -> float | None:
        gap = self.belady_hit_ratio - self.lru_hit_ratio
        return (self.outcome.hit_ratio - self.lru_hit_ratio) / gap if gap > 1e-9 else None

    def to_json(self) -> dict[str, Any]:
        config, outcome, counters = self.configuration, self.outcome, self.outcome.counters
        slots = sorted(set(config.slots))
        return {
            "memory_bytes": config.memory_bytes, "slots_per_layer": slots[0] if len(slots) == 1 else list(config.slots),
            "policy": config.policy, "predictor": config.predictor, "staging": config.staging,
            "threshold": config.threshold, "bits": config.bits, "batch": config.batch,
            "load_ratio": round(self.load_ratio, 4), "tokens": outcome.tokens,
            "tokens_per_s": round(outcome.tokens_per_s, 3), "hit_ratio": round(outcome.hit_ratio, 5),
            "demand_hits": counters.demand_hits, "prefetch_hits": counters.prefetch_hits, "misses": counters.misses,
            "prefetch_issued": counters.prefetch_issued, "prefetch_dropped": counters.prefetch_dropped,
            "stall_ratio": round(outcome.stall_s / outcome.elapsed_s, 4) if outcome.elapsed_s else 0.0,
            "bytes_per_token": round(outcome.bytes_per_token), "wasted_bytes": outcome.wasted_bytes,
            "lru_hit_ratio": round(self.lru_hit_ratio, 5), "belady_hit_ratio": round(self.belady_hit_ratio, 5),
            "belady_bypass_hit_ratio": round(self.bypass_hit_ratio, 5),
            "gap_closed": None if self.gap_closed is None else round(self.gap_closed, 4),
        }  # fmt: skip


def profile_at(profile: Profile, bits: int, recorded_bits: int) -> Profile:
    """The same machine with experts of ``bits`` bits; computing an expert costs in proportion to its bytes."""
    ratio = (bits + SCALE_BITS) / (recorded_bits + SCALE_BITS)
    return replace(profile, expert_bytes=round(profile.expert_bytes * ratio), expert_s=profile.expert_s * ratio)


class Sweep:
    """Runs configurations over the same routing; bounds are computed once for every (slots, batch)."""

    def __init__(
        self,
        steps_of: Callable[[int], Iterable[Step]],
        num_experts: int,
        num_experts_per_tok: int,
        profile: Profile,
        recorded_bits: int,
        make_predictor: Callable[[str], Foresight | None],
        most: int = 4,
        *,
        share: bool = True,
    ) -> None:
        """``steps_of(batch)`` gives the steps from the start; ``profile`` is that of the recorded bits. ``share``: slots move
        between layers, as in the engine; the bounds are always those of fixed slots."""
        self._steps_of, self._num_experts, self._top = steps_of, num_experts, num_experts_per_tok
        self._profile, self._recorded_bits, self._make_predictor = profile, recorded_bits, make_predictor
        self._most, self._share = most, share
        self._bounds: dict[tuple[tuple[int, ...], int], tuple[float, float, float]] = {}

    def run(self, config: Configuration) -> Result:
        profile = profile_at(self._profile, config.bits, self._recorded_bits)
        options = PrefetchOptions(config.staging, config.threshold, self._most)
        predictor = self._make_predictor(config.predictor) if config.staging > 1 else None
        outcome = simulate(
            self._steps_of(config.batch), config.slots, self._num_experts, policy_factory(config.policy), profile,
            predictor, options, share=self._share,
        )  # fmt: skip
        return Result(config, outcome, profile.load_ratio(self._top), *self.bounds(config.slots, config.batch))

    def bounds(self, slots: tuple[int, ...], batch: int) -> tuple[float, float, float]:
        """Hit ratios of LRU, Belady with forced admission, and Belady with bypass."""
        key = (slots, batch)
        if key not in self._bounds:
            self._bounds[key] = hit_bounds(self._steps_of(batch), slots, self._num_experts)
        return self._bounds[key]


def hit_bounds(steps: Iterable[Step], slots: Sequence[int], num_experts: int) -> tuple[float, float, float]:
    """Hit ratios of LRU, Belady with forced admission, and Belady with bypass."""
    steps = list(steps)
    lru = simulate(steps, slots, num_experts, policy_factory("lru"), Profile(1, 1.0, 0.0, 0.0)).hit_ratio
    forced = bypass = visits = 0
    for layer, capacity in enumerate(slots):
        events = [step.needed_L[layer] for step in steps]
        visits += sum(map(len, events))
        forced += belady_hits(events, capacity, num_experts, bypass=False)
        bypass += belady_hits(events, capacity, num_experts, bypass=True)
    return lru, forced / visits, bypass / visits


def pareto(results: Sequence[Result]) -> list[Result]:
    """Those that no other beats: at least as many tokens/s, at most as much memory, at least as many bits (the proxy of
    quality), and one of them strictly. Fastest first."""

    best = [
        one for one in results
        if not any(other is not one and _beats(goals(other), goals(one)) for other in results)
    ]  # fmt: skip
    return sorted(best, key=goals, reverse=True)


NUM_GOALS = 3


def goals(result: Result) -> tuple[float, float, int]:
    """What a sweep wants as large as possible: tokens/s, memory saved, and bits, which stand for quality."""
    config = result.configuration
    memory = config.memory_bytes or sum(config.slots) * (config.bits + SCALE_BITS)
    return result.outcome.tokens_per_s, -memory, config.bits


def _beats(other: tuple[float, float, int], one: tuple[float, float, int]) -> bool:
    return other != one and all(a >= b for a, b in zip(other, one, strict=True))


def run_flags(config: Configuration) -> str:
    """The flags of ``tidegate run`` that give this configuration, as far as the engine has them: it finds its own threshold, and
    its batch is who asks at the same time."""
    parts = [f"--policy {config.policy}", "--prefetch off" if config.predictor == "none" else "--prefetch auto"]
    if config.predictor not in NO_FILES:
        parts.append(f"--predictor {config.predictor}")
    if config.memory_bytes:
        gib, rest = divmod(config.memory_bytes, 1 << 30)
        parts.insert(0, f"--memory {config.memory_bytes}B" if rest else f"--memory {gib}GiB")
    if config.bits in (4, 8):
        parts.append(f"--experts int{config.bits}")
    return " ".join(parts)

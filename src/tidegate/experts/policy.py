"""Replacement policies: small classes around one decision, the victim. One object serves one layer.

Time is counted in accesses of the layer (one a step), so nothing depends on a clock. Ties go to the expert that was
used least recently, then to the lower id, so that equal histories give equal victims.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from tidegate import _core
from tidegate.errors import UsageError
from tidegate.experts.base import Policy


class CountingPolicy(Policy):
    """Evicts whoever is worth least by native counts, which know every expert, resident or not."""

    def __init__(self, uses: _core.Uses) -> None:
        self._uses = self.native = uses

    def on_access(self, experts: Sequence[int]) -> None:
        self._uses.use(experts)

    def on_insert(self, expert: int) -> None:
        self._uses.set_resident(expert, True)

    def on_evict(self, expert: int) -> None:
        self._uses.set_resident(expert, False)

    def victim(self, kept: Collection[int]) -> int | None:
        found = self._uses.lowest(list(kept))
        return None if found < 0 else found

    def value(self, expert: int) -> float:
        return self._uses.value(expert)

    def ranks(self, experts: Sequence[int]) -> list[int]:
        return self._uses.ranks(experts)


class Lru(CountingPolicy):
    """Least recently used."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(_core.Uses(_core.Worth.LAST_USE, num_experts))


class Lfu(CountingPolicy):
    """Least frequently used, counted since the start and kept for evicted experts too."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(_core.Uses(_core.Worth.USES, num_experts))


class Lfru(CountingPolicy):
    """Frequency over age: uses divided by accesses since the last use."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(_core.Uses(_core.Worth.USES_OVER_AGE, num_experts))


class DecayedLfu(CountingPolicy):
    """Uses that fade: each counts 2 ** (-age / half_life). The default policy."""

    def __init__(self, num_experts: int, half_life: float = 16.0) -> None:
        super().__init__(_core.Uses(_core.Worth.DECAYED_USES, num_experts, half_life))
        self._always_used: float = 1 / (1 - 2.0 ** (-1.0 / half_life))

    def worth(self, odds: float) -> float:
        return odds * self._always_used


class ResidentSet(DecayedLfu):
    """Decayed LFU for one half of the slots; the other half is kept for experts that are hot and stay hot.

    Every 64 accesses each expert's share of them updates a running mean, variance and covariance with the window before (weight
    1/8). The score is mean * (1 + autocorrelation) / 2; the best are pinned until the next evaluation. They are
    not loaded for that, only kept. The slots of the layer are learned from how many experts were resident at once.
    """

    every, share, weight = 64, 0.5, 0.125

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts)
        self.native = None
        self._window = [0] * num_experts
        self._mean = [0.0] * num_experts
        self._variance = [0.0] * num_experts
        self._covariance = [0.0] * num_experts
        self._deviation = [0.0] * num_experts
        self._now = self._num_resident = self._capacity = self._windows = 0
        self._kept: frozenset[int] = frozenset()

    def on_access(self, experts: Sequence[int]) -> None:
        super().on_access(experts)
        self._now += 1
        for expert in experts:
            self._window[expert] += 1
        if self._now % self.every == 0:
            self._evaluate()

    def on_insert(self, expert: int) -> None:
        super().on_insert(expert)
        self._num_resident += 1
        self._capacity = max(self._capacity, self._num_resident)

    def on_evict(self, expert: int) -> None:
        super().on_evict(expert)
        self._num_resident -= 1

    def value(self, expert: int) -> float:
        return super().value(expert) + (_KEPT if expert in self._kept else 0.0)

    def victim(self, kept: Collection[int]) -> int | None:
        found = super().victim(self._kept.union(kept))
        return super().victim(kept) if found is None else found

    def _evaluate(self) -> None:
        score = []
        for expert, uses in enumerate(self._window):
            use = uses / self.every
            if not self._windows:
                self._mean[expert] = use
            deviation = use - self._mean[expert]
            self._mean[expert] += self.weight * deviation
            self._variance[expert] += self.weight * (deviation * deviation - self._variance[expert])
            pair = deviation * self._deviation[expert]
            self._covariance[expert] += self.weight * (pair - self._covariance[expert])
            self._deviation[expert] = deviation
            spread = self._variance[expert]
            steadiness = min(1.0, max(0.0, self._covariance[expert] / spread)) if spread else 1.0
            score.append((-self._mean[expert] * (1 + steadiness) / 2, expert))
        self._kept = frozenset(expert for _, expert in sorted(score)[: int(self.share * self._capacity)])
        self._windows += 1
        self._window = [0] * len(self._window)


_KEPT = 1e9  # above any decayed count
PolicyFactory = Callable[[int], Policy]
POLICIES: dict[str, PolicyFactory] = {
    "decayed-lfu": DecayedLfu,
    "lru": Lru,
    "lfu": Lfu,
    "lfru": Lfru,
    "resident-set": ResidentSet,
}
DEFAULT_POLICY = "decayed-lfu"


def policy_factory(name: str) -> PolicyFactory:
    """The constructor, called with the number of experts of a layer. Raises UsageError listing the names."""
    if name not in POLICIES:
        raise UsageError(f"--policy {name!r}: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]

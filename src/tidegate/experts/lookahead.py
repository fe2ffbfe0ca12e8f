"""Prefetch from guesses at what a router will choose.

A guess names experts with a margin each: how far its score is above the edge between chosen and not chosen. Margin and decayed
counts give the odds that the expert is needed, by a logistic curve for each distance, learned on and on from the guesses whose
expert was not in memory: those are the ones that matter, and the harder ones. A load is worth it when the odds are good enough:
a wrong one takes the channel from a demand load with the probability that the channel is busy, so the odds must be the better
the busier it is. And however idle it is, no more than a quarter of the loads may be wrong: a floor under the threshold rises
with every wrong one. Where nothing was worth a load for some steps, or guessing does not pay, few guesses are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidegate import _core
from tidegate.experts.cache import ExpertCache
from tidegate.experts.trial import Trial

# When a guess at a layer is made: at the layer's own start, before its attention; or where the MoE layer before was routed.
AT_START, AHEAD = 0, 1
DISTANCES = 2
MOST_ROWS = 4  # a step of more tokens needs most experts anyway
# A step of several tokens that needs more of a layer's slots evicts what was loaded ahead before its turn.
MOST_OF_SLOTS = 0.5
LEAST_HEAT, HALF_LIFE = 0.1, 16  # of decayed counts, in steps
Curve = tuple[float, float, float]  # factors of margin and of log(heat + LEAST_HEAT), and a constant

# Of the routers' own gates, where nothing was fitted: between those of a trained and of a random model.
OWN_CURVES: tuple[Curve, ...] = ((9.0, 0.3, -0.5), (5.0, 0.25, -0.65))
_LEARNING_RATE = 1 / 128
# At rest a quarter of the loads are wrong: a wrong one lifts the floor three times as much as a right one lowers it. A high floor
# sinks a little with every step, or a bad start would forbid everything for good.
_FIRST_FLOOR, _RISE, _FALL, _FORGETTING = 0.3, 3 / 128, 1 / 128, 1 / 256
# An expert that the earlier guess names will be weighed again by the later one, which is much better and nearly in time: only
# what is that many times likelier to be needed is not worth waiting for.
_EARLY = 2.0
_PATIENCE, _NAP_STEPS = 16, 16  # after so many steps in which no guess was worth a load, one in so many has guesses


def most_rows(slots_per_layer: float, experts_per_token: int) -> int:
    """Steps of more rows have no guesses."""
    return max(1, min(MOST_ROWS, int(MOST_OF_SLOTS * slots_per_layer / experts_per_token)))


class Lookahead:
    """Drive it in the order of a step: ``begin_step``; for every MoE layer ``after_route`` once its own loads are queued; and,
    in a step that ``wants_guesses``, ``foresee`` for each guess, where it is made.

    ``counts``: somebody asks in this step; otherwise nothing is loaded ahead, and nothing learned.
    ``busy_ratio`` says how busy the channel was since it was last asked, 0 to 1. ``curves``: one a distance, to start from.
    ``clock`` as in Trial.
    """

    def __init__(
        self,
        cache: ExpertCache,
        experts_per_token: int,
        busy_ratio: Callable[[], float],
        curves: Sequence[Curve] = OWN_CURVES,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._cache, self._busy_ratio, self._per_token = cache, busy_ratio, experts_per_token
        self.odds = _core.Odds(
            cache.num_layers, cache.num_experts, list(curves), HALF_LIFE, LEAST_HEAT, _LEARNING_RATE,
            floor=_FIRST_FLOOR, rise=_RISE, fall=_FALL, early=_EARLY,
        )  # fmt: skip
        self.wants_guesses = False
        self._busy = 0.0
        slots = sum(map(cache.capacity, range(cache.num_layers)))
        self._most_rows = most_rows(slots / cache.num_layers, experts_per_token)
        self._idle_steps = self._num_worthy = 0
        self._trial = Trial(clock)
        self.counts = True

    @property
    def threshold(self) -> float:
        """Odds below it are not worth a load. A right load saves a wait; a wrong one delays demand loads if there are any."""
        return self.odds.threshold(AT_START)

    @property
    def is_done(self) -> bool:
        """Nothing is left to load."""
        return self._cache.is_complete

    def natives(self) -> list[_core.LayerCache] | None:
        """The cache that it loads into, for native code."""
        found = [native for layer in range(self._cache.num_layers) if (native := self._cache.native(layer)) is not None]
        return found if len(found) == self._cache.num_layers else None

    def begin_step(self, num_rows: int) -> None:
        """A forward pass of so many rows starts."""
        odds = self.odds
        odds.forget()
        self.wants_guesses, self.counts = False, True
        if num_rows > self._most_rows:
            self._trial.skip_step()
            return
        self._busy += (self._busy_ratio() - self._busy) / 8
        odds.bar = self._busy / (1 + self._busy)
        odds.floor -= max(0.0, odds.floor - _FIRST_FLOOR) * _FORGETTING
        counters = self._cache.counters
        if self._trial.begin_step(counters.misses + counters.prefetch_hits):
            if odds.num_worthy != self._num_worthy:
                self._idle_steps, self._num_worthy = 0, odds.num_worthy
            self._idle_steps += 1
            self.wants_guesses = self._idle_steps <= _PATIENCE or self._idle_steps % _NAP_STEPS == 0
        self.counts = self.wants_guesses  # where nobody asks, nothing more is spent

    def after_route(self, layer: int, needed: Sequence[int]) -> None:
        """What the layer really needs: loads that nobody asked for are stopped, and curves and floor follow."""
        if self.counts:
            self._cache.cancel_refuted(layer)
            self.odds.learn(layer, needed)

    def foresee(self, layer: int, distance: int, ranked: Sequence[int], margins: Sequence[float]) -> None:
        """A guess for one row: the router of ``layer`` would choose the first of these experts, best first; there may be more
        than it chooses. ``margins`` as Backend.rank."""
        cache, per_token = self._cache, self._per_token
        loads, num_dropped = self.odds.weigh(layer, distance, ranked, margins, cache.book(layer), per_token)
        cache.counters.prefetch_dropped += num_dropped
        for expert, odds in loads:
            if cache.prefetch(layer, expert, cache.worth(layer, odds), keep=ranked[:per_token]):
                self.odds.loaded(layer, expert)

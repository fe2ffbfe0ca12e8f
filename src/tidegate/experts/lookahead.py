"""Prefetch from guesses at what the routers of the next layers will choose.

A guess names experts with a margin each: how far its score is above the edge between chosen and not chosen. Margin and decayed
counts give the odds that the expert is needed, by a logistic curve for each distance, learned on and on from the guesses whose
expert was not in memory: those are the ones that matter, and the harder ones. A load is worth it when the odds are good enough:
a wrong one takes the channel from a demand load with the probability that the channel is busy, so the odds must be the better
the busier it is. And however idle it is, no more than a quarter of the loads may be wrong: a floor under the threshold rises
with every wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from tidegate.experts.cache import ExpertCache

REACH = 2  # layers ahead
MOST_ROWS = 4  # a step of more tokens needs most experts anyway
LEAST_HEAT, FADE = 0.1, 2.0 ** (-1 / 16)  # decayed counts halve in 16 steps
LARGEST_MARGIN = 8.0
Curve = tuple[float, float, float]  # factors of margin and of log(heat + LEAST_HEAT), and a constant

# For guesses that are ranks only, with margins from 2 for the best to -2.
RANK_CURVES: tuple[Curve, ...] = ((0.8, 0.15, 0.3), (0.7, 0.15, 0.0))
_LEARNING_RATE = 1 / 128
# What a wrong load evicts, and what it takes from the loads behind it; the second is per share of busy time. Measured.
_PRICE, _PRICE_WHEN_BUSY = 0.08, 0.12
# At rest a quarter of the loads are wrong: each lifts the floor three times as much as a right one lowers it.
# A high floor sinks a little with every step, or a bad start would forbid everything for good.
_FIRST_FLOOR, _RISE, _FALL, _FORGETTING = 0.3, 3 / 128, 1 / 128, 1 / 1024
# Expert, distance, margin, logarithm of its heat, odds, whether it is being loaded.
_Evidence = tuple[int, int, float, float, float, bool]
_NAP_STEPS = 16  # how seldom guesses are made where none is worth a load


class Lookahead:
    """Drive it in the order of a step: ``begin_step``; for every MoE layer ``after_route`` once its own loads are queued; and,
    in a step that ``wants_guesses``, ``foresee`` for each guess, those made before the first layer included.

    ``busy_ratio`` says how busy the channel was since it was last asked, 0 to 1. ``curves``: one a distance, to start from.
    """

    def __init__(
        self,
        cache: ExpertCache,
        experts_per_token: int,
        busy_ratio: Callable[[], float],
        curves: Sequence[Curve] = RANK_CURVES,
    ) -> None:
        self._cache, self._busy_ratio, self._per_token = cache, busy_ratio, experts_per_token
        self._rank_margins = [2 - 4 * (rank + 0.5) / experts_per_token for rank in range(experts_per_token)]
        self._curves = [list(curve) for curve in curves]
        self._heat = [[0.0] * cache.num_experts for _ in range(cache.num_layers)]
        self._seen = [[0] * cache.num_experts for _ in range(cache.num_layers)]
        self._now = [0] * cache.num_layers
        self._open: dict[int, list[_Evidence]] = {}
        self.wants_guesses = False
        self._busy, self._floor = 0.0, _FIRST_FLOOR
        self._naps = 0
        self._tempted = True

    @property
    def threshold(self) -> float:
        """Odds below it are not worth a load. A right load saves a wait; a wrong one delays demand loads if there are any."""
        busy = self._busy
        return max(self._floor, busy / (1 + busy) + _PRICE + _PRICE_WHEN_BUSY * busy)

    @property
    def curves(self) -> list[list[float]]:
        """As learned so far."""
        return self._curves

    def begin_step(self, num_rows: int) -> None:
        """A forward pass of so many rows starts."""
        self._open.clear()
        self.wants_guesses = False
        if num_rows > MOST_ROWS:
            return
        self._busy += (self._busy_ratio() - self._busy) / 8
        self._floor -= max(0.0, self._floor - _FIRST_FLOOR) * _FORGETTING
        self._naps = 0 if self._tempted else (self._naps + 1) % _NAP_STEPS
        if self._naps == 0:
            self.wants_guesses, self._tempted = True, False

    def after_route(self, layer: int, needed: Collection[int]) -> None:
        """What the layer really needs: loads that nobody asked for are stopped, and curves and floor follow."""
        for expert, distance, margin, log_heat, odds, is_loading in self._open.pop(layer, ()):
            is_right = expert in needed
            if is_loading:
                self._floor = max(0.0, self._floor - _FALL) if is_right else min(1.0, self._floor + _RISE)
            curve = self._curves[distance - 1]
            step = (is_right - odds) * _LEARNING_RATE
            curve[0] += step * margin
            curve[1] += step * log_heat
            curve[2] += step
        self._count(layer, needed)
        self._cache.cancel_refuted(layer)

    def foresee(self, layer: int, distance: int, ranked: Sequence[int], margins: Sequence[float] | None = None) -> None:
        """The router of ``layer``, ``distance`` layers ahead, would choose the first of these experts for one row, best first;
        there may be more than it chooses. Without ``margins`` the ranks have to do."""
        if margins is None:
            margins = self._rank_margins
        cache, threshold, per_token = self._cache, self.threshold, self._per_token
        chosen = ranked[:per_token]
        guesses = self._open.setdefault(layer, [])
        for rank, (expert, margin) in enumerate(zip(ranked, margins, strict=False)):
            if cache.is_resident(layer, expert):
                continue
            margin = max(-LARGEST_MARGIN, min(margin, LARGEST_MARGIN))
            log_heat = math.log(self._heat_of(layer, expert) + LEAST_HEAT)
            odds = self._odds(distance, margin, log_heat)
            is_loading = False
            if odds >= threshold:
                self._tempted = True
                is_loading = cache.prefetch(layer, expert, cache.worth(layer, odds), keep=chosen)
            elif rank < per_token:
                cache.counters.prefetch_dropped += 1
            guesses.append((expert, distance, margin, log_heat, odds, is_loading))

    def _odds(self, distance: int, margin: float, log_heat: float) -> float:
        a, b, c = self._curves[distance - 1]
        return 1 / (1 + math.exp(-max(-30.0, min(a * margin + b * log_heat + c, 30.0))))

    def _count(self, layer: int, needed: Collection[int]) -> None:
        heat, seen = self._heat[layer], self._seen[layer]
        now = self._now[layer] = self._now[layer] + 1
        for expert in needed:
            heat[expert] = heat[expert] * FADE ** (now - seen[expert]) + 1
            seen[expert] = now

    def _heat_of(self, layer: int, expert: int) -> float:
        return float(self._heat[layer][expert] * FADE ** (self._now[layer] - self._seen[layer][expert]))

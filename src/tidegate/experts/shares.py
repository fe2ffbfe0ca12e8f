"""Shares of the slots between layers, from shadow hit curves.

A policy's order of preference tells, for every use of an expert, how many slots its layer would have needed to have it: its
rank. Counting ranks gives the hit curve of every layer for every number of slots at once (the stack distances of Mattson et
al. 1970; exact for LRU, close for policies that score), and slots go where the next one would hit most.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from tidegate import _core

SAMPLE_EVERY = 4  # uses of a layer, of which one is looked at
DEAL_EVERY = 16  # looks at a layer
_FADE = 0.75  # what an old count is worth at the next deal
_POOLED = 0.1  # every curve leans on the mean of all: few counts say little
_LEAST_GAIN_RATIO = 0.005  # of all uses; less is not worth moving slots


class SlotShares:
    """One model's curves. Same calls, same shares."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.num_experts = num_experts
        self.native = _core.RankCounts(num_layers, num_experts, SAMPLE_EVERY)

    @property
    def is_due(self) -> bool:
        """Whether enough was observed since the last deal."""
        return self.native.looks >= DEAL_EVERY

    def wants(self, layer: int) -> bool:
        """Whether the coming use of the layer is one to look at."""
        return self.native.wants(layer)

    def observe(self, layer: int, ranks: Sequence[int]) -> None:
        """One token batch's experts of a layer, by Policy.ranks before the access; never used ones have no slot to need."""
        self.native.observe(layer, ranks)

    def deal(self, capacities: Sequence[int]) -> list[int]:
        """Slots of each layer, as many in total as ``capacities``; those same ones if others would hardly hit more. No layer
        gets fewer than one token batch has needed of it, or more than it has experts."""
        curves = self._curves()
        self.native.fade(_FADE)
        floor = min(self.native.most_needed, *capacities)
        dealt = [floor] * len(curves)
        chances = sorted(
            (-gain, slots, layer)
            for layer, curve in enumerate(curves)
            for slots, gain in enumerate(curve[floor:], start=floor)
        )
        for _, _, layer in chances[: sum(capacities) - floor * len(curves)]:
            dealt[layer] += 1
        used = sum(map(sum, curves))
        gain = _hits(curves, dealt) - _hits(curves, capacities)
        return dealt if gain > _LEAST_GAIN_RATIO * used else list(capacities)

    def _curves(self) -> list[list[float]]:
        """curve[l][c]: uses that slot number c of the layer would have turned into hits, smoothed and made to fall."""
        smooth = [_smoothed(counts, max(1, self.num_experts // 10)) for counts in self.native.counts]
        mean = [sum(column) / len(smooth) for column in zip(*smooth, strict=True)]
        curves = []
        for counts in smooth:
            leaning = [count + _POOLED * pooled for count, pooled in zip(counts, mean, strict=True)]
            curves.append(list(accumulate(reversed(leaning), max))[::-1])
        return curves


def _smoothed(counts: Sequence[float], reach: int) -> list[float]:
    """Mean over ``reach`` neighbours on either side, as many as there are."""
    sums = [0.0, *accumulate(counts)]
    size = len(counts)
    ends = [(max(0, i - reach), min(size, i + reach + 1)) for i in range(size)]
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in ends]


def _hits(curves: Sequence[Sequence[float]], capacities: Sequence[int]) -> float:
    return sum(sum(curve[:slots]) for curve, slots in zip(curves, capacities, strict=True))

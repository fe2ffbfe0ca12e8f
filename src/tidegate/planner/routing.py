"""How often an expert is found in memory: curves of the hit rate over the share of experts that have a slot.

Measured curves, decayed LFU, one token at a time (docs/log.md, docs/planner.md). ``EASY`` is gpt-oss-20b over whole
documents, ``HARD`` 64 experts with 6 a token over short unrelated prompts. Between points: straight lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

Curve = tuple[tuple[float, float], ...]  # (share resident, hit rate), ascending
EASY: Curve = (
    (0, 0),
    (0.125, 0.433),
    (0.1875, 0.580),
    (0.25, 0.691),
    (0.375, 0.830),
    (0.5, 0.917),
    (0.75, 0.982),
    (1, 1),
)
HARD: Curve = ((0, 0), (0.125, 0.29), (0.25, 0.507), (0.5, 0.75), (0.75, 0.90), (1, 1))
_FAMILIES: Mapping[str, Curve] = {"gpt_oss": EASY}


@dataclass(frozen=True)
class HitRates:
    """The hit rate expected of a decode step, and the range that it may fall in. ``source``: where it comes from.
    ``distinct``: experts that a layer needs in a step, where that is known."""

    expected: float
    low: float
    high: float
    source: str
    distinct: float | None = None


def expected_hits(family: str, resident_ratio: float) -> HitRates:
    """From the family's curve if there is one, else halfway between the easy and the hard one."""
    low, high = _at(HARD, resident_ratio), _at(EASY, resident_ratio)
    curve = _FAMILIES.get(family)
    if curve is not None:
        return HitRates(_at(curve, resident_ratio), low, high, f"curve of {family}")
    return HitRates((low + high) / 2, low, high, "default curve; record one with tidegate trace")


def _at(curve: Curve, x: float) -> float:
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return 1.0

"""Seconds that the engine spends beside bytes, as functions of the model and of what a step finds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cost:
    """``base_s``, and ``each_s`` for each of so many things."""

    base_s: float
    each_s: float = 0.0

    def of(self, count: float) -> float:
        """Seconds."""
        return self.base_s + count * self.each_s

    @staticmethod
    def through(few: tuple[float, float], many: tuple[float, float]) -> Cost:
        """The line through two measurements (count, seconds); no part of it is negative."""
        each_s = max(0.0, (many[1] - few[1]) / (many[0] - few[0]))
        return Cost(max(0.0, few[1] - few[0] * each_s), each_s)


@dataclass(frozen=True)
class Overhead:
    """Of a step of the model beside weights: ``step_s`` once, ``layer`` in every layer, each of them an expert that a token
    chooses."""

    step_s: float
    layer: Cost

    def of(self, layers: int, experts_per_token: float) -> float:
        """Seconds of a step."""
        return self.step_s + layers * self.layer.of(experts_per_token)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Overhead:
        return Overhead(data["step_s"], Cost(**data["layer"]))


@dataclass(frozen=True)
class Bookkeeping:
    """Seconds of the computing threads: ``miss_s`` on asking for a load on demand, ``rouse_s`` more if the loader was idle, and
    ``strain_s`` on being slower afterwards, because a load takes a core for a moment and caches for longer; ``ahead_s`` on all
    of that for a load ahead of its need. ``gate`` on asking a gate what it would choose, beside its weights, each of them a
    named expert that is not in memory; ``access`` on a layer that lacks experts, beyond one that has all, each of them an expert
    in use. ``wake_s``: from a load that finds the loader idle to its read."""

    wake_s: float
    miss_s: float
    ahead_s: float
    rouse_s: float
    strain_s: float
    gate: Cost
    access: Cost

    @staticmethod
    def from_json(data: dict[str, Any]) -> Bookkeeping:
        return Bookkeeping(**{**data, "gate": Cost(**data["gate"]), "access": Cost(**data["access"])})


def middle(found: Sequence[Any]) -> Any:
    """The median of numbers, of integers the lower one; of things in dictionaries or lists, of each of them; of other things the
    first."""
    first = found[0]
    if isinstance(first, dict):
        return {name: middle([one[name] for one in found]) for name in first}
    if isinstance(first, list | tuple):
        return [middle(ones) for ones in zip(*found, strict=True)]
    if isinstance(first, float):
        return statistics.median(found)
    return statistics.median_low(found) if type(first) is int else first

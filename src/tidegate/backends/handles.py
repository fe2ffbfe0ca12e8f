"""Native handles of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

W = TypeVar("W")
H = TypeVar("H")


class Handles(Generic[W, H]):
    """Calling it gives the handle that ``make`` makes of a weight object: made at first use, and kept by the identity of the
    object, which is kept, too, so that an id stays unique."""

    def __init__(self, make: Callable[[W], H]) -> None:
        self._make = make
        self._known: dict[int, tuple[H, W]] = {}

    def __call__(self, weights: W) -> H:
        known = self._known.get(id(weights))
        if known is None:
            known = self._known[id(weights)] = self._make(weights), weights
        return known[0]

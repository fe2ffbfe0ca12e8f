"""Native handles of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

W = TypeVar("W")
H = TypeVar("H")


def kept(make: Callable[[W], H]) -> Callable[[W], H]:
    """``make``, whose result is made at first use and kept by the identity of the weight object, which is kept, too, so that an
    id stays unique."""
    known: dict[int, tuple[H, W]] = {}

    def handle(weights: W) -> H:
        found = known.get(id(weights))
        if found is None:
            found = known[id(weights)] = make(weights), weights
        return found[0]

    return handle

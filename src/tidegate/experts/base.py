"""Interfaces of the expert cache: plain integers only, the same objects in the engine and in the simulator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tidegate import _core

CHUNK_BYTES = 4 << 20  # a load is read in requests of so many bytes, and can be stopped between them


class ExpertKey(NamedTuple):
    """One routed feed-forward block: ``layer`` counts MoE layers from 0 (not decoder layers), ``expert`` within it."""

    layer: int
    expert: int


class Placement(NamedTuple):
    """Some of a layer's experts, pinned, and the slot each is in: hits first, then misses in file order (ascending id).

    A slot of a miss may still be loading; whoever computes waits for it just before use.
    """

    experts: list[int]
    slots: list[int]


class Loader(ABC):
    """Brings experts into slots. The engine's reads bytes in native threads; the simulator's charges a clock.

    State of a slot: empty -> loading -> ready -> pinned -> ready ... -> empty. The cache never asks for a load into a
    slot that is pinned or loading.
    """

    @abstractmethod
    def load(self, key: ExpertKey, slot: int, *, demand: bool) -> None:
        """Queue a load; returns at once. Demand loads go before speculative ones."""

    @abstractmethod
    def cancel(self, slot: int) -> bool:
        """Stop a load (between chunks); True if the slot is empty afterwards, False if it became ready first."""

    @abstractmethod
    def promote(self, slot: int) -> None:
        """Turn a queued speculative load into a demand load (the router asked for it)."""

    @abstractmethod
    def is_ready(self, slot: int) -> bool:
        """True once the bytes are there."""

    def native_loads(self, num_layers: int, num_experts: int) -> _core.ExpertLoads | None:
        """The same for native code; None where there is no such thing."""
        return None


class InstantLoader(Loader):
    """Every load is ready at once; counts nothing, because the cache does."""

    def load(self, key: ExpertKey, slot: int, *, demand: bool) -> None:
        pass

    def cancel(self, slot: int) -> bool:
        return True

    def promote(self, slot: int) -> None:
        pass

    def is_ready(self, slot: int) -> bool:
        return True


class Policy(ABC):
    """Names the victim of one layer. Sees every access; decides nothing about pins or prefetch.

    An access is one token batch's whole set of experts of a layer (atomic: never replayed one by one). ``native``: the same for
    native code, where ``worth`` is proportional to the odds; None where there is no such thing.
    """

    native: _core.Uses | None = None

    @abstractmethod
    def on_access(self, experts: Sequence[int]) -> None:
        """The layer's experts used by this step, hits and misses alike, in one event. Advances the layer's clock."""

    @abstractmethod
    def on_insert(self, expert: int) -> None:
        """The expert now has a slot."""

    @abstractmethod
    def on_evict(self, expert: int) -> None:
        """The expert lost its slot."""

    @abstractmethod
    def victim(self, kept: Collection[int]) -> int | None:
        """The expert that has a slot and is not one of ``kept``, to evict; None if there is none. Deterministic."""

    @abstractmethod
    def value(self, expert: int) -> float:
        """Expected use, comparable within the layer: a higher one stays. Prefetch never evicts a higher value."""

    def worth(self, odds: float) -> float:
        """The ``value`` of an expert that every step needs with these odds. Infinite where values say nothing of the kind."""
        return float("inf")

    @abstractmethod
    def ranks(self, experts: Sequence[int]) -> list[int]:
        """For each of ``experts`` how many would be kept before it, resident or not: with that many slots it would not be
        here. The number of experts for one that was never used."""


@dataclass
class CacheCounters:
    """Demand hits, prefetch hits and misses are three counters; bytes are derived by whoever knows the blob size. A prefetch hit
    is late if its load was not done when the router asked. Wasted are those that were never asked for; dropped are guesses that
    were not worth a load, or would have evicted an expert that is worth more."""

    demand_hits: int = 0
    prefetch_hits: int = 0
    misses: int = 0
    evictions: int = 0
    prefetch_issued: int = 0
    prefetch_wasted: int = 0
    prefetch_dropped: int = 0
    prefetch_late: int = 0

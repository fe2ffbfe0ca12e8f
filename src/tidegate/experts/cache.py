"""ExpertCache: which expert is in which slot. Plain integers; the engine and the simulator run this very class.

Every layer owns its slots, so a sweep over the layers cannot turn one pool into a cyclic scan; between steps slots may move
to layers that gain more from them. What a step needs of a layer is one atomic event: ``visit`` reports it to the policy,
pins what is there, loads what is not, and never evicts an expert that the same visit still needs.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import fields

from tidegate import _core
from tidegate.experts.base import CacheCounters, ExpertKey, Loader, Placement
from tidegate.experts.policy import PolicyFactory
from tidegate.experts.shares import SlotShares

# A step of more tokens than PROMPT_TOKENS is a prompt as a rule; its latest ones count as if they had come one by one.
PROMPT_TOKENS, LATEST_TOKENS = 16, 128
_COUNTERS = [field.name for field in fields(CacheCounters)]


class _Layer:
    """``book``: slot of each resident expert, free slots, pins, and which residents nobody used yet. ``native``: the twin of
    this cache for decode steps, if loader and policy have such a thing."""

    def __init__(self, first_slot: int, capacity: int, num_experts: int, make_policy: PolicyFactory) -> None:
        self.book = _core.LayerBook(num_experts, first_slot, capacity)
        self.policy = make_policy(num_experts)
        self.native: _core.LayerCache | None = None


def _groups(one: _Layer, hits: list[int], misses: list[int]) -> list[list[int]]:
    """What is placed together: all, if there are slots for it."""
    if len(hits) + len(misses) <= one.book.capacity:
        return [hits + misses]
    half, misses = max(1, one.book.capacity // 2), sorted(misses, key=one.policy.value)
    groups = [sorted(misses[start : start + half]) for start in range(0, len(misses), half)]
    return [hits, *groups] if hits else groups


class ExpertCache:
    """``capacities[l]`` slots serve MoE layer l; slots are numbered through. ``loader`` brings the bytes (or charges time).
    With ``share`` the capacities are only how it starts."""

    def __init__(
        self,
        capacities: Sequence[int],
        num_experts: int,
        make_policy: PolicyFactory,
        loader: Loader,
        *,
        share: bool = False,
    ) -> None:
        assert all(1 <= capacity <= num_experts for capacity in capacities), capacities
        self._counters = CacheCounters()
        self.num_experts = num_experts
        self._loader = loader
        first = 0
        self._layers: list[_Layer] = []
        for capacity in capacities:
            self._layers.append(_Layer(first, capacity, num_experts, make_policy))
            first += capacity
        self._is_scarce = min(capacities, default=num_experts) < num_experts
        self._num_slots = first
        self._shares = SlotShares(len(capacities), num_experts) if share and self._is_scarce else None
        self.native_counts = _core.CacheCounts()
        loads = loader.native_loads(len(capacities), num_experts)
        ranks = self._shares.native if self._shares else None
        for layer, one in enumerate(self._layers):
            uses = one.policy.native if self._is_scarce else None  # otherwise nothing is ever evicted
            if loads is not None and (uses is not None or not self._is_scarce):
                worth = one.policy.worth(1.0)
                one.native = _core.LayerCache(layer, one.book, loads, self.native_counts, uses, ranks, worth)

    @property
    def counters(self) -> CacheCounters:
        """Of all that was done so far; the same object every time."""
        counters = self._counters
        for name, count in zip(_COUNTERS, self.native_counts.take(), strict=True):
            if count:
                setattr(counters, name, getattr(counters, name) + count)
        return counters

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return len(self._layers)

    def capacity(self, layer: int) -> int:
        """Slots of the layer."""
        return self._layers[layer].book.capacity

    @property
    def is_complete(self) -> bool:
        """Every expert of every layer has a slot: nothing will ever be loaded or evicted again, unless a load fails."""
        return not self._is_scarce and all(one.book.num_free == 0 for one in self._layers)

    def resident(self, layer: int) -> frozenset[int]:
        """Experts that have a slot, loading ones included."""
        return frozenset(self.residents(layer))

    def residents(self, layer: int) -> list[int]:
        """The same, ascending."""
        return self._layers[layer].book.residents()

    def book(self, layer: int) -> _core.LayerBook:
        """The same with their slots, for native code."""
        return self._layers[layer].book

    def native(self, layer: int) -> _core.LayerCache | None:
        """What visits the layer natively in a decode step, or in any step where no expert can be evicted, and counts in
        ``counters``; None if the loader has no such thing, or the policy that it would ask."""
        return self._layers[layer].native

    def is_prompt(self, num_rows: int) -> bool:
        """Whether the latest tokens of such a step count one by one."""
        return self._is_scarce and num_rows > PROMPT_TOKENS

    def worth(self, layer: int, odds: float) -> float:
        """The policy value of an expert that is needed with these odds, for ``prefetch``."""
        return self._layers[layer].policy.worth(odds)

    def deal(self) -> None:
        """A step begins: slots move between layers, if it is time."""
        if self._shares and self._shares.is_due:
            self._move_slots(self._shares.deal([one.book.capacity for one in self._layers]))

    def visit(
        self, layer: int, needed: Sequence[int], rows: Sequence[Sequence[int]] = ()
    ) -> Generator[Placement, None, None]:
        """All of ``needed`` (distinct ids), once each, in placements that are pinned while the caller holds them.

        A placement is released when the iterator advances or closes. When everything fits there is one placement.
        Otherwise the residents come first, then the rest in groups of half the layer's slots, each group loading while
        the one before it computes, experts of least value first, so that the others stay. An abandoned or failed visit
        leaves no pin and no expert whose load did not finish. ``rows``: what each token of the step chose, in order;
        without it the step is one access, however many tokens it had.
        """
        one = self._layers[layer]
        book = one.book
        if layer == 0:
            self.deal()
        if self._is_scarce:  # otherwise nothing is ever evicted
            self._access(layer, needed, rows)
        slots = [book.slot_of(expert) for expert in needed]
        if -1 not in slots and not any(map(book.is_unused, needed)):  # most visits
            self._counters.demand_hits += len(needed)
            for expert in needed:
                book.pin(expert)
            try:
                yield Placement(list(needed), slots)
            finally:
                for expert in needed:
                    book.unpin(expert)
            return
        hits = [expert for expert in needed if book.is_here(expert)]
        misses = sorted(expert for expert in needed if not book.is_here(expert))
        self._count(book, hits, misses)
        capacity, groups = book.capacity, _groups(one, hits, misses)
        held: list[list[int]] = []
        try:
            for index, group in enumerate(groups):
                if not held:
                    self._pin(layer, group)
                    held.append(group)
                following = groups[index + 1] if index + 1 < len(groups) else None
                if following and book.num_pinned + len(following) <= capacity:
                    self._pin(layer, following)
                    held.append(following)
                yield Placement(group, [book.slot_of(expert) for expert in group])
                for expert in held.pop(0):
                    book.unpin(expert)
        finally:
            for group in held:
                self._abandon(one, group)

    def prefetch(self, layer: int, expert: int, value: float, keep: Collection[int] = ()) -> bool:
        """Start a speculative load; False (counted as dropped) if it would evict an expert whose policy value is not
        below ``value``, or everything is pinned or in ``keep``. A resident expert needs nothing and is not counted."""
        one = self._layers[layer]
        if one.book.is_here(expert):
            return False
        if not one.book.num_free:
            victim = one.policy.victim([*one.book.pinned(), *keep])
            if victim is None or one.policy.value(victim) >= value:
                self._counters.prefetch_dropped += 1
                return False
            self._evict(one, victim)
        self._insert(layer, expert, demand=False)
        self._counters.prefetch_issued += 1
        return True

    def cancel_refuted(self, layer: int) -> None:
        """After the layer's router has spoken: stop speculative loads that it did not ask for and that are not done."""
        one = self._layers[layer]
        if not one.book.has_pending:
            return
        for expert in one.book.take_pending():
            slot = one.book.slot_of(expert)
            if not self._loader.is_ready(slot) and self._loader.cancel(slot):
                self._counters.prefetch_wasted += 1
                self._drop(one, expert)

    def check_integrity(self) -> None:
        """Recount: every slot has one owner, pins are resident. AssertionError is our bug."""
        seen: list[int] = []
        for one in self._layers:
            book, residents = one.book, one.book.residents()
            assert book.capacity == len(residents) + book.num_free
            seen += [book.slot_of(expert) for expert in residents]
            assert set(book.pinned()) <= set(residents), "a pinned expert is not resident"
            assert all(book.is_here(expert) for expert in range(self.num_experts) if book.is_unused(expert))
            free = [book.give_slot() for _ in range(book.num_free)]
            seen += free
            for slot in reversed(free):
                book.take_slot(slot)
        assert sorted(seen) == list(range(self._num_slots)), "a slot has two owners, or none"

    def _access(self, layer: int, needed: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """Tell the policy, and the shares what the policy would have thought of it."""
        policy, latest = self._layers[layer].policy, [needed]
        capacity = self._layers[layer].book.capacity
        if len(rows) > PROMPT_TOKENS:
            latest = list(rows[-LATEST_TOKENS:])
            earlier = set(needed).difference(*latest)
            if earlier:
                policy.on_access(sorted(earlier))
        for experts in latest:
            if self._shares and len(experts) <= capacity and self._shares.wants(layer):
                self._shares.observe(layer, policy.ranks(experts))
            policy.on_access(experts)

    def _move_slots(self, capacities: Sequence[int]) -> None:
        """Take slots from the layers that have too many, their least valuable experts with them, and give them to the others.
        Pinned experts stay, and whoever should have had their slots goes without."""
        spare: list[int] = []
        for one, capacity in zip(self._layers, capacities, strict=True):
            while one.book.capacity > capacity:
                if not one.book.num_free:
                    victim = one.policy.victim(one.book.pinned())
                    if victim is None:
                        break
                    self._evict(one, victim)
                spare.append(one.book.give_slot())
        for one, capacity in zip(self._layers, capacities, strict=True):
            while spare and one.book.capacity < capacity:
                one.book.take_slot(spare.pop())

    def _count(self, book: _core.LayerBook, hits: Sequence[int], misses: Sequence[int]) -> None:
        counters, prefetched = self._counters, [expert for expert in hits if book.is_unused(expert)]
        for expert in prefetched:
            book.use(expert)
            slot = book.slot_of(expert)
            if not self._loader.is_ready(slot):
                self._loader.promote(slot)
                counters.prefetch_late += 1
        counters.prefetch_hits += len(prefetched)
        counters.demand_hits += len(hits) - len(prefetched)
        counters.misses += len(misses)

    def _pin(self, layer: int, group: Sequence[int]) -> None:
        """Pin the group, residents before any eviction, then load what is missing."""
        one = self._layers[layer]
        book = one.book
        missing = [expert for expert in group if not book.is_here(expert)]
        for expert in group:
            if book.is_here(expert):
                book.pin(expert)
        for expert in missing:
            if not book.num_free:
                victim = one.policy.victim(book.pinned())
                assert victim is not None, "more is pinned than the layer has slots"
                self._evict(one, victim)
            self._insert(layer, expert, demand=True)
            book.pin(expert)

    def _insert(self, layer: int, expert: int, *, demand: bool) -> None:
        one = self._layers[layer]
        slot = one.book.insert(expert, not demand)
        one.policy.on_insert(expert)
        self._loader.load(ExpertKey(layer, expert), slot, demand=demand)

    def _evict(self, one: _Layer, expert: int) -> None:
        slot = one.book.slot_of(expert)
        if not self._loader.is_ready(slot):
            self._loader.cancel(slot)
        if one.book.is_unused(expert):
            self._counters.prefetch_wasted += 1
        self._counters.evictions += 1
        self._drop(one, expert)

    def _drop(self, one: _Layer, expert: int) -> None:
        one.book.drop(expert)
        one.policy.on_evict(expert)

    def _abandon(self, one: _Layer, group: Sequence[int]) -> None:
        """Unpin; forget experts whose bytes did not arrive."""
        for expert in group:
            one.book.unpin(expert)
            slot = one.book.slot_of(expert)
            if slot >= 0 and not self._loader.is_ready(slot):
                self._loader.cancel(slot)
                self._drop(one, expert)

"""ExpertCache: which expert is in which slot. Plain integers; the engine and the simulator run this very class.

Every layer owns its slots, so a sweep over the layers cannot turn one pool into a cyclic scan; between steps slots may move
to layers that gain more from them. What a step needs of a layer is one atomic event: ``visit`` reports it to the policy,
pins what is there, loads what is not, and never evicts an expert that the same visit still needs.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, KeysView, Sequence

from tidegate import _core
from tidegate.experts.base import CacheCounters, ExpertKey, Loader, Placement
from tidegate.experts.policy import PolicyFactory
from tidegate.experts.shares import SlotShares

# A step of more tokens than PROMPT_TOKENS is a prompt as a rule; its latest ones count as if they had come one by one.
PROMPT_TOKENS, LATEST_TOKENS = 16, 128


class _Layer:
    """Book of one layer: slot of each resident expert, free slots, pins, and which residents nobody used yet."""

    def __init__(self, slots: Sequence[int], num_experts: int, make_policy: PolicyFactory) -> None:
        self.capacity = len(slots)
        self.free = list(reversed(slots))
        self.slot_of: dict[int, int] = {}
        self.native = _core.LayerBook(num_experts)  # slot_of and unused_prefetch
        self.pinned: set[int] = set()
        self.unused_prefetch: set[int] = set()
        self.refutable: list[int] = []  # those of them whose loads may not be done
        self.policy = make_policy(num_experts)


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
        self.counters = CacheCounters()
        self.num_experts = num_experts
        self._loader = loader
        first = 0
        self._layers: list[_Layer] = []
        for capacity in capacities:
            self._layers.append(_Layer(range(first, first + capacity), num_experts, make_policy))
            first += capacity
        self._is_scarce = min(capacities, default=num_experts) < num_experts
        self._num_absent = num_experts * len(capacities)
        self._shares = SlotShares(len(capacities), num_experts) if share and self._is_scarce else None

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return len(self._layers)

    def capacity(self, layer: int) -> int:
        """Slots of the layer."""
        return self._layers[layer].capacity

    @property
    def is_complete(self) -> bool:
        """Every expert of every layer has a slot: nothing will ever be loaded or evicted again, unless a load fails."""
        return self._num_absent == 0

    def resident(self, layer: int) -> frozenset[int]:
        """Experts that have a slot, loading ones included."""
        return frozenset(self._layers[layer].slot_of)

    def residents(self, layer: int) -> KeysView[int]:
        """The same, as it changes."""
        return self._layers[layer].slot_of.keys()

    def book(self, layer: int) -> _core.LayerBook:
        """The same with their slots, for native code."""
        return self._layers[layer].native

    def at_hand(self, layer: int) -> _core.LayerBook | None:
        """``book``, if a visit of experts that were used before has nothing to decide or to count but hits (``count_hits``); they
        may still be loading. None where experts can be evicted."""
        return None if self._is_scarce else self._layers[layer].native

    def count_hits(self, count: int) -> None:
        """So many experts that were ``at_hand`` were used without a visit."""
        self.counters.demand_hits += count

    def worth(self, layer: int, odds: float) -> float:
        """The policy value of an expert that is needed with these odds, for ``prefetch``."""
        return self._layers[layer].policy.worth(odds)

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
        book = self._layers[layer]
        if layer == 0 and self._shares and self._shares.is_due:
            self._move_slots(self._shares.deal([one.capacity for one in self._layers]))
        if self._is_scarce:  # otherwise nothing is ever evicted
            self._access(layer, needed, rows)
        slots = [book.slot_of.get(expert, -1) for expert in needed]
        if -1 not in slots and book.unused_prefetch.isdisjoint(needed):  # most visits
            self.counters.demand_hits += len(needed)
            book.pinned.update(needed)
            try:
                yield Placement(list(needed), slots)
            finally:
                book.pinned.difference_update(needed)
            return
        hits = [expert for expert in needed if expert in book.slot_of]
        misses = sorted(expert for expert in needed if expert not in book.slot_of)
        self._count(book, hits, misses)
        if len(needed) <= book.capacity:
            groups = [hits + misses]
        else:
            half = max(1, book.capacity // 2)
            groups = [hits] if hits else []
            misses.sort(key=book.policy.value)
            groups += [sorted(misses[start : start + half]) for start in range(0, len(misses), half)]
        held: list[list[int]] = []
        try:
            for index, group in enumerate(groups):
                if not held:
                    self._pin(layer, group)
                    held.append(group)
                following = groups[index + 1] if index + 1 < len(groups) else None
                if following and len(book.pinned) + len(following) <= book.capacity:
                    self._pin(layer, following)
                    held.append(following)
                slots = [book.slot_of[expert] for expert in group]
                yield Placement(group, slots)
                book.pinned.difference_update(held.pop(0))
        finally:
            for group in held:
                self._abandon(book, group)

    def prefetch(self, layer: int, expert: int, value: float, keep: Collection[int] = ()) -> bool:
        """Start a speculative load; False (counted as dropped) if it would evict an expert whose policy value is not
        below ``value``, or everything is pinned or in ``keep``. A resident expert needs nothing and is not counted."""
        book = self._layers[layer]
        if expert in book.slot_of:
            return False
        if not book.free:
            victim = book.policy.victim([*book.pinned, *keep])
            if victim is None or book.policy.value(victim) >= value:
                self.counters.prefetch_dropped += 1
                return False
            self._evict(book, victim)
        book.unused_prefetch.add(expert)
        book.refutable.append(expert)
        self._insert(layer, expert, demand=False)
        self.counters.prefetch_issued += 1
        return True

    def cancel_refuted(self, layer: int) -> None:
        """After the layer's router has spoken: stop speculative loads that it did not ask for and that are not done."""
        book = self._layers[layer]
        if not book.refutable:
            return
        for expert in sorted(book.unused_prefetch.intersection(book.refutable)):
            slot = book.slot_of[expert]
            if not self._loader.is_ready(slot) and self._loader.cancel(slot):
                self.counters.prefetch_wasted += 1
                self._drop(book, expert)
        book.refutable.clear()

    def check_integrity(self) -> None:
        """Recount: free + resident == capacity, no slot twice, pins are resident. AssertionError is our bug."""
        seen: set[int] = set()
        for book in self._layers:
            slots = [*book.free, *book.slot_of.values()]
            assert len(slots) == book.capacity, (len(slots), book.capacity)
            assert not seen.intersection(slots), "a slot has two owners"
            seen.update(slots)
            assert book.pinned <= book.slot_of.keys(), "a pinned expert is not resident"
            assert book.unused_prefetch <= book.slot_of.keys()
            for expert in range(self.num_experts):
                assert book.native.slot_of(expert) == book.slot_of.get(expert, -1)
                assert book.native.is_unused(expert) == (expert in book.unused_prefetch)

    def _access(self, layer: int, needed: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """Tell the policy, and the shares what the policy would have thought of it."""
        policy, latest = self._layers[layer].policy, [needed]
        capacity = self._layers[layer].capacity
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
        for book, capacity in zip(self._layers, capacities, strict=True):
            while book.capacity > capacity:
                if not book.free:
                    victim = book.policy.victim(book.pinned)
                    if victim is None:
                        break
                    self._evict(book, victim)
                spare.append(book.free.pop())
                book.capacity -= 1
        for book, capacity in zip(self._layers, capacities, strict=True):
            while spare and book.capacity < capacity:
                book.free.append(spare.pop())
                book.capacity += 1

    def _count(self, book: _Layer, hits: Sequence[int], misses: Sequence[int]) -> None:
        prefetched = [expert for expert in hits if expert in book.unused_prefetch] if book.unused_prefetch else ()
        for expert in prefetched:
            book.unused_prefetch.discard(expert)
            book.native.use(expert)
            if not self._loader.is_ready(book.slot_of[expert]):
                self._loader.promote(book.slot_of[expert])
                self.counters.prefetch_late += 1
        self.counters.prefetch_hits += len(prefetched)
        self.counters.demand_hits += len(hits) - len(prefetched)
        self.counters.misses += len(misses)

    def _pin(self, layer: int, group: Sequence[int]) -> None:
        """Pin the group, residents before any eviction, then load what is missing."""
        book = self._layers[layer]
        book.pinned.update(expert for expert in group if expert in book.slot_of)
        for expert in group:
            if expert not in book.slot_of:
                if not book.free:
                    victim = book.policy.victim(book.pinned)
                    assert victim is not None, "more is pinned than the layer has slots"
                    self._evict(book, victim)
                self._insert(layer, expert, demand=True)
                book.pinned.add(expert)

    def _insert(self, layer: int, expert: int, *, demand: bool) -> None:
        book = self._layers[layer]
        slot = book.slot_of[expert] = book.free.pop()
        book.native.insert(expert, slot, not demand)
        self._num_absent -= 1
        book.policy.on_insert(expert)
        self._loader.load(ExpertKey(layer, expert), slot, demand=demand)

    def _evict(self, book: _Layer, expert: int) -> None:
        slot = book.slot_of[expert]
        if not self._loader.is_ready(slot):
            self._loader.cancel(slot)
        if expert in book.unused_prefetch:
            self.counters.prefetch_wasted += 1
        self.counters.evictions += 1
        self._drop(book, expert)

    def _drop(self, book: _Layer, expert: int) -> None:
        book.free.append(book.slot_of.pop(expert))
        book.native.drop(expert)
        self._num_absent += 1
        book.unused_prefetch.discard(expert)
        book.policy.on_evict(expert)

    def _abandon(self, book: _Layer, group: Sequence[int]) -> None:
        """Unpin; forget experts whose bytes did not arrive."""
        for expert in group:
            book.pinned.discard(expert)
            slot = book.slot_of.get(expert)
            if slot is not None and not self._loader.is_ready(slot):
                self._loader.cancel(slot)
                self._drop(book, expert)

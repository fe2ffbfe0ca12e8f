"""The cache and every policy against one contract, and against an independent brute-force replay."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import UsageError
from tidegate.experts.base import ExpertKey, Loader
from tidegate.experts.cache import ExpertCache
from tidegate.experts.policy import POLICIES, policy_factory

NUM_EXPERTS = 12


class RecordingLoader(Loader):
    """Remembers what was asked. Loads are ready at once, or (``instant=False``) when ``loading`` is cleared."""

    def __init__(self, *, instant: bool = True) -> None:
        self.instant = instant
        self.loads: list[tuple[ExpertKey, int, bool]] = []
        self.loading: set[int] = set()
        self.promoted: list[int] = []

    def load(self, key: ExpertKey, slot: int, *, demand: bool) -> None:
        assert slot not in self.loading, "a load into a slot that is still loading"
        self.loads.append((key, slot, demand))
        if not self.instant:
            self.loading.add(slot)

    def cancel(self, slot: int) -> bool:
        self.loading.discard(slot)
        return True

    def promote(self, slot: int) -> None:
        self.promoted.append(slot)

    def is_ready(self, slot: int) -> bool:
        return slot not in self.loading


visits = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=1, max_size=8, unique=True)),
    max_size=60,
)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(capacities=st.tuples(st.integers(1, NUM_EXPERTS), st.integers(1, NUM_EXPERTS)), events=visits)
def test_every_visit_places_each_expert_once_and_never_evicts_a_pinned_one(name, capacities, events):
    loader = RecordingLoader()
    cache = ExpertCache(capacities, NUM_EXPERTS, POLICIES[name], loader)
    slot_holds: dict[int, ExpertKey] = {}
    for layer, needed in events:
        resident = cache.resident(layer)
        first_load, misses = len(loader.loads), cache.counters.misses
        placed: list[int] = []
        for placement in cache.visit(layer, needed):
            for key, slot, demand in loader.loads[first_load:]:
                assert demand
                slot_holds[slot] = key
            assert len(set(placement.slots)) == len(placement.experts) <= capacities[layer]
            for expert, slot in zip(placement.experts, placement.slots, strict=True):
                assert slot_holds[slot] == ExpertKey(layer, expert), "the slot holds another expert"
            placed += placement.experts
            cache.check_integrity()
        missed = set(needed) - resident
        assert sorted(placed) == sorted(needed)
        assert cache.counters.misses - misses == len(missed) == len(loader.loads) - first_load
        if len(needed) <= capacities[layer]:
            assert placed == [e for e in needed if e in resident] + sorted(missed)
        assert len(cache.resident(layer)) <= capacities[layer]


def _brute_force(name: str, capacity: int, events: list[list[int]]) -> int:
    """Hits by rereading the whole history at every event; shares no code with the policies."""
    resident: set[int] = set()
    hits = 0
    for now, needed in enumerate(events):
        past = events[: now + 1]
        hits += len(resident & set(needed))

        def last(expert, past=past):
            return max((time for time, event in enumerate(past) if expert in event), default=-1)

        def score(expert, past=past, last=last):
            uses = [time for time, event in enumerate(past) if expert in event]
            if name == "lru":
                return last(expert)
            if name == "lfu":
                return len(uses)
            if name == "lfru":
                return len(uses) / (len(past) - 1 - last(expert) + 1)
            return sum(2.0 ** ((time - len(past)) / 16) for time in uses)

        for expert in sorted(set(needed) - resident):
            if len(resident) == capacity:
                victims = resident - set(needed)
                resident.remove(min(victims, key=lambda e: (round(score(e), 12), last(e), e)))
            resident.add(expert)
    return hits


@pytest.mark.parametrize("name", ["decayed-lfu", "lru", "lfu", "lfru"])
@pytest.mark.parametrize("capacity", [4, 6, 8])
def test_hits_equal_a_brute_force_replay(name, capacity):
    rng = random.Random(capacity)
    heat = [rng.random() ** 3 + 0.02 for _ in range(NUM_EXPERTS)]
    events = []
    for _ in range(150):
        event: list[int] = []
        while len(event) < 4:
            expert = rng.choices(range(NUM_EXPERTS), heat)[0]
            if expert not in event:
                event.append(expert)
        events.append(event)
    cache = ExpertCache([capacity], NUM_EXPERTS, POLICIES[name], RecordingLoader())
    for event in events:
        for _ in cache.visit(0, event):
            pass
    assert cache.counters.demand_hits == _brute_force(name, capacity, events)


def test_decayed_counts_survive_rescaling():
    policy = POLICIES["decayed-lfu"](2)
    policy.on_insert(0)
    policy.on_insert(1)
    for _ in range(20_000):
        policy.on_access([0])
    policy.on_access([1])
    assert policy.value(0) > policy.value(1) > 0
    assert policy.victim([]) == 1
    for _ in range(200):
        policy.on_access([1])
    assert policy.victim([]) == 0


def test_groups_load_ahead_of_compute_when_a_layer_needs_more_than_its_slots():
    loader = RecordingLoader()
    cache = ExpertCache([4], NUM_EXPERTS, POLICIES["lru"], loader)
    loads_at_yield = [len(loader.loads) for _ in cache.visit(0, range(8))]
    assert loads_at_yield == [4, 6, 8, 8], "two groups of two are in flight at once"


def test_an_abandoned_visit_leaves_no_pin_and_no_half_loaded_expert():
    loader = RecordingLoader(instant=False)
    cache = ExpertCache([3], NUM_EXPERTS, POLICIES["lru"], loader)
    visit = cache.visit(0, [1, 2, 3])
    next(visit)
    loader.loading.discard(loader.loads[0][1])
    visit.close()
    assert cache.resident(0) == {1}
    cache.check_integrity()
    assert sum(1 for _ in cache.visit(0, [4, 5, 6])) == 1


def test_prefetch_is_counted_promoted_and_guarded():
    loader = RecordingLoader(instant=False)
    cache = ExpertCache([2], NUM_EXPERTS, POLICIES["lfu"], loader)
    assert cache.prefetch(0, 5, value=1.0)
    assert not cache.prefetch(0, 5, value=1.0)
    for placement in cache.visit(0, [5, 6]):
        loader.loading.clear()
        assert placement.experts == [5, 6]
    assert loader.promoted == [loader.loads[0][1]]
    assert (cache.counters.prefetch_hits, cache.counters.demand_hits, cache.counters.misses) == (1, 0, 1)
    assert not cache.prefetch(0, 7, value=0.5), "a warmer expert stays"
    assert cache.counters.prefetch_dropped == 1
    assert cache.prefetch(0, 7, value=2.0)
    for _ in cache.visit(0, [8, 9]):
        loader.loading.clear()
    assert cache.counters.prefetch_wasted == 1
    cache.check_integrity()


def test_books_say_where_experts_are():
    loader = RecordingLoader(instant=False)
    cache = ExpertCache([4, 4], 4, POLICIES["lru"], loader)
    book = cache.book(0)
    cache.prefetch(0, 3, value=float("inf"))
    for placement in cache.visit(0, [1, 2]):
        loader.loading.clear()
        assert [book.slot_of(expert) for expert in (1, 2)] == placement.slots and book.pinned() == [1, 2]
    assert [cache.book(1).slot_of(expert) for expert in range(4)] == [-1] * 4
    assert [book.is_unused(expert) for expert in range(4)] == [False, False, False, True], "3 was not used yet"
    [placement] = cache.visit(0, [3])
    assert book.slot_of(3) == placement.slots[0] and not book.is_unused(3) and cache.counters.prefetch_hits == 1
    for _ in cache.visit(0, [0, 3]):
        assert book.slot_of(0) >= 0
        break  # 0 never arrives
    assert book.slot_of(0) == -1 and not book.pinned() and book.num_free == 1
    assert cache.counters.demand_hits == 1 and cache.counters.misses == 3
    with pytest.raises(RuntimeError, match="has a slot"):
        book.insert(1, False)
    with pytest.raises(RuntimeError, match="no slot"):
        book.drop(0)


def test_an_unknown_policy_is_named_with_the_choices():
    with pytest.raises(UsageError, match=r"--policy 'mru'.*decayed-lfu, lru, lfu, lfru"):
        policy_factory("mru")

"""Slots that move between layers: curves, deals, and a cache that stays consistent while they move."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.experts.base import InstantLoader
from tidegate.experts.cache import LATEST_TOKENS, ExpertCache
from tidegate.experts.policy import POLICIES
from tidegate.experts.shares import DEAL_EVERY, SlotShares

NUM_EXPERTS = 24


def _draw(rng: random.Random, layer: int) -> list[int]:
    """Layer 0 uses four experts only; layer 1 all of them."""
    return rng.sample(range(4 if layer == 0 else NUM_EXPERTS), 3)


def _run(cache: ExpertCache, tokens: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(tokens):
        for layer in range(2):
            for _ in cache.visit(layer, sorted(_draw(rng, layer))):
                pass
        cache.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_slots_go_where_they_hit(policy: str) -> None:
    misses = []
    for share in (False, True):
        cache = ExpertCache([10, 10], NUM_EXPERTS, POLICIES[policy], InstantLoader(), share=share)
        _run(cache, 600)
        misses.append(cache.counters.misses)
    assert cache.capacity(0) < 10 < cache.capacity(1) and cache.capacity(0) + cache.capacity(1) == 20
    assert misses[1] < 0.9 * misses[0]


def test_a_cache_that_holds_everything_has_nothing_to_share() -> None:
    cache = ExpertCache([NUM_EXPERTS] * 2, NUM_EXPERTS, POLICIES["lru"], InstantLoader(), share=True)
    _run(cache, 200)
    assert [cache.capacity(layer) for layer in range(2)] == [NUM_EXPERTS] * 2 and cache.counters.evictions == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_deal_keeps_every_slot_and_every_limit(data: st.DataObject) -> None:
    layers, experts = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    shares = SlotShares(layers, experts)
    capacities = data.draw(st.lists(st.integers(1, experts), min_size=layers, max_size=layers))
    for _ in range(data.draw(st.integers(0, 40))):
        layer = data.draw(st.integers(0, layers - 1))
        shares.observe(layer, data.draw(st.lists(st.integers(0, experts), max_size=min(capacities))))
    dealt = shares.deal(capacities)
    assert sum(dealt) == sum(capacities) and shares.deal(dealt) is not None
    assert all(min(shares.native.most_needed, *capacities) <= slots <= experts for slots in dealt)
    assert not shares.is_due


@pytest.mark.parametrize("policy", POLICIES)
def test_rank_is_the_number_of_slots_that_would_have_been_too_few(policy: str) -> None:
    """Against caches of every size: a use hits exactly when the layer has more slots than its rank (LRU), or nearly so."""
    rng = random.Random(1)
    uses = [rng.sample(range(6), 2) if rng.random() < 0.6 else rng.sample(range(NUM_EXPERTS), 2) for _ in range(300)]
    order = POLICIES[policy](NUM_EXPERTS)
    caches = [ExpertCache([size], NUM_EXPERTS, POLICIES[policy], InstantLoader()) for size in range(2, NUM_EXPERTS + 1)]
    right = total = 0
    for experts in uses:
        ranks = order.ranks(sorted(experts))
        order.on_access(sorted(experts))
        for size, cache in enumerate(caches, start=2):
            before = cache.resident(0)
            right += sum(
                (expert in before) == (rank < size) for expert, rank in zip(sorted(experts), ranks, strict=True)
            )
            total += len(experts)
            for _ in cache.visit(0, sorted(experts)):
                pass
    assert right >= (0.99 if policy == "lru" else 0.9) * total


def test_a_prompt_leaves_its_hottest_experts_behind() -> None:
    rng = random.Random(2)
    rows = [rng.sample(range(6), 2) if rng.random() < 0.7 else rng.sample(range(NUM_EXPERTS), 2) for _ in range(300)]
    cache = ExpertCache([8], NUM_EXPERTS, POLICIES["decayed-lfu"], InstantLoader())
    for placement in cache.visit(0, sorted(set().union(*rows)), rows):
        assert placement.experts
    policy = POLICIES["decayed-lfu"](NUM_EXPERTS)
    for row in rows[-LATEST_TOKENS:]:
        policy.on_access(row)
    hottest = sorted(range(NUM_EXPERTS), key=lambda expert: -policy.value(expert))[:8]
    assert len(cache.resident(0) & set(hottest)) >= 7


def test_a_prompt_is_enough_for_a_deal() -> None:
    rng = random.Random(3)
    cache = ExpertCache([10, 10], NUM_EXPERTS, POLICIES["decayed-lfu"], InstantLoader(), share=True)
    for layer in range(2):
        rows = [_draw(rng, layer) for _ in range(LATEST_TOKENS)]
        for _ in cache.visit(layer, sorted(set().union(*rows)), rows):
            pass
    assert LATEST_TOKENS // 4 >= DEAL_EVERY and cache.capacity(0) == 10
    _run(cache, 1)
    assert cache.capacity(0) < 10

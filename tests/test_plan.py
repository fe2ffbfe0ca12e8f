"""The split of the budget: adds up, monotone, exact at its edges."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import BudgetTooSmall
from tidegate.plan import HEADROOM_BYTES, HEADROOM_SHIFT, Needs, WayOut, make_plan

needs_of = st.builds(
    lambda sizes, slot, layers, experts, k: Needs(*sizes, slot, layers, experts, min(k, experts)),
    st.tuples(*[st.integers(0, 1 << 33)] * 5), st.integers(4096, 1 << 26), st.integers(0, 60), st.integers(1, 256),
    st.integers(1, 8),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(needs_of, st.integers(0, 1 << 36))
def test_the_split_adds_up_and_keeps_its_limits(needs: Needs, extra: int) -> None:
    budget = needs.smallest_bytes + extra
    plan = make_plan(budget, needs)
    assert sum(plan.accounts().values()) == budget
    assert plan.headroom_bytes >= HEADROOM_BYTES + (budget >> HEADROOM_SHIFT)
    assert len(plan.slots) == needs.num_layers
    if plan.slots:
        assert needs.min_slots <= min(plan.slots) <= max(plan.slots) <= needs.num_experts
        assert max(plan.slots) - min(plan.slots) <= 1
        assert plan.slots == tuple(sorted(plan.slots, reverse=True))
        if min(plan.slots) < needs.num_experts:  # one slot more would not fit
            assert needs.budget_for(sum(plan.slots) + 1) > budget


@settings(max_examples=200, deadline=None)
@given(needs_of)
def test_one_byte_under_the_smallest_is_refused(needs: Needs) -> None:
    make_plan(needs.smallest_bytes, needs)
    with pytest.raises(BudgetTooSmall) as caught:
        make_plan(needs.smallest_bytes - 1, needs)
    assert "too small by 1 B" in str(caught.value) and f"{needs.smallest_bytes:,}" in str(caught.value)


def test_a_start_that_used_more_than_the_budget_is_refused_in_other_words() -> None:
    needs = Needs(50 << 20, 0, 0, 0, 0, 4096, 1, 4, 2, start_peak_bytes=90 << 20)
    assert make_plan(90 << 20, needs).slots == (4,)
    with pytest.raises(BudgetTooSmall, match="run again"):
        make_plan((90 << 20) - 1, needs)


def test_largest_useful_budget_holds_everything() -> None:
    needs = Needs(50 << 20, 1 << 20, 7 << 20, 3 << 20, 1 << 20, 9 << 12, 5, 16, 2)
    assert make_plan(needs.largest_useful_bytes, needs).resident_ratio == 1
    assert make_plan(needs.largest_useful_bytes - 1, needs).resident_ratio < 1
    assert make_plan(1 << 40, needs).slots == (16,) * 5


def test_the_message_names_flags_that_suffice_before_flags_that_help() -> None:
    needs = Needs(50 << 20, 0, 0, 100 << 20, 0, 4096, 1, 4, 2)
    ways = [WayOut("--context 512", 60 << 20), WayOut("--kv f16", 110 << 20), WayOut("--threads 1", 1 << 40)]
    with pytest.raises(BudgetTooSmall, match=r"fits with --context 512\)"):
        make_plan(80 << 20, needs, ways)
    with pytest.raises(BudgetTooSmall, match=r"needs less: --context 512 60.0 MiB, --kv f16 110 MiB"):
        make_plan(10 << 20, needs, ways)
    with pytest.raises(BudgetTooSmall, match="raise --memory"):
        make_plan(10 << 20, needs)

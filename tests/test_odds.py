"""The native counts and odds of the expert cache against plain twins."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate import _core
from tidegate.experts.lookahead import AHEAD, HALF_LIFE, LEAST_HEAT

NUM_EXPERTS, LAYERS, RATE = 12, 2, 1 / 128
CURVES = [(6.0, 0.4, -0.8), (4.2, 0.3, -0.5)]
_experts = st.lists(st.integers(0, NUM_EXPERTS - 1), unique=True, max_size=5)


class _UsesTwin:
    """Rereads the whole history."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.resident: set[int] = set()

    def value(self, expert: int) -> float:
        return math.fsum(
            2.0 ** ((time + 1 - len(self.steps)) / HALF_LIFE) for time, step in enumerate(self.steps) if expert in step
        )

    def last_use(self, expert: int) -> int:
        return max((time for time, step in enumerate(self.steps) if expert in step), default=-1)

    def order(self, expert: int) -> tuple[float, int, int]:
        return round(self.value(expert), 9), self.last_use(expert), expert


@settings(deadline=None, max_examples=80)
@given(st.lists(_experts, max_size=40), _experts, _experts)
def test_decayed_uses(steps: list[list[int]], resident: list[int], kept: list[int]) -> None:
    uses, twin = _core.Uses(_core.Worth.DECAYED_USES, NUM_EXPERTS, HALF_LIFE), _UsesTwin()
    for step in steps:
        uses.use(step)
        twin.steps.append(step)
    for expert in resident:
        uses.set_resident(expert, True)
    values = [twin.value(expert) for expert in range(NUM_EXPERTS)]
    assert [uses.value(expert) for expert in range(NUM_EXPERTS)] == pytest.approx(values, abs=1e-12)
    assert uses.lowest(kept) == min(set(resident) - set(kept), key=twin.order, default=-1)
    rounded = [round(value, 9) for value in values]
    ranks = uses.ranks(list(range(NUM_EXPERTS)))
    for expert, rank in enumerate(ranks):
        if twin.last_use(expert) < 0:
            assert rank == NUM_EXPERTS
        else:  # equal sums may differ in their last bit
            more = sum(value > rounded[expert] for value in rounded)
            assert more <= rank < more + rounded.count(rounded[expert])


@settings(deadline=None, max_examples=80)
@given(st.sampled_from(list(_core.Worth)[1:]), st.lists(_experts, max_size=40), _experts, _experts)
def test_other_counts(worth: _core.Worth, steps: list[list[int]], resident: list[int], kept: list[int]) -> None:
    uses, twin = _core.Uses(worth, NUM_EXPERTS), _UsesTwin()
    for step in steps:
        uses.use(step)
        twin.steps.append(step)
    for expert in resident:
        uses.set_resident(expert, True)

    def value(expert: int) -> float:
        count, last = sum(expert in step for step in steps), twin.last_use(expert) + 1 or -1
        if worth == _core.Worth.LAST_USE:
            return last
        return count if worth == _core.Worth.USES else count / (len(steps) - last + 1)

    values = [value(expert) for expert in range(NUM_EXPERTS)]
    assert [uses.value(expert) for expert in range(NUM_EXPERTS)] == values
    order = {expert: (values[expert], twin.last_use(expert), expert) for expert in range(NUM_EXPERTS)}
    assert uses.lowest(kept) == min(set(resident) - set(kept), key=order.__getitem__, default=-1)
    more = [sum(other > one for other in values) for one in values]
    wanted = [NUM_EXPERTS if twin.last_use(expert) < 0 else more[expert] for expert in range(NUM_EXPERTS)]
    assert uses.ranks(list(range(NUM_EXPERTS))) == wanted


FLOOR, RISE, FALL, EARLY = 0.4, 3 / 128, 1 / 128, 2.0


def _odds() -> _core.Odds:
    return _core.Odds(
        LAYERS, NUM_EXPERTS, CURVES, HALF_LIFE, LEAST_HEAT, RATE, floor=FLOOR, rise=RISE, fall=FALL, early=EARLY
    )


def _book(here: list[int]) -> _core.LayerBook:
    book = _core.LayerBook(NUM_EXPERTS, 0, NUM_EXPERTS)
    for expert in here:
        book.insert(expert, False)
    return book


class _OddsTwin:
    """The formulas, one expert at a time."""

    def __init__(self) -> None:
        self.floor, self.bar, self.judged = FLOOR, 0.0, 0
        self.loads: list[list[int]] = [[] for _ in range(LAYERS)]
        self.curves = [list(curve) for curve in CURVES]
        self.uses = [_UsesTwin() for _ in range(LAYERS)]
        self.open: list[list[tuple[int, int, float, float, float]]] = [[] for _ in range(LAYERS)]

    def weigh(
        self, layer: int, distance: int, ranked: list[int], margins: list[float], here: list[int], most: int
    ) -> tuple[list[tuple[int, float]], int]:
        loads, dropped, least = [], 0, max(self.floor, self.bar)
        if distance == AHEAD:  # the odds against it are so many times smaller
            least = 1 / (1 + (1 / least - 1) / EARLY)
        for rank, (expert, margin) in enumerate(zip(ranked, margins, strict=True)):
            if expert in here:
                continue
            a, b, c = self.curves[distance]
            log_heat = math.log(self.uses[layer].value(expert) + LEAST_HEAT)
            odds = 1 / (1 + math.exp(-max(-30.0, min(a * margin + b * log_heat + c, 30.0))))
            self.open[layer].append((expert, distance, margin, log_heat, odds))
            if odds >= least:
                loads.append((expert, odds))
            else:
                dropped += rank < most
        return loads, dropped

    def learn(self, layer: int, needed: list[int]) -> None:
        for expert, distance, margin, log_heat, odds in self.open[layer]:
            step = ((expert in needed) - odds) * RATE
            self.curves[distance] = [
                old + step * factor for old, factor in zip(self.curves[distance], (margin, log_heat, 1), strict=True)
            ]
        for expert in self.loads[layer]:
            pace = 1 + 3 * max(0, 64 - self.judged) / 64
            self.judged += 1
            self.floor = max(0.0, self.floor - pace * FALL) if expert in needed else min(1.0, self.floor + pace * RISE)
        self.open[layer], self.loads[layer] = [], []
        self.uses[layer].steps.append(needed)


_guess = st.tuples(
    st.integers(0, LAYERS - 1), st.integers(0, 1), st.permutations(range(NUM_EXPERTS)), st.integers(0, 6),
    st.lists(st.integers(-512, 512), min_size=6, max_size=6), _experts, _experts, st.booleans(),
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(st.lists(_guess, max_size=30))
def test_odds(guesses: list[tuple[int, int, list[int], int, list[int], list[int], list[int], bool]]) -> None:
    odds, twin = _odds(), _OddsTwin()
    odds.bar = twin.bar = 0.4200001
    for layer, distance, order, size, margins_256, here, needed, is_known in guesses:
        ranked, margins = list(order[:size]), [margin / 256 for margin in margins_256[:size]]
        found, dropped = odds.weigh(layer, distance, ranked, margins, _book(here), 3)
        loads, twin_dropped = twin.weigh(layer, distance, ranked, margins, here, 3)
        assert [expert for expert, _ in found] == [expert for expert, _ in loads] and dropped == twin_dropped
        assert [value for _, value in found] == pytest.approx([value for _, value in loads], rel=1e-9)
        for expert, _ in found:
            odds.loaded(layer, expert)
            twin.loads[layer].append(expert)
        if is_known:
            odds.learn(layer, needed)
            twin.learn(layer, needed)
        elif not ranked:
            odds.forget()
            twin.open, twin.loads = ([[] for _ in range(LAYERS)] for _ in range(2))
        assert odds.floor == pytest.approx(twin.floor)


def test_what_is_no_expert_is_refused() -> None:
    odds, book = _odds(), _book([])
    for layer, distance, ranked in ((LAYERS, 0, [1]), (0, 2, [1]), (0, 0, [NUM_EXPERTS]), (0, 0, [-1])):
        with pytest.raises(IndexError):
            odds.weigh(layer, distance, ranked, [0.0], book, 1)
    with pytest.raises(ValueError, match="margin"):
        odds.weigh(0, 0, [1], [], book, 1)
    uses = _core.Uses(_core.Worth.DECAYED_USES, NUM_EXPERTS, HALF_LIFE)
    for call in (lambda expert: odds.loaded(LAYERS, expert), lambda expert: book.insert(expert, False)):
        with pytest.raises(IndexError):
            call(NUM_EXPERTS)
    for call in (
        book.slot_of,
        book.is_unused,
        book.use,
        book.drop,
        uses.value,
        lambda expert: uses.use([expert]),
        lambda expert: uses.ranks([expert]),
    ):
        with pytest.raises(IndexError):
            call(NUM_EXPERTS)

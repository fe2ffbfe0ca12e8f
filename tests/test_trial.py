"""Guessing is tried and given up where it does not pay, and tried again now and then."""

import random

import pytest

from tidegate.experts.trial import Trial


class _Steps:
    """A step takes 1 s, a load 0.1 s more or so; with guesses all of that times ``factor``."""

    def __init__(self) -> None:
        self.now_s, self.loads, self._random = 0.0, 0, random.Random(3)

    def run(self, trial: Trial, steps: int, factor: float) -> list[bool]:
        out = []
        for _ in range(steps):
            out.append(trial.begin_step(self.loads))
            loads = self._random.randrange(12)
            self.loads += loads
            duration_s = 1 + 0.1 * loads * self._random.uniform(0.8, 1.2)
            self.now_s += duration_s * (factor if out[-1] else 1.0)
        return out


def test_what_does_not_pay_ends_within_32_steps_and_is_tried_rarely() -> None:
    clock = _Steps()
    trial = Trial(lambda: clock.now_s)
    done = clock.run(trial, 1000, 1.1)
    assert sum(done[:32]) == 16 and not any(done[32:64])
    assert 0 < sum(done[32:]) < 0.08 * len(done)
    assert not trial.pays


def test_what_pays_stays_and_is_compared_rarely() -> None:
    clock = _Steps()
    done = clock.run(Trial(lambda: clock.now_s), 1000, 0.9)
    assert all(done[32:64]) and sum(done[32:]) > 0.92 * 968
    assert not all(done[32:])


@pytest.mark.parametrize("pays_at_first", [True, False])
def test_it_changes_its_mind(pays_at_first: bool) -> None:
    clock = _Steps()
    trial = Trial(lambda: clock.now_s)
    factors = (0.8, 1.25) if pays_at_first else (1.25, 0.8)
    clock.run(trial, 400, factors[0])
    assert trial.pays == pays_at_first
    clock.run(trial, 2000, factors[1])
    assert trial.pays != pays_at_first


def test_without_a_clock_it_goes_on() -> None:
    assert all(Trial(None).begin_step(0) for _ in range(100))


def test_prompts_and_pauses_do_not_count() -> None:
    clock = _Steps()
    trial = Trial(lambda: clock.now_s)
    for step in range(200):
        is_on = clock.run(trial, 1, 0.9)[0]
        if step % 5 == 4:
            trial.skip_step()
            clock.now_s += 2 if is_on else 0
        if step > 20 and step % 7 == 6:
            clock.now_s += 100 if is_on else 0
    assert trial.pays

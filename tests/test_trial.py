"""Guessing is tried and given up where it does not pay, and tried again now and then."""

import pytest

from tidegate.experts.trial import Trial


class _Clock:
    def __init__(self) -> None:
        self.spent_s, self.loads = 0.0, 0

    def run(self, trial: Trial, steps: int, with_s: float, without_s: float) -> list[bool]:
        """Each step loads 3 experts, at a price each."""
        out = []
        for _ in range(steps):
            out.append(trial.begin_step(self.loads))
            self.loads += 3
            self.spent_s += 3 * (with_s if out[-1] else without_s)
        return out


def test_what_does_not_pay_ends_within_32_steps_and_is_tried_rarely() -> None:
    clock = _Clock()
    trial = Trial(lambda: clock.spent_s)
    done = clock.run(trial, 1000, with_s=1.1, without_s=1.0)
    assert sum(done[:32]) == 16 and not any(done[32:64])
    assert 0 < sum(done[32:]) < 0.08 * len(done)
    assert not trial.pays


def test_what_pays_stays_and_is_compared_rarely() -> None:
    clock = _Clock()
    done = clock.run(Trial(lambda: clock.spent_s), 1000, with_s=0.8, without_s=1.0)
    assert all(done[32:64]) and sum(done[32:]) > 0.92 * 968
    assert not all(done[32:])


@pytest.mark.parametrize("pays_at_first", [True, False])
def test_it_changes_its_mind(pays_at_first: bool) -> None:
    clock = _Clock()
    trial = Trial(lambda: clock.spent_s)
    prices = (0.5, 1.0) if pays_at_first else (1.0, 0.5)
    clock.run(trial, 400, *prices)
    assert trial.pays == pays_at_first
    clock.run(trial, 1600, *reversed(prices))
    assert trial.pays != pays_at_first


def test_without_a_clock_or_without_loads_it_goes_on() -> None:
    assert all(Trial(None).begin_step(0) for _ in range(100))
    trial = Trial(lambda: 0.0)
    done = [trial.begin_step(0) for _ in range(100)]
    assert all(done[32:]) and trial.pays


def test_skipped_steps_do_not_count() -> None:
    clock = _Clock()
    trial = Trial(lambda: clock.spent_s)
    for _ in range(40):
        clock.run(trial, 1, with_s=0.8, without_s=1.0)
        trial.skip_step()
        clock.spent_s += 100
        clock.loads += 1
    assert trial.pays

"""The Kneser-Ney baseline: a probability distribution, better than its lower orders where context helps."""

from __future__ import annotations

import numpy as np
import pytest

from tidegate.train.ngram import KneserNey


def test_probabilities_of_all_next_tokens_sum_to_one() -> None:
    rng = np.random.default_rng(0)
    model = KneserNey(rng.integers(0, 6, (20, 30)), vocab_size=7, order=4)
    for context in ([0, 1, 2], [6, 6, 6], [3, 6, 1], [5, 5, 5]):
        total = sum(np.exp(-model.nll(np.array([*context, last]))[-1]) for last in range(7))
        assert total == pytest.approx(1.0, abs=1e-9)


def test_longer_context_predicts_a_pattern_that_needs_it() -> None:
    pattern = np.array([0, 1, 2, 0, 1, 3, 0, 2, 1] * 40)
    sequences = pattern[: 36 * 10].reshape(-1, 36)
    losses = [KneserNey(sequences, 4, order).nll(pattern[:90])[10:].mean() for order in (1, 2, 3, 5)]
    assert losses[0] > losses[1] > losses[2] > losses[3]
    assert losses[3] < 0.2


def test_a_lower_order_counts_neighbours_not_occurrences() -> None:
    """The word that only ever follows one other is unlikely after an unseen context, however frequent it is."""
    rows = [[0, 1]] * 50 + [[left, 2] for left in (3, 4, 5, 6, 7)] * 2
    model = KneserNey(np.array(rows), vocab_size=9, order=2)
    assert model.nll(np.array([8, 2]))[1] < model.nll(np.array([8, 1]))[1]

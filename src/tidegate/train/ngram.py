"""The baseline that a trained model must beat: interpolated modified Kneser-Ney n-grams over the same tokens.

Chen and Goodman (1998): the highest order uses counts, lower orders the number of distinct left neighbours, and each
order three discounts (for counts 1, 2 and more). N-grams are numbered order by order: an n-gram's key is the number of
its first n-1 tokens times the vocabulary size plus its last token, so keys of any order fit into 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class _Order:
    """Sorted keys of all n-grams of one order, their (adjusted) counts, and per context: total and back-off mass."""

    keys: Ints
    counts: Ints
    discounts: Floats
    totals: Floats
    backoff: Floats


class KneserNey:
    """``sequences`` int64 [S, L]: n-grams are counted within rows."""

    def __init__(self, sequences: Ints, vocab_size: int, order: int = 5) -> None:
        self.vocab_size, self.order = vocab_size, order
        numbers, num_contexts = np.zeros((sequences.shape[0], sequences.shape[1] + 1), dtype=np.int64), 1
        found: list[tuple[Ints, Ints]] = []
        for n in range(1, order + 1):
            length = sequences.shape[1] - n + 1
            keys = numbers[:, :length] * vocab_size + sequences[:, n - 1 :]
            unique, first, inverse, counts = np.unique(
                keys.ravel(), return_index=True, return_inverse=True, return_counts=True
            )
            if n > 1:
                row, column = np.divmod(first, length)
                suffixes = numbers[row, column + 1]
                found[-1] = (found[-1][0], np.bincount(suffixes, minlength=len(found[-1][0])))
            found.append((unique, counts))
            numbers = inverse.reshape(keys.shape)
        self._orders = []
        for unique, counts in found:
            self._orders.append(_smooth(unique, counts, num_contexts, vocab_size))
            num_contexts = len(unique)

    def nll(self, tokens: Ints) -> Floats:
        """Negative log-likelihood in nats of every token of a stream [T] given up to ``order - 1`` before it."""
        probability = np.full(len(tokens), 1.0 / self.vocab_size)
        numbers = np.zeros(len(tokens), dtype=np.int64)  # of the n-gram that ends right before each token
        for n, level in enumerate(self._orders, start=1):
            known = numbers >= 0
            context = np.where(known, numbers, 0)
            found, at = _find(level.keys, np.where(known, context * self.vocab_size + tokens, -1))
            counts = np.where(found, level.counts[at], 0)
            seen = known & (level.totals[context] > 0)
            discounted = counts - level.discounts[np.minimum(counts, 3)]
            total = np.where(seen, level.totals[context], 1.0)
            better = discounted / total + level.backoff[context] * probability
            probability = np.where(seen, better, probability)
            if n < self.order:
                ended = np.where(found, at, -1)  # the n-gram that ends at each token, and so before the next one
                numbers = np.concatenate([[-1], ended[:-1]])
        nll: Floats = -np.log(np.maximum(probability, np.finfo(np.float64).tiny))
        return nll


def _smooth(keys: Ints, counts: Ints, num_contexts: int, vocab_size: int) -> _Order:
    frequency = [max(1, int(np.count_nonzero(counts == value))) for value in range(1, 5)]
    ratio = frequency[0] / (frequency[0] + 2 * frequency[1])
    discounts = np.array(
        [0.0] + [max(0.0, value - (value + 1) * ratio * frequency[value] / frequency[value - 1]) for value in (1, 2, 3)]
    )
    contexts = keys // vocab_size
    totals: Floats = np.bincount(contexts, weights=counts, minlength=num_contexts).astype(np.float64)
    taken = np.bincount(contexts, weights=discounts[np.minimum(counts, 3)], minlength=num_contexts)
    backoff = taken / np.maximum(totals, 1.0)
    return _Order(keys, counts, discounts, totals, backoff)


def _find(keys: Ints, wanted: Ints) -> tuple[Any, Ints]:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return keys[at] == wanted, at

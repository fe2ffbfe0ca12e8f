"""Batches of token windows: a fixed mixture of domains, each domain walked in a seeded permutation without repeats.

Everything follows from the seed and a sequence's number: a resumed run sees exactly the batches that the interrupted
one would have seen.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tidegate.errors import UsageError

PATTERN_LENGTH = 400


class Sampler:
    """Numbered sequences of L tokens and their successors."""

    def __init__(self, paths: dict[str, Path], shares: dict[str, float], sequence_length: int, seed: int) -> None:
        """``paths`` are token files by domain, ``shares`` their part of all sequences (normalised here)."""
        self._tokens = {domain: np.memmap(path, dtype="<u2", mode="r") for domain, path in paths.items()}
        self._length, self._seed = sequence_length, seed
        for domain, tokens in self._tokens.items():
            if len(tokens) <= 2 * sequence_length:
                raise UsageError(
                    f"{paths[domain]}: {len(tokens)} tokens are fewer than two sequences of {sequence_length}"
                )
        self.domains = sorted(paths)
        total = sum(shares[domain] for domain in self.domains)
        quotas = np.array([shares[domain] / total * PATTERN_LENGTH for domain in self.domains])
        places = [(at + 0.5) / quota for quota in quotas for at in range(round(quota))]
        owners = [owner for owner, quota in enumerate(quotas) for _ in range(round(quota))]
        self._pattern = np.array(owners)[np.argsort(places, kind="stable")]
        self._per_pattern = np.bincount(self._pattern, minlength=len(self.domains))
        self._rank_in_pattern = np.array([
            np.count_nonzero(self._pattern[:at] == owner) for at, owner in enumerate(self._pattern)
        ])  # fmt: skip
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def batch(self, first: int, count: int) -> np.ndarray:
        """Sequences ``first`` to ``first + count`` of the run: int64 [count, L + 1], inputs and next tokens."""
        return np.stack([self._sequence(number) for number in range(first, first + count)])

    def _sequence(self, number: int) -> np.ndarray:
        block, place = divmod(number, len(self._pattern))
        owner = int(self._pattern[place])
        index = block * int(self._per_pattern[owner]) + int(self._rank_in_pattern[place])
        tokens = self._tokens[self.domains[owner]]
        windows = (len(tokens) - 1) // self._length - 1
        epoch, position = divmod(index, windows)
        order = self._order(owner, epoch, windows)
        shift = (self._seed * 7919 + epoch * 104729) % self._length
        start = int(order[position]) * self._length + shift
        return np.asarray(tokens[start : start + self._length + 1], dtype=np.int64)

    def _order(self, owner: int, epoch: int, windows: int) -> np.ndarray:
        if (owner, epoch) not in self._orders:
            self._orders = {key: value for key, value in self._orders.items() if key[0] != owner}
            generator = np.random.default_rng([self._seed, owner, epoch])
            self._orders[owner, epoch] = generator.permutation(windows)
        return self._orders[owner, epoch]


def heldout_windows(path: Path, sequence_length: int, count: int) -> np.ndarray:
    """``count`` windows (fewer if the file is short), evenly spread over a held-out token file: int64 [count, L + 1]."""
    tokens = np.memmap(path, dtype="<u2", mode="r")
    windows = (len(tokens) - 1) // sequence_length
    starts = np.unique(np.linspace(0, windows - 1, min(count, windows)).astype(np.int64)) * sequence_length
    return np.stack([np.asarray(tokens[at : at + sequence_length + 1], dtype=np.int64) for at in starts])

"""Prefetch from the router's own guesses: the gates of the next layers, applied to the hidden state of this one.

A guess is worth a load when the odds are good enough. The odds are learned while running, per distance and rank of the guess,
from those guesses alone whose expert was not in memory, which are the ones that matter and the harder ones. A wrong load takes
the channel from a demand load with the probability that the channel is busy, so the odds must be the better the busier it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from tidegate.experts.cache import ExpertCache

REACH = 2  # layers ahead
MOST_ROWS = 4  # a step of more tokens needs most experts anyway
_LEARNING_RATE = 1 / 64
_FIRST_ODDS = 0.6
_MARGIN = 0.25  # measured: what a wrong load evicts, and what it takes from the loads behind it
_NAP_STEPS = 16  # how seldom guesses are made where none is worth a load
_ABOVE_ALL = float("inf")


class Lookahead:
    """Drive it in the order of a step: ``begin_step``; for every MoE layer ``after_route`` once its own loads are queued; and,
    in a step that ``wants_guesses``, ``foresee`` for each.

    ``busy_ratio`` says how busy the channel was since it was last asked, 0 to 1.
    """

    def __init__(self, cache: ExpertCache, experts_per_token: int, busy_ratio: Callable[[], float]) -> None:
        self._cache, self._busy_ratio = cache, busy_ratio
        self._odds = [[_FIRST_ODDS] * experts_per_token for _ in range(REACH)]
        self._open: dict[int, list[tuple[int, int, int]]] = {}  # layer -> guesses: expert, distance, rank
        self.wants_guesses = False
        self._busy = 0.0
        self._naps = 0
        self._tempted = True

    @property
    def threshold(self) -> float:
        """Odds below it are not worth a load. A right load saves a wait; a wrong one delays demand loads if there are any."""
        return self._busy / (1 + self._busy) + _MARGIN

    def begin_step(self, num_rows: int) -> None:
        """A forward pass of so many rows starts."""
        self._open.clear()
        self.wants_guesses = False
        if num_rows > MOST_ROWS:
            return
        self._busy += (self._busy_ratio() - self._busy) / 8
        self._naps = 0 if self._tempted else (self._naps + 1) % _NAP_STEPS
        if self._naps == 0:
            self.wants_guesses, self._tempted = True, False

    def after_route(self, layer: int, needed: Collection[int]) -> None:
        """What the layer really needs: loads that nobody asked for are stopped, and the odds follow."""
        for expert, distance, rank in self._open.pop(layer, ()):
            odds = self._odds[distance - 1]
            odds[rank] += ((expert in needed) - odds[rank]) * _LEARNING_RATE
        self._cache.cancel_refuted(layer)

    def foresee(self, layer: int, distance: int, ranked: Sequence[int]) -> None:
        """The gate of ``layer``, ``distance`` layers ahead, would choose these experts, best first, for one row."""
        resident, odds, threshold = self._cache.resident(layer), self._odds[distance - 1], self.threshold
        guesses = self._open.setdefault(layer, [])
        for rank, expert in enumerate(ranked):
            if expert not in resident:
                guesses.append((expert, distance, rank))
                if odds[rank] >= threshold:
                    self._tempted = True
                    self._cache.prefetch(layer, expert, _ABOVE_ALL, keep=ranked)

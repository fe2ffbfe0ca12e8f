"""Whether guessing pays, by trying: some steps go with guesses and some without, and what loads cost in either is compared.

What counts is the time in which compute waits for loads, with the bookkeeping of cache and guesses, for every expert that had to
be loaded: it varies far less from step to step than the steps themselves.
"""

from __future__ import annotations

from collections.abc import Callable

_BLOCK_STEPS, _FIRST_BLOCKS = 8, 4  # blocks alternate at first; from then on
_RARE_BLOCKS = 16  # one in so many tries what does not pay
_FADE = 0.95  # of what was seen, with every block


class Trial:
    """``spent_s``: what all loads have cost so far, in seconds; it only grows. Without it guesses are taken to pay."""

    def __init__(self, spent_s: Callable[[], float] | None) -> None:
        self._spent_s = spent_s
        self._costs = {True: [0.0, 0.0], False: [0.0, 0.0]}  # with guesses and without: seconds, loads
        self._before: tuple[float, int] | None = None
        self._step = 0
        self._is_on = True

    def begin_step(self, num_loads: int) -> bool:
        """A step starts, and so many experts had to be loaded so far. Whether to guess in it."""
        if self._spent_s is None:
            return True
        now = self._spent_s(), num_loads
        if self._before is not None:
            cost = self._costs[self._is_on]
            cost[0] += now[0] - self._before[0]
            cost[1] += now[1] - self._before[1]
        self._before = now
        if self._step % _BLOCK_STEPS == 0:
            self._begin_block(self._step // _BLOCK_STEPS)
        self._step += 1
        return self._is_on

    def skip_step(self) -> None:
        """A step starts that has no part in it."""
        self._before = None

    @property
    def pays(self) -> bool:
        """By what was seen so far."""
        (on_s, on_loads), (off_s, off_loads) = self._costs[True], self._costs[False]
        return not on_loads or not off_loads or on_s / on_loads <= off_s / off_loads

    def _begin_block(self, block: int) -> None:
        for cost in self._costs.values():
            cost[:] = [number * _FADE for number in cost]
        is_exception = block % 2 == 1 if block < _FIRST_BLOCKS else block % _RARE_BLOCKS == 0
        self._is_on = (block < _FIRST_BLOCKS or self.pays) != is_exception

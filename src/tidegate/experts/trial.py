"""Whether guessing pays, by trying: some steps go with guesses and some without, and how long they take is compared.

Steps differ most by how many experts have to be loaded, so that is allowed for: a line through each kind of steps, one slope.
"""

from __future__ import annotations

from collections.abc import Callable

_BLOCK_STEPS, _FIRST_BLOCKS = 8, 4  # blocks alternate at first; from then on
_RARE_BLOCKS = 32  # one in so many tries what does not pay
_FADE = 0.97  # of what was seen, with every block
_DOUBT = 0.02  # of a step's time: less than what so few steps can tell
_OUTLIER = 4.0  # means: the process stood still, or nobody asked for anything


class Trial:
    """``clock``: seconds since some time. Without it guesses are taken to pay."""

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self._clock = clock
        # With guesses (1) and without: steps, loads, seconds, loads squared, loads times seconds.
        self._sums = [[0.0] * 5, [0.0] * 5]
        self._before: tuple[float, int] | None = None
        self._step = 0
        self._is_on = True

    def begin_step(self, num_loads: int) -> bool:
        """A step starts, and so many experts had to be loaded so far. Whether to guess in it."""
        if self._clock is None:
            return True
        now = self._clock(), num_loads
        if self._before is not None:
            self._add(now[0] - self._before[0], now[1] - self._before[1])
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
        off, on = self._sums
        if min(off[0], on[0]) < _BLOCK_STEPS / 2:
            return True
        spread = sum(squares - loads * loads / steps for steps, loads, _, squares, _ in self._sums)
        slope = sum(both - loads * seconds / steps for steps, loads, seconds, _, both in self._sums)
        slope = slope / spread if spread > 0 else 0.0
        off_s, on_s = off[2] / off[0], on[2] / on[0]
        return on_s - off_s < slope * (on[1] / on[0] - off[1] / off[0]) + _DOUBT * off_s

    def _add(self, seconds: float, loads: int) -> None:
        off, on = self._sums
        steps, total_s = off[0] + on[0], off[2] + on[2]
        if steps < _BLOCK_STEPS or seconds < _OUTLIER * total_s / steps:
            seen = (1, loads, seconds, loads * loads, loads * seconds)
            self._sums[self._is_on] = [old + new for old, new in zip(self._sums[self._is_on], seen, strict=True)]

    def _begin_block(self, block: int) -> None:
        self._sums = [[_FADE * total for total in sums] for sums in self._sums]
        is_exception = block % 2 == 1 if block < _FIRST_BLOCKS else block % _RARE_BLOCKS == 0
        self._is_on = (block < _FIRST_BLOCKS or self.pays) != is_exception

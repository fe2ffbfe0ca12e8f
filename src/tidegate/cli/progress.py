"""Progress of long work on standard error: a bar on a terminal, elsewhere a plain line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from tidegate.terminal import StatusLine, bar
from tidegate.units import format_bytes, format_seconds

_LINE_EVERY_S, _LINE_EVERY_SHARE = 2.0, 20
_BAR_CELLS = 20


class Progress:
    """Call it with (done, total, what) inside its ``with`` block; nothing is shown before the first call. ``amount`` writes a
    number of what is counted, bytes if it is not given."""

    def __init__(self, title: str, amount: Callable[[int], str] = format_bytes) -> None:
        self._title, self._amount = title, amount
        self._status = StatusLine()
        self._started_s = 0.0
        self._first = 0
        self._last_line_s = 0.0
        self._next_share = 0
        self.is_unfinished = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the line of a terminal."""
        self._status.close()

    def __call__(self, done: int, total: int, what: str = "") -> None:
        self.is_unfinished = done < total
        is_first = not self._started_s
        if is_first:
            self._started_s = self._last_line_s = time.monotonic()
            self._first = done
        if not sys.stderr.isatty():
            self._print_line(done, total)
            return
        elapsed_s, fresh = time.monotonic() - self._started_s, done - self._first
        pace = ""
        if fresh and elapsed_s:
            left = format_seconds((total - done) * elapsed_s / fresh)
            pace = f", {self._amount(int(fresh / elapsed_s))}/s, {left} left"
        part = f"{self._amount(done)} of {self._amount(total)}"
        self._status.show(f"{bar(done / max(total, 1), _BAR_CELLS)} {part}{pace}  {self._title}  {what}")

    def of(self, total: int) -> Callable[[int], None]:
        """Starts, and returns what is to be called with each piece of ``total`` that is done."""
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            self(done, total)

        self(0, total)
        return advance

    def _print_line(self, done: int, total: int) -> None:
        now_s, share = time.monotonic(), _LINE_EVERY_SHARE * done // max(total, 1)
        if share < self._next_share or now_s - self._last_line_s < _LINE_EVERY_S:
            return
        self._last_line_s, self._next_share = now_s, share + 1
        elapsed_s = now_s - self._started_s
        speed = self._amount(int((done - self._first) / elapsed_s))
        part = f"{self._amount(done)} of {self._amount(total)}"
        print(f"{self._title}: {part}, {format_seconds(elapsed_s)}, {speed}/s", file=sys.stderr, flush=True)


def counted(title: str) -> Progress:
    """Of things that are counted, like tokens."""
    return Progress(title, "{:,}".format)


@contextmanager
def converting(source: str | Path, keeper: str = "the cache") -> Iterator[Progress]:
    """Progress of a conversion. Ctrl-C in the middle of it says that ``keeper`` has what is done, and passes through."""
    with Progress(f"converting {source}") as progress:
        try:
            yield progress
        except KeyboardInterrupt:
            if progress.is_unfinished:
                progress.close()
                print(f"tidegate: interrupted; {keeper} keeps what is done, the same command goes on", file=sys.stderr)
            raise

"""Progress of long work on standard error: a bar on a terminal, elsewhere a plain line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tidegate.terminal import StatusLine, bar
from tidegate.units import format_bytes, format_seconds

_LINE_EVERY_S, _LINE_EVERY_SHARE = 2.0, 20
_BAR_CELLS = 20


class ByteProgress:
    """Call it with (done_bytes, total_bytes, what) inside its ``with`` block; nothing is shown before the first call."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._status = StatusLine()
        self._started_s = 0.0
        self._first_bytes = 0
        self._last_line_s = 0.0
        self._next_share = 0

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.close()

    def __call__(self, done_bytes: int, total_bytes: int, what: str = "") -> None:
        is_first = not self._started_s
        if is_first:
            self._started_s = self._last_line_s = time.monotonic()
            self._first_bytes = done_bytes
        if not sys.stderr.isatty():
            self._print_line(done_bytes, total_bytes)
            return
        elapsed_s, fresh_bytes = time.monotonic() - self._started_s, done_bytes - self._first_bytes
        pace = ""
        if fresh_bytes and elapsed_s:
            left = format_seconds((total_bytes - done_bytes) * elapsed_s / fresh_bytes)
            pace = f", {format_bytes(int(fresh_bytes / elapsed_s))}/s, {left} left"
        amount = f"{format_bytes(done_bytes)} of {format_bytes(total_bytes)}"
        self._status.show(f"{bar(done_bytes / max(total_bytes, 1), _BAR_CELLS)} {amount}{pace}  {self._title}  {what}")

    def _print_line(self, done_bytes: int, total_bytes: int) -> None:
        now_s, share = time.monotonic(), _LINE_EVERY_SHARE * done_bytes // max(total_bytes, 1)
        if share < self._next_share or now_s - self._last_line_s < _LINE_EVERY_S:
            return
        self._last_line_s, self._next_share = now_s, share + 1
        elapsed_s = now_s - self._started_s
        speed = format_bytes(int((done_bytes - self._first_bytes) / elapsed_s))
        amount = f"{format_bytes(done_bytes)} of {format_bytes(total_bytes)}"
        print(f"{self._title}: {amount}, {format_seconds(elapsed_s)}, {speed}/s", file=sys.stderr, flush=True)

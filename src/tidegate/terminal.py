"""What people see on a terminal: tables, bars, colours, and a line that is rewritten while work goes on."""

from __future__ import annotations

import shutil
import sys
import time
import unicodedata
from collections.abc import Sequence
from typing import TextIO

_REDRAW_S = 0.1
_STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "cyan": 36}


def styled(text: str, style: str) -> str:
    """The text in a colour or weight of ``_STYLES``; only for terminals."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def width(text: str) -> int:
    """Columns that the text takes: East Asian wide characters take two, combining marks none."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", left: Sequence[str] = ()) -> str:
    """Columns two spaces apart: the first one and those named in ``left`` to the left, the others to the right."""
    sizes = [max(map(width, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = []
        for index, (cell, size) in enumerate(zip(cells, sizes, strict=True)):
            gap = " " * (size - width(cell))
            padded.append(cell + gap if index == 0 or head[index] in left else gap + cell)
        return "  ".join(padded).rstrip()

    return "\n".join(
        [*([title] if title else []), line(head), "  ".join("─" * size for size in sizes), *map(line, rows)]
    )


def bar(ratio: float, cells: int) -> str:
    """A bar of this many cells, the part done filled."""
    full = round(min(1.0, max(0.0, ratio)) * cells)
    return "█" * full + "░" * (cells - full)


class StatusLine:
    """One line of a terminal, rewritten by every :meth:`show` (at most ten times a second) and ended by :meth:`close`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._last_s, self._text = 0.0, ""

    def show(self, text: str, *, now: bool = False) -> None:
        """``now`` draws even if the last drawing is recent."""
        self._text = text
        if now or time.monotonic() - self._last_s >= _REDRAW_S:
            self._draw()

    def say(self, text: str) -> None:
        """A line that stays, above the one that is rewritten."""
        self._stream.write(f"\r\x1b[K{text}\n")
        self._draw()

    def clear(self) -> None:
        """Take the line away, as if nothing had been shown."""
        if self._text:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._text = ""

    def close(self) -> None:
        """Draw the last text and end the line, if anything was shown."""
        if self._text:
            self._draw()
            self._stream.write("\n")
            self._stream.flush()
            self._text = ""

    def _draw(self) -> None:
        room = shutil.get_terminal_size().columns - 1
        text = self._text
        while width(text) > room:
            text = text[:-1]
        self._stream.write(f"\r{text}\x1b[K")
        self._stream.flush()
        self._last_s = time.monotonic()

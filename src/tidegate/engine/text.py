"""From token ids to the text a person sees, piece by piece: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol


class PieceDecoder(Protocol):
    """Turns one more token id into the characters that became complete (models/tokenizer.py makes them)."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class StopStrings:
    """Finds the first stop string in a growing text and holds back an end that could still become one."""

    def __init__(self, stops: Items[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that is safe to show now, and whether a stop string was met (then nothing is held any more)."""
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The answer ended: what was held is text after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class TextStream:
    """The visible text of one sequence. ``pieces`` grow until somebody takes them."""

    def __init__(self, decoder: PieceDecoder, stops: Items[str] = ()) -> None:
        self._decoder, self._stops = decoder, StopStrings(stops)
        self._pieces: list[str] = []

    def push(self, token_id: int) -> bool:
        """Add a token; True if its text completed a stop string."""
        shown, stopped = self._stops.push(self._decoder.push(token_id))
        self._pieces.append(shown)
        return stopped

    def close(self) -> None:
        """No more tokens, and no stop string was met: release what was held back (it may still hold one)."""
        shown, stopped = self._stops.push(self._decoder.flush())
        self._pieces.append(shown if stopped else shown + self._stops.flush())

    def take(self) -> str:
        """The text since the last call."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

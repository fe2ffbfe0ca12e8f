"""An answer, printed as it comes. Ctrl-C ends it between two steps, instead of tearing one apart."""

from __future__ import annotations

import signal
import sys
from contextlib import closing
from types import FrameType, TracebackType
from typing import Any

from tidegate.engine.model import Model, Prompt
from tidegate.terminal import StatusLine


class Interrupt:
    """While entered, the first Ctrl-C sets ``asked`` and the second one raises KeyboardInterrupt as usual."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Interrupt:
        self.asked = False
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def write_answer(model: Model, prompt: Prompt, sampling: dict[str, Any], *, is_shown: bool = True) -> tuple[str, bool]:
    """Ask, and print the answer piece by piece if ``is_shown``. Returns it, and whether Ctrl-C ended it. Raises as
    ``Model.stream``; what was printed has ended its line by then. On a terminal a long prompt says how far it has been read."""
    pieces: list[str] = []
    status = StatusLine() if is_shown and sys.stderr.isatty() else None
    before = model.stats()["prefill_tokens"]
    try:
        with Interrupt() as interrupt, closing(model.stream(prompt, **sampling)) as answer:
            for piece in answer:
                if status is not None and not (piece or any(pieces)):
                    status.show(f"reading the prompt: {model.stats()['prefill_tokens'] - before:,} tokens", now=True)
                pieces.append(piece)
                if is_shown and piece:
                    if status is not None:
                        status.clear()
                    print(piece, end="", flush=True)
                if interrupt.asked:
                    break
    finally:
        if status is not None:
            status.clear()
        if pieces and is_shown:
            print()
    return "".join(pieces), interrupt.asked

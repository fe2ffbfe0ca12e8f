"""An answer, printed as it comes. Ctrl-C ends it between two steps, instead of tearing one apart."""

from __future__ import annotations

import signal
from contextlib import closing
from types import FrameType, TracebackType
from typing import Any

from tidegate.engine.model import Model, Prompt


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
    ``Model.stream``; what was printed has ended its line by then."""
    pieces: list[str] = []
    try:
        with Interrupt() as interrupt, closing(model.stream(prompt, **sampling)) as answer:
            for piece in answer:
                pieces.append(piece)
                if is_shown:
                    print(piece, end="", flush=True)
                if interrupt.asked:
                    break
    finally:
        if pieces and is_shown:
            print()
    return "".join(pieces), interrupt.asked

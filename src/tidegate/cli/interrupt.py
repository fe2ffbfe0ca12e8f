"""Ctrl-C that ends an answer between two steps, instead of tearing one apart."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


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

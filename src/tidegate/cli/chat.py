"""The interactive chat of ``tidegate run``. Ctrl-C ends the answer, not the program."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from typing import Any

from tidegate.cli.interrupt import Interrupt
from tidegate.engine.model import Model
from tidegate.errors import TidegateError

_HELP = "/reset starts anew, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


def talk_with(model: Model, first: str | None, sampling: dict[str, Any]) -> None:
    """Read messages until the end of the input or /quit. ``first`` is the first message, if it is known already."""
    with suppress(ImportError):
        import readline  # noqa: F401, PLC0415  (line editing and history for input())
    if sys.stdin.isatty():
        print(_HELP, file=sys.stderr)
    messages: list[dict[str, str]] = []
    message = first if first is not None else _read()
    while message is not None and message.strip() != "/quit":
        if message.strip() == "/reset":
            messages.clear()
        elif message.strip():
            _exchange(model, messages, message, sampling)
        message = _read()


def _read() -> str | None:
    """The next message; None at the end of the input. Ctrl-C discards the line that is being written."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            if sys.stdin.isatty():
                print()
            return None
        except KeyboardInterrupt:
            print(f"\n({_HELP})", file=sys.stderr)


def _exchange(model: Model, messages: list[dict[str, str]], message: str, sampling: dict[str, Any]) -> None:
    """Ask, print the answer as it comes, remember both. An error is printed and the message forgotten."""
    messages.append({"role": "user", "content": message})
    pieces = []
    try:
        with Interrupt() as interrupt, closing(model.stream(model.chat_prompt(messages), **sampling)) as answer:
            for piece in answer:
                pieces.append(piece)
                print(piece, end="", flush=True)
                if interrupt.asked:
                    break
        print()
        messages.append({"role": "assistant", "content": "".join(pieces)})
    except TidegateError as error:
        messages.pop()
        print(f"tidegate: error: {error}" + (" (or /reset)" if len(messages) else ""), file=sys.stderr)

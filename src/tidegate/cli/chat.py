"""The interactive chat of ``tidegate run``. Ctrl-C ends the answer, not the program."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from tidegate.cli.answer import write_answer
from tidegate.engine.model import Model
from tidegate.errors import TidegateError, UsageError

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
    try:
        answer, _ = write_answer(model, model.chat_prompt(messages), sampling)
        messages.append({"role": "assistant", "content": answer})
    except TidegateError as error:
        messages.pop()
        print(
            f"tidegate: error: {error}" + (" (or /reset)" if messages and isinstance(error, UsageError) else ""),
            file=sys.stderr,
        )

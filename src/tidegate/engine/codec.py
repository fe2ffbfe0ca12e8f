"""Text in and out of one model: its tokenizer and chat template, either of which a checkpoint may lack."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any, Protocol

from tidegate.engine.text import PieceDecoder, TextStream
from tidegate.errors import UsageError


class Tokenizer(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def stream(self) -> PieceDecoder: ...


class ChatTemplate(Protocol):
    def render(self, messages: Items[Mapping[str, Any]]) -> str: ...


class _NoText:
    """A stream of a model without tokenizer."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class TextCodec:
    """``name`` is the model's path, for messages."""

    def __init__(self, name: str, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> None:
        self._name, self._tokenizer, self._template = name, tokenizer, template

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer is not None and self._template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids with what the model expects in front. Raises UsageError without a tokenizer."""
        return self._need_tokenizer().encode(text)

    def chat_prompt(self, messages: Items[Mapping[str, Any]]) -> list[int]:
        """A conversation, ready for the answer. Raises UsageError without a tokenizer or template."""
        if self._template is None:
            raise UsageError(f"{self._name} has no chat template; give it plain text (--raw)")
        return self._need_tokenizer().encode(self._template.render(messages), add_special_tokens=False)

    def stream(self, stops: Items[str]) -> TextStream:
        """A new answer's text; always empty without a tokenizer."""
        if self._tokenizer is None and stops:
            raise UsageError(f"{self._name} has no tokenizer, so --stop cannot work")
        return TextStream(self._tokenizer.stream() if self._tokenizer else _NoText(), stops)

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise UsageError(f"{self._name} has no tokenizer; give token ids instead of text")
        return self._tokenizer

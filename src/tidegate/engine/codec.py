"""Text in and out of one model: its tokenizer and chat template, either of which a checkpoint may lack."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

from tidegate.checkpoint.store import ExpertStore
from tidegate.engine.text import TextStream
from tidegate.errors import UsageError
from tidegate.models.tokenizer import Tokenizer


class TextCodec:
    """Made before the arena, so that its memory is part of the measured runtime; jinja2 is imported only for a template."""

    def __init__(self, store: ExpertStore) -> None:
        special, self._where = store.special_tokens(), str(store.path)
        self._tokenizer = Tokenizer(store.tokenizer_json(), special, self._where)
        self._template = None
        template = store.chat_template()
        if template is not None:
            from tidegate.models.chat import ChatTemplate  # noqa: PLC0415

            self._template = ChatTemplate(template, special, self._where)

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.has_text and self._template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids with what the model expects in front. Raises CheckpointError without a tokenizer."""
        return self._tokenizer.encode(text)

    def chat_prompt(self, messages: Items[Mapping[str, Any]]) -> list[int]:
        """A conversation, ready for the answer. Raises UsageError without a template or for messages it refuses."""
        if self._template is None:
            raise UsageError(f"{self._where} has no chat template; give it plain text")
        return self._tokenizer.encode(self._template.render(messages), add_special=False)

    def stream(self, stops: Items[str]) -> TextStream | None:
        """A new answer's text; None without a tokenizer. Raises UsageError for stop strings then."""
        if self._tokenizer.has_text:
            return TextStream(self._tokenizer.stream(), stops)
        if stops:
            raise UsageError(f"{self._where} has no tokenizer, so stop strings cannot be found")
        return None

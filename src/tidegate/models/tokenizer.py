"""Text to token ids and back, the same for Hugging Face folders, GGUF files and stores: all give a `tokenizers` JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from tidegate.errors import CheckpointError

_REPLACEMENT = "\ufffd"
_LONGEST_WAIT = 16  # tokens; an unfinished character has at most 3 bytes, so more than this is no character
_LONGEST_WINDOW = 64  # tokens


class Tokenizer:
    """``tokenizer_json`` and ``special`` are what a Checkpoint's methods of those names return; ``where`` names the
    checkpoint in errors. Without a JSON document a model still runs on token ids, and whatever needs text raises
    CheckpointError saying so."""

    def __init__(self, tokenizer_json: str | None, special: Mapping[str, Any], where: str = "the checkpoint") -> None:
        """Raises CheckpointError for a document that the library refuses."""
        self._where = where
        self._model = None if tokenizer_json is None else _parse(tokenizer_json, where)
        self.eos_token_ids: tuple[int, ...] = tuple(int(i) for i in special.get("eos_token_ids") or ())
        self.bos_token_id = self._optional_id(special.get("bos_token"))
        self._add_bos = bool(special.get("add_bos"))

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer at all."""
        return self._model is not None

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added ones included; 0 without a tokenizer."""
        return 0 if self._model is None else self._model.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids. Names of special tokens in ``text`` become those tokens. ``add_special`` adds what the model wants
        around a text (bos); leave it out for a rendered chat template, which has written it itself."""
        ids: list[int] = self._needed().encode(_valid(text), add_special_tokens=add_special).ids
        bos = self.bos_token_id
        if add_special and self._add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ``token_ids``; ids outside the vocabulary have none, bytes that are no UTF-8 become U+FFFD."""
        return str(self._needed().decode(list(token_ids), skip_special_tokens=skip_special))

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it (for logprobs), None outside it."""
        return self._needed().id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """The id of one token of the vocabulary."""
        return self._needed().token_to_id(token)

    def stream(self, skip_special: bool = True) -> StreamDecoder:
        """A decoder for one answer. Raises CheckpointError without a tokenizer."""
        self._needed()
        return StreamDecoder(self, skip_special)

    def _optional_id(self, token: str | None) -> int | None:
        return None if self._model is None or token is None else self._model.token_to_id(token)

    def _needed(self) -> tokenizers.Tokenizer:
        if self._model is None:
            raise CheckpointError(f"{self._where} has no tokenizer: give token ids instead of text")
        return self._model


class StreamDecoder:
    """Turns token ids into text as they come: whole characters only, and together exactly ``decode`` of all ids (but for
    stray bytes, which may count as one or several U+FFFD).

    A token's text depends on its neighbours (a leading space, the bytes of one character), so a short window of tokens is
    decoded again each time, and what is new at its end is given out.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that are out
        self._waiting = 0  # tokens that completed nothing, in a row

    def push(self, token_id: int) -> str:
        """The characters that ``token_id`` completes, often none."""
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = text if self._waiting >= _LONGEST_WAIT else text.rstrip(_REPLACEMENT)
        new = stable[self._given :]
        self._given = max(self._given, len(stable))
        self._waiting = 0 if new else self._waiting + 1
        if new or len(self._window) > _LONGEST_WINDOW:
            self._shorten()
        return new

    def flush(self) -> str:
        """The end of the answer: what was held back (an unfinished character is U+FFFD)."""
        rest = self._decode(self._window)[self._given :]
        self._window, self._given, self._waiting = [], 0, 0
        return rest

    def _shorten(self) -> None:
        """Keep only as many tokens as the next one's neighbours as have whole characters of their own."""
        for size in range(1, len(self._window)):
            whole = self._decode(self._window[-size:]).rstrip(_REPLACEMENT)
            if whole and _REPLACEMENT not in whole:
                self._window, self._given = self._window[-size:], len(whole)
                return
        if len(self._window) > _LONGEST_WINDOW:
            self._window = self._window[-1:]
            self._given = len(self._decode(self._window))

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special)


def _parse(tokenizer_json: str, where: str) -> tokenizers.Tokenizer:
    try:
        model = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(f"{where}: tokenizer that cannot be used: {error}") from None
    model.no_truncation()
    model.no_padding()
    return model


def _valid(text: str) -> str:
    """Lone surrogates, which no tokenizer can hold, as U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

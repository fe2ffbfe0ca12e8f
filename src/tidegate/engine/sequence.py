"""One request while it lives: its tokens, how many are computed, its KV pages, and how it ended."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tidegate.config import SamplingOptions
from tidegate.engine.text import TextStream
from tidegate.errors import TidegateError, UsageError

_NO_PAGES = np.empty(0, np.int32)
FinishReason = Literal["stop", "length", "cancelled", "error", "scored"]


@dataclass(frozen=True)
class Sampled:
    """A chosen token; ``top`` holds (token id, log probability) of the most probable ones, when asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def check_token_ids(token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises UsageError for one that the vocabulary lacks."""
    wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise UsageError(f"token id {wrong}: the vocabulary has ids 0 to {vocab_size - 1}")


class Sequence:
    """``tokens`` are the prompt and the answer so far; positions below ``num_computed`` have their K and V cached.

    ``max_tokens`` bounds the answer and must be known, because pages for all of it are taken at admission. A sequence
    with ``kept_logits`` (float32 [prompt, V], to be filled) answers nothing: it is scored, and ends when its whole prompt
    is computed. One that ``may_continue`` need not compute what it has in common with the sequence before it. ``first_token_s``
    is the time from arrival to the first token of the answer.
    """

    def __init__(
        self,
        sequence_id: int,
        prompt_ids: list[int],
        max_tokens: int,
        sampling: SamplingOptions,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        text: TextStream | None = None,
        kept_logits: NDArray[np.float32] | None = None,
        may_continue: bool = False,
    ) -> None:
        assert prompt_ids and (max_tokens > 0 or kept_logits is not None)
        assert not may_continue or kept_logits is None
        self.may_continue = may_continue
        self.id, self.sampling, self.max_tokens = sequence_id, sampling, max_tokens if kept_logits is None else 0
        self.tokens, self.num_prompt = list(prompt_ids), len(prompt_ids)
        self.eos_token_ids, self.text, self.kept_logits = eos_token_ids, text, kept_logits
        self.num_computed = 0
        self.pages: NDArray[np.int32] = _NO_PAGES
        self.output_counts: Counter[int] = Counter()
        self.logprobs: list[Sampled] = []
        self.finish_reason: FinishReason | None = None
        self.error: TidegateError | None = None
        self.arrived_s = time.perf_counter()
        self.first_token_s: float | None = None

    @property
    def most_tokens(self) -> int:
        """Tokens this sequence can grow to."""
        return self.num_prompt + self.max_tokens

    @property
    def keep_logits(self) -> bool:
        """Whether this sequence is scored instead of answered."""
        return self.kept_logits is not None

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_pending(self) -> int:
        """Tokens that are not computed yet; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    def append(self, sampled: Sampled) -> None:
        """Add a chosen token and decide whether the answer ends with it. The end-of-text token shows no text."""
        token = sampled.token_id
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.arrived_s
        self.tokens.append(token)
        self.output_counts[token] += 1
        if self.sampling.logprobs is not None:
            self.logprobs.append(sampled)
        if token in self.eos_token_ids and not self.sampling.ignore_eos:
            self.finish("stop")
        elif self.text is not None and self.text.push(token):
            self.finish_reason = "stop"
        elif len(self.tokens) == self.most_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason, error: TidegateError | None = None) -> None:
        """End now; text that was held back for a stop string is shown."""
        self.finish_reason, self.error = reason, error
        if self.text is not None:
            self.text.close()

"""Who runs this step: first come, first served. Decoding sequences get one token each in every step; prompts are cut
into chunks that share what is left, so a long prompt never stops the others.

T tokens of the step, R rows whose logits are wanted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidegate.backends.operands import StepBatch
from tidegate.engine.kv_cache import KvCache
from tidegate.engine.sequence import FinishReason, Sampled, Sequence
from tidegate.errors import TidegateError


@dataclass(frozen=True)
class Chunk:
    """Compute positions ``start:stop`` of a sequence in this step."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """Whether the step chooses this sequence's next token."""
        return self.stop == len(self.sequence.tokens) and not self.sequence.keep_logits

    @property
    def is_decode(self) -> bool:
        """Whether this is one token of a growing answer."""
        return self.start >= self.sequence.num_prompt

    @property
    def num_logit_rows(self) -> int:
        return self.stop - self.start if self.sequence.keep_logits else int(self.samples)


class Scheduler:
    """``max_running`` sequences at most, and at most ``prefill_chunk`` prompt tokens a step (``max_logit_rows`` of
    sequences that are scored). The head of the queue waits for pages; nobody overtakes it."""

    def __init__(self, kv: KvCache, *, max_running: int, prefill_chunk: int, max_logit_rows: int) -> None:
        self.kv = kv
        self.max_running, self.prefill_chunk, self.max_logit_rows = max_running, prefill_chunk, max_logit_rows
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def max_step_tokens(self) -> int:
        """The largest T that ``schedule`` makes."""
        return self.prefill_chunk + self.max_running - 1

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. It must fit the KV cache when alone."""
        assert self.kv.pages_for(sequence.most_tokens) <= self.kv.num_pages
        self.waiting.append(sequence)

    def schedule(self, *, may_continue: bool = True) -> list[Chunk]:
        """Admit what fits, then deal the step's tokens in order of arrival. Empty only when idle. ``may_continue``: whoever is
        admitted now need not compute what the pages hold already."""
        self._admit(may_continue)
        left, rows_left = self.prefill_chunk, self.max_logit_rows
        chunks = []
        for sequence in self.running:
            if sequence.num_pending == 1 and sequence.num_computed and not sequence.keep_logits:
                count = 1
            else:
                count = min(sequence.num_pending, left, rows_left if sequence.keep_logits else left)
                left = left - count if count == sequence.num_pending else 0
                rows_left -= count if sequence.keep_logits else 0
            if count:
                chunks.append(Chunk(sequence, sequence.num_computed, sequence.num_computed + count))
        return chunks

    def _admit(self, may_continue: bool) -> None:
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            beginning = sequence.tokens[:-1] if may_continue and sequence.may_continue else ()
            found = self.kv.allocate(sequence.id, sequence.most_tokens, beginning)
            if found is None:
                return
            pages, sequence.num_computed = found
            sequence.pages = np.array(pages, np.int32)
            self.running.append(self.waiting.popleft())

    def postprocess(self, chunks: list[Chunk], sampled: list[Sampled]) -> list[Sequence]:
        """Record what was computed and chosen (one entry a sampling chunk, in order); sequences that ended give their
        pages back. Returns the sequences that got a token or ended."""
        tokens, changed = iter(sampled), []
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.stop
            if chunk.samples:
                sequence.append(next(tokens))
                changed.append(sequence)
            elif sequence.num_pending == 0:
                sequence.finish("scored")
                changed.append(sequence)
            if sequence.finish_reason is not None:
                self._release(sequence)
        return changed

    def end(self, sequence: Sequence, reason: FinishReason, error: TidegateError | None = None) -> None:
        """End a sequence early, wherever it is; nothing happens if it has ended."""
        if sequence.finish_reason is None:
            sequence.finish(reason, error)
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.kv.free(sequence.id, sequence.tokens[: sequence.num_computed])
        sequence.pages = sequence.pages[:0]
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)


def make_batch(chunks: list[Chunk]) -> StepBatch:
    """The arrays of one forward pass; sequence i of the batch is chunk i's."""
    counts = [chunk.stop - chunk.start for chunk in chunks]
    rows: list[int] = []
    end = 0
    for chunk, count in zip(chunks, counts, strict=True):
        end += count
        rows.extend(range(end - chunk.num_logit_rows, end))
    return StepBatch(
        token_ids_T=np.array([t for c in chunks for t in c.sequence.tokens[c.start : c.stop]], np.int32),
        positions_T=np.array([p for c in chunks for p in range(c.start, c.stop)], np.int32),
        sequence_T=np.array([i for i, count in enumerate(counts) for _ in range(count)], np.int32),
        block_tables=_block_tables([chunk.sequence.pages for chunk in chunks]),
        logit_rows_R=np.array(rows, np.int32),
    )


def _block_tables(pages: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    """One row a sequence, padded with zeros."""
    if len(pages) == 1:
        return pages[0][None]
    tables = np.zeros((len(pages), max(map(len, pages))), np.int32)
    for row, own in zip(tables, pages, strict=True):
        row[: len(own)] = own
    return tables

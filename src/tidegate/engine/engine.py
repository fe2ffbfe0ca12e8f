"""The loop: schedule -> forward -> sample -> postprocess. R rows whose logits are wanted, V vocabulary."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tidegate.backends.operands import StepBatch
from tidegate.engine.native_sampler import sample
from tidegate.engine.scheduler import Chunk, Scheduler, make_batch
from tidegate.engine.sequence import Sampled, Sequence
from tidegate.errors import TidegateError

F32Array = NDArray[np.float32]
I32Array = NDArray[np.int32]


class ForwardModel(Protocol):
    """What the engine asks of a decoder."""

    def forward(self, batch: StepBatch) -> F32Array:
        """float32 [R, V], valid until the next call. Raises ReadFailed or CorruptFile when an expert cannot be read; the
        caches are consistent then, and the same step may be tried again."""


class RowWatcher(Protocol):
    """Who wants to know whose tokens a step computes, before it does."""

    def begin_rows(self, sequence_T: Items[int], token_T: Items[int]) -> None:
        """Sequence ids and input token ids of the rows."""


class StepRecorder(Protocol):
    """A trace, as far as the engine knows it; the MoE layers record between the two calls."""

    def begin_step(self, sequence_T: I32Array, position_T: I32Array, token_T: I32Array) -> None: ...

    def end_step(self) -> None:
        """The step went well. A step that failed is not ended; the next ``begin_step`` forgets it."""


@dataclass
class StepTimes:
    """What steps have cost so far. A step with any prompt tokens in it counts as prefill. ``first_token_s`` is the latest
    sequence's wait for its first token."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    steps: int = 0
    first_token_s: float = 0.0

    def add(self, chunks: list[Chunk], elapsed_s: float) -> None:
        tokens = sum(chunk.stop - chunk.start for chunk in chunks)
        self.steps += 1
        if all(chunk.is_decode for chunk in chunks):
            self.decode_tokens += tokens
            self.decode_s += elapsed_s
        else:
            self.prefill_tokens += tokens
            self.prefill_s += elapsed_s


class Engine:
    """Runs the scheduler's sequences through the decoder, one step a call. One thread drives it.

    A read that fails ends the sequences of its step with the error; the others and later ones go on. Every few steps
    ``recount`` is called, which raises OverBudget when the process has outgrown its budget.
    """

    def __init__(
        self, decoder: ForwardModel, scheduler: Scheduler, recount: Callable[[], object], recount_every: int = 64
    ) -> None:
        self.decoder, self.scheduler = decoder, scheduler
        self.times = StepTimes()
        self.trace: StepRecorder | None = None
        self.watcher: RowWatcher | None = None
        self._recount, self._recount_every = recount, recount_every

    def step(self) -> list[Sequence]:
        """Advance everybody who runs; returns the sequences that got a token or ended. Empty when nothing is to do or
        when only prompts were computed."""
        chunks = self.scheduler.schedule(may_continue=self.trace is None)  # a trace has every token
        if not chunks:
            return []
        started_s = time.perf_counter()
        try:
            logits_RV = self._forward(chunks)
        except TidegateError as error:
            return self._fail(chunks, error)
        changed = self.scheduler.postprocess(chunks, _choose(logits_RV, chunks))
        self.times.add(chunks, time.perf_counter() - started_s)
        for sequence in changed:
            if len(sequence.output_ids) == 1:
                self.times.first_token_s = sequence.first_token_s or 0.0
        if self.times.steps % self._recount_every == 0:
            self._recount()
        return changed

    def _forward(self, chunks: list[Chunk]) -> F32Array:
        batch = make_batch(chunks)
        if self.trace is None and self.watcher is None:
            return self.decoder.forward(batch)
        sequence_T = np.array([chunk.sequence.id for chunk in chunks], np.int32)[batch.sequence_T]
        if self.watcher is not None:
            self.watcher.begin_rows(sequence_T.tolist(), batch.token_ids_T.tolist())
        if self.trace is None:
            return self.decoder.forward(batch)
        self.trace.begin_step(sequence_T, batch.positions_T, batch.token_ids_T)
        logits_RV = self.decoder.forward(batch)
        self.trace.end_step()
        return logits_RV

    def _fail(self, chunks: list[Chunk], error: TidegateError) -> list[Sequence]:
        for chunk in chunks:
            self.scheduler.end(chunk.sequence, "error", error)
        return [chunk.sequence for chunk in chunks]


def _choose(logits_RV: F32Array, chunks: list[Chunk]) -> list[Sampled]:
    """The next token of every sampling chunk, in order; rows of scored sequences are kept."""
    sampled, row = [], 0
    for chunk in chunks:
        rows = logits_RV[row : row + chunk.num_logit_rows]
        row += chunk.num_logit_rows
        if chunk.samples:
            sampled.append(sample(rows[0], chunk.sequence))
        elif chunk.sequence.kept_logits is not None:
            chunk.sequence.kept_logits[chunk.start : chunk.stop] = rows
    return sampled

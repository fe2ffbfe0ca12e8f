"""The Python interface: a loaded model that answers. ``tidegate.load`` makes one.

T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from tidegate.checkpoint.convert import Progress
from tidegate.config import EngineOptions, SamplingOptions, parse_options
from tidegate.engine.build import Runtime, build
from tidegate.engine.sequence import Sampled, Sequence, check_token_ids
from tidegate.engine.source import open_store
from tidegate.errors import UsageError
from tidegate.experts.gates_file import fingerprint
from tidegate.experts.lookahead import DISTANCES
from tidegate.experts.trace import TraceMeta, TraceWriter
from tidegate.plan import Plan

F32Array = NDArray[np.float32]
Prompt = str | list[int]
_log = logging.getLogger("tidegate")


def load(
    path: str | os.PathLike[str],
    *,
    say: Callable[[str], None] = _log.info,
    progress: Progress | None = None,
    **options: Any,
) -> Model:
    """Load a model inside a budget: ``load("model", memory="8GiB")``. ``path`` is an expert store, a Hugging Face folder,
    a GGUF file, or the text ``builtin``; ``options`` are those of EngineOptions.

    A source is converted once into a cache folder; ``say`` gets the line that says so, ``progress`` is called with bytes
    done, bytes in total and what was written. Raises UsageError, BudgetTooSmall (before any weight is read),
    CheckpointError and its kinds, DiskFull.
    """
    parsed = parse_options(EngineOptions, options)
    return Model(build(open_store(path, parsed, say, progress), parsed))


@dataclass(frozen=True)
class Completion:
    """One answer. ``finish_reason``: "stop" (end-of-text token or stop string), "length" or "cancelled". ``logprobs`` has
    an entry for every token of the answer when they were asked for. ``first_token_s`` is the wait for the first token."""

    text: str
    token_ids: list[int]
    finish_reason: str
    num_prompt_tokens: int
    logprobs: list[Sampled]
    first_token_s: float


class Model:
    """A model inside its budget. Use it from one thread; close it (or use ``with``) to give the memory back."""

    def __init__(self, runtime: Runtime) -> None:
        self._open: Runtime | None = runtime
        self._next_id = 0

    @property
    def _runtime(self) -> Runtime:
        """Raises UsageError after close()."""
        if self._open is None:
            raise UsageError("the model is closed; load it again")
        return self._open

    @property
    def runtime(self) -> Runtime:
        """The parts, for those who measure them."""
        return self._runtime

    @property
    def plan(self) -> Plan:
        """The split of the budget."""
        return self._runtime.plan

    @property
    def budget_explanation(self) -> str:
        """Where the budget comes from, for people."""
        return self._runtime.budget.explanation

    @property
    def has_chat_template(self) -> bool:
        return self._runtime.codec.has_chat_template

    @property
    def context(self) -> int:
        """The longest sequence in tokens, prompt and answer together."""
        return self._runtime.sizes.context_tokens

    @overload
    def generate(self, prompts: Prompt, **options: Any) -> Completion: ...

    @overload
    def generate(self, prompts: list[str] | list[list[int]], **options: Any) -> list[Completion]: ...

    def generate(self, prompts: Any, **options: Any) -> Completion | list[Completion]:
        """Answer one prompt or a list of them; a prompt is a string or a list of token ids. ``options`` are those of
        SamplingOptions. Raises UsageError (bad option, prompt too long), ReadFailed or CorruptFile (an expert could not
        be read)."""
        sampling = parse_options(SamplingOptions, options)
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | np.integer)):
            return self._complete([self._sequence(prompts, sampling)])[0]
        return self._complete([self._sequence(prompt, sampling) for prompt in prompts])

    def stream(self, prompt: Prompt, **options: Any) -> Generator[str, None, None]:
        """The answer's text, a piece after every step; a step that completes no character, as while the prompt is computed,
        gives an empty piece. Closing the iterator ends the answer. Errors as in generate."""
        return self._stream(self._sequence(prompt, parse_options(SamplingOptions, options)))

    def chat(self, messages: Items[Mapping[str, Any]], **options: Any) -> Completion:
        """The model's answer to a conversation (``[{"role": "user", "content": "..."}]``), through its chat template.
        Raises UsageError if it has none; otherwise as generate."""
        return self.generate(self.chat_prompt(messages), **options)

    def encode(self, text: str) -> list[int]:
        """Token ids, with what the model expects in front. Raises CheckpointError without a tokenizer."""
        return self._runtime.codec.encode(text)

    def chat_prompt(self, messages: Items[Mapping[str, Any]]) -> list[int]:
        """The conversation as the token ids that the model expects, ready for its answer."""
        return self._runtime.codec.chat_prompt(messages)

    def logits(self, token_ids: Items[int]) -> F32Array:
        """float32 [T, V]: row t predicts the token behind ``token_ids[t]``. Raises OverBudget when T * V numbers do not
        fit what the plan left free."""
        account = self._runtime.ledger.account("logits", "score fewer tokens at once or raise --memory")
        nbytes = 4 * len(token_ids) * self._runtime.config.vocab_size
        account.reserve(nbytes)
        try:
            sequence = self._scored(list(token_ids))
            self._finish([sequence])
        finally:
            account.release(nbytes)
        assert sequence.kept_logits is not None
        return sequence.kept_logits

    @contextmanager
    def trace(self, path: Path, source: str = "", sketch_dims: int = 0) -> Iterator[TraceWriter]:
        """Record the routing of every step inside the ``with`` block to ``path``, which appears when the block ends well;
        ``sketch_dims`` numbers of every router's input with it, by default as many as the predictor in use looks at. Raises
        UsageError for a model without MoE layers, and for other sketches than those."""
        runtime = self._runtime
        config, needs = runtime.config, runtime.plan.needs
        if runtime.experts is None or config.moe is None:
            raise UsageError("--trace has no effect: this model has no experts")
        if runtime.experts.foreseer is not None:
            wanted = runtime.experts.foreseer.predictor.sketch_dims
            if sketch_dims and wanted and sketch_dims != wanted:
                raise UsageError(f"--sketch {sketch_dims}: the predictor in use needs {wanted}, to be replayed")
            sketch_dims = sketch_dims or wanted
        meta = TraceMeta(
            config.num_moe_layers, config.moe.num_experts, config.moe.num_experts_per_tok, source, needs.slot_bytes,
            needs.fixed_bytes - needs.predictor_heap_bytes, sketch_dims, DISTANCES if runtime.experts.guesser else 0,
            runtime.decoder.guess_width, tuple(runtime.experts.curves), fingerprint(runtime.store),
        )  # fmt: skip
        writer = TraceWriter(path, meta)
        runtime.experts.trace = runtime.engine.trace = writer
        try:
            yield writer
        except BaseException:
            writer.discard()
            raise
        else:
            writer.close()
        finally:
            runtime.experts.trace = runtime.engine.trace = None

    def stats(self) -> dict[str, Any]:
        """Counters since the load: tokens and seconds of prefill and decode, cache hits and misses, bytes read, memory."""
        return self._runtime.stats()

    def close(self) -> None:
        """End the threads and give the memory back. Idempotent."""
        if self._open is not None:
            self._open.close()
            self._open = None  # the last reference to arena and compute threads

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _sequence(self, prompt: Prompt, sampling: SamplingOptions) -> Sequence:
        """A request, not queued yet. Raises UsageError for an empty prompt, a bad token id, or one too long."""
        runtime = self._runtime
        ids = self._checked(runtime.codec.encode(prompt) if isinstance(prompt, str) else list(prompt))
        asked = sampling.max_tokens or max(1, self.context - len(ids))
        if len(ids) + asked > self.context:
            raise UsageError(
                f"{len(ids)} tokens of prompt and up to {asked} of the answer are more than the context of "
                f"{self.context}; raise --context"
            )
        text = runtime.codec.stream(sampling.stop)
        return Sequence(
            self._new_id(), ids, asked, sampling, eos_token_ids=runtime.eos_token_ids, text=text, may_continue=True
        )

    def _scored(self, token_ids: list[int]) -> Sequence:
        """A sequence that is only scored, not queued yet. Raises UsageError as ``_sequence``."""
        ids = self._checked(token_ids)
        if len(ids) > self.context:
            raise UsageError(f"{len(ids)} tokens are more than the context of {self.context}; raise --context")
        rows = np.empty((len(ids), self._runtime.config.vocab_size), np.float32)
        return Sequence(self._new_id(), ids, 0, SamplingOptions(), kept_logits=rows)

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids:
            raise UsageError("the prompt is empty")
        check_token_ids(ids, self._runtime.config.vocab_size)
        return ids

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _complete(self, sequences: list[Sequence]) -> list[Completion]:
        self._finish(sequences)
        return [
            Completion(
                sequence.text.take() if sequence.text else "",
                sequence.output_ids,
                str(sequence.finish_reason),
                sequence.num_prompt,
                sequence.logprobs,
                sequence.first_token_s or 0.0,
            )
            for sequence in sequences
        ]

    def _finish(self, sequences: list[Sequence]) -> None:
        """Run until all of them have ended; raises the first one's error. An exception ends all of them."""
        engine = self._runtime.engine
        try:
            for sequence in sequences:
                engine.scheduler.add(sequence)
            while any(sequence.finish_reason is None for sequence in sequences):
                engine.step()
        finally:
            for sequence in sequences:
                engine.scheduler.end(sequence, "cancelled")
        _raise_first_error(sequences)

    def _stream(self, sequence: Sequence) -> Generator[str, None, None]:
        engine, text = self._runtime.engine, sequence.text
        assert text is not None
        engine.scheduler.add(sequence)
        try:
            while sequence.finish_reason is None:
                engine.step()
                yield text.take()
            rest = text.take()  # somebody else's steps may have ended this answer
            if rest:
                yield rest
        finally:
            engine.scheduler.end(sequence, "cancelled")
        _raise_first_error([sequence])


def _raise_first_error(sequences: list[Sequence]) -> None:
    """An error's traceback holds the frames it came through; whatever leads from those back to the error would keep the
    whole model alive until the garbage collector runs."""
    error = next((sequence.error for sequence in sequences if sequence.error is not None), None)
    if error is None:
        return
    for sequence in sequences:
        sequence.error = None
    try:
        raise error
    finally:
        del error

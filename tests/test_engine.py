"""The engine's loop around a stand-in decoder that keeps real pages: a wrong page, row or position changes its answer."""

import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.backends.operands import StepBatch
from tidegate.config import SamplingOptions
from tidegate.engine.engine import Engine
from tidegate.engine.kv_cache import KvCache
from tidegate.engine.scheduler import Scheduler
from tidegate.engine.sequence import Sequence
from tidegate.errors import OverBudget, ReadFailed

PAGE, VOCAB = 4, 50


class PagedDecoder:
    """Logits are a hash of the whole history, which is read back from the pages."""

    def __init__(self, num_pages: int) -> None:
        self.pages = np.full((num_pages, PAGE), -1, np.int64)
        self.fail_at: set[int] = set()
        self.calls = 0

    def forward(self, batch: StepBatch) -> np.ndarray:
        self.calls += 1
        if self.calls in self.fail_at:
            raise ReadFailed("experts.bin", 4096, 100, 7)
        out = []
        for row, (token, position, index) in enumerate(
            zip(batch.token_ids_T, batch.positions_T, batch.sequence_T, strict=True)
        ):
            table = batch.block_tables[index]
            self.pages[table[position // PAGE], position % PAGE] = token
            if row in batch.logit_rows_R:
                out.append(_logits([self.pages[table[p // PAGE], p % PAGE] for p in range(position + 1)]))
        return np.array(out, np.float32).reshape(-1, VOCAB)


def _logits(history: list[int]) -> np.ndarray:
    seed = zlib.crc32(np.array(history, np.int64).tobytes())
    return np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)


def _engine(pages: int = 40, running: int = 3, chunk: int = 8, recount: Callable[[], object] = int) -> Engine:
    kv = KvCache(pages, PAGE)
    scheduler = Scheduler(kv, max_running=running, prefill_chunk=chunk, max_logit_rows=4)
    return Engine(PagedDecoder(pages), scheduler, recount, recount_every=4)


def _drain(engine: Engine) -> None:
    while not engine.scheduler.is_idle:
        engine.step()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10), st.sampled_from([0.0, 1.0])), min_size=1, max_size=6),
    st.integers(1, 4), st.integers(1, 12),
)  # fmt: skip
def test_answers_do_not_depend_on_chunks_or_batch_mates(asked, running, chunk) -> None:
    engine = _engine(running=running, chunk=chunk)
    sequences = []
    for i, (prompt, answer, temperature) in enumerate(asked):
        options = SamplingOptions(temperature=temperature, seed=i)
        sequences.append(Sequence(i, [(7 * i + j) % VOCAB for j in range(prompt)], answer, options))
        engine.scheduler.add(sequences[-1])
    _drain(engine)
    for i, sequence in enumerate(sequences):
        alone = _engine(running=1, chunk=64)
        same = Sequence(9, sequence.tokens[: sequence.num_prompt], sequence.max_tokens, sequence.sampling)
        alone.scheduler.add(same)
        _drain(alone)
        assert same.output_ids == sequence.output_ids and len(same.output_ids) == asked[i][1]
        assert sequence.first_token_s is not None


def test_scored_rows_are_the_teacher_forced_logits() -> None:
    engine, tokens = _engine(), list(range(11))
    rows = np.zeros((len(tokens), VOCAB), np.float32)
    scored = Sequence(0, tokens, 0, SamplingOptions(), kept_logits=rows)
    engine.scheduler.add(scored)
    engine.scheduler.add(Sequence(1, [3, 4], 5, SamplingOptions()))
    _drain(engine)
    assert scored.finish_reason == "scored"
    assert np.array_equal(rows, np.array([_logits(tokens[: i + 1]) for i in range(11)]))


def test_a_failed_read_ends_its_sequences_and_nobody_else() -> None:
    engine = _engine(running=2)
    engine.decoder.fail_at = {3}
    sequences = [Sequence(i, [i + 1], 5, SamplingOptions()) for i in range(3)]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    _drain(engine)
    assert [s.finish_reason for s in sequences] == ["error", "error", "length"]
    assert isinstance(sequences[0].error, ReadFailed) and sequences[2].error is None
    engine.scheduler.kv.check_integrity()
    assert engine.scheduler.kv.num_free == 40


def test_the_ledger_is_recounted_every_few_steps() -> None:
    calls: list[int] = []
    engine = _engine(recount=lambda: calls.append(engine.times.steps))
    engine.scheduler.add(Sequence(0, [1], 9, SamplingOptions()))
    _drain(engine)
    assert calls == [4, 8]
    engine = _engine(recount=_over)
    engine.scheduler.add(Sequence(1, [1], 9, SamplingOptions()))
    with pytest.raises(OverBudget):
        _drain(engine)


def _over() -> None:
    raise OverBudget("runtime", 2, 1, "raise --memory")


def test_eos_and_counts_of_prefill_and_decode() -> None:
    engine = _engine(chunk=4)
    first = Sequence(0, list(range(10)), 30, SamplingOptions())
    engine.scheduler.add(first)
    _drain(engine)
    assert (engine.times.prefill_tokens, engine.times.decode_tokens) == (10, 29)
    eos = first.output_ids[4]
    again = Sequence(1, list(range(10)), 30, SamplingOptions(), eos_token_ids=frozenset([eos]))
    ignoring = Sequence(2, list(range(10)), 30, SamplingOptions(ignore_eos=True), eos_token_ids=frozenset([eos]))
    engine.scheduler.add(again)
    engine.scheduler.add(ignoring)
    _drain(engine)
    assert again.finish_reason == "stop" and again.output_ids == first.output_ids[: first.output_ids.index(eos) + 1]
    assert ignoring.finish_reason == "length" and ignoring.output_ids == first.output_ids

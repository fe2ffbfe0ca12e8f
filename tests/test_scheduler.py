"""Scheduler and KV pages with a stand-in for the model: integers only."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.config import SamplingOptions
from tidegate.engine.kv_cache import KvCache
from tidegate.engine.scheduler import Scheduler, make_batch
from tidegate.engine.sequence import Sampled, Sequence

PAGE = 4


def _scheduler(pages: int, running: int, chunk: int, rows: int = 8) -> tuple[KvCache, Scheduler]:
    kv = KvCache(pages, PAGE)
    return kv, Scheduler(kv, max_running=running, prefill_chunk=chunk, max_logit_rows=rows)


def _sequence(index: int, prompt: int, answer: int, keep_logits: bool = False) -> Sequence:
    rows = np.zeros((prompt, 1), np.float32) if keep_logits else None
    return Sequence(index, list(range(prompt)), answer, SamplingOptions(), kept_logits=rows)


def _step(scheduler: Scheduler) -> list[int]:
    """One step; ids of the sequences that got a token or ended."""
    chunks = scheduler.schedule()
    assert sum(c.stop - c.start for c in chunks) <= scheduler.max_step_tokens
    changed = scheduler.postprocess(chunks, [Sampled(7) for c in chunks if c.samples])
    return [sequence.id for sequence in changed]


requests = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(requests, st.integers(1, 5), st.integers(1, 9), st.integers(11, 30), st.randoms())
def test_everybody_ends_in_order_of_arrival_and_no_page_is_lost(asked, running, chunk, pages, random) -> None:
    kv, scheduler = _scheduler(pages, running, chunk, rows=3)
    sequences = [_sequence(i, p, a, keep_logits=scored) for i, (p, a, scored) in enumerate(asked)]
    late = sequences[random.randint(0, len(sequences)) :]
    for sequence in sequences[: len(sequences) - len(late)]:
        scheduler.add(sequence)
    started: list[int] = []
    for _ in range(2000):
        if late and (scheduler.is_idle or random.random() < 0.3):
            scheduler.add(late.pop(0))
        if scheduler.is_idle and not late:
            break
        chunks = scheduler.schedule()
        assert chunks, "a step that is not idle does something"
        started += [c.sequence.id for c in chunks if c.start == 0]
        for chunk_ in chunks:
            assert len(chunk_.sequence.pages) * PAGE >= chunk_.sequence.most_tokens
        scheduler.postprocess(chunks, [Sampled(1) for c in chunks if c.samples])
        kv.check_integrity()
        if random.random() < 0.05 and scheduler.running:
            scheduler.end(random.choice(scheduler.running), "cancelled")
            kv.check_integrity()
    assert all(s.finish_reason for s in sequences)
    assert started == sorted(started), "first come, first served"
    assert kv.num_free == pages
    for s in sequences:
        if s.finish_reason == "length":
            assert len(s.output_ids) == s.max_tokens


texts = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(1, 6)), min_size=2, max_size=10
)


@settings(max_examples=200, deadline=None)
@given(texts, st.integers(1, 3), st.integers(1, 9), st.randoms())
def test_what_is_not_computed_again_is_in_the_pages(asked, running, chunk, random) -> None:
    """Pages that keep what was written: every position that a sequence skips holds the very tokens that it begins with."""
    _, scheduler = _scheduler(12, running, chunk)
    written: dict[tuple[int, int], list[int]] = {}
    waiting = [
        Sequence(index, prompt, answer, SamplingOptions(), may_continue=True)
        for index, (prompt, answer) in enumerate(asked)
    ]
    while waiting or not scheduler.is_idle:
        if waiting and (scheduler.is_idle or random.random() < 0.3):
            scheduler.add(waiting.pop(0))
        chunks = scheduler.schedule()
        for part in chunks:
            sequence = part.sequence
            places = [(int(sequence.pages[at // PAGE]), at % PAGE) for at in range(part.stop)]
            assert all(written[places[at]] == sequence.tokens[: at + 1] for at in range(part.start))
            for at in range(part.start, part.stop):
                written[places[at]] = sequence.tokens[: at + 1]
        scheduler.postprocess(chunks, [Sampled(random.randint(0, 1)) for part in chunks if part.samples])
        if scheduler.running and random.random() < 0.1:
            scheduler.end(random.choice(scheduler.running), "cancelled")


def test_the_next_turn_computes_only_what_is_new() -> None:
    _, scheduler = _scheduler(pages=20, running=2, chunk=100)

    def first_chunk(
        index: int, prompt: list[int], may_continue: bool = True, in_this_step: bool = True
    ) -> tuple[int, int]:
        scheduler.add(Sequence(index, prompt, 2, SamplingOptions(), may_continue=may_continue))
        (chunk,) = scheduler.schedule(may_continue=in_this_step)
        scheduler.postprocess([chunk], [Sampled(7)])
        while not scheduler.is_idle:
            _step(scheduler)
        return chunk.start, chunk.stop

    assert first_chunk(0, [1, 2, 3]) == (0, 3)
    assert first_chunk(1, [1, 2, 3, 7, 8]) == (4, 5), "the last token of the answer was never computed"
    assert first_chunk(2, [1, 2, 3, 7, 8]) == (4, 5), "one token has to be computed for the first logits"
    assert first_chunk(3, [1, 2, 9, 9]) == (2, 4)
    assert first_chunk(4, [1, 2, 9, 9], may_continue=False) == (0, 4)
    assert first_chunk(5, [5, 2, 9, 9]) == (0, 4)
    assert first_chunk(6, [5, 2, 9, 9], in_this_step=False) == (0, 4), "somebody records every token"
    assert first_chunk(7, [5, 2, 9, 9]) == (3, 4)


def test_the_head_of_the_queue_is_never_overtaken() -> None:
    _, scheduler = _scheduler(pages=4, running=4, chunk=8)
    for sequence in (_sequence(0, 4, 4), _sequence(1, 12, 4), _sequence(2, 1, 1)):
        scheduler.add(sequence)
    assert [c.sequence.id for c in scheduler.schedule()] == [0], "2 would fit, but 1 came first"


def test_decoding_goes_on_while_a_long_prompt_is_computed() -> None:
    _, scheduler = _scheduler(pages=100, running=3, chunk=4)
    scheduler.add(_sequence(0, 1, 20))
    _step(scheduler)
    scheduler.add(_sequence(1, 40, 2))
    for _ in range(9):
        assert _step(scheduler) == [0]
    assert _step(scheduler) == [0, 1]


def test_batch_arrays() -> None:
    _, scheduler = _scheduler(pages=20, running=3, chunk=5)
    first, second = _sequence(0, 3, 2), _sequence(1, 9, 2)
    scheduler.add(first)
    _step(scheduler)
    scheduler.add(second)
    batch = make_batch(scheduler.schedule())
    assert batch.token_ids_T.tolist() == [7, 0, 1, 2, 3, 4]
    assert batch.positions_T.tolist() == [3, 0, 1, 2, 3, 4]
    assert batch.sequence_T.tolist() == [0, 1, 1, 1, 1, 1]
    assert batch.logit_rows_R.tolist() == [0], "the prompt's chunk is not its last"
    assert batch.block_tables[0, :2].tolist() == first.pages.tolist()
    assert batch.block_tables[1].tolist() == second.pages.tolist()
    assert all(
        a.dtype == np.int32 for a in (batch.token_ids_T, batch.positions_T, batch.sequence_T, batch.block_tables)
    )


def test_scored_sequences_ask_for_every_row_in_small_steps() -> None:
    _, scheduler = _scheduler(pages=20, running=2, chunk=8, rows=3)
    scheduler.add(_sequence(0, 7, 1, keep_logits=True))
    rows = []
    while not scheduler.is_idle:
        chunks = scheduler.schedule()
        rows += [len(make_batch(chunks).logit_rows_R)]
        scheduler.postprocess(chunks, [])
    assert rows == [3, 3, 1]


def test_cancel_while_waiting() -> None:
    kv, scheduler = _scheduler(pages=2, running=1, chunk=8)
    sequences = [_sequence(i, 3, 3) for i in range(2)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.schedule()
    scheduler.end(sequences[1], "cancelled")
    scheduler.end(sequences[1], "cancelled")
    scheduler.end(sequences[0], "cancelled")
    assert scheduler.is_idle and kv.num_free == 2

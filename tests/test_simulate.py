"""The clock, the channel and the simulator: against hand-computed timelines, the replay, and the engine's scheduler."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.config import SamplingOptions
from tidegate.engine.kv_cache import KvCache
from tidegate.engine.scheduler import Scheduler
from tidegate.engine.sequence import Sampled, Sequence
from tidegate.errors import UsageError
from tidegate.experts.base import CHUNK_BYTES, ExpertKey, InstantLoader
from tidegate.experts.cache import ExpertCache
from tidegate.experts.policy import POLICIES
from tidegate.experts.predictor import Predictor
from tidegate.experts.predictor_counts import DecayedCounts
from tidegate.experts.trace import TraceReader
from tidegate.experts.trace_import import import_arrays
from tidegate.sim.batching import batched
from tidegate.sim.clock import ClockLoader
from tidegate.sim.oracle import Oracle
from tidegate.sim.prefetcher import Prefetcher, PrefetchOptions
from tidegate.sim.replay import replay, whole_steps
from tidegate.sim.simulate import Profile, simulate

TRACE = Path(__file__).parent / "data" / "gpt-oss-20b.trace"
KEY = ExpertKey(0, 0)


@pytest.fixture(scope="module")
def steps():
    reader = TraceReader(TRACE)
    return [step for step, _ in zip(whole_steps(reader), range(400), strict=False)]


def test_demand_loads_queue_and_speculation_fills_the_gaps():
    chunk_s = 1.0
    loader = ClockLoader(4, 2 * CHUNK_BYTES, CHUNK_BYTES / chunk_s)
    loader.load(KEY, 0, demand=True)
    loader.load(KEY, 1, demand=True)
    assert [loader.ready_s(slot) for slot in (0, 1)] == [2, 4]
    loader.load(KEY, 2, demand=False)
    loader.now_s = 4.5
    assert loader.is_ready(1) and not loader.is_ready(2)
    loader.load(KEY, 3, demand=True)  # waits for the chunk in flight, overtakes the second one
    assert loader.ready_s(3) == 7
    loader.now_s = 7.5
    assert not loader.is_ready(2)
    loader.now_s = 8
    assert loader.is_ready(2)
    assert (loader.demand_bytes, loader.speculative_bytes) == (6 * CHUNK_BYTES, 2 * CHUNK_BYTES)
    assert loader.busy_s == 8


def test_promoted_and_cancelled_loads():
    loader = ClockLoader(3, 4 * CHUNK_BYTES, CHUNK_BYTES, wake_s=0.5)
    loader.load(KEY, 0, demand=False)
    loader.load(KEY, 1, demand=False)
    loader.now_s = 1.0
    loader.promote(0)  # one chunk is under way until 1.5; three more follow
    assert loader.ready_s(0) == 4.5
    assert loader.cancel(1) and not loader.cancel(1)
    loader.now_s = 5.0
    assert loader.is_ready(0) and not loader.cancel(0)
    assert loader.speculative_bytes == CHUNK_BYTES and loader.demand_bytes == 3 * CHUNK_BYTES
    small = ClockLoader(2, CHUNK_BYTES, CHUNK_BYTES)
    small.load(KEY, 0, demand=False)
    small.now_s = 0.5
    assert not small.is_ready(0) and small.cancel(0)  # its only chunk is under way, and is read for nothing
    small.load(KEY, 1, demand=True)
    assert small.ready_s(1) == 2.0


def test_an_idle_channel_wakes_up_first_and_is_not_busy_meanwhile():
    loader = ClockLoader(3, 4 * CHUNK_BYTES, CHUNK_BYTES, wake_s=0.5)
    loader.load(KEY, 0, demand=True)
    loader.load(KEY, 1, demand=True)
    assert [loader.ready_s(slot) for slot in (0, 1)] == [4.5, 8.5]
    loader.now_s = 10.0
    assert loader.busy_ratio() == pytest.approx(0.8)
    loader.load(KEY, 2, demand=False)
    loader.now_s = 10.25
    assert loader.cancel(2), "nothing was read yet"
    loader.load(KEY, 1, demand=True)  # finds a channel that is about to wake up anyway
    assert loader.ready_s(1) == 14.5 and loader.speculative_bytes == 0
    loader.now_s = 14.0
    assert loader.busy_ratio() == 0.0, "a read counts when it has ended"
    loader.now_s = 15.0
    assert loader.busy_ratio() == 1.0


def test_whoever_asks_for_a_load_pays_for_it_while_it_is_read():
    loader = ClockLoader(3, CHUNK_BYTES, CHUNK_BYTES, wake_s=0.5, rouse_s=0.25, miss_s=0.125, ahead_s=0.0625)
    loader.load(KEY, 0, demand=True)
    assert (loader.now_s, loader.ready_s(0)) == (0.375, 1.5)
    loader.load(KEY, 1, demand=True)
    assert (loader.now_s, loader.ready_s(1)) == (0.5, 2.5), "the channel is awake"
    loader.now_s = 3.0
    loader.load(KEY, 2, demand=False)
    assert loader.now_s == 3.0625, "the price of a load ahead is for everything"
    loader.now_s = 4.5
    assert loader.is_ready(2)


def test_loads_on_demand_make_the_computation_after_them_slower():
    loader = ClockLoader(3, CHUNK_BYTES, CHUNK_BYTES, strain_s=0.5)
    for slot, demand in enumerate((True, True, False)):
        loader.load(KEY, slot, demand=demand)
    loader.strain()
    assert loader.now_s == 1.0
    loader.strain()
    assert loader.now_s == 1.0, "once"


def test_computation_and_loads_slow_each_other_while_both_last():
    loader = ClockLoader(3, 4 * CHUNK_BYTES, CHUNK_BYTES, load_beside_ratio=0.5, compute_beside_ratio=0.8)
    loader.compute(3.0)  # alone
    assert loader.now_s == 3.0
    loader.load(KEY, 0, demand=True)
    loader.load(KEY, 1, demand=True)
    loader.compute(4.0)  # takes 5 beside the loads, which get 2.5 of their 8 s done
    assert loader.now_s == pytest.approx(8.0)
    assert [loader.ready_s(slot) for slot in (0, 1)] == pytest.approx([8 + 1.5, 8 + 5.5])
    loader.now_s = loader.ready_s(0)
    loader.compute(10.0)  # the second load's last 4 s take 8, in which 6.4 s of the computation are done
    assert loader.ready_s(1) == pytest.approx(9.5 + 8) and loader.now_s == pytest.approx(9.5 + 8 + 3.6)
    loader.load(KEY, 2, demand=False)
    loader.compute(8.0)  # beside a load that nobody asked for: 8 s for its 4 chunks
    assert loader.now_s == pytest.approx(21.1 + 8 + 1.6) and loader.is_ready(2)
    assert loader.busy_ratio() == pytest.approx((5 + 1.5 + 8 + 8) / loader.now_s)


def test_a_timeline_by_hand(tmp_path):
    # One layer, one slot: A misses, A hits, B misses. Dense 1 s, expert 2 s, load 4 s, token 0.5 s.
    import_arrays(tmp_path / "t.trace", np.array([[[0]], [[0]], [[1]]], np.uint8), np.array([0, 3]), num_experts=2)
    profile = Profile(100, 25.0, expert_s=2.0, dense_s=1.0, token_s=0.5)
    outcome = simulate(whole_steps(TraceReader(tmp_path / "t.trace")), [1], 2, POLICIES["lru"], profile)
    assert outcome.elapsed_s == (1 + 4 + 2 + 0.5) + (1 + 2 + 0.5) + (1 + 4 + 2 + 0.5)
    assert (outcome.stall_s, outcome.demand_bytes, outcome.counters.misses) == (8.0, 200, 2)
    assert outcome.tokens_per_s == pytest.approx(3 / 18.5) and outcome.bytes_per_token == pytest.approx(200 / 3)


def _profile(load_ratio: float) -> Profile:
    return Profile(4 << 20, (4 << 20) / (load_ratio * 1e-3), 1e-3 / 8, 0.5e-3)


@pytest.mark.parametrize("policy", POLICIES)
def test_without_prefetch_the_counts_are_the_replays(steps, policy):
    chunks = list(TraceReader(TRACE))[:1]
    outcome = simulate(whole_steps(chunks), [8] * 24, 32, POLICIES[policy], _profile(1))
    assert outcome.counters == replay(chunks, [8] * 24, 32, POLICIES[policy])
    assert outcome.demand_bytes == outcome.counters.misses * 4 << 20 and outcome.wasted_bytes == 0


def test_a_perfect_prefetch_removes_misses_and_wastes_nothing(steps):
    demand = simulate(steps, [8] * 24, 32, POLICIES["lru"], _profile(0.5))
    perfect = simulate(steps, [8] * 24, 32, POLICIES["lru"], _profile(0.5), Oracle(24, 32), PrefetchOptions(2, 0.5))
    assert perfect.counters.misses < 0.1 * demand.counters.misses
    assert perfect.stall_s < 0.5 * demand.stall_s and perfect.tokens_per_s > 1.15 * demand.tokens_per_s
    assert perfect.wasted_bytes == 0 and perfect.counters.prefetch_wasted == 0
    busy = len(steps) * 24 * 1e-3
    assert demand.elapsed_s == pytest.approx(busy + demand.stall_s) and perfect.elapsed_s >= busy


def test_wrong_predictions_waste_bytes_and_are_counted(steps):
    wrong = simulate(
        steps, [8] * 24, 32, POLICIES["lru"], _profile(1), Oracle(24, 32, 0.5, 0.5), PrefetchOptions(2, 0.5)
    )
    counters = wrong.counters
    assert counters.prefetch_issued >= counters.prefetch_hits + counters.prefetch_wasted > counters.prefetch_hits > 0
    assert wrong.wasted_bytes > 0


def test_a_history_predictor_runs_and_equal_inputs_give_equal_numbers(steps):
    runs = [
        simulate(
            steps, [8] * 24, 32, POLICIES["decayed-lfu"], _profile(1), DecayedCounts(24, 32), PrefetchOptions(3, 0.4)
        )
        for _ in range(2)
    ]
    assert runs[0] == runs[1] and runs[0].counters.prefetch_issued > 0


@settings(max_examples=20, deadline=None)
@given(
    staging=st.integers(1, 4), threshold=st.floats(0, 1), most=st.integers(1, 8), capacity=st.integers(1, 12),
    load_ratio=st.sampled_from([0.1, 1.0, 10.0]), recall=st.floats(0, 1), policy=st.sampled_from(list(POLICIES)),
)  # fmt: skip
def test_time_and_bytes_always_add_up(steps, staging, threshold, most, capacity, load_ratio, recall, policy):
    profile = _profile(load_ratio)
    few = steps[:25]
    options = PrefetchOptions(staging, threshold, most)
    outcome = simulate(few, [capacity] * 24, 32, POLICIES[policy], profile, Oracle(24, 32, recall, 0.3), options)
    counters = outcome.counters
    visits = sum(len(needed) for step in few for needed in step.needed_L)
    assert counters.demand_hits + counters.prefetch_hits + counters.misses == visits
    compute_s = len(few) * 24 * profile.dense_s + visits * profile.expert_s
    assert outcome.elapsed_s == pytest.approx(compute_s + outcome.stall_s)
    assert outcome.demand_bytes >= counters.misses * profile.expert_bytes
    assert outcome.channel_busy_s * profile.bandwidth_bytes_per_s == pytest.approx(
        outcome.demand_bytes + outcome.speculative_bytes
    )


class _Fixed(Predictor):
    """Always says the same of every layer."""

    def __init__(self, probabilities: list[float]) -> None:
        super().__init__(2, len(probabilities))
        self._said = np.array(probabilities, np.float32)

    def begin_step(self, sequence_T, token_T) -> None: ...

    def observe(self, layer, topk_expert_ids_TK) -> None: ...

    def predict(self, layer):
        return self._said


def test_the_prefetcher_takes_the_most_probable_and_spares_whom_it_expects_more():
    cache = ExpertCache([3, 3], 8, POLICIES["lru"], InstantLoader())
    for layer in (0, 1):
        for _ in cache.visit(layer, [0, 1, 2]):
            pass
    prefetcher = Prefetcher(cache, _Fixed([0.9, 0.55, 0.1, 0.6, 0.3, 0.7, 0.5, 0.4]), PrefetchOptions(2, 0.5, 4))
    prefetcher.after_route(0, np.array([[0, 1, 2]]))
    # 5 replaces 1 or 2, 3 the other one; 6 is above the threshold, but everybody left is more probable.
    assert cache.resident(1) == {0, 3, 5}
    assert (cache.counters.prefetch_issued, cache.counters.prefetch_dropped) == (2, 1)
    assert cache.resident(0) == {0, 1, 2}, "only the next layer is in work"
    cache.check_integrity()


def test_loads_that_the_router_refuted_are_cancelled():
    loader = ClockLoader(6, 4 * CHUNK_BYTES, CHUNK_BYTES)
    cache = ExpertCache([3, 3], 8, POLICIES["lru"], loader)
    prefetcher = Prefetcher(cache, _Fixed([0, 0, 0, 0, 0, 0.7, 0.8, 0]), PrefetchOptions(2, 0.5))
    prefetcher.after_route(0, np.array([[0]]))
    assert cache.resident(1) == {5, 6}
    loader.now_s = 6.5  # expert 6 has arrived, 5 is half way
    for _ in cache.visit(1, [0, 1]):
        prefetcher.after_route(1, np.array([[0, 1]]))
    assert cache.resident(1) >= {0, 1} and 5 not in cache.resident(1)
    assert cache.counters.prefetch_wasted >= 1
    cache.check_integrity()


def test_options_that_cannot_be_are_named():
    for options in ({"staging": 0}, {"threshold": 1.5}, {"most": 0}):
        with pytest.raises(UsageError, match=f"--{next(iter(options))}"):
            PrefetchOptions(**options)
    with pytest.raises(UsageError, match="--expert-bytes"):
        Profile(0, 1.0, 1.0, 1.0)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=10), batch=st.integers(1, 5))
def test_batching_is_the_schedulers(tmp_path_factory, lengths, batch):
    """One-token prompts, answers as long as the recorded sequences: who runs in which step is the same."""
    path = tmp_path_factory.mktemp("batch") / "t.trace"
    rows = sum(lengths)
    token = np.concatenate([np.arange(n) + 100 * i for i, n in enumerate(lengths)])
    experts = (token % 7)[:, None, None].astype(np.uint8)
    import_arrays(path, experts, np.cumsum([0, *lengths]), num_experts=8, token_T=token)
    simulated = [(step.sequence_T, step.token_T) for step in batched(TraceReader(path), batch)]

    scheduler = Scheduler(KvCache(1000, 4), max_running=batch, prefill_chunk=64, max_logit_rows=64)
    for i, n in enumerate(lengths):
        scheduler.add(Sequence(i, [100 * i], n, SamplingOptions(ignore_eos=True)))
    engine = []
    while not scheduler.is_idle:
        chunks = scheduler.schedule()
        engine.append(
            ([c.sequence.id for c in chunks], [token for c in chunks for token in c.sequence.tokens[c.start : c.stop]])
        )
        scheduler.postprocess(chunks, [Sampled(c.sequence.tokens[-1] + 1) for c in chunks])
    assert simulated == engine
    assert sum(len(tokens) for _, tokens in simulated) == rows


def test_a_recorded_batch_can_be_taken_apart(tmp_path):
    path = tmp_path / "t.trace"
    experts = np.arange(24).reshape(12, 1, 2).astype(np.uint8)
    import_arrays(path, experts, np.array([0, 5, 12]), num_experts=24, token_T=np.arange(12))
    together = list(batched(TraceReader(path), 2))
    assert [step.needed_L[0] for step in together[:2]] == [[0, 1, 10, 11], [2, 3, 12, 13]]
    alone = list(batched(TraceReader(path), 1))
    assert [step.needed_L for step in alone] == [step.needed_L for step in whole_steps(TraceReader(path))]

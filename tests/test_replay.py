"""The simulator's replay and Belady's bound, each against brute force."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.experts import trace as trace_module
from tidegate.experts.policy import POLICIES
from tidegate.experts.trace import TraceMeta, TraceReader, TraceWriter
from tidegate.sim.belady import belady_hits
from tidegate.sim.replay import replay, steps

event = st.lists(st.integers(0, 4), min_size=1, max_size=2, unique=True)


def _best_hits(events: list[list[int]], capacity: int, bypass: bool) -> int:
    """Most hits that any replacement decisions can reach, by trying them all."""

    @cache
    def best(index: int, resident: frozenset[int]) -> int:
        if index == len(events):
            return 0
        needed = frozenset(events[index])
        hits = len(needed & resident)
        keep_all = resident | needed
        must = frozenset() if bypass else needed
        if len(keep_all) <= capacity:
            return hits + best(index + 1, keep_all)
        options = [frozenset(kept) for kept in _subsets(sorted(keep_all), capacity) if must <= frozenset(kept)]
        return hits + max(best(index + 1, kept) for kept in options)

    return best(0, frozenset())


def _subsets(items: list[int], size: int):
    if size == 0:
        yield ()
        return
    for index, item in enumerate(items):
        for rest in _subsets(items[index + 1 :], size - 1):
            yield (item, *rest)


@settings(max_examples=60, deadline=None)
@given(events=st.lists(event, max_size=9), capacity=st.integers(2, 4), bypass=st.booleans())
def test_belady_reaches_the_best_possible_hit_count(events, capacity, bypass):
    assert belady_hits(events, capacity, 5, bypass=bypass) == _best_hits(events, capacity, bypass)


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_beats_belady(name, tmp_path):
    rng = np.random.default_rng(3)
    writer = TraceWriter(tmp_path / "t.trace", TraceMeta(2, 16, 4))
    for step in range(300):
        writer.begin_step(np.zeros(1), np.array([step]), np.zeros(1))
        for layer in range(2):
            heat = np.roll(np.linspace(1, 20, 16) ** 2, step // 60 + layer)
            ids = rng.choice(16, (1, 4), replace=False, p=heat / heat.sum())
            writer.record(ids, np.ones((1, 4)))
        writer.end_step()
    writer.close()
    reader = TraceReader(tmp_path / "t.trace")
    counters = replay(reader, [6, 6], 16, POLICIES[name])
    layers = list(zip(*steps(reader), strict=True))
    forced = sum(belady_hits(events, 6, 16, bypass=False) for events in layers)
    bypass = sum(belady_hits(events, 6, 16, bypass=True) for events in layers)
    assert counters.demand_hits + counters.misses == 300 * 2 * 4
    assert 0 < counters.demand_hits <= forced <= bypass


def test_a_step_cut_by_a_chunk_end_is_one_event(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_module, "CHUNK_ROWS", 1)
    writer = TraceWriter(tmp_path / "t.trace", TraceMeta(1, 8, 2))
    for ids in ([[1, 2], [2, 3]], [[7, 0]]):
        writer.begin_step(np.arange(len(ids)), np.zeros(len(ids)), np.zeros(len(ids)))
        writer.record(np.array(ids), np.ones((len(ids), 2)))
        writer.end_step()
    writer.close()
    assert list(steps(TraceReader(tmp_path / "t.trace"))) == [[[1, 2, 3]], [[0, 7]]]

"""Golden hit counts of every policy on a real trace, and the same counts from an implementation that shares no code."""

from pathlib import Path

import numpy as np
import pytest

from tidegate.experts.base import CacheCounters, InstantLoader
from tidegate.experts.cache import ExpertCache
from tidegate.experts.policy import POLICIES
from tidegate.experts.trace import TraceReader
from tidegate.sim.belady import belady_hits
from tidegate.sim.replay import steps

TRACE = Path(__file__).parent / "data" / "gpt-oss-20b.trace"
LAYERS = (0, 8, 16, 23)
CAPACITIES = (4, 6, 8, 12, 16, 24)
GOLDEN = {
    "decayed-lfu": [45169, 60997, 72321, 88382, 98253, 108041],
    "lru": [45169, 57141, 67772, 84760, 95736, 107540],
    "lfu": [45169, 56080, 65125, 81268, 92977, 107098],
    "lfru": [45169, 59475, 70579, 86678, 97097, 107900],
    "resident-set": [45169, 58905, 67801, 85079, 96367, 107908],
    "belady": [45169, 69370, 82285, 96549, 103809, 109942],
    "belady-bypass": [65342, 78477, 87258, 98322, 104524, 110059],
}


@pytest.fixture(scope="module")
def events():
    """events[layer][step]: the experts that the step needs, ascending."""
    layers = list(zip(*steps(TraceReader(TRACE)), strict=True))
    return [layers[layer] for layer in LAYERS]


def _engine_counters(name: str, capacity: int, events) -> CacheCounters:
    cache = ExpertCache([capacity] * len(LAYERS), 32, POLICIES[name], InstantLoader())
    for layer, layer_events in enumerate(events):
        for needed in layer_events:
            for _ in cache.visit(layer, needed):
                pass
    return cache.counters


def _independent_hits(name: str, capacity: int, events) -> int:
    """Scores in arrays that fade at every event; the lowest (kept, score, last use, id) leaves."""
    hits = 0
    for layer_events in events:
        last, count, heat = np.full(32, -1), np.zeros(32), np.zeros(32)
        resident, kept = np.zeros(32, bool), np.zeros(32, bool)
        kept_after = _kept_after(layer_events, capacity) if name == "resident-set" else {}
        for now, needed in enumerate(layer_events):
            kept = kept_after.get(now, kept)
            hits += int(resident[needed].sum())
            heat *= 2.0 ** (-1 / 16)
            heat[needed] += 1
            count[needed] += 1
            last[needed] = now
            score = {
                "lru": last,
                "lfu": count,
                "lfru": count / (now - last + 1),
                "decayed-lfu": heat,
                "resident-set": heat,
            }[name]
            missing = [expert for expert in needed if not resident[expert]]
            surplus = int(resident.sum()) + len(missing) - capacity
            if surplus > 0:
                order = np.lexsort((np.arange(32), last, score.round(12), kept))
                victims = [expert for expert in order if resident[expert] and expert not in needed]
                resident[victims[:surplus]] = False
            resident[missing] = True
    return hits


def _kept_after(layer_events, capacity: int) -> dict[int, np.ndarray]:
    """Which experts the resident set keeps from an event on, recomputed from all windows of 64 events so far."""
    hot = np.zeros((len(layer_events), 32))
    for now, needed in enumerate(layer_events):
        hot[now, needed] = 1
    use_W = hot[: len(hot) // 64 * 64].reshape(-1, 64, 32).mean(axis=1)
    out, mean, variance, covariance, before = {}, use_W[0], np.zeros(32), np.zeros(32), np.zeros(32)
    for window, use in enumerate(use_W):
        off = use - mean
        mean = mean + off / 8
        variance = variance * 7 / 8 + off**2 / 8
        covariance = covariance * 7 / 8 + off * before / 8
        before = off
        steady = np.where(variance > 0, np.clip(covariance / np.where(variance > 0, variance, 1), 0, 1), 1)
        best = np.lexsort((np.arange(32), -(mean * (1 + steady) / 2).round(12)))[: capacity // 2]
        out[window * 64 + 63] = np.isin(np.arange(32), best)
    return out


@pytest.mark.parametrize("name", POLICIES)
def test_golden_hits_of_every_policy(name, events):
    hits = [_engine_counters(name, capacity, events).demand_hits for capacity in CAPACITIES]
    assert hits == GOLDEN[name]
    assert hits == [_independent_hits(name, capacity, events) for capacity in CAPACITIES]


def test_golden_hits_of_belady(events):
    for name, bypass in (("belady", False), ("belady-bypass", True)):
        hits = [sum(belady_hits(e, capacity, 32, bypass=bypass) for e in events) for capacity in CAPACITIES]
        assert hits == GOLDEN[name]

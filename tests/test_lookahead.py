"""Prefetch from the next layers' gates: odds, thresholds and naps; and answers that do not depend on it."""

import random
from pathlib import Path

import numpy as np
import pytest

from engines import fixed_process, load_model
from stores import deepseek_config, qwen_config, write_store
from tidegate import _core
from tidegate.experts.base import ExpertKey, InstantLoader
from tidegate.experts.cache import ExpertCache
from tidegate.experts.lookahead import AHEAD, MOST_ROWS, Lookahead, most_rows
from tidegate.experts.policy import POLICIES

__all__ = ["fixed_process"]
NUM_EXPERTS, TOP_K, LAYERS = 32, 4, 3


class _Loader(InstantLoader):
    """Speculative loads never finish by themselves."""

    def __init__(self) -> None:
        self.waiting: set[int] = set()
        self.loads = 0

    def load(self, key: ExpertKey, slot: int, *, demand: bool) -> None:
        self.loads += 1
        if not demand:
            self.waiting.add(slot)

    def cancel(self, slot: int) -> bool:
        self.waiting.discard(slot)
        return True

    def promote(self, slot: int) -> None:
        self.waiting.discard(slot)

    def is_ready(self, slot: int) -> bool:
        return slot not in self.waiting


def _run(steps: int, accuracy: float, busy: float, *, prefetch: bool = True) -> tuple[ExpertCache, Lookahead, _Loader]:
    """Random routing; each guess of the next layer is right with probability ``accuracy``."""
    rng, loader = random.Random(7), _Loader()
    cache = ExpertCache([10] * LAYERS, NUM_EXPERTS, POLICIES["decayed-lfu"], loader)
    lookahead = Lookahead(cache, TOP_K, lambda: busy)
    for _ in range(steps):
        routed = [rng.sample(range(NUM_EXPERTS), TOP_K) for _ in range(LAYERS)]
        for layer, needed in enumerate(routed):
            placements = cache.visit(layer, sorted(needed))
            next(placements)
            if layer == 0:
                lookahead.begin_step(1)
            lookahead.after_route(layer, needed)
            if prefetch and lookahead.wants_guesses and layer + 1 < LAYERS:
                wrong = rng.sample([e for e in range(NUM_EXPERTS) if e not in routed[layer + 1]], TOP_K)
                guess = [e if rng.random() < accuracy else w for e, w in zip(routed[layer + 1], wrong, strict=True)]
                lookahead.foresee(layer + 1, AHEAD, guess, [0.5] * TOP_K)
            placements.close()
            cache.check_integrity()
    return cache, lookahead, loader


def test_good_guesses_become_hits() -> None:
    cache, _, _ = _run(400, accuracy=1.0, busy=0.5)
    off, _, _ = _run(400, accuracy=1.0, busy=0.5, prefetch=False)
    assert cache.counters.prefetch_wasted == 0
    assert cache.counters.prefetch_late == cache.counters.prefetch_hits > 0
    assert cache.counters.misses < 0.5 * off.counters.misses


def test_half_wrong_guesses_on_a_busy_channel_cost_no_bytes() -> None:
    cache, lookahead, loader = _run(1500, accuracy=0.5, busy=1.0)
    _, _, off = _run(1500, accuracy=0.5, busy=1.0, prefetch=False)
    assert loader.loads <= 1.05 * off.loads
    assert lookahead.threshold > 0.49 and cache.counters.prefetch_issued > 0


def test_useless_guesses_are_hardly_made_any_more() -> None:
    _, lookahead, _ = _run(600, accuracy=0.0, busy=1.0)
    wanted = 0
    for _ in range(160):
        lookahead.begin_step(1)
        wanted += lookahead.wants_guesses
    assert 5 <= wanted <= 20


def test_an_idle_channel_lowers_the_bar_and_a_prompt_is_not_looked_at() -> None:
    _, busy, _ = _run(50, accuracy=0.9, busy=1.0)
    _, idle, _ = _run(50, accuracy=0.9, busy=0.0)
    assert idle.threshold < busy.threshold
    idle.begin_step(MOST_ROWS + 1)
    assert not idle.wants_guesses


def test_several_tokens_at_once_are_looked_at_only_where_there_are_slots_for_it() -> None:
    assert [most_rows(slots, 4) for slots in (4, 15, 16, 24, 32, 500)] == [1, 1, 2, 3, 4, MOST_ROWS]
    _, lookahead, _ = _run(50, accuracy=0.9, busy=0.0)  # 10 slots
    lookahead.begin_step(2)
    assert not lookahead.wants_guesses
    lookahead.begin_step(1)
    assert lookahead.wants_guesses


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v2"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = qwen_config() if request.param == "qwen3_moe" else deepseek_config()
    return write_store(tmp_path_factory.mktemp(request.param) / "store", config)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_answers_are_the_same_and_every_visit_is_counted(store: Path, backend: str) -> None:
    """With a tight cache and reads of random duration."""
    answers, counters = {}, {}
    for prefetch in ("off", "auto"):
        with load_model(store, backend=backend) as model:
            needs = model.plan.needs
        memory = needs.budget_for(needs.num_layers * (needs.min_slots + 2))
        reader = _core.FaultyReader(seed=5, max_delay_us=200)
        with load_model(store, reader, backend=backend, memory=memory, prefetch=prefetch) as model:
            answer = model.generate([1, 2, 3, 4, 5], max_tokens=120, ignore_eos=True, logprobs=1)
            model.runtime.cache.check_integrity()
            answers[prefetch] = [(one.token_id, np.float64(one.logprob).tobytes()) for one in answer.logprobs]
            counters[prefetch] = model.stats()
    assert answers["off"] == answers["auto"]
    visits = {key: one["demand_hits"] + one["prefetch_hits"] + one["misses"] for key, one in counters.items()}
    assert visits["off"] == visits["auto"] and counters["off"]["prefetch_issued"] == 0
    on = counters["auto"]
    assert on["prefetch_issued"] >= on["prefetch_hits"] >= on["prefetch_late"]
    assert on["prefetch_issued"] > 0

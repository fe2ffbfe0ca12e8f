"""Logits are the same to the bit for every budget, policy, thread count, prefill chunk, batch, way of reading and
instruction set, with late reads."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import TIMELESS_COUNTERS, fixed_process, load_model, record_logits
from stores import deepseek_config, qwen_config, write_store
from tidegate import _core
from tidegate.config import SamplingOptions
from tidegate.experts.cache import ExpertCache
from tidegate.experts.predictor_file import save_predictor
from tidegate.experts.trace import TraceReader
from tidegate.sim.fit import fit_predictor
from tidegate.sim.rows import read_rows

__all__ = ["fixed_process"]
PROMPT = [int(i) for i in np.random.default_rng(4).integers(0, 250, 45)]
ANSWER = 12
STORES = {
    "qwen3_moe": (qwen_config(), "int4-g32-m8", "int8-g32"),
    "deepseek_v2": (deepseek_config(), "int8-g32", "bf16"),
}


@pytest.fixture(scope="module", params=list(STORES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """A store and what its model says when it is alone and everything fits."""
    config, experts, dense = STORES[request.param]
    store = write_store(tmp_path_factory.mktemp(request.param) / "store", config, experts, dense)
    with pytest.MonkeyPatch.context() as patch:
        rows = record_logits(patch)
        with load_model(store, threads=1, prefill_chunk=64) as model:
            done = model.generate(PROMPT, max_tokens=ANSWER, ignore_eos=True)
            scored = model.logits(PROMPT + done.token_ids[:-1])
    assert len(rows) == 1
    answer = np.array(next(iter(rows.values())))
    assert np.isfinite(answer).all() and np.array_equal(answer, scored[len(PROMPT) - 1 :])
    return store, {"ids": done.token_ids, "answer": answer, "scored": scored, "predictors": _fit(store)}


def _fit(store: Path) -> dict[str, str]:
    """Kind -> file of predictors that see the layers before, and what the routers see."""
    trace, files = store.parent / "t.trace", {}
    with load_model(store) as model, model.trace(trace, sketch_dims=8):
        for seed in range(4):
            model.generate([seed, *PROMPT], max_tokens=20, ignore_eos=True)
    rows = read_rows(TraceReader(trace), TraceReader(trace).meta.num_experts)
    for kind in ("markov", "next-gate"):
        files[kind] = str(store.parent / f"{kind}.npz")
        save_predictor(Path(files[kind]), fit_predictor(kind, rows))
    return files


draws = st.fixed_dictionaries(
    {
        "slots_ratio": st.floats(0, 1),
        "policy": st.sampled_from(["decayed-lfu", "lru", "lfu", "lfru", "resident-set"]),
        "threads": st.integers(1, 4),
        "io_threads": st.integers(1, 6),
        "prefill_chunk": st.integers(1, 70),
        "mates": st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20), st.booleans()), max_size=4),
        "place": st.integers(0, 4),
        "delay_us": st.sampled_from([0, 100, 800]),
        "short_at": st.integers(-1, 30),
        "refuse_direct": st.booleans(),
        "page_cache": st.booleans(),
        "predictor": st.sampled_from(["off", "gates", "decayed", "markov", "next-gate"]),
        "isa": st.sampled_from(_core.available_isas()),
        "seed": st.integers(0, 1 << 30),
        "scored": st.booleans(),
    }
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(draw=draws)
def test_nothing_but_the_tokens_decides_the_logits(family, draw) -> None:
    store, wanted = family
    options = {name: draw[name] for name in ("policy", "threads", "io_threads", "prefill_chunk", "page_cache")}
    if draw["predictor"] == "off":
        options["prefetch"] = "off"
    else:
        options["predictor"] = wanted["predictors"].get(draw["predictor"], draw["predictor"])
    options["sequences"] = len(draw["mates"]) + 1
    with load_model(store, **options) as model:
        needs = model.plan.needs
    most = needs.largest_useful_bytes
    budget = needs.smallest_bytes + int(draw["slots_ratio"] * (most - needs.smallest_bytes))
    reader = _core.FaultyReader(
        seed=draw["seed"], max_delay_us=draw["delay_us"], short_at=draw["short_at"], refuse_direct=draw["refuse_direct"]
    )
    random = np.random.default_rng(draw["seed"])
    mates_drawn = [
        (random.integers(0, 250, prompt).tolist(), answer, scored) for prompt, answer, scored in draw["mates"]
    ]
    mate_options = SamplingOptions(ignore_eos=True, temperature=1.0, seed=draw["seed"])
    with pytest.MonkeyPatch.context() as patch:
        rows = record_logits(patch)
        patch.setenv("TIDEGATE_ISA", draw["isa"])
        with load_model(store, reader, memory=budget, **options) as model:
            mates = [
                model._scored(ids) if scored else model._sequence(ids, replace(mate_options, max_tokens=answer))
                for ids, answer, scored in mates_drawn
            ]
            main = model._sequence(PROMPT, SamplingOptions(max_tokens=ANSWER, ignore_eos=True))
            mates.insert(min(draw["place"], len(mates)), main)
            model._finish(mates)
            assert np.array_equal(np.array(rows[main.id]), wanted["answer"])
            assert main.output_ids == wanted["ids"]
            if draw["scored"]:
                again = model._scored(PROMPT + main.output_ids[:-1])
                model._finish([again])
                assert np.array_equal(again.kept_logits, wanted["scored"])
            model._runtime.cache.check_integrity()


def test_an_int8_kv_cache_gives_one_answer_near_the_usual_one(family: tuple[Path, dict[str, object]]) -> None:
    store, _ = family
    tokens = PROMPT + [7] * 40
    with load_model(store, threads=1, prefill_chunk=90) as model:
        usual = model.logits(tokens)
    with load_model(store, kv="int8", threads=1, prefill_chunk=90) as model:
        want, smaller = model.logits(tokens), model.plan.needs
    for changes in (
        {"threads": 3, "prefill_chunk": 7},
        {"memory": smaller.smallest_bytes + (1 << 20), "prefill_chunk": 16},
    ):
        with load_model(store, kv="int8", **changes) as model:
            assert np.array_equal(model.logits(tokens), want), changes
    error = np.sqrt(np.mean((want - usual) ** 2)) / np.std(usual)
    assert 0 < error < 0.2, error


def test_a_layer_in_memory_is_one_call_with_the_same_answer_and_counts(
    family: tuple[Path, dict[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, wanted = family
    visits, visit = [], ExpertCache.visit
    monkeypatch.setattr(ExpertCache, "visit", lambda *args: visits.append(1) or visit(*args))
    found = []
    for is_recorded in (True, False):
        visits.clear()
        with load_model(store, prefetch="off", threads=1) as model:
            with model.trace(tmp_path / "t.trace") if is_recorded else nullcontext():
                done = model.generate(PROMPT, max_tokens=60, ignore_eos=True)
            assert done.token_ids[:ANSWER] == wanted["ids"]
            counters = model._runtime.cache.counters
            found.append((done.token_ids, [getattr(counters, name) for name in TIMELESS_COUNTERS], len(visits)))
    recorded, alone = found
    assert recorded[:2] == alone[:2]
    assert alone[2] < recorded[2] / 2, found

"""The simulator replays a recorded trace through the cache; the live engine's counters must come out, to the last one."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from engines import TIMELESS_COUNTERS, fixed_process, load_model
from stores import deepseek_config, qwen_config, write_store
from tidegate import _core
from tidegate.errors import ReadFailed
from tidegate.experts import lookahead
from tidegate.experts.cache import ExpertCache
from tidegate.experts.loader import NativeLoader
from tidegate.experts.lookahead import DISTANCES
from tidegate.experts.policy import POLICIES, policy_factory
from tidegate.experts.trace import TraceReader
from tidegate.experts.trial import Trial
from tidegate.sim.ahead import Gates
from tidegate.sim.batching import batched
from tidegate.sim.clock import ClockLoader
from tidegate.sim.fit import fit_predictor
from tidegate.sim.prefetcher import PrefetchOptions
from tidegate.sim.replay import replay, whole_steps
from tidegate.sim.rows import read_rows
from tidegate.sim.score import score_predictor
from tidegate.sim.simulate import Profile, simulate

__all__ = ["fixed_process"]
BUDGETS = 5


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v2"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = qwen_config() if request.param == "qwen3_moe" else deepseek_config()
    return write_store(tmp_path_factory.mktemp(request.param) / "store", config)


@pytest.mark.parametrize("policy", POLICIES)
def test_demand_counts_equal_the_live_engines(store: Path, tmp_path: Path, policy: str) -> None:
    options = {"policy": policy, "sequences": 3, "prefill_chunk": 16, "prefetch": "off"}
    with load_model(store, **options) as model:
        needs = model.plan.needs
    rng = np.random.default_rng(8)
    prompts = [rng.integers(0, 250, size).tolist() for size in (5, 40, 1, 23)]
    least, most = needs.smallest_bytes, needs.largest_useful_bytes
    misses = []
    for index in range(BUDGETS):
        path = tmp_path / f"{index}.trace"
        with load_model(store, memory=least + (most - least) * index // (BUDGETS - 1), **options) as model:
            with model.trace(path):
                model.generate(prompts, max_tokens=12, ignore_eos=True, temperature=1.0)
            live, slots = model.stats(), model.plan.slots
        reader = TraceReader(path)
        counters = replay(reader, slots, reader.meta.num_experts, policy_factory(policy), share=True)
        for name in ("demand_hits", "misses", "evictions", "prefetch_hits"):
            assert getattr(counters, name) == live[name], (name, index)
        assert reader.meta.expert_bytes == needs.slot_bytes and reader.meta.fixed_bytes > 0
        misses.append(counters.misses)
    assert misses[0] > misses[-1] > 0


def test_rows_are_the_tokens_that_ran(store: Path, tmp_path: Path) -> None:
    prompts = [[5, 6, 7, 8], [9, 10]]
    with load_model(store, sequences=2) as model, model.trace(tmp_path / "t.trace", "tiny"):
        answers = model.generate(prompts, max_tokens=3, ignore_eos=True)
    reader = TraceReader(tmp_path / "t.trace")
    (chunk,) = reader
    assert reader.meta.source == "tiny"
    for sequence, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), start=1):
        mine = chunk.sequence == sequence
        assert chunk.token[mine].tolist() == prompt + answer.token_ids[:-1]
        assert chunk.position[mine].tolist() == list(range(len(prompt) + 2))
    assert chunk.step.max() == 2 and len(chunk.step) == 6 + 2 * 2
    assert (chunk.weights[..., 0] >= chunk.weights[..., -1]).all()


@pytest.mark.parametrize("policy", ["decayed-lfu", "lru"])
def test_the_engines_prefetch_runs_in_the_simulator(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """What depends on time is fixed: how busy the channel is, and whether a refuted load could still be stopped. Then every
    count of the engine's prefetch comes out of the trace, too."""
    for loader in (NativeLoader, ClockLoader):
        monkeypatch.setattr(loader, "busy_ratio", lambda self: 0.5)
    monkeypatch.setattr(ExpertCache, "cancel_refuted", lambda self, layer: None)
    monkeypatch.setattr(Trial, "begin_step", lambda self, num_loads: True)
    monkeypatch.setattr(lookahead, "MOST_OF_SLOTS", 4.0)  # two sequences in layers of very few slots
    path = tmp_path / "t.trace"
    with load_model(store, sequences=2) as model:
        needs = model.plan.needs
    memory = needs.budget_for(needs.num_layers * (needs.min_slots + 2))
    with load_model(store, memory=memory, policy=policy, sequences=2) as model:
        with model.trace(path):
            model.generate([[1, 2, 3], [4]], max_tokens=80, ignore_eos=True, temperature=1.0, seed=3)
        live, slots = model.stats(), model.plan.slots
    reader = TraceReader(path)
    assert reader.meta.guess_reach == DISTANCES
    profile = Profile(needs.slot_bytes, 1e9, 1e-5, 1e-5)
    ahead = Gates(reader.meta.guess_curves)
    found = simulate(
        whole_steps(reader), slots, reader.meta.num_experts, policy_factory(policy), profile, ahead, share=True
    ).counters
    assert {name: getattr(found, name) for name in TIMELESS_COUNTERS} == {
        name: live[name] for name in TIMELESS_COUNTERS
    }
    assert found.prefetch_hits > 0


@pytest.mark.parametrize("sequences", [1, 3])
def test_native_steps_are_those_that_a_trace_records(
    store: Path, tmp_path: Path, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever records takes the Python way through the same book of slots, and nobody else does whose experts have slots."""
    visits, visit = [], ExpertCache.visit
    monkeypatch.setattr(ExpertCache, "visit", lambda *args: visits.append(1) or visit(*args))
    with load_model(store, sequences=sequences) as model:
        needs = model.plan.needs
    memory = needs.budget_for(needs.num_layers * (needs.min_slots + 3))
    found = []
    for is_recorded in (True, False):
        with load_model(store, memory=memory, sequences=sequences, prefetch="off") as model:
            visits.clear()  # of the dry run
            with model.trace(tmp_path / "t.trace") if is_recorded else nullcontext():
                prompts = [[5 * one + 1] for one in range(sequences)]
                answers = model.generate(prompts, max_tokens=150, ignore_eos=True, temperature=1.0, seed=4)
            model.runtime.cache.check_integrity()
            stats = model.stats()
            slots = [model.runtime.cache.capacity(layer) for layer in range(needs.num_layers)]
            found.append(([one.token_ids for one in answers], {name: stats[name] for name in TIMELESS_COUNTERS}, slots))
    assert found[0] == found[1]
    assert bool(visits) == (sequences > 1)
    assert min(found[0][1]["misses"], found[0][1]["demand_hits"]) > 300


def test_a_trace_ends_with_its_block_and_an_error_leaves_no_file(store: Path, tmp_path: Path) -> None:
    with load_model(store, _core.FaultyReader(fail_at=0)) as model:
        with pytest.raises(ReadFailed), model.trace(tmp_path / "bad.trace"):
            model.generate([1, 2, 3], max_tokens=2)
        assert not list(tmp_path.iterdir())
        with model.trace(tmp_path / "good.trace"):
            model.generate([1, 2, 3], max_tokens=2, ignore_eos=True)
        model.generate([1, 2, 3], max_tokens=2, ignore_eos=True)
    (chunk,) = TraceReader(tmp_path / "good.trace")
    assert len(chunk.step) == 4


def _tidegate(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tidegate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_commands_record_and_import(store: Path, tmp_path: Path) -> None:
    flags = ("--prefetch", "off", "--memory", "120MiB", "--context", "256", "--backend", "reference")
    (tmp_path / "prose.txt").write_text("It was a dark and stormy night. " * 20)
    (tmp_path / "code.txt").write_text("for i in range(3): print(i)")
    out = tmp_path / "t.trace"
    done = _tidegate("trace", store, tmp_path / "prose.txt", tmp_path / "code.txt", "-o", out, "--answer", 4, *flags)
    assert done.returncode == 0, done.stderr
    reader = TraceReader(out)
    assert list(reader.categories.values()) == ["prose", "code", "prose", "prose"]
    assert sum(len(chunk.step) for chunk in reader) == 640 + 27 + 4 * 3
    done = _tidegate("run", store, "hello", "--max-tokens", 5, "--ignore-eos", "--json", "--trace", out, *flags)
    live, reader = json.loads(done.stdout), TraceReader(out)
    counters = replay(
        reader, live["plan"]["slots_per_layer"], reader.meta.num_experts, policy_factory("decayed-lfu"), share=True
    )
    assert (counters.demand_hits, counters.misses) == (live["demand_hits"], live["misses"])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_sketches_fit_a_next_gate_that_beats_counting(store: Path, tmp_path: Path, backend: str) -> None:
    path = tmp_path / "t.trace"
    rng = np.random.default_rng(3)
    with load_model(store, backend=backend) as model, model.trace(path, sketch_dims=48):
        for _ in range(6):
            model.generate(rng.integers(0, 250, 150).tolist(), max_tokens=1)
    reader = TraceReader(path)
    rows, held_out = read_rows(reader, reader.meta.num_experts).split(0.2)
    assert rows.sketch_TLS.shape[2] == 48 and rows.sketch_TLS.any()
    found = {}
    for kind in ("next-gate", "decayed"):
        predictor = fit_predictor(kind, rows)
        score = score_predictor(predictor, held_out, policy_factory("lru"), 4, most_tokens=150)
        found[kind] = score.recall[4]
        steps = list(batched(reader, 1))[:100]
        size = reader.meta.num_layers
        outcome = simulate(
            steps, [4] * size, reader.meta.num_experts, policy_factory("lru"), Profile(1000, 1e6, 1e-4, 5e-4), predictor,
            PrefetchOptions(2, 0.3),
        )  # fmt: skip
        assert outcome.counters.prefetch_issued > 0
    assert found["next-gate"] > 1.1 * found["decayed"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model", "-o", "t"], "text file"),
        (
            ["model", __file__.removesuffix("test_engine_is_simulator.py") + "data/gpt-oss-20b.trace", "-o", "t"],
            "UTF-8",
        ),
        (["a.npz", "-o", "t"], "--num-experts"),
        (["a.npz", "b.txt", "-o", "t", "--num-experts", 8], "recorded already"),
        (["a.npz", "-o", "t", "--num-experts", 8], "no such file"),
        (["model", "b.txt", "-o", "t", "--num-experts", 8], "for an .npz file"),
    ],
)
def test_mistakes_are_named(arguments: list[object], said: str) -> None:
    done = _tidegate("trace", *arguments)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1

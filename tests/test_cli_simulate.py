"""``tidegate simulate`` and ``fit-predictor`` as a person meets them."""

import json
import sys
from pathlib import Path

import pytest

from stores import qwen_config, write_store
from tidegate.checkpoint.store import ExpertStore
from tidegate.cli import main
from tidegate.config import EngineOptions
from tidegate.engine.needs import needs_of, sizes_of
from tidegate.plan import make_plan
from tidegate.planner.card import expected_process
from tidegate.planner.machine import assumed_machine
from tidegate.planner.profile import simulated_profile
from tidegate.planner.step_clock import StepClock
from tidegate.sim.simulate import Outcome
from tidegate.sim.sweep import Configuration, Result, pareto, run_flags

TRACE = str(Path(__file__).parent / "data" / "gpt-oss-20b.trace")
SIZE = ["--expert-bytes", "13MB"]


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_grid_of_policies_and_budgets(capsys) -> None:
    arguments = ["simulate", TRACE, *SIZE, "--tokens", "150", "--fixed", "1GiB", "--memory", "3GiB,5GiB", "--no-share"]
    results = _json(capsys, *arguments, "--policy", "lru,decayed-lfu", "--predictor", "none,decayed")["results"]
    assert len(results) == 8
    for one in results:
        assert (
            one["tokens"] == 150 and one["lru_hit_ratio"] <= one["belady_hit_ratio"] <= one["belady_bypass_hit_ratio"]
        )
        visits = one["demand_hits"] + one["prefetch_hits"] + one["misses"]
        assert visits == 150 * 24 * 4 and one["hit_ratio"] == pytest.approx(1 - one["misses"] / visits, abs=1e-4)
        if one["predictor"] == "none":
            assert one["staging"] == 1 and one["prefetch_issued"] == 0
            assert one["policy"] != "lru" or one["gap_closed"] == 0
    small, large = (sum(o["tokens_per_s"] for o in results if o["memory_bytes"] == b << 30) for b in (3, 5))
    assert large > small
    again = _json(capsys, *arguments, "--policy", "lru,decayed-lfu", "--predictor", "none,decayed")["results"]
    assert again == results


def test_machine_flags_and_sharing_change_the_answer(capsys) -> None:
    arguments = ["simulate", TRACE, *SIZE, "--tokens", "500", "--slots", "8", "--disk", "2GB", "--ram", "20GB"]
    (shared,) = _json(capsys, *arguments)["results"]
    (fixed,) = _json(capsys, *arguments, "--no-share")["results"]
    (slow,) = _json(capsys, *arguments[:-4], "--disk", "200MB", "--ram", "20GB")["results"]
    assert shared["misses"] != fixed["misses"] and slow["misses"] == shared["misses"]
    assert slow["load_ratio"] > 5 * shared["load_ratio"] and slow["tokens_per_s"] < 0.3 * shared["tokens_per_s"]


def test_sweep_shows_the_best_and_their_flags(capsys) -> None:
    arguments = ["simulate", TRACE, *SIZE, "--tokens", "60", "--slots", "8,12", "--bits", "4,8", "--batch", "1,2"]
    answer = _json(capsys, *arguments, "--sweep", "grid")
    assert len(answer["results"]) == 8 and 0 < len(answer["pareto"]) < 8
    assert answer["pareto"][0]["tokens_per_s"] == max(one["tokens_per_s"] for one in answer["results"])
    assert all("--policy decayed-lfu --prefetch off --experts int" in one["flags"] for one in answer["pareto"])
    assert main([*arguments, "--sweep", "grid"]) == 0
    assert "the best of 8" in capsys.readouterr().out


def test_optuna_finds_the_best_of_the_grid_and_the_same_ones_again(capsys, tmp_path, monkeypatch) -> None:
    pytest.importorskip("optuna")
    arguments = ["simulate", TRACE, *SIZE, "--tokens", "20", "--slots", "6,12", "--bits", "4,8", "--policy", "lru,lfu"]
    grid = _json(capsys, *arguments, "--sweep", "grid")
    plot = tmp_path / "plot.png"
    arguments += ["--predictor", "none,decayed", "--threshold", "0.2,0.9", "--sweep", "optuna", "--trials", "40"]
    found, again = (_json(capsys, *arguments, "--seed", "3", "--plot", str(plot)) for _ in range(2))
    assert found == again and len(found["results"]) <= 40
    assert found["pareto"][0]["tokens_per_s"] >= grid["pareto"][0]["tokens_per_s"]
    between = {one["threshold"] for one in found["results"]} - {0.0}
    assert len(between) > 2 and all(0.2 <= limit <= 0.9 for limit in between)
    assert plot.read_bytes().startswith(b"\x89PNG")
    for name, flags in (("optuna", ["--sweep", "optuna"]), ("matplotlib.figure", ["--plot", str(plot)])):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            assert main(["simulate", TRACE, *SIZE, "--tokens", "5", "--slots", "6", *flags]) == 2
        assert "pip install" in capsys.readouterr().err


def test_the_pareto_set_is_what_nothing_beats() -> None:
    def result(tokens: int, memory: int, bits: int) -> Result:
        config = Configuration(memory << 30, (4,), "lru", "none", 1, 0.0, bits, 1)
        return Result(config, Outcome(tokens=tokens, elapsed_s=1.0), 1.0, 0.5, 0.6, 0.7)

    results = [result(10, 4, 4), result(9, 4, 4), result(10, 4, 8), result(20, 8, 4), result(5, 2, 4), result(4, 2, 8)]
    assert pareto(results) == [results[3], results[2], results[4], results[5]]
    assert run_flags(results[0].configuration) == "--memory 4GiB --policy lru --prefetch off --experts int4"


def test_the_times_of_a_model_are_the_planners_and_its_experts_the_traces(capsys, tmp_path) -> None:
    path = write_store(tmp_path / "store", qwen_config())
    store, machine = ExpertStore.open(path), assumed_machine(2)
    profile = simulated_profile(store, EngineOptions(context=256), machine, 2)
    needs = needs_of(store, EngineOptions(context=256), expected_process(machine, store.config.vocab_size), 2)
    plan, sizes = make_plan(needs.largest_useful_bytes, needs), sizes_of(store.config, EngineOptions(context=256))
    layers, top = store.config.num_moe_layers, store.config.moe.num_experts_per_tok
    resident_s = layers * (profile.dense_s + top * profile.expert_s) + profile.token_s
    clock = StepClock(store, plan, sizes, machine, 2, prefetch=False)
    assert resident_s == pytest.approx(clock.decode(1.0, None).total_s)
    assert profile.load_s == pytest.approx(machine.load_s(needs.slot_bytes))
    assert main(["simulate", TRACE, *SIZE, "--slots", "8", "--tokens", "5", "--model", str(path)]) == 2
    assert "its experts have" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["decayed", "markov", "mlp"])
def test_a_predictor_is_fitted_scored_and_simulated(capsys, tmp_path, kind) -> None:
    path = str(tmp_path / "p.npz")
    score = _json(capsys, "fit-predictor", TRACE, "--kind", kind, "-o", path, "--tokens", "900", "--score-tokens", "40")
    assert 0.1 < score["recall"]["4"] <= score["recall"]["8"] < 1
    assert score["miss_recall"]["4"] > 0 and 0 < score["wasted"]["4"] < 1 and score["predict_us"] > 0
    done = _json(
        capsys, "simulate", TRACE, *SIZE, "--slots", "8", "--predictor", path, "--staging", "3", "--tokens", "50"
    )
    assert done["results"][0]["staging"] == 3 and done["results"][0]["predictor"] == path
    assert main(["fit-predictor", TRACE, "--kind", kind, "-o", path, "--tokens", "900", "--score-tokens", "9"]) == 0
    assert "recall on the misses" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulate", TRACE, "--slots", "8"], "--expert-bytes"),
        (["simulate", TRACE, *SIZE], "--memory or --slots"),
        (["simulate", TRACE, *SIZE, "--slots", "8", "--memory", "2GiB"], "one of them"),
        (["simulate", TRACE, *SIZE, "--slots", "33"], "--slots 33: 1 to 32"),
        (["simulate", TRACE, *SIZE, "--slots", "x"], "--slots 'x'"),
        (["simulate", TRACE, *SIZE, "--memory", "1GiB", "--fixed", "1GiB"], "too small"),
        (["simulate", TRACE, *SIZE, "--slots", "8", "--policy", "mru"], "--policy 'mru'"),
        (["simulate", TRACE, *SIZE, "--slots", "8", "--predictor", "lstm"], "fitted first"),
        (["simulate", TRACE, *SIZE, "--slots", "8", "--staging", "9"], "--staging 9"),
        (["simulate", TRACE, *SIZE, "--slots", "8", "--predictor", "gates"], "what the gates guessed"),
        (["simulate", TRACE, *SIZE, "--slots", "8", "--sweep", "random"], "grid or optuna"),
        (["simulate", TRACE, *SIZE, "--slots", "8", "--plot", "x.svg"], "ends in .png"),
        (["simulate", TRACE, *SIZE, "--slots", "8", "--plot", "/no/such/x.png"], "there is no folder /no/such"),
        (["simulate", "none.trace", *SIZE, "--slots", "8"], "no such trace"),
        (["analyze", TRACE, "--report", TRACE], "is a file; name a folder"),
        (["fit-predictor", TRACE, "--kind", "magic", "-o", "x"], "--kind 'magic'"),
        (["fit-predictor", TRACE, "--kind", "next-gate", "-o", "x"], "--sketch"),
        (["fit-predictor", TRACE, "--kind", "decayed", "-o", "x", "--slots", "40"], "--slots 40"),
        (["fit-predictor", TRACE, "--kind", "decayed", "-o", "/"], "--output /: is a folder"),
        (["fit-predictor", TRACE, "--kind", "semantic", "-o", "x"], "--embedding"),
    ],
)
def test_mistakes_are_named(capsys, arguments: list[str], said: str) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err

"""The doctor's words on made-up runs, and the command on a real store."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stores import qwen_config, write_store
from tidegate.checkpoint.store import ExpertStore
from tidegate.cli import main
from tidegate.config import EngineOptions
from tidegate.engine.needs import needs_of, sizes_of
from tidegate.memory.budget import Budget
from tidegate.plan import make_plan
from tidegate.planner.advise import choices, rule_of_thumb
from tidegate.planner.card import expected_process, make_card
from tidegate.planner.doctor import Observed, comparison, findings
from tidegate.planner.headers import ModelHeaders
from tidegate.planner.machine import assumed_machine


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts far larger than what a layer costs beside them."""
    config = qwen_config(hidden_size=256, num_hidden_layers=4, num_experts=32, moe_intermediate_size=384)
    return write_store(tmp_path_factory.mktemp("doctor") / "store", config, experts="int8-g32")


def observed(store: Path, **changes: Any) -> Observed:
    """A run exactly as forecast, at a quarter of the experts."""
    opened, options = ExpertStore.open(store), EngineOptions(context=128)
    machine = replace(assumed_machine(2), is_measured=True)
    needs = needs_of(opened, options, expected_process(machine, 258), 2)
    plan = make_plan(needs.budget_for(32), needs)
    stats = {
        "ledger_bytes": 100 << 20, "peak_bytes": 101 << 20, "budget_bytes": plan.budget_bytes, "decode_tokens": 10,
        "decode_s": 1.0,
    }  # fmt: skip
    run = Observed(opened, plan, sizes_of(opened.config, options), machine, 2, stats, 0.6, 0.0, 1000, 0.0)
    found = run.forecast(hit_ratio=0.6)
    stats |= {"decode_s": 10 * found.step.total_s, "budget_bytes": 102 << 20}
    return replace(run, wait_s=10 * found.step.wait_s, **changes)


def test_a_run_as_forecast_only_hears_what_would_be_faster(store: Path) -> None:
    run = observed(store)
    said = findings(run)
    assert "spent waiting for experts" in said[0], said
    assert any(text.startswith("--memory ") and "every expert" in text for text in said)
    assert said[-1].startswith("convert with --experts int4")
    rows = {what: (planned, real) for what, planned, real in comparison(run)}
    assert rows["memory at its peak"] == ("100 MiB", "101 MiB") and rows["hits without prefetch"][1] == "60%"


def test_what_is_wrong_comes_first(store: Path) -> None:
    run = observed(store, workspace_peak_bytes=1 << 40)
    bad = {**run.stats, "peak_bytes": 120 << 20}
    said = findings(replace(run, stats=bad))
    assert "passed its budget by 18.0 MiB" in said[0] and "differ by 17%" in said[1] and "activations" in said[2]


def test_a_few_megabytes_of_a_small_process_are_no_fault(store: Path) -> None:
    run = observed(store)
    near = {**run.stats, "ledger_bytes": 66 << 20, "peak_bytes": 69 << 20, "budget_bytes": 70 << 20}
    assert not any("please report" in text for text in findings(replace(run, stats=near)))


def test_doubts_about_the_measurement(store: Path) -> None:
    assert any("others used 40%" in text for text in findings(observed(store, busy_ratio=0.4)))
    run = observed(store)
    assert any("run tidegate hardware" in text for text in findings(replace(run, machine=assumed_machine(2))))
    slow = replace(run, stats={**run.stats, "decode_s": 3 * run.stats["decode_s"]})
    assert any(text.startswith("computing is slower") for text in findings(slow))
    assert any(
        text.startswith("reading experts is slower")
        for text in findings(replace(slow, wait_s=2.5 * run.stats["decode_s"]))
    )
    assert any("where a usual model has" in text for text in findings(replace(run, demand_hit_ratio=0.1)))


def test_the_command_runs_a_real_model(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(store), "--memory", "1GiB", "--prompt", "8", "--answer", "4", "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert [row[0] for row in found["comparison"]][:3] == ["memory at its peak", "activations", "decode, tokens/s"]
    assert found["findings"] and found["stats"]["decode_tokens"] == 4


def test_advice_keeps_the_quality_bound_and_the_budget(store: Path) -> None:
    opened = ExpertStore.open(store)
    headers = ModelHeaders("m", "hf", opened.config, opened.dense, opened.manifest.layers, None, None)
    machine = assumed_machine(2)
    card = make_card(headers, EngineOptions(context=128), Budget(72 << 20, ""), machine, 2)
    found = choices(card, machine)
    kinds = [one.experts for one in found]
    assert {"bf16", "int8", "int4", "mxfp4"} >= set(kinds) >= {"int4", "mxfp4"}
    assert kinds.index("mxfp4") > max(place for place, kind in enumerate(kinds) if kind == "int4")
    within = [one.forecast.decode_tokens_per_s for one in found if one.experts != "mxfp4"]
    assert within == sorted(within, reverse=True)
    kept = choices(replace(card, headers=replace(headers, kind="store")), machine)
    assert {one.experts for one in kept} == {None}
    resident = [one for one in found if one.resident_ratio == 1]
    scarce = [one for one in found if one.resident_ratio < 1]
    assert scarce and all(one.prefetch_layers == one.staging_experts == 0 for one in resident)
    for one in scarce:
        assert one.prefetch_layers >= one.forecast.load_ratio and one.staging_experts >= 1
    assert "below 1.2: quantize" in rule_of_thumb(card)
    assert "run as it is" in rule_of_thumb(replace(card, budget=Budget(1 << 40, "")))
    assert "offload" in rule_of_thumb(replace(card, budget=Budget(1 << 20, "")))

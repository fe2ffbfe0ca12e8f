"""Activations are counted and measured, and the larger of the two is planned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import checkpoints
import tidegate
from engines import fixed_process, load_model, smallest_budget
from stores import deepseek_config, qwen_config, write_store
from tidegate import _core
from tidegate.checkpoint.convert import ConvertOptions, convert
from tidegate.checkpoint.store import ExpertStore
from tidegate.cli.plan_text import plain
from tidegate.config import EngineOptions, parse_options
from tidegate.engine import activation_peak, needs
from tidegate.engine.activation_peak import KEPT_SHAPES, Peak, fingerprint, keep_peak, kept_peak
from tidegate.engine.needs import PackedModel, activation_inputs, activations_of, sizes_of
from tidegate.errors import OverBudget
from tidegate.memory.budget import Budget
from tidegate.planner.card import make_card
from tidegate.planner.headers import read_headers
from tidegate.planner.machine import assumed_machine

__all__ = ["fixed_process"]
ASKED = {"context": 256, "prefill_chunk": 64, "sequences": 2, "threads": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_store(tmp_path / "store", qwen_config())


def key_of(model: PackedModel, **options: Any) -> str:
    sizes = sizes_of(model.config, parse_options(EngineOptions, {**ASKED, **options}))
    return fingerprint(*activation_inputs(model, sizes, 2))


@pytest.mark.parametrize("config", [qwen_config(), deepseek_config()], ids=["qwen3_moe", "deepseek_v2"])
def test_the_dry_run_takes_what_the_largest_step_takes(config: Any, tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", config)
    with load_model(store, **ASKED) as model:
        dry = kept_peak(key_of(model._runtime.store))
        assert dry is not None and dry.is_whole and dry.nbytes <= model.plan.needs.workspace_bytes
        assert model.stats()["read_bytes"] == 0 and model.stats()["misses"] == 0 and model.stats()["steps"] == 0
    with load_model(store, **ASKED) as model:  # no dry run now: what the real steps take
        model.generate([[1] * 200, [2] * 200], max_tokens=50, ignore_eos=True)
        used = model._runtime.decoder.backend.workspace_peak_bytes
    assert 0.85 * used <= dry.nbytes <= 1.02 * used


def test_it_happens_once_for_each_batch_and_chunk(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    real = activation_peak.keep_peak
    monkeypatch.setattr("tidegate.engine.build.keep_peak", lambda key, peak: (kept.append(key), real(key, peak)))
    for changes in ({}, {}, {"prefill_chunk": 32}, {"sequences": 3}, {"sequences": 3}, {"kv": "f32"}, {}):
        load_model(store, **{**ASKED, **changes}).close()
    assert len(kept) == len(set(kept)) == 4


def test_a_measured_peak_above_the_count_is_planned(store: Path) -> None:
    budget = f"{smallest_budget(store, **ASKED) + (120 << 10)}B"
    with load_model(store, memory=budget, **ASKED) as model:
        before, answer = model.plan, model.generate("tide", max_tokens=8, ignore_eos=True).token_ids
    opened = ExpertStore.open(store)
    more = before.needs.workspace_bytes + (64 << 10)
    keep_peak(key_of(opened), Peak(more, is_whole=True))
    with load_model(store, memory=budget, **ASKED) as model:
        after = model.plan
        assert model.generate("tide", max_tokens=8, ignore_eos=True).token_ids == answer
    assert after.needs.workspace_bytes == more and sum(after.slots) < sum(before.slots)
    assert after.needs.smallest_bytes > before.needs.smallest_bytes and after.planned_bytes <= after.budget_bytes
    options = parse_options(EngineOptions, {**ASKED, "memory": budget})
    headers = read_headers(str(store), ConvertOptions())
    card = make_card(headers, options, Budget(after.budget_bytes, "by the test"), assumed_machine(2), 2)
    found = card.to_json()
    assert found["activation_bytes"] == found["activation_bytes_measured"] == more > found["activation_bytes_counted"]
    assert "counted and" in plain(card) and "measured" in plain(card)


def test_a_smaller_one_changes_nothing(store: Path) -> None:
    opened, sizes = ExpertStore.open(store), sizes_of(qwen_config(), parse_options(EngineOptions, dict(ASKED)))
    counted = activations_of(opened, sizes, 2)
    keep_peak(key_of(opened), Peak(1000, is_whole=True))
    again = activations_of(opened, sizes, 2)
    assert again.peak_bytes == counted.peak_bytes == again.counted_bytes and again.measured_bytes == 1000


def test_a_source_and_its_store_share_what_was_measured(tmp_path: Path) -> None:
    source = checkpoints.checkpoint("qwen3_moe")
    store = ExpertStore.open(convert(source, tmp_path / "store"))
    assert key_of(read_headers(str(source), ConvertOptions("auto", "auto"))) == key_of(store)


def test_another_program_is_another_fingerprint(store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened = ExpertStore.open(store)
    keep_peak(key_of(opened), Peak(1 << 30, is_whole=True))
    assert kept_peak(key_of(opened)) == Peak(1 << 30, True)
    with monkeypatch.context() as patch:
        patch.setattr(tidegate, "__version__", "another")
        assert kept_peak(key_of(opened)) is None
    with monkeypatch.context() as patch:
        (tmp_path / "core.so").write_bytes(b"another build")
        patch.setattr(_core, "__file__", str(tmp_path / "core.so"))
        assert kept_peak(key_of(opened)) is None
    assert kept_peak(key_of(opened, sequences=3)) is None
    assert kept_peak(key_of(opened)) is not None


def halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the count is wrong: half of what is needed."""
    real = needs.activations
    monkeypatch.setattr(needs, "activations", lambda *a: replace(real(*a), counted_bytes=real(*a).counted_bytes // 2))


def test_a_count_that_is_too_small_is_found_out_before_the_first_request(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_model(store, **ASKED) as model:
        answer, right = (
            model.generate("tide", max_tokens=8, ignore_eos=True).token_ids,
            model.plan.needs.workspace_bytes,
        )
    halved(monkeypatch)
    keep_peak(key_of(ExpertStore.open(store)), Peak(1, is_whole=False))  # a dry run that ended early
    with load_model(store, **ASKED) as model:
        assert right // 2 < model.plan.needs.workspace_bytes <= right
        assert model.generate("tide", max_tokens=8, ignore_eos=True).token_ids == answer
        model.generate([[1] * 200, [2] * 200], max_tokens=50, ignore_eos=True)
    kept = kept_peak(key_of(ExpertStore.open(store)))
    assert kept is not None and kept.is_whole


def test_without_a_place_to_keep_it_a_wrong_count_is_an_error(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_CACHE", "/proc/nowhere")
    load_model(store, **ASKED).close()
    halved(monkeypatch)
    with pytest.raises(OverBudget, match="workspace"):
        load_model(store, **ASKED)


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 3}', '{"a": ["x", true]}', "null", "{"])
def test_a_damaged_file_is_no_measurement(text: str, cache: Path) -> None:
    cache.mkdir()
    (cache / "activations.json").write_text(text)
    assert kept_peak("a") is None
    keep_peak("a", Peak(5, is_whole=True))
    assert kept_peak("a") == Peak(5, is_whole=True)


def test_the_oldest_shapes_are_forgotten(cache: Path) -> None:
    for number in range(KEPT_SHAPES + 5):
        keep_peak(str(number), Peak(number, is_whole=True))
    found = json.loads((cache / "activations.json").read_text())
    assert len(found) == KEPT_SHAPES and kept_peak("4") is None and kept_peak("5") == Peak(5, is_whole=True)

"""``tidegate bench``: it computes what the engine computes, and its counters add up."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engines import fixed_process, load_model
from stores import qwen_config, write_store
from tidegate import _core
from tidegate.engine import bench
from tidegate.errors import ReadFailed, UsageError

__all__ = ["fixed_process"]
TOKENS = np.random.default_rng(3).integers(0, 250, 60).tolist()
PREFILL = 40


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("bench") / "store", qwen_config())


def test_forced_tokens_give_the_choices_of_the_whole_text(store: Path) -> None:
    with load_model(store, backend="cpu") as model:
        card = bench.make_card(model.runtime, PREFILL)
        found = bench.measure(model.runtime, card, TOKENS, PREFILL)
        assert found.choices == model.logits(TOKENS)[PREFILL - 1 :].argmax(axis=1).tolist()
        assert model.runtime.engine.scheduler.is_idle
    assert (found.prefill.tokens, found.decode.tokens) == (PREFILL, len(TOKENS) - PREFILL)


def test_the_counters_add_up_and_the_probe_of_the_disk_is_not_among_them(store: Path) -> None:
    with load_model(store, backend="cpu") as model:
        needs = model.plan.needs
    memory = needs.budget_for(needs.num_layers * (needs.min_slots + 1))
    with load_model(store, backend="cpu", memory=memory, prefetch="off") as model:
        card = bench.make_card(model.runtime, PREFILL)
        found = bench.measure(model.runtime, card, TOKENS, PREFILL)
        model.runtime.cache.check_integrity()
    visits = found.decode.counters["demand_hits"] + found.decode.counters["misses"]
    assert visits == found.decode.tokens * needs.num_layers * needs.min_slots
    for phase in (found.prefill, found.decode):
        assert phase.counters["read_bytes"] == phase.counters["misses"] * needs.slot_bytes > 0
        assert 0 <= phase.stall_ratio <= 1 and phase.tokens_per_s > 0
    data = json.loads(json.dumps(found.to_json()))
    assert data["decode_binding"] in ("disk", "memory bandwidth") and data["decode_ceiling_tokens_per_s"] > 0
    assert data["active_bytes_per_token"] < needs.dense_bytes + needs.num_layers * needs.num_experts * needs.slot_bytes


@pytest.mark.parametrize(
    ("tokens", "prefill"),
    [(TOKENS[:5], 5), (TOKENS, 0), (TOKENS * 10, 40), ([*TOKENS[:-1], 1 << 20], 40), ([-1, *TOKENS], 40)],
)
def test_too_few_too_many_and_unknown_tokens_are_refused(store: Path, tokens: list[int], prefill: int) -> None:
    with load_model(store) as model:
        card = bench.make_card(model.runtime, 1)
        with pytest.raises(UsageError):
            bench.measure(model.runtime, card, tokens, prefill)


def test_a_failed_read_leaves_the_engine_usable(store: Path) -> None:
    with load_model(store, _core.FaultyReader(fail_at=0)) as model:
        with pytest.raises(ReadFailed):
            bench.make_card(model.runtime, 1)
        assert len(model.generate([1, 2, 3], max_tokens=2, ignore_eos=True).token_ids) == 2


def test_the_probe_of_the_memory_takes_time() -> None:
    assert _core.fastest_read_s(np.ones(1 << 20, np.uint8), 2, 3) > 0


def test_the_command_ends_with_one_json_object(store: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(TOKENS))
    command = [sys.executable, "-m", "tidegate", "bench", str(store), "--memory", "200MiB", "--warm", "--choices"]
    command += ["--tokens", str(tokens), "--prefill", "40", "--decode", "10", "--trace", str(tmp_path / "t.trace")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout.splitlines()[-1])
    assert len(data["greedy_token_ids"]) == 11 and data["decode_hit_ratio"] == 1.0 and (tmp_path / "t.trace").exists()
    tokens.write_text("{}")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2 and "JSON list" in done.stderr

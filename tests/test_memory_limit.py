"""Child processes under a real memory limit equal to --memory: none is killed, none passes its budget, and the ledger
agrees with the kernel."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from cgroup import Finished, run_under_limit
from stores import qwen_config, write_store
from tidegate.experts.trace import TraceReader

PROMPT = "The tide is the rise and fall of the sea. " * 4
NUM_BUDGETS = 50


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 MB of experts beside a process of 50 MB."""
    config = qwen_config(
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        head_dim=32,
        num_experts=32,
        moe_intermediate_size=384,
    )
    return write_store(tmp_path_factory.mktemp("limit") / "store", config)


def _run(store: Path, budget: int, *arguments: str) -> Finished:
    assert budget % 4096 == 0, "a limit is whole pages"
    command = [sys.executable, "-m", "tidegate", "run", store, PROMPT, "--json", "--ignore-eos", "--context", "512"]
    return run_under_limit([*map(str, command), "--memory", f"{budget}B", "--max-tokens", "8", *arguments], budget)


def _result(done: Finished) -> dict[str, object]:
    assert done.returncode == 0 and done.oom_kills == 0, done
    return json.loads(done.stdout)


def test_random_budgets_hold_and_the_ledger_agrees_with_the_kernel(store: Path) -> None:
    everything = _result(_run(store, 400 << 20))
    smallest, most = everything["plan"]["smallest_bytes"], everything["plan"]["largest_useful_bytes"]
    assert most - smallest > 25 << 20
    draw = random.Random(11)
    low, high = smallest // 4096 + 128, most // 4096 + 1  # half a MiB: what the runtime varies by
    budgets = [4096 * pages for pages in (low, high, *(draw.randint(low, high) for _ in range(NUM_BUDGETS - 2)))]
    slots = set()
    for budget in budgets:
        threads, chunk = str(draw.randint(1, 3)), str(draw.choice([16, 64, 256]))
        result = _result(_run(store, budget, "--threads", threads, "--prefill-chunk", chunk))
        assert result["text"] == everything["text"]
        peak, planned = result["peak_bytes"], budget - result["plan"]["accounts_bytes"]["headroom"]
        assert peak <= budget, (budget, result)
        assert abs(result["ledger_bytes"] - peak) <= 0.03 * peak, (budget, result)
        assert abs(planned - peak) <= 0.03 * peak, (budget, planned, result)
        slots.add(sum(result["plan"]["slots_per_layer"]))
    assert len(slots) > 20


def test_a_budget_below_the_smallest_is_refused_under_its_own_limit(store: Path) -> None:
    smallest = _result(_run(store, 400 << 20))["plan"]["smallest_bytes"]
    done = _run(store, (smallest - (1 << 20)) // 4096 * 4096)
    assert done.returncode == 2 and done.oom_kills == 0 and "the smallest budget that works is" in done.stderr


def test_a_trace_is_written_inside_the_budget(store: Path, tmp_path: Path) -> None:
    smallest = _result(_run(store, 400 << 20))["plan"]["smallest_bytes"]
    for number, chunk in enumerate(("16", "256")):
        budget, trace = 4096 * (smallest // 4096 + 128), tmp_path / f"{number}.trace"
        result = _result(_run(store, budget, "--prefill-chunk", chunk, "--trace", str(trace)))
        assert result["peak_bytes"] <= budget, (chunk, result)
        reader = TraceReader(trace)
        assert sum(len(rows.step) for rows in reader) == result["prefill_tokens"] + result["decode_tokens"]
        reader.close()


def test_budgets_hold_with_predictors(store: Path, tmp_path: Path) -> None:
    text, trace = tmp_path / "text.txt", tmp_path / "t.trace"
    text.write_text(PROMPT * 12)
    _tidegate("trace", store, text, "-o", trace, "--memory", "400MiB", "--context", "512", "--sketch", "64")
    draw, slots = random.Random(12), set()
    plain = _result(_run(store, 400 << 20))
    for kind in ("decayed", "mlp", "next-gate"):
        name = str(tmp_path / f"{kind}.npz")
        _tidegate("fit-predictor", trace, "--kind", kind, "-o", name, "--score-tokens", "9")
        plan = _result(_run(store, 400 << 20, "--predictor", name))["plan"]
        nbytes = plan["accounts_bytes"]["predictor"]
        assert nbytes > 1 << 20 and plan["smallest_bytes"] > plain["plan"]["smallest_bytes"] + nbytes // 2
        low, high = plan["smallest_bytes"] // 4096 + 128, plan["largest_useful_bytes"] // 4096 - 512
        for pages in (low, draw.randint(low, high), draw.randint(low, high)):
            result = _result(_run(store, 4096 * pages, "--predictor", name))
            assert result["text"] == plain["text"]
            peak, planned = result["peak_bytes"], 4096 * pages - result["plan"]["accounts_bytes"]["headroom"]
            assert peak <= 4096 * pages and abs(planned - peak) <= 0.03 * peak, (kind, pages, result)
            slots.add(sum(result["plan"]["slots_per_layer"]))
    assert len(slots) > 5


def _tidegate(*arguments: object) -> None:
    subprocess.run(
        [sys.executable, "-m", "tidegate", *map(str, arguments)], check=True, capture_output=True, timeout=300
    )

"""The default budget: what it leaves to others, what others took during earlier runs, and ballast in a real control group far
smaller than the machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cgroup import run_under_limit
from engines import fixed_process, load_model
from stores import qwen_config, write_store
from tidegate.config import EngineOptions, parse_options
from tidegate.engine import reserve
from tidegate.engine.reserve import KEPT_RUNS, budget_of, keep_rise, rises
from tidegate.errors import UsageError
from tidegate.memory.budget import budget_of_machine, budget_of_process, ceilings, choose_budget
from tidegate.memory.probe import Cgroup, MachineMemory, ProcessMemory, machine_memory

__all__ = ["fixed_process"]
MIB, GIB = 1 << 20, 1 << 30
PROCESS = ProcessMemory(60 * MIB, 60 * MIB, 40 * MIB, 20 * MIB, 0, 0, 500 * MIB, 2)
MACHINE = MachineMemory(24 * GIB, 20 * GIB)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path / "cache"))


def reserve_of(percent: int | None = None, rise: int = 0, groups: tuple[Cgroup, ...] = ()) -> int | None:
    return choose_budget(None, ceilings(MACHINE, PROCESS, list(groups), None, percent, rise)).reserve_bytes


def test_the_reserve_follows_the_flag_or_what_others_have_taken() -> None:
    total, usual = MACHINE.total_bytes, reserve_of()
    assert usual == int(total * 0.1) == reserve_of(rise=usual // 2)
    assert reserve_of(rise=total // 5) == total // 5 and reserve_of(rise=total) == int(total * 0.3)
    assert reserve_of(10, rise=total) == total // 10 and reserve_of(30) == total * 30 // 100
    group = Cgroup(Path("/g"), 2, 2 * GIB, 60 * MIB, 0, None)
    assert reserve_of(25, groups=(group,)) == GIB // 2, "the limit of a control group counts like a machine"
    assert choose_budget(GIB, ceilings(MACHINE, PROCESS, [], None)).reserve_bytes is None


@pytest.mark.parametrize("percent", [10, 20, 30])
def test_the_flag_changes_the_plan_of_a_machine(percent: int) -> None:
    budget = budget_of_machine(None, 64 * GIB, percent)
    assert budget.limit_bytes == 64 * GIB - 64 * GIB * percent // 100 and "a reserve of" in budget.explanation


def test_a_flag_without_effect_or_sense_is_refused() -> None:
    for ask in (lambda: budget_of_process(GIB, 20), lambda: budget_of_machine(GIB, 64 * GIB, 20)):
        with pytest.raises(UsageError, match="--reserve 20: only the default budget"):
            ask()
    for percent in (9, 31, 0, -5):
        with pytest.raises(UsageError, match="between 10 and 30"):
            parse_options(EngineOptions, {"reserve": percent})


def test_what_others_took_during_the_last_runs_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    used = iter([5 * GIB, 7 * GIB, 6 * GIB, 4 * GIB])
    monkeypatch.setattr(reserve, "_others_bytes", lambda: next(used))
    reserve.watch_others()()
    reserve.watch_others()()
    assert rises() == [2 * GIB, 0]
    for number in range(KEPT_RUNS):
        keep_rise(number)
    assert rises() == list(range(KEPT_RUNS))
    usual = budget_of(EngineOptions()).reserve_bytes
    keep_rise(machine_memory().total_bytes)
    raised = budget_of(EngineOptions()).reserve_bytes
    assert usual is not None and raised is not None and raised >= usual
    (tmp_path / "cache" / "others.json").write_text('{"not": "a list"}')
    assert rises() == []
    monkeypatch.setenv("TIDEGATE_CACHE", "/proc/nowhere")
    keep_rise(1)


def test_a_run_leaves_one_entry(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", qwen_config())
    with load_model(store) as model:
        model.generate([1, 2, 3], max_tokens=1)
        assert rises() == []
    assert len(rises()) == 1


BESIDE_BALLAST = """
import json, subprocess, sys
ballast = "import time; data = bytearray(%d); data[::4096] = b'x' * len(data[::4096]); print(flush=True); time.sleep(600)"
beside = subprocess.Popen([sys.executable, "-c", ballast % int(sys.argv[1])], stdout=subprocess.PIPE)
beside.stdout.readline()
try:
    done = subprocess.run([sys.executable, "-m", "tidegate", *sys.argv[2:]], stdout=subprocess.PIPE)
finally:
    beside.kill()
    beside.wait()
sys.stdout.write(done.stdout.decode())
sys.exit(done.returncode)
"""


@pytest.mark.parametrize("percent", [None, 30])
def test_ballast_in_a_small_group_is_respected(tmp_path: Path, percent: int | None) -> None:
    """300 MB for all, a third of it taken: the default budget is what is left, and a run in it is not killed."""
    limit, taken = 300 * MIB, 100 * MIB
    config = qwen_config(hidden_size=256, num_hidden_layers=6, num_experts=32, moe_intermediate_size=384)
    store = write_store(tmp_path / "store", config)
    asked = ["run", str(store), "the tide", "--json", "--ignore-eos", "--max-tokens", "8", "--context", "128"]
    flag = [] if percent is None else ["--reserve", str(percent)]
    done = run_under_limit([sys.executable, "-c", BESIDE_BALLAST, str(taken), *asked, *flag], limit)
    assert done.returncode == 0 and done.oom_kills == 0, done
    result = json.loads(done.stdout)
    budget, left = result["budget_bytes"], limit - taken
    reserved = 8 * MIB if percent is None else limit * percent // 100
    assert result["peak_bytes"] <= budget <= left - reserved
    assert budget > left - reserved - 40 * MIB, "the ballast's and the starter's interpreters are the rest"

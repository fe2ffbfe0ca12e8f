"""Ledger and arena: the book adds up under any sequence of entries, and agrees with the kernel in a process of its own."""

import json
import resource
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgroup import run_under_limit
from tidegate.errors import LedgerMismatch, OverBudget
from tidegate.memory.arena import HUGE_PAGE_BYTES, Arena
from tidegate.memory.ledger import Ledger
from tidegate.memory.probe import ProcessMemory, process_memory

MIB = 1 << 20
NAMES = ("dense", "kv", "experts")


def process_of(peak_bytes: int) -> ProcessMemory:
    return replace(process_memory(), rss_bytes=peak_bytes, peak_rss_bytes=peak_bytes)


entries = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "release", "move", "settle"]),
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(0, 400),
    )
)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 300), entries)
def test_the_book_adds_up_whatever_is_entered(
    limit: int, headroom: int, steps: list[tuple[str, int, int, int]]
) -> None:
    if headroom > limit:
        with pytest.raises(OverBudget):
            Ledger(limit, headroom)
        return
    ledger = Ledger(limit, headroom)
    accounts = [ledger.account(name, "--flag") for name in NAMES]
    for what, first, second, nbytes in steps:
        account, before, free = accounts[first], ledger.accounts(), ledger.free_bytes
        try:
            if what == "reserve":
                account.reserve(nbytes)
            elif what == "release":
                account.release(min(nbytes, account.reserved_bytes))
            elif what == "move":
                account.move_to(accounts[second], min(nbytes, account.reserved_bytes))
            else:
                ledger.settle(process_of(nbytes))
                booked = sum(one.reserved_bytes for one in accounts)
                assert ledger.total_bytes == max(nbytes, booked)
        except OverBudget as error:
            assert ledger.accounts() == before, "a refused entry changed the book"
            assert error.asked_bytes > error.free_bytes and (what == "settle" or error.free_bytes == free)
        assert sum(ledger.accounts().values()) + ledger.free_bytes == limit
        assert ledger.total_bytes + ledger.accounts()["headroom"] + ledger.free_bytes == limit
        assert ledger.free_bytes >= 0


def test_a_refusal_names_owner_asked_free_and_flag() -> None:
    ledger = Ledger(100, 10)
    ledger.account("kv", "use a shorter --context").reserve(60)
    with pytest.raises(OverBudget, match=r"kv asked for 31 B, 30 B are free; use a shorter --context"):
        ledger.account("kv").reserve(31)


def test_check_finds_memory_that_nobody_booked_and_booked_memory_that_is_not_there() -> None:
    ledger = Ledger(1000 * MIB, 100 * MIB)
    ledger.runtime.reserve(50 * MIB)
    ledger.account("experts").reserve(600 * MIB)
    assert ledger.check(process_of(640 * MIB)).error_ratio == pytest.approx(10 / 640)
    assert ledger.accounts() == {"runtime": 40 * MIB, "headroom": 110 * MIB, "experts": 600 * MIB}
    assert ledger.check(process_of(655 * MIB)).booked_bytes == 640 * MIB
    assert ledger.total_bytes == 655 * MIB and ledger.accounts()["headroom"] == 95 * MIB
    with pytest.raises(LedgerMismatch, match=r"has 686,817,280 B, the kernel says 734,003,200 B .*experts 600 MiB"):
        ledger.check(process_of(700 * MIB))
    with pytest.raises(LedgerMismatch):
        ledger.check(process_of(500 * MIB))


def test_growth_beyond_headroom_and_free_is_over_budget() -> None:
    ledger = Ledger(100 * MIB, 5 * MIB)
    ledger.runtime.reserve(90 * MIB)
    ledger.settle(process_of(99 * MIB))
    assert ledger.free_bytes == 1 * MIB and ledger.accounts()["headroom"] == 0
    with pytest.raises(OverBudget, match=r"runtime asked for 2,097,152 B, 1,048,576 B are free; raise --memory"):
        ledger.settle(process_of(101 * MIB))


carve_sizes = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 300_000), st.integers(0, 16)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1_500_000), carve_sizes)
def test_carve_outs_are_aligned_disjoint_and_paid_for(nbytes: int, carves: list[tuple[str, int, int]]) -> None:
    ledger = Ledger(1 << 30)
    arena = Arena(ledger, nbytes, threads=1)
    total, views = ledger.total_bytes, []
    for number, (name, size, shift) in enumerate(carves, start=1):
        try:
            view = arena.carve(ledger.account(name, "--flag"), size, 1 << shift)
        except OverBudget as error:
            assert error.owner == name and error.free_bytes < error.asked_bytes < size + (1 << shift)
            continue
        assert view.size == size and view.ctypes.data % (1 << shift) == 0 and not view.any()
        view[:] = number
        views.append((number, view))
    assert all((view == number).all() for number, view in views), "two carve-outs share bytes"
    arena.check()
    assert ledger.total_bytes == total == arena.nbytes
    arena.close()
    assert ledger.total_bytes == 0 and ledger.free_bytes == 1 << 30
    assert not any(view.any() for _, view in views), "closing gives the memory back; what is left reads zeros"
    arena.close()


def test_arena_base_is_aligned_to_huge_pages_and_a_forged_carve_is_found() -> None:
    ledger = Ledger(64 * MIB)
    arena = Arena(ledger, 5 * MIB)
    assert arena.carve(ledger.account("kv"), 1).ctypes.data % HUGE_PAGE_BYTES == 0
    arena.carves[0] = replace(arena.carves[0], offset=4096)
    with pytest.raises(AssertionError):
        ledger.check(process_of(5 * MIB))
    with pytest.raises(OverBudget, match="arena asked for 67,112,960 B"):
        Arena(ledger, 64 * MIB + 1)


RUN = """
import json, sys
import numpy as np
from tidegate.memory import probe
from tidegate.memory.arena import Arena
from tidegate.memory.ledger import Ledger

limit = int(sys.argv[1])
ledger = Ledger(limit, limit // 512 + (2 << 20))
ledger.runtime.reserve(probe.process_memory().rss_bytes + (1 << 20))
arena = Arena(ledger, ledger.free_bytes // 4096 * 4096)
after_start = probe.process_memory()
views = [arena.carve(ledger.account(name), arena.free_bytes // 3) for name in "abc"]
for view in views:
    view[:] = 1
recount = ledger.check()
end = probe.process_memory()
print(json.dumps([recount.booked_bytes, ledger.total_bytes, after_start.rss_bytes, end.rss_bytes, end.peak_rss_bytes,
                  probe.share_of_memory().huge_bytes, arena.nbytes, end.threads]))
"""


@pytest.mark.parametrize("limit_mib", [96, 301])
def test_a_process_under_a_hard_limit_equal_to_its_budget_lives_and_its_ledger_agrees(limit_mib: int) -> None:
    limit = limit_mib * MIB
    done = run_under_limit([sys.executable, "-c", RUN, str(limit)], limit)
    assert done.returncode == 0, done.stderr
    booked, total, after_start, end, peak, _, arena, _ = json.loads(done.stdout)
    assert peak <= limit and done.oom_kills == 0
    assert booked == pytest.approx(peak, rel=0.03) and total == pytest.approx(peak, rel=0.001)
    assert end - after_start < 3 * MIB, "the arena was not present from the start"
    assert arena > limit // 3
    if done.peak_bytes is not None:
        assert done.peak_bytes <= limit


def test_a_smaller_budget_after_a_larger_one_in_the_same_process() -> None:
    code = """
from tidegate.memory.arena import Arena
from tidegate.memory.ledger import Ledger
from tidegate.memory.probe import process_memory
for size in (200 << 20, 20 << 20):
    Arena.forget_closed()
    ledger = Ledger(size + (100 << 20), 40 << 20)
    ledger.runtime.reserve(process_memory().rss_bytes)
    arena = Arena(ledger, size)
    assert ledger.check().error_ratio < 0.03
    assert process_memory().peak_rss_bytes < size + (60 << 20)
    arena.close()
    assert process_memory().peak_rss_bytes > size  # still there to be read
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_memory_that_the_system_refuses_is_over_budget_not_a_crash() -> None:
    def limit_address_space() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    code = "from tidegate.memory.ledger import Ledger\nfrom tidegate.memory.arena import Arena\nArena(Ledger(1 << 40), 2 << 30)"
    done = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=limit_address_space, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "OverBudget: over budget: arena asked for 2,147,483,648 B" in done.stderr, done.stderr
    assert "use a smaller --memory" in done.stderr


def test_arena_works_where_huge_pages_are_off() -> None:
    code = (
        "import ctypes, sys; assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0\n"  # PR_SET_THP_DISABLE
        "sys.argv[1:] = ['100000000']\n"
    )
    done = subprocess.run([sys.executable, "-c", code + RUN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    booked, _, _, _, peak, huge, arena, _ = json.loads(done.stdout)
    assert huge == 0 and arena > 30_000_000 and booked == pytest.approx(peak, rel=0.03)


def test_zeros_after_carving_are_writable_numpy() -> None:
    ledger = Ledger(16 * MIB)
    arena = Arena(ledger, 1 * MIB)
    view = arena.carve(ledger.account("kv"), 4096)
    view.view(np.float32)[:] = 1.5
    assert view.view(np.float32).sum() == 1024 * 1.5

"""What the kernel says: real numbers of this process, and control groups of both versions in fake trees."""

import mmap
import sys
from pathlib import Path

import pytest

from cgroup import run_under_limit
from tidegate.errors import UsageError
from tidegate.memory.budget import Ceiling, budget_of_process, ceilings, choose_budget
from tidegate.memory.probe import (
    Cgroup,
    MachineMemory,
    ProcessMemory,
    machine_memory,
    memory_cgroups,
    process_memory,
    reset_peak,
    share_of_memory,
)

MIB = 1 << 20
GIB = 1 << 30


def test_process_memory_follows_an_allocation() -> None:
    if not reset_peak():
        pytest.skip("clear_refs is not writable here")
    before = process_memory()
    assert 0 <= before.peak_rss_bytes - before.rss_bytes < 2 * MIB
    block = mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # malloc might keep what is given back
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    during, share = process_memory(), share_of_memory()
    assert abs(during.anon_bytes - before.anon_bytes - len(block)) < 4 * MIB
    assert share.private_bytes <= during.rss_bytes + 4 * MIB and share.pss_bytes >= len(block)
    block.close()
    after = process_memory()
    assert after.peak_rss_bytes >= during.rss_bytes - 2 * MIB and after.rss_bytes < during.rss_bytes - 32 * MIB
    assert after.threads >= 1 and after.page_table_bytes > 0 and after.virtual_bytes > after.rss_bytes
    assert after.rss_bytes < machine_memory().total_bytes


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def v1_group(folder: str, limit: str, usage: int, cache: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": str(usage),
        f"{folder}/memory.max_usage_in_bytes": str(usage + 1),
        f"{folder}/memory.stat": f"cache 9\ninactive_file 7\ntotal_inactive_file {cache}",
    }


def v2_group(folder: str, limit: str, usage: int, cache: int = 0, high: str = "max") -> dict[str, str]:
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.high": high,
        f"{folder}/memory.current": str(usage),
        f"{folder}/memory.peak": str(usage + 1),
        f"{folder}/memory.stat": f"anon 3\ninactive_file {cache}",
    }


def test_v1_own_group_and_all_ancestors(tmp_path: Path) -> None:
    write_tree(tmp_path, {
        "proc/mountinfo": "30 1 0:2 / /proc rw - proc proc rw\n"
        "35 32 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory",
        "proc/cgroup": "5:cpu:/elsewhere\n4:memory:/a/b\n0::/",
        **v1_group("sys/fs/cgroup/memory", "9223372036854771712", 900),
        **v1_group("sys/fs/cgroup/memory/a", "1000", 600, 50),
        **v1_group("sys/fs/cgroup/memory/a/b", "500", 300, 20),
    })  # fmt: skip
    top = tmp_path / "sys/fs/cgroup/memory"
    assert memory_cgroups(tmp_path / "proc", tmp_path) == [
        Cgroup(top / "a/b", 1, 500, 300, 20, 301),
        Cgroup(top / "a", 1, 1000, 600, 50, 601),
        Cgroup(top, 1, None, 900, 0, 901),
    ]


def test_v2_with_memory_high_and_a_root_without_files(tmp_path: Path) -> None:
    write_tree(tmp_path, {
        "proc/mountinfo": r"41 31 0:38 / /sys/fs/c\040group rw,relatime - cgroup2 cgroup2 rw,nsdelegate",
        "proc/cgroup": "0::/user.slice/app.scope",
        **v2_group("sys/fs/c group/user.slice", "max", 700),
        **v2_group("sys/fs/c group/user.slice/app.scope", "5000", 400, 30, high="4000"),
    })  # fmt: skip
    top = tmp_path / "sys/fs/c group"
    assert memory_cgroups(tmp_path / "proc", tmp_path) == [
        Cgroup(top / "user.slice/app.scope", 2, 4000, 400, 30, 401),
        Cgroup(top / "user.slice", 2, None, 700, 0, 701),
    ]


def test_a_container_sees_only_its_part_of_the_hierarchy(tmp_path: Path) -> None:
    """The path in /proc/self/cgroup is the host's; the mount shows what is below the container's own group."""
    write_tree(tmp_path, {
        "proc/mountinfo": "35 32 0:32 /docker/77 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory",
        "proc/cgroup": "4:memory:/docker/77/inner",
        **v1_group("sys/fs/cgroup/memory", "1000", 600),
        **v1_group("sys/fs/cgroup/memory/inner", "800", 100),
    })  # fmt: skip
    assert [group.limit_bytes for group in memory_cgroups(tmp_path / "proc", tmp_path)] == [800, 1000]
    (tmp_path / "proc/cgroup").write_text("4:memory:/docker/77/gone/too\n")
    assert [group.limit_bytes for group in memory_cgroups(tmp_path / "proc", tmp_path)] == [1000]
    (tmp_path / "proc/cgroup").write_text("4:memory:/../../outside\n")
    assert [group.limit_bytes for group in memory_cgroups(tmp_path / "proc", tmp_path)] == [1000]


def test_no_control_groups_at_all(tmp_path: Path) -> None:
    assert memory_cgroups(tmp_path, tmp_path) == []
    write_tree(tmp_path, {"mountinfo": "30 1 0:2 / /proc rw - proc proc rw", "cgroup": "0::/"})
    assert memory_cgroups(tmp_path, tmp_path) == []


PROCESS = ProcessMemory(60 * MIB, 60 * MIB, 40 * MIB, 20 * MIB, 0, 0, 500 * MIB, 2)
MACHINE = MachineMemory(24 * GIB, 20 * GIB)


def group(limit: int | None, usage: int, cache: int = 0, name: str = "/g") -> Cgroup:
    return Cgroup(Path(name), 2, limit, usage, cache, None)


def test_the_default_leaves_a_reserve_to_others() -> None:
    budget = choose_budget(None, ceilings(MACHINE, PROCESS, [group(None, GIB)], None))
    assert budget.limit_bytes == 20 * GIB + 40 * MIB - int(2.4 * GIB)
    assert "20.0 GiB available on this machine" in budget.explanation and "--memory" in budget.explanation


def test_the_tightest_group_counts_with_the_use_of_others_but_not_its_page_cache_or_our_own() -> None:
    groups = [group(8 * GIB, 60 * MIB, name="/own"), group(4 * GIB, 3 * GIB, 1 * GIB, name="/parent"), group(None, 0)]
    found = ceilings(MACHINE, PROCESS, groups, None)
    budget = choose_budget(None, found)
    parent_free = 4 * GIB - (2 * GIB - 40 * MIB)
    assert budget.limit_bytes == parent_free - int(4 * GIB * 0.02) and "/parent" in budget.explanation
    taken = choose_budget(3 * GIB, found)
    assert taken.limit_bytes == 3 * GIB and "only 2.04 GiB are free" in taken.explanation


def test_a_budget_that_can_never_be_had_is_refused() -> None:
    found = ceilings(MACHINE, PROCESS, [group(2 * GIB, 60 * MIB)], None)
    assert choose_budget(2 * GIB, found).limit_bytes == 2 * GIB
    with pytest.raises(UsageError, match=r"--memory 2,147,487,744 B: more than .* 2,147,483,648 B .*/g"):
        choose_budget(2 * GIB + 4096, found)
    rounded = ceilings(MACHINE, PROCESS, [group((2 * GIB - 1) // 4096 * 4096, 60 * MIB)], None)
    assert choose_budget(2 * GIB - 1, rounded).limit_bytes == 2 * GIB - 1  # what the kernel made of this very limit


def test_address_space_counts_what_is_mapped_but_not_used() -> None:
    found = ceilings(MACHINE, PROCESS, [], 2 * GIB)
    assert found[-1] == Ceiling("of address space (ulimit -v)", 2 * GIB - 440 * MIB, 2 * GIB - 440 * MIB, 256 * MIB)
    assert choose_budget(None, found).limit_bytes == 2 * GIB - 696 * MIB


def test_this_machine_has_a_default_budget() -> None:
    budget = budget_of_process(None)
    assert 64 * MIB < budget.limit_bytes < machine_memory().total_bytes
    assert "\n" not in budget.explanation


CHILD = """
import mmap
import sys
from tidegate.memory.budget import budget_of_process
from tidegate.memory.probe import memory_cgroups
print(budget_of_process(None).limit_bytes, memory_cgroups()[0].limit_bytes)
block = bytearray(int(sys.argv[1]))
print("alive")
"""


def test_a_real_limit_is_seen_and_enforced() -> None:
    limit = 128 * MIB
    done = run_under_limit([sys.executable, "-c", CHILD, str(64 * MIB)], limit)
    assert done.returncode == 0, done.stderr
    budget, seen = map(int, done.stdout.splitlines()[0].split())
    assert seen == limit and limit * 0.5 < budget <= limit - 8 * MIB
    assert done.peak_bytes is None or 64 * MIB < done.peak_bytes <= limit
    killed = run_under_limit([sys.executable, "-c", CHILD, str(256 * MIB)], limit)
    assert killed.returncode == -9 and killed.oom_kills == 1 and "alive" not in killed.stdout

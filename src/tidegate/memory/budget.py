"""The one dial: how many bytes the whole process may use, and where that number comes from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tidegate.errors import UsageError
from tidegate.memory import probe
from tidegate.units import format_bytes

# Left to others by the default budget. A control group is ours alone as a rule, so only the kernel needs a little there.
_MACHINE_RESERVE_RATIO, _MACHINE_RESERVE_MIN_BYTES, _MACHINE_RESERVE_MAX_BYTES = 0.10, 256 << 20, 4 << 30
_MOST_RESERVE_RATIO = 0.30  # whatever others have been seen to take
_GROUP_RESERVE_RATIO, _GROUP_RESERVE_MIN_BYTES, _GROUP_RESERVE_MAX_BYTES = 0.02, 8 << 20, 256 << 20


@dataclass(frozen=True)
class Ceiling:
    """One thing that bounds this process. ``free_bytes``: what the whole process may use now, its present use included;
    ``hard_bytes``: what it could use if nobody else used anything; beyond that the kernel kills or refuses."""

    name: str
    free_bytes: int
    hard_bytes: int
    reserve_bytes: int

    @property
    def default_bytes(self) -> int:
        return max(0, self.free_bytes - self.reserve_bytes)


@dataclass(frozen=True)
class Budget:
    """The limit in bytes and the line that explains it. ``reserve_bytes``: left to others by the default, None with --memory."""

    limit_bytes: int
    explanation: str
    reserve_bytes: int | None = None


def ceilings(
    machine: probe.MachineMemory,
    process: probe.ProcessMemory,
    groups: list[probe.Cgroup],
    address_space: int | None,
    reserve_percent: int | None = None,
    rise_bytes: int = 0,
) -> list[Ceiling]:
    """Everything that bounds this process, in the order machine, control groups (own first), address space. The reserve is
    ``reserve_percent``, or what is usual; on the machine then at least ``rise_bytes``, up to 30 %."""
    own = process.anon_bytes
    usual = _clip(machine.total_bytes * _MACHINE_RESERVE_RATIO, _MACHINE_RESERVE_MIN_BYTES, _MACHINE_RESERVE_MAX_BYTES)
    seen = min(rise_bytes, int(machine.total_bytes * _MOST_RESERVE_RATIO))
    out = [
        Ceiling(
            "available on this machine",
            min(machine.available_bytes + own, machine.total_bytes),
            machine.total_bytes,
            max(usual, seen) if reserve_percent is None else machine.total_bytes * reserve_percent // 100,
        )
    ]
    for group in groups:
        if group.limit_bytes is not None:
            others = max(0, group.usage_bytes - group.reclaimable_bytes - own)
            reserve = _clip(
                group.limit_bytes * _GROUP_RESERVE_RATIO, _GROUP_RESERVE_MIN_BYTES, _GROUP_RESERVE_MAX_BYTES
            )
            if reserve_percent is not None:
                reserve = group.limit_bytes * reserve_percent // 100
            name = f"free in the control group {group.path}"
            out.append(Ceiling(name, max(0, group.limit_bytes - others), group.limit_bytes, reserve))
    if address_space is not None:
        # Address space that is reserved but not used (libraries, stacks, heaps) counts against this limit, and grows.
        unused = process.virtual_bytes - process.rss_bytes
        free = max(0, address_space - unused)
        out.append(Ceiling("of address space (ulimit -v)", free, free, _GROUP_RESERVE_MAX_BYTES))
    return out


def choose_budget(memory_bytes: int | None, found: list[Ceiling], *, is_for_here: bool = True) -> Budget:
    """The budget that --memory asks for, or the default: the lowest ceiling minus its reserve.

    Raises UsageError for a budget above what the machine or a limit could ever give, if it ``is_for_here``; a budget above what
    is free only right now is taken. The explanation says so.
    """
    tightest = min(found, key=lambda ceiling: ceiling.default_bytes)
    if memory_bytes is None:
        reserve = f"a reserve of {format_bytes(tightest.reserve_bytes)}"
        why = f"{format_bytes(tightest.free_bytes)} {tightest.name}, minus {reserve}"
        explanation = f"{format_bytes(tightest.default_bytes)} by default ({why}; set --memory)"
        return Budget(tightest.default_bytes, explanation, tightest.reserve_bytes)
    hardest = min(found, key=lambda ceiling: ceiling.hard_bytes)
    if memory_bytes >= hardest.hard_bytes + 4096:  # the kernel keeps limits in whole pages, rounded down
        if not is_for_here:
            explanation = (
                f"{format_bytes(memory_bytes)} by --memory: for another machine, this one can never have more than "
            )
            return Budget(memory_bytes, f"{explanation}{format_bytes(hardest.hard_bytes)} ({hardest.name})")
        raise UsageError(
            f"--memory {memory_bytes:,} B: more than this process can ever have, {hardest.hard_bytes:,} B "
            f"({hardest.name}); use --memory {tightest.default_bytes >> 20}MiB or less"
        )
    explanation = f"{format_bytes(memory_bytes)} by --memory"
    least = min(found, key=lambda ceiling: ceiling.free_bytes)
    if memory_bytes > least.free_bytes:
        explanation += f"; only {format_bytes(least.free_bytes)} are {least.name} now"
    return Budget(memory_bytes, explanation)


def budget_of_process(
    memory_bytes: int | None, reserve_percent: int | None = None, rise_bytes: int = 0, *, is_for_here: bool = True
) -> Budget:
    """``choose_budget`` with what the kernel says now about this process."""
    _check_reserve(memory_bytes, reserve_percent)
    groups, limit = probe.memory_cgroups(), probe.address_space_limit()
    machine, process = probe.machine_memory(), probe.process_memory()
    found = ceilings(machine, process, groups, limit, reserve_percent, rise_bytes)
    return choose_budget(memory_bytes, found, is_for_here=is_for_here)


def budget_of_machine(memory_bytes: int | None, total_bytes: int, reserve_percent: int | None = None) -> Budget:
    """``choose_budget`` for an idle machine with that much memory. Raises UsageError for a budget above it."""
    _check_reserve(memory_bytes, reserve_percent)
    idle = probe.ProcessMemory(0, 0, 0, 0, 0, 0, 0, 1)
    found = ceilings(probe.MachineMemory(total_bytes, total_bytes), idle, [], None, reserve_percent)
    return choose_budget(memory_bytes, [replace(found[0], name="of memory (--ram)")])


def _check_reserve(memory_bytes: int | None, reserve_percent: int | None) -> None:
    if memory_bytes is not None and reserve_percent is not None:
        raise UsageError(
            f"--reserve {reserve_percent}: only the default budget leaves a reserve; use it without --memory"
        )


def _clip(value: float, low: int, high: int) -> int:
    return max(low, min(int(value), high))

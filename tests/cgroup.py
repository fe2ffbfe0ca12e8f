"""Runs a child under a real memory limit: a control group of its own (v1 or v2), made as root and removed afterwards."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tidegate.memory.probe import memory_cgroups

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Finished:
    """``peak_bytes`` is the group's high-water mark: the child with its kernel memory and page cache; None if not offered."""

    returncode: int
    stdout: str
    stderr: str
    peak_bytes: int | None
    oom_kills: int


def run_under_limit(
    argv: Sequence[str], limit_bytes: int, env: Mapping[str, str] | None = None, timeout_s: float = 300
) -> Finished:
    """Run ``argv`` to its end with all its memory limited; a kill by the kernel is returncode -9. Skips the test where
    groups cannot be made."""
    version, folder = _make_group()
    try:
        _limit(version, folder, limit_bytes)
        procs = folder / "cgroup.procs"
        child = subprocess.Popen(
            list(argv),
            env=None if env is None else dict(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: procs.write_text(str(os.getpid())) and None,  # noqa: PLW1509 (before exec, on purpose)
        )
        try:
            stdout, stderr = child.communicate(timeout=timeout_s)
        except BaseException:
            child.kill()
            child.wait()
            raise
        return Finished(child.returncode, stdout, stderr, _peak(version, folder), _oom_kills(version, folder))
    finally:
        _remove(folder)


def _make_group() -> tuple[int, Path]:
    for group in reversed(memory_cgroups()):  # the top of the hierarchy first: no other limit is above it
        folder = group.path / f"tidegate-test-{os.getpid()}-{next(_NUMBERS)}"
        try:
            folder.mkdir()
        except OSError:
            continue
        limit = folder / ("memory.limit_in_bytes" if group.version == 1 else "memory.max")
        if os.access(limit, os.W_OK):
            return group.version, folder
        folder.rmdir()
    pytest.skip("no memory control group can be made here (needs root and the memory controller)")


def _limit(version: int, folder: Path, limit_bytes: int) -> None:
    """Linux rounds the limit down to whole pages. Swap would only hide what is used."""
    if version == 1:
        (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
        swap = folder / "memory.memsw.limit_in_bytes"
    else:
        (folder / "memory.max").write_text(str(limit_bytes))
        swap = folder / "memory.swap.max"
    if swap.exists():
        swap.write_text(str(limit_bytes) if version == 1 else "0")


def _peak(version: int, folder: Path) -> int | None:
    path = folder / ("memory.max_usage_in_bytes" if version == 1 else "memory.peak")
    return int(path.read_text()) if path.exists() else None


def _oom_kills(version: int, folder: Path) -> int:
    path = folder / ("memory.oom_control" if version == 1 else "memory.events")
    fields = dict(line.split() for line in path.read_text().splitlines())
    return int(fields.get("oom_kill", 0))


def _remove(folder: Path) -> None:
    for _ in range(100):
        try:
            folder.rmdir()
            return
        except OSError:  # the kernel has not let go of the last process yet
            time.sleep(0.02)
    folder.rmdir()

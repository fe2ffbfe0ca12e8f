"""The budget that options ask for. What the default leaves to others follows how much their memory has risen during the last
runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tidegate.checkpoint.files import cache_folder, whole_file
from tidegate.config import EngineOptions
from tidegate.memory import probe
from tidegate.memory.budget import Budget, budget_of_process

_FILE, KEPT_RUNS = "others.json", 20


def budget_of(options: EngineOptions, *, is_for_here: bool = True) -> Budget:
    """Of this process, now. Raises UsageError for both --memory and --reserve, and for a budget that can never be had;
    not ``is_for_here``: that one is for another machine, and the explanation says so."""
    return budget_of_process(options.memory_bytes, options.reserve, max(rises(), default=0), is_for_here=is_for_here)


def watch_others() -> Callable[[], None]:
    """Remember what others use now; the callable keeps by how much that has risen since."""
    before = _others_bytes()
    return lambda: keep_rise(max(0, _others_bytes() - before))


def rises() -> list[int]:
    """Bytes by which the memory of other processes rose during each of the last runs, oldest first."""
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):
        return []
    return [one for one in found if isinstance(one, int) and one >= 0] if isinstance(found, list) else []


def keep_rise(rise_bytes: int) -> None:
    """Nothing is kept where the cache folder cannot be written."""
    file = _file()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as output:
            output.write(json.dumps([*rises(), rise_bytes][-KEPT_RUNS:]).encode())


def _others_bytes() -> int:
    machine = probe.machine_memory()
    return max(0, machine.total_bytes - machine.available_bytes - probe.process_memory().anon_bytes)


def _file() -> Path:
    return cache_folder() / _FILE

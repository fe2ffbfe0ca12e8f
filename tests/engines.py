"""Loaded models for tests: with faulty reads, and with every row of logits that was sampled from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tidegate.engine.engine as engine_module
from tidegate import _core
from tidegate.checkpoint.store import ExpertStore
from tidegate.config import EngineOptions, parse_options
from tidegate.engine.build import build
from tidegate.engine.model import Model
from tidegate.engine.sampler import sample
from tidegate.memory.probe import ProcessMemory

# What an engine counts that depends on what was asked for, not on when it arrived.
TIMELESS_COUNTERS = (
    "demand_hits",
    "prefetch_hits",
    "misses",
    "evictions",
    "prefetch_issued",
    "prefetch_wasted",
    "prefetch_dropped",
)


@pytest.fixture(scope="module", autouse=True)
def fixed_process() -> Iterator[None]:
    """Plans and ledgers of the importing module see a small process that never grows, not the one that runs all tests, so
    that a budget means the same number of slots every time. Real processes are measured in test_memory_limit.py."""
    process = ProcessMemory(50 << 20, 50 << 20, 30 << 20, 20 << 20, 0, 1 << 20, 1 << 30, 4)
    with pytest.MonkeyPatch.context() as patch:
        for user in ("tidegate.engine.build", "tidegate.memory.ledger"):
            patch.setattr(f"{user}.process_memory", lambda: process)
        yield


def smallest_budget(store: Path, **options: Any) -> int:
    """What leaves exactly top-k slots a layer."""
    with load_model(store, **options) as model:
        return model.plan.needs.smallest_bytes


def load_model(store: Path, reader: _core.BlockReader | None = None, **options: Any) -> Model:
    """``tidegate.load`` with another reader of experts."""
    options = {"memory": "1GiB", "context": 256, "threads": 2, **options}
    return Model(build(ExpertStore.open(store), parse_options(EngineOptions, options), reader))


def record_logits(patch: pytest.MonkeyPatch) -> dict[int, list[np.ndarray]]:
    """From now on, a copy of every row that is sampled from, by sequence id."""
    rows: dict[int, list[np.ndarray]] = {}

    def recording(logits_V: np.ndarray, sequence: Any) -> Any:
        rows.setdefault(sequence.id, []).append(logits_V.copy())
        return sample(logits_V, sequence)

    patch.setattr(engine_module, "sample", recording)
    return rows


def num_threads() -> int:
    """Threads of this process, native ones included."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())

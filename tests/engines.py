"""Loaded models for tests: with faulty reads, and with every row of logits that was sampled from."""

from __future__ import annotations

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


def load_model(store: Path, reader: _core.BlockReader | None = None, **options: Any) -> Model:
    """``tidegate.load`` with another reader of experts."""
    options = {"memory": "1GiB", "context": 256, "threads": 2, "backend": "reference", **options}
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

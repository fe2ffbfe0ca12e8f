"""From what a user names to an open expert store, converted once if it is a source."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tidegate.checkpoint.convert import ConvertOptions, Progress, cached_store
from tidegate.checkpoint.open import detect
from tidegate.checkpoint.store import ExpertStore
from tidegate.config import EngineOptions
from tidegate.errors import UsageError


def open_store(
    path: str | os.PathLike[str],
    options: EngineOptions,
    say: Callable[[str], None] = lambda message: None,
    progress: Progress | None = None,
) -> ExpertStore:
    """``say`` and ``progress`` as in ``cached_store``. Raises CheckpointError and its kinds, DiskFull, and UsageError for a
    conversion option that a finished store cannot follow."""
    kind, found = detect(path if isinstance(path, str) else Path(path))
    if kind == "store":
        for name in ("experts", "dense", "group"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} has no effect: {found} is converted already; convert its source again")
        return ExpertStore.open(found)
    wanted = ConvertOptions(options.experts or "auto", options.dense or "auto", options.group)
    return ExpertStore.open(cached_store(found, wanted, say=say, progress=progress))

"""From what a user names to an open expert store."""

from __future__ import annotations

import os
from pathlib import Path

from tidegate.checkpoint.manifest import MANIFEST
from tidegate.checkpoint.store import ExpertStore
from tidegate.config import EngineOptions
from tidegate.errors import UsageError


def open_store(path: str | os.PathLike[str], options: EngineOptions) -> ExpertStore:
    """The store at ``path``. Raises CheckpointError and its kinds, UsageError for a conversion
    option that a finished store cannot follow."""
    folder = Path(path)
    if not (folder / MANIFEST).exists():
        raise UsageError(f"{folder}: not a store")
    for name in ("experts", "dense", "group"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name}: {folder} is converted already; use it without, or convert its source again")
    return ExpertStore.open(folder)

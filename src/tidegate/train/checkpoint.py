"""Checkpoints of a training run: one file a step, written beside and renamed, so that a kill leaves the last good one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tidegate.checkpoint.files import whole_file
from tidegate.errors import CorruptFile, UsageError

KEPT = 2


def save(directory: Path, step: int, state: dict[str, Any]) -> Path:
    """Write ``checkpoint-<step>.pt`` atomically and delete all but the newest two."""
    path = directory / f"checkpoint-{step:07d}.pt"
    with whole_file(path) as output:
        torch.save(state, output)
    for old in sorted(directory.glob("checkpoint-*.pt"))[:-KEPT]:
        old.unlink()
    return path


def latest(directory: Path) -> Path:
    """The newest complete checkpoint of a run. Raises UsageError where there is none."""
    found = sorted(directory.glob("checkpoint-*.pt"))
    if not found:
        raise UsageError(
            f"{directory}: holds no checkpoint-*.pt to go on from or to export; train first, without --resume"
        )
    return found[-1]


def load(path: Path) -> dict[str, Any]:
    """A saved state. Raises CorruptFile where the file is cut or not a checkpoint."""
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CorruptFile(path, 0, "training checkpoint", "a torch archive", error) from error
    if not isinstance(state, dict) or "options" not in state:
        raise CorruptFile(path, 0, "training checkpoint", "options and tensors", type(state).__name__)
    return state


class Curve:
    """The run's log, one JSON object a line; a resumed run drops what lies behind its checkpoint."""

    def __init__(self, path: Path, resume_step: int) -> None:
        records = read_curve(path) if path.exists() else []
        kept = [record for record in records if record["step"] < resume_step]
        with whole_file(path) as output:
            output.writelines(json.dumps(record).encode() + b"\n" for record in kept)
        self._output = path.open("a", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        self._output.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._output.close()


def read_curve(path: Path) -> list[dict[str, Any]]:
    """All complete records of a curve file; a last line cut by a kill is left out."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records

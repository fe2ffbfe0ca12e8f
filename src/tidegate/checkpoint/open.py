"""What lies at a path: a Hugging Face folder, a GGUF file, or an expert store."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from tidegate.checkpoint.base import Checkpoint
from tidegate.errors import CheckpointError

Kind = Literal["hf", "gguf", "store"]
BUILTIN_NAME, BUILTIN_STORE = "builtin", Path(__file__).parents[1] / "builtin"  # the model that comes with Tidegate
_SPLIT = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")


def detect(path: Path | str) -> tuple[Kind, Path]:
    """What ``path`` is, and the path to open (of a folder with one GGUF model: its first file). Reads no weights.
    The text ``builtin`` names the model that comes with Tidegate; ``./builtin`` and a Path are files and folders.

    Raises CheckpointError saying what was looked for when it is none of the three.
    """
    if path == BUILTIN_NAME and BUILTIN_STORE.exists():
        return "store", BUILTIN_STORE
    path = Path(path).expanduser()
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
        if magic == b"GGUF":
            return "gguf", path
        raise CheckpointError(
            f"{path}: not a GGUF file (it starts with {magic!r}); give the folder of a safetensors model"
        )
    if not path.is_dir():
        hint = "; it looks like a repository name: download it first (`hf download`)" if _is_repo_name(path) else ""
        raise CheckpointError(f"{path}: no such file or folder{hint}")
    if (path / "manifest.json").exists():
        return "store", path
    if (path / "config.json").exists():
        return "hf", path
    files = sorted(file for file in path.glob("*.gguf") if not (m := _SPLIT.search(file.name)) or m[1] == "00001")
    if len(files) == 1:
        return "gguf", files[0]
    if files:
        raise CheckpointError(
            f"{path}: holds several GGUF models, choose one: {', '.join(file.name for file in files)}"
        )
    raise CheckpointError(
        f"{path}: nothing to run here; wanted config.json + *.safetensors, a *.gguf file, or the manifest.json of a store"
    )


def open_checkpoint(path: Path | str) -> Checkpoint:
    """The source checkpoint at ``path``. Raises CheckpointError and its kinds; a store is not a source and refused."""
    kind, found = detect(path)
    if kind == "store":
        raise CheckpointError(
            f"{found}: is an expert store already, which runs as it is; convert wants a Hugging Face folder or a GGUF file"
        )
    if kind == "gguf":
        from tidegate.checkpoint.gguf import GgufCheckpoint  # noqa: PLC0415  (only what is needed)

        return GgufCheckpoint(found)
    from tidegate.checkpoint.hf import HfCheckpoint  # noqa: PLC0415

    return HfCheckpoint(found)


def _is_repo_name(path: Path) -> bool:
    return len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists()

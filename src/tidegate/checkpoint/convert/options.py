"""What a conversion can be asked for, and what identifies its source."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tidegate
from tidegate.checkpoint.manifest import VERSION
from tidegate.config import DENSE_KINDS, EXPERT_KINDS
from tidegate.errors import UsageError
from tidegate.quant.formats import Format

GROUPS = (32, 64, 128)
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_SOURCE_SUFFIXES = (".safetensors", ".json", ".jinja")


@dataclass(frozen=True)
class ConvertOptions:
    """``auto`` keeps the source's own quantization where a format holds it exactly or within float16 rounding of its
    scales; everything else becomes int4 (experts) or int8 (dense). ``int4`` has two-level scales, ``q4_0`` float16 scales.
    ``group`` (None: 32) is the number of inputs that share a scale in int4 and int8."""

    experts: str = "auto"
    dense: str = "auto"
    group: int | None = None

    def __post_init__(self) -> None:
        """Raises UsageError naming the flag, what was asked and what is allowed."""
        for flag, value, allowed in (("experts", self.experts, EXPERT_KINDS), ("dense", self.dense, DENSE_KINDS)):
            if value not in allowed:
                raise UsageError(f"--{flag} {value}: choose one of {', '.join(allowed)}")
        if self.group is None:
            return
        if self.group not in GROUPS:
            raise UsageError(f"--group {self.group}: choose one of {', '.join(map(str, GROUPS))}")
        if {self.experts, self.dense} <= {"q4_0", "mxfp4", "bf16", "f32"}:
            raise UsageError(
                f"--group {self.group} has no effect on {self.experts} experts and {self.dense} dense weights"
            )

    def expert_format(self, native: Format | None) -> Format:
        """The format of expert matrices whose source has ``native`` codes (None: has none)."""
        return native or self._format("int4") if self.experts == "auto" else self._format(self.experts)

    def dense_format(self, native: Format | None) -> Format:
        """The format of a dense matrix whose source has ``native`` codes (None: has none)."""
        return native or self._format("int8") if self.dense == "auto" else self._format(self.dense)

    def _format(self, kind: str) -> Format:
        if kind == "int4":
            return Format("int4", self.group or 32, two_level=True)
        if kind == "q4_0":
            return Format("int4", 32)
        group = {"int8": self.group or 32, "mxfp4": 32}.get(kind, 0)
        return Format(kind, group)  # type: ignore[arg-type]  # kind is one of EXPERT_KINDS here


def source_files(path: Path) -> list[Path]:
    """The files that make a source: of a folder its weights, JSON and template files; of a GGUF file all its parts."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in _SOURCE_SUFFIXES)
    split = _SPLIT.search(path.name)
    if split is None:
        return [path]
    stem = path.name[: split.start()]
    return sorted(path.parent.glob(f"{stem}-[0-9][0-9][0-9][0-9][0-9]-of-{split[1]}.gguf"))


def source_identity(path: Path) -> list[tuple[str, int, int]]:
    """Name, size in bytes and modification time in ns of every source file: what a partial or cached store must match."""
    stats = [(file.name, file.stat()) for file in source_files(path)]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def fingerprint(path: Path, options: ConvertOptions, *more: Any) -> str:
    """Hex digest of everything that decides the bytes of a store: source files, options, format version, program."""
    known = [VERSION, tidegate.__version__, source_identity(path), asdict(options), *more]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

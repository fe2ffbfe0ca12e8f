"""What activations took in a dry run, kept for every shape of model, batch and chunk: the plan takes the larger of this and
what is counted (backends/cpu_workspace.py)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import tidegate
from tidegate import _core
from tidegate.backends.cpu_workspace import StepShape, kinds_of_layers
from tidegate.backends.operands import KvLayout
from tidegate.checkpoint.files import cache_folder, whole_file
from tidegate.model_config import ModelConfig
from tidegate.quant.formats import Format
from tidegate.quant.layout import ExpertLayout

_FILE, KEPT_SHAPES = "activations.json", 200


def fingerprint(
    config: ModelConfig,
    dense: Mapping[str, Format],
    layouts: Sequence[ExpertLayout],
    kv: KvLayout,
    shape: StepShape,
) -> str:
    """Of everything that activations depend on: shapes and formats (the same before and after a conversion), the step, the
    kernels. Another build of the core is another one."""
    shapes = replace(config, bos_token_id=None, eos_token_ids=())  # a store takes these from the tokenizer
    top = [(name, fmt) for name, fmt in dense.items() if not name.startswith("layers.")]
    built = Path(_core.__file__).stat()
    core = (
        tidegate.__version__,
        built.st_size,
        built.st_mtime_ns,
        os.environ.get("TIDEGATE_ISA"),
        _core.available_isas(),
    )
    known = (shapes, kinds_of_layers(config, dense, layouts), top, kv, shape, core)
    return hashlib.sha256(repr(known).encode()).hexdigest()[:16]


class Peak(NamedTuple):
    """What a dry run took; not ``is_whole``: what it had asked for when it ended for want of room."""

    nbytes: int
    is_whole: bool


def kept_peak(key: str) -> Peak | None:
    """None if there was no dry run."""
    return _kept().get(key)


def keep_peak(key: str, peak: Peak) -> None:
    """Nothing is kept where the cache folder cannot be written."""
    file, kept = _file(), _kept()
    kept.pop(key, None)
    latest = list(kept.items())[1 - KEPT_SHAPES :]
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as output:
            output.write(json.dumps(dict([*latest, (key, peak)])).encode())


def _kept() -> dict[str, Peak]:
    """Oldest first."""
    try:
        return {
            key: Peak(int(nbytes), bool(is_whole))
            for key, (nbytes, is_whole) in json.loads(_file().read_text()).items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _file() -> Path:
    return cache_folder() / _FILE

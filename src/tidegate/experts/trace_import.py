"""Traces from plain arrays, such as other projects publish.

Legend: T tokens (rows), L MoE layers, K experts per token.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.errors import CorruptFile, UsageError
from tidegate.experts.trace import CHUNK_ROWS, TraceChunk, TraceMeta, TraceWriter

Array = NDArray[Any]


def import_arrays(
    path: Path, experts_TLK: Array, offsets: Array, num_experts: int, weights_TLK: Array | None = None,
    token_T: Array | None = None, source: str = "", categories: Sequence[str] = (), expert_bytes: int = 0,
) -> None:  # fmt: skip
    """Write a trace: one token a step, sequence i = rows offsets[i]:offsets[i+1], ``categories`` one a sequence.

    Raises UsageError for shapes that do not fit together or an expert out of range.
    """
    if experts_TLK.ndim != 3 or experts_TLK.dtype.kind not in "iu":
        raise UsageError(f"experts must be whole numbers [T, L, K], not {experts_TLK.dtype} {experts_TLK.shape}")
    rows, layers, top = experts_TLK.shape
    if offsets[0] != 0 or offsets[-1] != rows or (np.diff(offsets) < 0).any():
        raise UsageError(f"offsets must rise from 0 to the number of rows, {rows:,}")
    if rows and not (experts_TLK.min() >= 0 and experts_TLK.max() < num_experts):
        raise UsageError(
            f"expert ids reach {experts_TLK.max()}; with {num_experts} experts the last is {num_experts - 1}"
        )
    for name, values, wanted in (("weights", weights_TLK, experts_TLK.shape), ("token", token_T, (rows,))):
        if values is not None and values.shape != wanted:
            raise UsageError(f"{name} has shape {values.shape}, experts ask for {wanted}")
    writer = TraceWriter(path, TraceMeta(layers, num_experts, top, source, expert_bytes))
    writer.categories = dict(enumerate(categories))
    step_T = np.arange(rows, dtype=np.int32)
    sequence_T = np.repeat(np.arange(len(offsets) - 1, dtype=np.int32), np.diff(offsets))
    position_T = (step_T - np.asarray(offsets)[sequence_T]).astype(np.int32)
    token_T = np.zeros(rows, np.int32) if token_T is None else token_T.astype(np.int32)
    try:
        for start in range(0, rows, CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            experts = experts_TLK[part].astype(np.uint8 if num_experts <= 256 else np.uint16)
            weights = (
                np.zeros(experts.shape, np.float16) if weights_TLK is None else weights_TLK[part].astype(np.float16)
            )
            sketch = np.empty((*experts.shape[:2], 0), np.float16)
            none = np.empty((*experts.shape[:2], 0, 0))
            columns = (step_T[part], sequence_T[part], position_T[part], token_T[part])
            writer.extend(TraceChunk(*columns, experts, weights, sketch, none, none))
    except BaseException:
        writer.discard()
        raise
    writer.close()


def import_npz(source: Path, path: Path, num_experts: int, expert_bytes: int = 0) -> None:
    """From an npz with ``experts`` [T, L, K] and ``offsets``; ``probs``, ``token`` and ``category`` are used when there."""
    try:
        with np.load(source, allow_pickle=False) as data:
            missing = {"experts", "offsets"} - set(data)
            if missing:
                raise UsageError(f"{source}: has no {' and no '.join(sorted(missing))}, only {', '.join(data)}")
            optional = {name: data.get(name) for name in ("probs", "token", "category")}
            experts, offsets = data["experts"], data["offsets"]
    except FileNotFoundError:
        raise UsageError(f"{source}: no such file") from None
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, AttributeError) as error:
        raise CorruptFile(source, 0, "not an npz of plain arrays", "experts and offsets", error) from None
    categories = [] if optional["category"] is None else optional["category"].tolist()
    import_arrays(
        path, experts, offsets, num_experts, optional["probs"], optional["token"], source.name, categories, expert_bytes
    )  # fmt: skip

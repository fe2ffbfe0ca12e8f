"""Fits the predictor of a loaded model to texts, and writes it where the engine looks for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tidegate.checkpoint.convert import Progress
from tidegate.checkpoint.manifest import PREDICTOR_FILE
from tidegate.engine.model import Model
from tidegate.engine.router_inputs import record_inputs
from tidegate.errors import UsageError
from tidegate.experts.gates_file import find_gates, save_gates
from tidegate.models.weights import moe_weights
from tidegate.sim.fit_gates import Recall, fit_gates

PIECE_TOKENS, LEAST_PIECES = 512, 4
MOST_TOKENS, SPOOL_BYTES, LEAST_TOKENS = 32_768, 1 << 30, 2048


@dataclass(frozen=True)
class Fit:
    """What was made, and how good it is on text that it was not fitted to."""

    path: Path
    file_bytes: int
    fitted_tokens: int
    held_out_tokens: int
    recall: Recall

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


def fit_model(
    model: Model,
    texts: Sequence[list[int]],
    *,
    output: Path | None,
    tokens: int | None,
    held_out_ratio: float,
    progress: Progress | None = None,
) -> Fit:
    """``texts``: token ids; the end of each is held out. ``tokens``: at most so many are read; without it as many as a spool
    file of 1 GiB in the output's folder holds, up to 32,768. ``progress`` as in ``record_inputs``. Raises UsageError for a model
    without experts, for too little text and where the file cannot be written; otherwise as ``generate``."""
    store, config = model.runtime.store, model.runtime.config
    if config.moe is None:
        raise UsageError(f"{store.path}: has no experts, so there is nothing to predict")
    path = output or store.path / PREDICTOR_FILE
    spool = SPOOL_BYTES // (2 * config.hidden_size * 2 * config.num_moe_layers)
    most = tokens or min(MOST_TOKENS, max(LEAST_TOKENS, spool))
    fitting, held_out = _pieces(texts, min(PIECE_TOKENS, model.context - 1), most, held_out_ratio)
    with closing(record_inputs(model, [*fitting, *held_out], path.parent, progress)) as inputs:
        num_fitting = inputs.starts[len(fitting)]
        fitted = fit_gates(
            moe_weights(model.runtime.decoder.weights), config.moe, inputs.input, inputs.chosen(), num_fitting
        )
    save_gates(path, store, fitted.gates, fitted.curves)
    assert find_gates(store, str(path)) is not None
    return Fit(path, path.stat().st_size, num_fitting, inputs.num_rows - num_fitting, fitted.recall)


def _pieces(
    texts: Sequence[list[int]], length: int, most_tokens: int, held_out_ratio: float
) -> tuple[list[list[int]], list[list[int]]]:
    """(fitting, held out): pieces of ``length`` tokens, the same share of each text."""
    total = sum(map(len, texts))
    share = min(1.0, most_tokens / total) if total else 0.0
    fitting: list[list[int]] = []
    held_out: list[list[int]] = []
    for text in texts:
        taken = text[: round(share * len(text))]
        pieces = [taken[start : start + length] for start in range(0, len(taken), length)]
        cut = len(pieces) - max(1, round(held_out_ratio * len(pieces)))
        fitting += pieces[:cut]
        held_out += pieces[cut:]
    if len(fitting) + len(held_out) < LEAST_PIECES or not fitting:
        raise UsageError(
            f"{total:,} tokens of text are too few to fit a predictor; give at least {LEAST_PIECES * length:,}"
        )
    return fitting, held_out

"""What --prefetch and --predictor come to for one model: who guesses, and the bytes that it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.checkpoint.store import ExpertStore
from tidegate.config import EngineOptions
from tidegate.errors import UsageError
from tidegate.experts.gates_file import GatesFile, find_gates, fingerprint, open_gates, own_gates_bytes
from tidegate.model_config import ModelConfig

if TYPE_CHECKING:
    from tidegate.experts.predictor_file import PredictorSource

_ZIP_MAGIC = b"PK"


@dataclass(frozen=True)
class PredictorChoice:
    """``gates``: fitted gates, else the routers' own are packed; either is in the arena, and guesses for traces in any case.
    ``source``: of a predictor that guesses for prefetch instead, kept on the heap."""

    gates: GatesFile | None = None
    source: PredictorSource | None = None
    heap_bytes: int = 0
    arena_bytes: int = 0


def choose_predictor(config: ModelConfig, options: EngineOptions, store: ExpertStore | None) -> PredictorChoice:
    """Reads headers only. ``store`` is None for a model that is not converted yet, whose routers nobody knows. Raises UsageError
    for an option that has no effect and for a file that is missing or of another model, CorruptFile."""
    name, moe = options.predictor, config.moe
    if moe is None or options.prefetch == "off":
        if name == "auto":
            return _gates(config, None)
        why = "this model has no experts" if moe is None else "--prefetch is off"
        raise UsageError(f"--predictor {name} has no effect: {why}")
    if name in ("auto", "gates"):
        return _gates(config, find_gates(store, name) if store else None)
    from tidegate.experts.predictor_file import PREDICTORS, find_predictor  # noqa: PLC0415  (a plan rarely wants them)

    if name not in PREDICTORS and _is_gates_file(Path(name)):
        return _gates(config, find_gates(store, name) if store else open_gates(Path(name), config))
    source = find_predictor(name, config.num_moe_layers, moe.num_experts, fingerprint(store) if store else "")
    nbytes = source.heap_bytes(moe.num_experts_per_tok, options.sequences, config.hidden_size)
    return replace(_gates(config, None), source=source, heap_bytes=nbytes)


def _gates(config: ModelConfig, gates: GatesFile | None) -> PredictorChoice:
    moe = config.moe
    if moe is None:
        return PredictorChoice()
    own_bytes = own_gates_bytes(config.num_moe_layers, moe.num_experts, config.hidden_size)
    return PredictorChoice(gates, arena_bytes=gates.nbytes if gates else own_bytes)


def _is_gates_file(path: Path) -> bool:
    """A predictor that was fitted to a trace is a zip; what else there is, gates will refuse."""
    try:
        with path.open("rb") as file:
            return file.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC
    except OSError:
        return False

"""What --prefetch and --predictor come to for one model: who guesses, and the bytes that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tidegate.checkpoint.store import ExpertStore
from tidegate.config import EngineOptions
from tidegate.errors import UsageError
from tidegate.experts.foreseer import pending_bytes
from tidegate.experts.gates_file import GatesFile, find_gates, fingerprint, open_gates
from tidegate.experts.predictor import Predictor
from tidegate.experts.predictor_file import PREDICTORS, UNFITTED, PredictorFile, make_unfitted, refuse_unfitted
from tidegate.model_config import ModelConfig

# Measured: what numpy takes once a predictor uses it, and once its random numbers make the matrix of the sketches.
_NUMPY_BYTES, _RANDOM_BYTES = 1 << 20, 4 << 20
_ZIP_MAGIC = b"PK"


@dataclass(frozen=True)
class PredictorChoice:
    """``gates``: matrices for the guesses of the routers' gates, kept in the arena. ``make``: a predictor that guesses instead,
    kept on the heap. Neither: the routers themselves, or nobody."""

    gates: GatesFile | None = None
    make: Callable[[], Predictor] | None = None
    heap_bytes: int = 0

    @property
    def arena_bytes(self) -> int:
        return self.gates.nbytes if self.gates else 0


def choose_predictor(config: ModelConfig, options: EngineOptions, store: ExpertStore | None) -> PredictorChoice:
    """Reads headers only. ``store`` is None for a model that is not converted yet, whose routers nobody knows. Raises UsageError
    for an option that has no effect and for a file that is missing or of another model, CorruptFile."""
    name, moe = options.predictor, config.moe
    if moe is None or options.prefetch == "off":
        if name == "auto":
            return PredictorChoice()
        why = "this model has no experts" if moe is None else "--prefetch is off"
        raise UsageError(f"--predictor {name} has no effect: {why}")
    if name in ("auto", "gates"):
        return PredictorChoice(find_gates(store, name) if store else None)
    refuse_unfitted(name)
    layers, num_experts, per_token = config.num_moe_layers, moe.num_experts, moe.num_experts_per_tok
    if name in UNFITTED:
        kind, nbytes = name, 0
        make: Callable[[], Predictor] = partial(make_unfitted, name, layers, num_experts)
    elif _is_gates_file(Path(name)):
        return PredictorChoice(find_gates(store, name) if store else open_gates(Path(name), config))
    else:
        file = PredictorFile.open(Path(name))
        file.check(layers, num_experts, fingerprint(store) if store else "")
        kind, make, nbytes = file.kind, file.load, file.arrays_bytes
        if file.sketch_dims:
            nbytes += 4 * config.hidden_size * file.sketch_dims + _RANDOM_BYTES
    nbytes += options.sequences * PREDICTORS[kind].history_bytes(layers, num_experts, per_token)
    return PredictorChoice(None, make, nbytes + pending_bytes(layers, per_token) + _NUMPY_BYTES)


def _is_gates_file(path: Path) -> bool:
    """A predictor that was fitted to a trace is a zip; what else there is, gates will refuse."""
    try:
        with path.open("rb") as file:
            return file.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC
    except OSError:
        return False

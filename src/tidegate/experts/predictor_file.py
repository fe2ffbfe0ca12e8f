"""Predictors by name, and as files: an npz of plain arrays, written by ``tidegate fit-predictor``."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.checkpoint.files import whole_file
from tidegate.errors import CorruptFile, UsageError
from tidegate.experts.foreseer import pending_bytes
from tidegate.experts.predictor import Calibration, Predictor
from tidegate.experts.predictor_class import SemanticMlp
from tidegate.experts.predictor_counts import DecayedCounts, Groups, LastToken, Markov, SlidingWindow, TokenTable
from tidegate.experts.predictor_networks import LayerMlp, Lstm, NextGate, WindowMlp

VERSION = 2
PREDICTORS: dict[str, type[Any]] = {
    "last-token": LastToken,
    "window": SlidingWindow,
    "decayed": DecayedCounts,
    "token-table": TokenTable,
    "markov": Markov,
    "groups": Groups,
    "mlp": LayerMlp,
    "semantic": SemanticMlp,
    "window-mlp": WindowMlp,
    "lstm": Lstm,
    "next-gate": NextGate,
}
UNFITTED = ("last-token", "window", "decayed")
# Measured: what numpy takes once a predictor uses it, and once its random numbers make the matrix of the sketches.
_NUMPY_BYTES, _RANDOM_BYTES = 1 << 20, 4 << 20


def kind_of(predictor: Predictor) -> str:
    """The name under which its class is known."""
    return next(name for name, cls in PREDICTORS.items() if type(predictor) is cls)


def save_predictor(path: Path, predictor: Predictor, fingerprint: str = "") -> None:
    """Write it whole; the file appears when it is complete. ``fingerprint``: that of the trace it was fitted to."""
    calibration = getattr(predictor, "calibration", None)
    arrays: dict[str, Any] = {name: np.asarray(getattr(predictor, name)) for name in getattr(predictor, "arrays", ())}
    if calibration is not None:
        arrays |= {"calibration_scores": calibration.scores, "calibration_frequencies": calibration.frequencies}
    meta = {
        "version": VERSION, "kind": kind_of(predictor), "num_layers": predictor.num_layers,
        "num_experts": predictor.num_experts, "sketch_dims": predictor.sketch_dims, "fingerprint": fingerprint,
    }  # fmt: skip
    with whole_file(path) as file:
        np.savez(file, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)


@dataclass(frozen=True)
class PredictorSource:
    """What a predictor is made from: a kind that needs no fitting, or a file whose arrays are still on disk. ``fingerprint``: of
    the routers it was fitted to, empty when unknown."""

    kind: str
    num_layers: int
    num_experts: int
    path: Path | None = None
    sketch_dims: int = 0
    fingerprint: str = ""
    arrays_bytes: int = 0

    @staticmethod
    def open(path: Path) -> PredictorSource:
        """Raises UsageError for a missing file and CorruptFile for anything that is no predictor of this version."""
        try:
            with zipfile.ZipFile(path) as file:
                nbytes = sum(info.file_size for info in file.infolist())
                with file.open("meta.npy") as member:
                    data = json.loads(np.lib.format.read_array(member, allow_pickle=False).tobytes())
            version, kind = data["version"], str(data["kind"])
            layers, experts, sketch = (int(data.get(name, 0)) for name in ("num_layers", "num_experts", "sketch_dims"))
        except FileNotFoundError:
            raise UsageError(f"--predictor {path}: no such file; make one with tidegate fit-predictor") from None
        except _BROKEN as error:
            if _holds_gates(path):
                raise UsageError(
                    f"--predictor {path}: holds gates, which guess from the states of a model, not from a trace; record a trace "
                    f"with --predictor {path}, then --predictor gates replays them"
                ) from None
            raise CorruptFile(path, 0, "not a predictor", "a file of tidegate fit-predictor", error) from None
        if version != VERSION or kind not in PREDICTORS:
            raise CorruptFile(path, 0, "predictor", f"version {VERSION}", f"{kind} of version {version}")
        return PredictorSource(kind, layers, experts, path, sketch, str(data.get("fingerprint", "")), nbytes)

    def heap_bytes(self, num_experts_per_tok: int, sequences: int, hidden_size: int) -> int:
        """What its predictor takes when it works for so many sequences at a time."""
        layers, per_token = self.num_layers, num_experts_per_tok
        history_bytes = PREDICTORS[self.kind].history_bytes(layers, self.num_experts, per_token)
        sketch_bytes = 4 * hidden_size * self.sketch_dims + _RANDOM_BYTES if self.sketch_dims else 0
        return (
            self.arrays_bytes + sequences * int(history_bytes) + pending_bytes(layers, per_token)
            + sketch_bytes + _NUMPY_BYTES
        )  # fmt: skip

    def load(self) -> Predictor:
        """Raises CorruptFile."""
        make, shape = PREDICTORS[self.kind], (self.num_layers, self.num_experts)
        predictor: Predictor
        if self.path is None:
            predictor = make(*shape)
            return predictor
        try:
            with np.load(self.path, allow_pickle=False) as data:
                arrays = {name: data[name] for name in data if name != "meta"}
            scores, frequencies = arrays.pop("calibration_scores", None), arrays.pop("calibration_frequencies", None)
            calibration = None if scores is None else Calibration(scores, frequencies)
            predictor = make(*shape, **arrays, calibration=calibration)
        except _BROKEN as error:
            raise CorruptFile(self.path, 0, "not a predictor", "a file of tidegate fit-predictor", error) from None
        return predictor


def _holds_gates(path: Path) -> bool:
    """Whether this is the other kind of predictor (gates_file.py): a safetensors file, which begins with the length of a JSON
    object."""
    try:
        with path.open("rb") as file:
            return file.read(9)[8:] == b"{"
    except OSError:
        return False


def load_predictor(path: Path) -> Predictor:
    """Raises UsageError for a missing file and CorruptFile for anything that is no predictor of this version."""
    return PredictorSource.open(path).load()


def find_predictor(name: str, num_layers: int, num_experts: int, fingerprint: str = "") -> PredictorSource:
    """``name`` is a kind that needs no fitting, or a file; an empty ``fingerprint`` is unknown. Raises UsageError for a predictor
    that was fitted to another model, and as ``PredictorSource.open``."""
    if name in UNFITTED:
        return PredictorSource(name, num_layers, num_experts)
    if name in PREDICTORS:
        raise UsageError(f"--predictor {name}: has to be fitted first; give the file that tidegate fit-predictor wrote")
    found = PredictorSource.open(Path(name))
    shape, wanted = (found.num_layers, found.num_experts), (num_layers, num_experts)
    if shape != wanted:
        raise UsageError(
            f"--predictor {name}: was fitted to {shape[0]} layers of {shape[1]} experts, not {wanted[0]} of {wanted[1]}"
        )
    if fingerprint and found.fingerprint and fingerprint != found.fingerprint:
        raise UsageError(
            f"--predictor {name}: was fitted to another model (routers {found.fingerprint}, not {fingerprint}); fit one to a "
            "trace of this model"
        )
    return found


_BROKEN = (ValueError, KeyError, TypeError, EOFError, OSError, AttributeError, NotImplementedError, zipfile.BadZipFile)

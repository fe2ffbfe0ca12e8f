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
class PredictorFile:
    """A file whose arrays are still on disk. ``fingerprint``: of the routers it was fitted to, empty when unknown."""

    path: Path
    kind: str
    num_layers: int
    num_experts: int
    sketch_dims: int
    fingerprint: str
    arrays_bytes: int

    @staticmethod
    def open(path: Path) -> PredictorFile:
        """Raises UsageError for a missing file and CorruptFile for anything that is no predictor of this version."""
        try:
            with zipfile.ZipFile(path) as file:
                nbytes = sum(info.file_size for info in file.infolist())
                with file.open("meta.npy") as member:
                    data = json.loads(np.lib.format.read_array(member, allow_pickle=False).tobytes())
            version, kind = data["version"], data["kind"]
            shape = int(data["num_layers"]), int(data["num_experts"]), int(data.get("sketch_dims", 0))
        except FileNotFoundError:
            raise UsageError(f"--predictor {path}: no such file; make one with tidegate fit-predictor") from None
        except _BROKEN as error:
            raise CorruptFile(path, 0, "not a predictor", "a file of tidegate fit-predictor", error) from None
        if version != VERSION or kind not in PREDICTORS:
            raise CorruptFile(path, 0, "predictor", f"version {VERSION}", f"{kind} of version {version}")
        return PredictorFile(path, kind, *shape, str(data.get("fingerprint", "")), nbytes)

    def check(self, num_layers: int, num_experts: int, fingerprint: str = "") -> None:
        """Raises UsageError if it was fitted to another model; an empty ``fingerprint`` is unknown."""
        shape, wanted = (self.num_layers, self.num_experts), (num_layers, num_experts)
        if shape != wanted:
            raise UsageError(
                f"--predictor {self.path}: was fitted to {shape[0]} layers of {shape[1]} experts, not {wanted[0]} of {wanted[1]}"
            )
        if fingerprint and self.fingerprint and fingerprint != self.fingerprint:
            raise UsageError(
                f"--predictor {self.path}: was fitted to another model (routers {self.fingerprint}, not {fingerprint}); fit one "
                "to a trace of this model"
            )

    def load(self) -> Predictor:
        """Raises CorruptFile."""
        try:
            with np.load(self.path, allow_pickle=False) as data:
                arrays = {name: data[name] for name in data if name != "meta"}
            scores, frequencies = arrays.pop("calibration_scores", None), arrays.pop("calibration_frequencies", None)
            calibration = None if scores is None else Calibration(scores, frequencies)
            predictor: Predictor = PREDICTORS[self.kind](
                self.num_layers, self.num_experts, **arrays, calibration=calibration
            )
        except _BROKEN as error:
            raise CorruptFile(self.path, 0, "not a predictor", "a file of tidegate fit-predictor", error) from None
        return predictor


def load_predictor(path: Path) -> Predictor:
    """Raises UsageError for a missing file and CorruptFile for anything that is no predictor of this version."""
    return PredictorFile.open(path).load()


def find_predictor(name: str, num_layers: int, num_experts: int, fingerprint: str = "") -> Predictor | None:
    """``none``, a kind that needs no fitting, or a file. Raises UsageError for one that was fitted to another model, and as
    ``load_predictor``."""
    if name == "none":
        return None
    if name in UNFITTED:
        return make_unfitted(name, num_layers, num_experts)
    refuse_unfitted(name)
    file = PredictorFile.open(Path(name))
    file.check(num_layers, num_experts, fingerprint)
    return file.load()


def make_unfitted(name: str, num_layers: int, num_experts: int) -> Predictor:
    """One of UNFITTED."""
    made: Predictor = PREDICTORS[name](num_layers, num_experts)
    return made


def refuse_unfitted(name: str) -> None:
    """Raises UsageError for a kind where a file is needed."""
    if name in PREDICTORS and name not in UNFITTED:
        raise UsageError(f"--predictor {name}: has to be fitted first; give the file that tidegate fit-predictor wrote")


_BROKEN = (ValueError, KeyError, TypeError, EOFError, OSError, AttributeError, NotImplementedError, zipfile.BadZipFile)

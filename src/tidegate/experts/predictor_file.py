"""Predictors by name, and as files: an npz of plain arrays, written by ``tidegate fit-predictor``."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.checkpoint.files import whole_file
from tidegate.errors import CorruptFile, UsageError
from tidegate.experts.predictor import Calibration, Predictor
from tidegate.experts.predictor_class import SemanticMlp
from tidegate.experts.predictor_counts import DecayedCounts, Groups, LastToken, Markov, SlidingWindow, TokenTable
from tidegate.experts.predictor_networks import LayerMlp, Lstm, NextGate, WindowMlp

VERSION = 1
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


def save_predictor(path: Path, predictor: Predictor) -> None:
    """Write it whole; the file appears when it is complete."""
    calibration = getattr(predictor, "calibration", None)
    arrays: dict[str, Any] = {name: np.asarray(getattr(predictor, name)) for name in getattr(predictor, "arrays", ())}
    if calibration is not None:
        arrays |= {"calibration_scores": calibration.scores, "calibration_frequencies": calibration.frequencies}
    meta = {
        "version": VERSION, "kind": kind_of(predictor), "num_layers": predictor.num_layers,
        "num_experts": predictor.num_experts,
    }  # fmt: skip
    with whole_file(path) as file:
        np.savez(file, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)


def load_predictor(path: Path) -> Predictor:
    """Raises UsageError for a missing file and CorruptFile for anything that is no predictor of this version."""
    try:
        with np.load(path, allow_pickle=False) as data:
            arrays = {name: data[name] for name in data}
        meta = json.loads(arrays.pop("meta").tobytes())
        version, cls = meta["version"], PREDICTORS.get(meta["kind"])
        if version != VERSION or cls is None:
            raise CorruptFile(path, 0, "predictor", f"version {VERSION}", f"{meta['kind']} of version {version}")
        scores, frequencies = arrays.pop("calibration_scores", None), arrays.pop("calibration_frequencies", None)
        calibration = None if scores is None else Calibration(scores, frequencies)
        predictor: Predictor = cls(meta["num_layers"], meta["num_experts"], **arrays, calibration=calibration)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such predictor; fit one with tidegate fit-predictor") from None
    except (ValueError, KeyError, TypeError, EOFError, OSError, AttributeError, zipfile.BadZipFile) as error:
        raise CorruptFile(path, 0, "not a predictor", "a file of tidegate fit-predictor", error) from None
    return predictor


def find_predictor(name: str, num_layers: int, num_experts: int) -> Predictor | None:
    """``none``, a kind that needs no fitting, or a file. Raises UsageError for one that was fitted to another shape."""
    if name == "none":
        return None
    if name in UNFITTED:
        made: Predictor = PREDICTORS[name](num_layers, num_experts)
        return made
    if name in PREDICTORS:
        raise UsageError(f"--predictor {name}: has to be fitted first; give the file that tidegate fit-predictor wrote")
    predictor = load_predictor(Path(name))
    shape, wanted = (predictor.num_layers, predictor.num_experts), (num_layers, num_experts)
    if shape != wanted:
        raise UsageError(f"{name}: fitted to {shape[0]} layers of {shape[1]} experts, not {wanted[0]} of {wanted[1]}")
    return predictor

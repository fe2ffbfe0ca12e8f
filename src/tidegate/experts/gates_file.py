"""A fitted predictor of routing, kept beside the store whose routers it was fitted to: one safetensors file.

For every source i (docs/format.md): ``matrix.i``, packed int8-g32, and ``bias.i``, float32, both padded to 64 bytes. The
metadata say which routers it belongs to and where the odds start. Made by ``tidegate fit-predictor``.

L MoE layers, E experts, D hidden, N outputs of a source (E, or 2 E for all but the last).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tidegate.backends.base import ByteArray, F32Array, Linear
from tidegate.checkpoint.base import TensorInfo
from tidegate.checkpoint.files import InputFile, whole_file
from tidegate.checkpoint.reading import read_into
from tidegate.checkpoint.safetensors import METADATA, read_header, read_metadata
from tidegate.checkpoint.store import ExpertStore
from tidegate.errors import CorruptFile, UsageError
from tidegate.experts.lookahead import REACH, Curve
from tidegate.model_config import ModelConfig
from tidegate.quant.formats import Format
from tidegate.quant.native import pack
from tidegate.units import align_up

PREDICTOR_FILE = "predictor.safetensors"
GATES_FORMAT = Format("int8", 32)
_KIND, _VERSION, _ALIGNMENT = "tidegate-predictor", "1", 64
_ROUTER_TENSORS = ("router", "router_bias", "router_correction", "mlp_norm", "mlp_norm_bias")


@dataclass(frozen=True)
class Gate:
    """What one source says of its layers: ``matrix_ND`` times the source plus ``bias_N``."""

    matrix_ND: NDArray[np.float32]
    bias_N: NDArray[np.float32]


@dataclass(frozen=True)
class GatesFile:
    """An open predictor; its matrices are still on disk."""

    path: Path
    model: str
    fingerprint: str
    curves: tuple[Curve, ...]
    nbytes: int
    _tensors: dict[str, TensorInfo]
    _shape: tuple[int, int, int]

    def read(self, memory: ByteArray) -> list[Linear]:
        """One a source, as views of ``memory``, which has ``nbytes``. Raises ReadFailed."""
        start = min(info.offset for info in self._tensors.values())
        read_into(self.path, start, memory)
        num_layers, num_experts, hidden = self._shape
        out = []
        for source in range(num_layers):
            n = _outputs(source, num_layers, num_experts)
            packed, bias = (self._tensors[f"{name}.{source}"].offset - start for name in ("matrix", "bias"))
            values: F32Array = memory[bias : bias + 4 * n].view(np.float32)
            matrix = memory[packed : packed + GATES_FORMAT.packed_bytes(n, hidden)]
            out.append(Linear(f"predictor.{source}", matrix, GATES_FORMAT, n, hidden, values))
        return out


def fingerprint(store: ExpertStore) -> str:
    """Of the routers and their norms, which are the same however the experts are packed."""
    parts = [f"{name}:{entry.crc32}" for name, entry in store.dense.items() if name.split(".")[-1] in _ROUTER_TENSORS]
    return f"{zlib.crc32(';'.join(sorted(parts)).encode()):08x}"


def find_gates(store: ExpertStore, option: str) -> GatesFile | None:
    """``option`` is that of --predictor: "auto" takes the file in the store's folder if there is one, "gates" none; anything else
    is a path. Raises as ``open_gates``, and UsageError for a file that was fitted to another model."""
    path = store.path / PREDICTOR_FILE if option == "auto" else Path(option)
    if option == "gates" or store.config.moe is None or (option == "auto" and not path.exists()):
        return None
    gates = open_gates(path, store.config)
    if gates.fingerprint != fingerprint(store):
        raise UsageError(
            f"{path}: was fitted to {gates.model} (routers {gates.fingerprint}), not to {store.path} "
            f"({fingerprint(store)}); run tidegate fit-predictor on this model, or use --predictor gates"
        )
    return gates


def open_gates(path: Path, config: ModelConfig) -> GatesFile:
    """Of whichever model has this config. Raises UsageError for a missing file, CorruptFile."""
    if not path.is_file():
        raise UsageError(
            f"--predictor {path}: no such file; make one with tidegate fit-predictor, or use --predictor gates"
        )
    file = InputFile(path)
    meta = read_metadata(file)
    if meta.get("kind") != _KIND or meta.get("version") != _VERSION:
        got = f"{meta.get('kind')} of version {meta.get('version')}"
        raise CorruptFile(path, 8, "not a predictor", f"{_KIND} of version {_VERSION}", got)
    assert config.moe is not None
    shape = (config.num_moe_layers, config.moe.num_experts, config.hidden_size)
    tensors = read_header(file)
    wanted = {name: size for source in range(shape[0]) for name, size in _sizes(source, *shape).items()}
    if {name: info.nbytes for name, info in tensors.items()} != wanted:
        raise CorruptFile(path, 8, "tensors of the predictor", wanted, {n: info.nbytes for n, info in tensors.items()})
    model, curves = str(meta.get("model")), _curves(path, meta.get("curves", ""))
    return GatesFile(path, model, str(meta.get("fingerprint")), curves, sum(wanted.values()), tensors, shape)


def save_gates(path: Path, store: ExpertStore, gates: Sequence[Gate], curves: Sequence[Curve]) -> None:
    """Write it whole; the file appears when it is complete. Raises UsageError where it cannot be written."""
    meta = {
        "kind": _KIND, "version": _VERSION, "fingerprint": fingerprint(store), "format": str(GATES_FORMAT),
        "model": str(store.manifest.source.get("name", store.path.name)), "curves": json.dumps(curves),
    }  # fmt: skip
    header: dict[str, object] = {METADATA: meta}
    parts, offset = [], 0
    for source, gate in enumerate(gates):
        matrix, bias = pack(gate.matrix_ND, GATES_FORMAT), gate.bias_N.astype(np.float32).view(np.uint8)
        for name, dtype, values in (("matrix", "U8", matrix), ("bias", "F32", bias)):
            padded = np.zeros(align_up(values.size, _ALIGNMENT), np.uint8)
            padded[: values.size] = values
            shape = [padded.size if dtype == "U8" else padded.size // 4]
            header[f"{name}.{source}"] = {
                "dtype": dtype, "shape": shape, "data_offsets": [offset, offset + padded.size],
            }  # fmt: skip
            offset += padded.size
            parts.append(padded)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)  # direct reads begin at a page
    try:
        with whole_file(path) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.writelines(part.data for part in parts)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}; choose another place with --output") from None


def _outputs(source: int, num_layers: int, num_experts: int) -> int:
    return min(REACH, num_layers - source) * num_experts


def _sizes(source: int, num_layers: int, num_experts: int, hidden: int) -> dict[str, int]:
    n = _outputs(source, num_layers, num_experts)
    nbytes = {"matrix": GATES_FORMAT.packed_bytes(n, hidden), "bias": 4 * n}
    return {f"{name}.{source}": align_up(size, _ALIGNMENT) for name, size in nbytes.items()}


def _curves(path: Path, text: str) -> tuple[Curve, ...]:
    try:
        curves = tuple((float(a), float(b), float(c)) for a, b, c in json.loads(text))
    except (ValueError, TypeError):
        curves = ()
    if len(curves) != REACH or not np.isfinite(curves).all():
        raise CorruptFile(path, 8, "curves of the predictor", f"{REACH} times three numbers", text)
    return curves

"""Gates that guess at routers (models/guesses.py), packed: in memory, and as a file beside the store whose routers they were
fitted to.

The file (docs/format.md) is one safetensors file: for every gate its matrix, packed int8-g32, and its bias, float32, both padded
to 64 bytes. The metadata say which routers it belongs to and where the odds start. Made by ``tidegate fit-predictor``.

L MoE layers, E experts, D hidden.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tidegate.backends.operands import ByteArray, F32Array, Linear
from tidegate.checkpoint.files import InputFile, whole_file
from tidegate.checkpoint.manifest import PREDICTOR_FILE
from tidegate.checkpoint.reading import read_into
from tidegate.checkpoint.safetensors import METADATA, read_header, read_metadata
from tidegate.checkpoint.store import ExpertStore
from tidegate.errors import CorruptFile, UsageError
from tidegate.experts.lookahead import DISTANCES, Curve
from tidegate.model_config import ModelConfig
from tidegate.quant.formats import Format
from tidegate.quant.native import pack
from tidegate.units import align_up

GATES_FORMAT = Format("int8", 32)
_KIND, _VERSION, _ALIGNMENT = "tidegate-predictor", "2", 64
_BIAS = ".bias"
_ROUTER_TENSORS = ("router", "router_bias", "router_correction", "mlp_norm", "mlp_norm_bias")


@dataclass(frozen=True)
class Gate:
    """Scores of a layer's experts: ``matrix_ED`` times a state plus ``bias_E``."""

    matrix_ED: NDArray[np.float32]
    bias_E: NDArray[np.float32]


def start_gate(layer: int) -> str:
    """Name of the gate of MoE layer ``layer`` on the state at its own start, under the norm of its router."""
    return f"start.{layer}"


def next_gate(layer: int) -> str:
    """Name of the gate of the MoE layer after ``layer`` on what the router of ``layer`` saw."""
    return f"next.{layer}"


def gate_names(num_layers: int) -> list[str]:
    """Of all gates that can be, in the order of the file."""
    return [*map(start_gate, range(num_layers)), *map(next_gate, range(num_layers - 1))]


def own_gates_bytes(num_layers: int, num_experts: int, hidden: int) -> int:
    """What pack_gates needs for the routers' own gates: no start of the first layer."""
    return 2 * (num_layers - 1) * sum(_sizes(num_experts, hidden))


def pack_gates(gates: Iterable[tuple[str, Gate]], memory: ByteArray, threads: int) -> dict[str, Linear]:
    """Into ``memory``, which has room for them."""
    out, start = {}, 0
    for name, gate in gates:
        sizes = _sizes(*gate.matrix_ED.shape)
        linear = _linear(name, memory[start : start + sum(sizes)], *gate.matrix_ED.shape)
        pack(gate.matrix_ED, GATES_FORMAT, threads, linear.packed)
        assert linear.bias is not None
        linear.bias[:] = gate.bias_E
        out[name] = linear
        start += sum(sizes)
    return out


@dataclass(frozen=True)
class GatesFile:
    """An open predictor; its matrices are still on disk."""

    path: Path
    model: str
    fingerprint: str
    curves: tuple[Curve, ...]
    nbytes: int
    _start: int
    _shape: tuple[int, int, int]

    def read(self, memory: ByteArray) -> dict[str, Linear]:
        """The gates by name, as views of ``memory``, which has ``nbytes``. Raises ReadFailed."""
        read_into(self.path, self._start, memory)
        num_layers, num_experts, hidden = self._shape
        size = sum(_sizes(num_experts, hidden))
        return {
            name: _linear(name, memory[index * size : (index + 1) * size], num_experts, hidden)
            for index, name in enumerate(gate_names(num_layers))
        }


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
    found = {name: (info.offset, info.nbytes) for name, info in tensors.items()}
    start = min((offset for offset, _ in found.values()), default=0)
    wanted = {name: (start + offset, size) for name, offset, size in _places(gate_names(shape[0]), *shape[1:])}
    if found != wanted:
        raise CorruptFile(path, 8, "places of the predictor's tensors", wanted, found)
    model, curves = str(meta.get("model")), _curves(path, meta.get("curves", ""))
    nbytes = sum(size for _, size in wanted.values())
    return GatesFile(path, model, str(meta.get("fingerprint")), curves, nbytes, start, shape)


def save_gates(path: Path, store: ExpertStore, gates: Mapping[str, Gate], curves: Sequence[Curve]) -> None:
    """Write it whole; the file appears when it is complete. ``gates``: all of gate_names. Raises UsageError where it cannot be
    written."""
    meta = {
        "kind": _KIND, "version": _VERSION, "fingerprint": fingerprint(store), "format": str(GATES_FORMAT),
        "model": str(store.manifest.source.get("name", store.path.name)), "curves": json.dumps(curves),
    }  # fmt: skip
    names = gate_names(len(store.layouts))
    num_experts, hidden = gates[names[0]].matrix_ED.shape
    header: dict[str, object] = {METADATA: meta}
    for name, offset, size in _places(names, num_experts, hidden):
        dtype, shape = ("F32", [size // 4]) if name.endswith(_BIAS) else ("U8", [size])
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
    memory = np.zeros(len(names) * sum(_sizes(num_experts, hidden)), np.uint8)
    pack_gates(((name, gates[name]) for name in names), memory, 1)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)  # direct reads begin at a page
    try:
        with whole_file(path) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.write(memory.data)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}; choose another place with --output") from None


def _sizes(num_experts: int, hidden: int) -> tuple[int, int]:
    """Bytes of a gate's matrix and of its bias."""
    matrix = GATES_FORMAT.packed_bytes(num_experts, hidden)
    return align_up(matrix, _ALIGNMENT), align_up(4 * num_experts, _ALIGNMENT)


def _places(names: Sequence[str], num_experts: int, hidden: int) -> Iterator[tuple[str, int, int]]:
    """(tensor, offset, bytes)"""
    offset = 0
    for name in names:
        for part, size in zip((name, name + _BIAS), _sizes(num_experts, hidden), strict=True):
            yield part, offset, size
            offset += size


def _linear(name: str, memory: ByteArray, num_experts: int, hidden: int) -> Linear:
    matrix = memory[: GATES_FORMAT.packed_bytes(num_experts, hidden)]
    first = _sizes(num_experts, hidden)[0]
    bias: F32Array = memory[first : first + 4 * num_experts].view(np.float32)
    return Linear(f"predictor.{name}", matrix, GATES_FORMAT, num_experts, hidden, bias)


def _curves(path: Path, text: str) -> tuple[Curve, ...]:
    try:
        curves = tuple((float(a), float(b), float(c)) for a, b, c in json.loads(text))
    except (ValueError, TypeError):
        curves = ()
    if len(curves) != DISTANCES or not np.isfinite(curves).all():
        raise CorruptFile(path, 8, "curves of the predictor", f"{DISTANCES} times three numbers", text)
    return curves

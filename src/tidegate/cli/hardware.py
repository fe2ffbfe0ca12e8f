"""``tidegate hardware``: measure this machine once; plans and forecasts use the result."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from tidegate.backends.cuda.probe import measure_cuda, torch_with_cuda
from tidegate.checkpoint.files import cache_folder
from tidegate.checkpoint.manifest import EXPERTS_FILE
from tidegate.checkpoint.open import BUILTIN_NAME, BUILTIN_STORE
from tidegate.cli.arguments import Argument, Flag
from tidegate.errors import UsageError
from tidegate.planner.machine import Machine, Rates, keep_machine
from tidegate.planner.measure import measure_machine
from tidegate.quant.formats import Format
from tidegate.units import format_bytes, format_seconds

MOST_BUSY_RATIO, MOST_DRIFT_RATIO, TRIES = 0.05, 0.25, 3
SHOWN_TOKENS = 4


def command(
    path: Annotated[
        str | None,
        Argument(help="A model, store or folder on the disk to measure; default: the cache."),
    ] = None,
    threads: Annotated[int | None, Flag(min=1, help="Compute threads; default: the cores there are.")] = None,
    as_json: Annotated[bool, Flag("--json", help="Print one JSON object.")] = False,
) -> int:
    """Takes under 20 seconds. A result taken while others computed is shown, but not kept: exit code 1."""
    where = _file_to_read(path, _writable_cache())
    machine: Machine | None = None
    print("measuring memory, kernels, disk and engine for up to 20 seconds", file=sys.stderr, flush=True)
    for number in range(TRIES):
        found = measure_machine(where, threads or len(os.sched_getaffinity(0)))
        if machine is None or _unrest(found) < _unrest(machine):
            machine = found
        if _unrest(machine) <= 1:
            break
        again = "; measuring again" if number + 1 < TRIES else ""
        why = f"others use {found.busy_ratio:.0%} of the processors, and speeds moved by {found.drift_ratio:.0%}"
        print(f"{why} meanwhile{again}", file=sys.stderr)
    assert machine is not None
    torch, missing = torch_with_cuda()
    if torch is not None:
        machine = replace(machine, cuda=measure_cuda(torch))
    else:
        print(f"CUDA: not measured, {missing}", file=sys.stderr)
    print(json.dumps(machine.to_json()) if as_json else "\n".join(_lines(machine)))
    if machine.busy_ratio > MOST_BUSY_RATIO:
        print("tidegate: not kept, because the machine is busy; run it again when it is idle", file=sys.stderr)
        return 1
    kept = keep_machine(machine, where)
    print(f"kept in {kept}", file=sys.stderr)
    return 0


def _unrest(machine: Machine) -> float:
    """At most 1 if the measurement can be trusted."""
    return max(machine.busy_ratio / MOST_BUSY_RATIO, machine.drift_ratio / MOST_DRIFT_RATIO)


def _writable_cache() -> Path:
    """Where the result will be kept. Raises UsageError if it could not."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror}; set TIDEGATE_CACHE") from None
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{folder}: cannot be written to; set TIDEGATE_CACHE")
    return folder


def _file_to_read(name: str | None, cache: Path) -> Path:
    """A store's experts, a model's largest file, or a folder to write to: the ``cache``, if none is named."""
    if name is None:
        return cache
    path = BUILTIN_STORE if name == BUILTIN_NAME else Path(name).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        raise UsageError(f"{path}: no such file or folder")
    if (path / EXPERTS_FILE).exists():
        return path / EXPERTS_FILE
    files = [file for file in path.iterdir() if file.suffix in (".safetensors", ".gguf")]
    return max(files, key=lambda file: file.stat().st_size, default=path)


def _lines(machine: Machine) -> list[str]:
    memory = ", ".join(f"{_gb(rate)} with {count}" for count, rate in machine.memory.items())
    lines = [
        f"memory reads: {memory} thread{'s' if machine.threads > 1 else ''}",
        "weights when each serves 1, 2 and 4 tokens:",
    ]
    for fmt, rates in machine.dense.items():
        experts = f", experts {_by_tokens(machine.experts[fmt])}" if fmt in machine.experts else ""
        lines.append(f"{fmt:11} {_by_tokens(rates)}{experts}; prompts {_gmacs(machine, fmt):.0f} G multiply-adds/s")
    lines.append("int4 by instruction set: " + ", ".join(f"{name} {_gb(rate)}" for name, rate in machine.isas.items()))
    for disk in machine.disk:
        lines.append(
            f"disk reads of {format_bytes(disk.block_bytes)}: {format_seconds(disk.latency_s)} alone, "
            f"{_gb(disk.bytes_per_s)} when queued, {_gb(disk.beside_bytes_per_s)} beside computation"
        )
    lines.append(f"beside loads the kernels run at {machine.beside_loads_ratio:.0%}")
    book, once = machine.bookkeeping, machine.overhead
    lines.append(
        f"an idle loader needs {format_seconds(book.wake_s)} to wake up and {format_seconds(book.rouse_s)} to be told; asking "
        f"for a load takes {format_seconds(book.miss_s)}, {format_seconds(book.ahead_s)} ahead of its need; a guess takes "
        f"{format_seconds(book.gate.base_s)} and {format_seconds(book.gate.each_s)} for each expert in it that is not here"
    )
    lines.append(
        f"a step costs {format_seconds(once.step_s)} beside its weights and {format_seconds(once.layer.base_s)} a layer and "
        f"{format_seconds(once.layer.each_s)} for each expert of a token; the process takes "
        f"{format_bytes(machine.runtime_bytes)} before a model; others used {machine.busy_ratio:.0%} of the processors"
    )
    if machine.cuda is not None:
        cuda = machine.cuda
        products = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in cuda.macs_per_s.items())
        lines.append(
            f"{cuda.name}: {format_bytes(cuda.free_bytes)} of {format_bytes(cuda.total_bytes)} free, reads "
            f"{_gb(cuda.memory_bytes_per_s)}, pinned copies {_gb(cuda.to_device_bytes_per_s)} there and "
            f"{_gb(cuda.from_device_bytes_per_s)} back; G multiply-adds/s: {products}"
        )
    return lines


def _by_tokens(rates: Rates) -> str:
    """GB/s at one token and at a few."""
    return ", ".join(f"{rate / 1e9:.1f}" for count, rate in rates.items() if count <= SHOWN_TOKENS) + " GB/s"


def _gmacs(machine: Machine, fmt: str) -> float:
    return machine.prefill_macs_per_s(Format.parse(fmt)) / 1e9


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"

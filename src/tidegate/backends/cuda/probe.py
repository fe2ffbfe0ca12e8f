"""Rates of a CUDA device, through torch where it is installed: copies both ways from pinned memory, reads of its own memory,
products. Never imported unless asked for."""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

COPY_BYTES, MATRIX, ROUNDS = 256 << 20, 4096, 5


@dataclass(frozen=True)
class CudaRates:
    """``to_device`` and ``from_device``: copies between pinned host memory and the device; ``memory``: bytes that its kernels
    read a second; ``macs``: multiply-adds a second of large products, by dtype; ``free_bytes`` of ``total_bytes`` just now."""

    name: str
    total_bytes: int
    free_bytes: int
    to_device_bytes_per_s: float
    from_device_bytes_per_s: float
    memory_bytes_per_s: float
    macs_per_s: dict[str, float]


def torch_with_cuda() -> tuple[Any | None, str]:
    """The module and nothing, or None and what is missing."""
    try:
        CDLL("libcuda.so.1")
    except OSError:
        return None, "there is no CUDA driver"
    if find_spec("torch") is None:
        return None, "torch is not installed"
    import torch  # noqa: PLC0415  (seconds and hundreds of megabytes)

    return (torch, "") if torch.cuda.is_available() else (None, "torch finds no CUDA device")


def measure_cuda(torch: Any, index: int = 0) -> CudaRates:
    """About a second, half a gigabyte of each memory. ``torch`` has a CUDA device."""
    device = torch.device("cuda", index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    here, there = (torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    copies = [
        COPY_BYTES / _typical_s(torch, dest, source) for dest, source in ((here, host), (host, here), (there, here))
    ]
    macs = {}
    for name in ("float32", "float16", "bfloat16"):
        matrix = torch.ones((MATRIX, MATRIX), dtype=getattr(torch, name), device=device)
        out = torch.empty_like(matrix)
        macs[name] = MATRIX**3 / _event_s(torch, lambda matrix=matrix, out=out: torch.matmul(matrix, matrix, out=out))
    # A copy within the device reads and writes every byte.
    return CudaRates(
        torch.cuda.get_device_name(device), total_bytes, free_bytes, copies[0], copies[1], 2 * copies[2], macs
    )  # fmt: skip


def _typical_s(torch: Any, dest: Any, source: Any) -> float:
    return _event_s(torch, lambda: dest.copy_(source, non_blocking=True))


def _event_s(torch: Any, run: Any) -> float:
    """Seconds on the device: the median, after one round that does not count."""
    found = []
    for _ in range(ROUNDS + 1):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop) / 1e3)
    return float(np.median(found[1:]))

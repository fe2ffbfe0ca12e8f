"""Bytes that the loader counts are bytes that the block device delivers: nothing is read twice, nothing ahead of time."""

import mmap
import os
from pathlib import Path

import pytest

from engines import fixed_process, load_model
from stores import qwen_config, write_store

__all__ = ["fixed_process"]
_PROBE_BYTES = 4 << 20


def _device_bytes() -> int:
    """What the storage layer has fetched for this process, all threads."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


@pytest.fixture
def counting_folder(tmp_path: Path) -> Path:
    """Skips where direct reads are not possible or nobody counts them (tmpfs, some network and layered file systems)."""
    path = tmp_path / "probe"
    path.write_bytes(os.urandom(_PROBE_BYTES))
    try:
        before = _device_bytes()
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (OSError, StopIteration) as error:
        pytest.skip(f"no direct reads, or no /proc/self/io: {error}")
    try:
        os.fsync(fd)
        done = os.preadv(fd, [mmap.mmap(-1, _PROBE_BYTES)], 0)
    finally:
        os.close(fd)
    counted = _device_bytes() - before
    if done != _PROBE_BYTES or not 0.97 * _PROBE_BYTES <= counted <= 1.2 * _PROBE_BYTES:
        pytest.skip(f"this file system counted {counted} of {done} bytes that were read directly")
    return tmp_path


@pytest.mark.parametrize("prefetch", ["off", "auto"])
def test_device_bytes_are_logical_bytes(counting_folder: Path, prefetch: str) -> None:
    config = qwen_config(
        hidden_size=256, moe_intermediate_size=256, num_hidden_layers=3, num_experts=32, num_experts_per_tok=4
    )
    store = write_store(counting_folder / "store", config)
    with load_model(store) as model:
        needs = model.plan.needs
    with load_model(store, memory=needs.budget_for(needs.num_layers * 6), prefetch=prefetch) as model:
        model.generate([1], max_tokens=4, ignore_eos=True)  # whatever the first steps page in
        logical, device = model.stats()["read_bytes"], _device_bytes()
        model.generate([1], max_tokens=90, ignore_eos=True, temperature=1.0)
        logical, device = model.stats()["read_bytes"] - logical, _device_bytes() - device
    assert logical > 20e6
    assert abs(device - logical) <= 0.03 * logical

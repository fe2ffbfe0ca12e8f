"""Loads of experts from disk, cold and direct: latency and bandwidth by blob size, threads and chunk size.

    python benchmarks/loader.py [FOLDER] [--file 2GiB]

FOLDER must be on the disk to measure. Slots are filled as a decode step does it: a few loads are queued, then awaited
in order. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from tidegate.experts.base import ExpertKey
from tidegate.experts.loader import Blob, LoaderOptions, NativeLoader
from tidegate.memory.arena import Arena
from tidegate.memory.ledger import Ledger
from tidegate.units import format_bytes, parse_bytes

SLOTS = 8
MEASURED_BYTES = 512 << 20


class RandomBlobs:
    """Blobs of one size at random places of a file, none twice."""

    def __init__(self, path: Path, file_bytes: int, blob_bytes: int) -> None:
        self.paths = [path]
        self.blob_bytes = blob_bytes
        self.order = np.random.default_rng(1).permutation(file_bytes // blob_bytes)

    def blob(self, key: ExpertKey) -> Blob:
        return Blob(0, int(self.order[key.expert]) * self.blob_bytes, self.blob_bytes, 0)


def write_file(path: Path, nbytes: int) -> None:
    part = np.random.default_rng(0).integers(0, 256, 32 << 20, dtype=np.uint8)
    with path.open("wb") as file:
        for start in range(0, nbytes, part.size):
            file.write(np.roll(part, start)[: nbytes - start].data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(table: RandomBlobs, slots: list[np.ndarray], options: LoaderOptions, queued: int) -> dict[str, float]:
    loader = NativeLoader(table, slots, options)
    count = min(len(table.order), MEASURED_BYTES // table.blob_bytes) // queued * queued
    latencies_s = []
    start = time.perf_counter()
    for first in range(0, count, queued):
        begin = time.perf_counter()
        for slot in range(queued):
            loader.load(ExpertKey(0, first + slot), slot, demand=True)
        for slot in range(queued):
            loader.wait(slot)
            latencies_s.append(time.perf_counter() - begin)
    wall_s = time.perf_counter() - start
    loader.close()
    return {
        "first_ms": 1e3 * float(np.median(latencies_s[::queued])),
        "last_ms": 1e3 * float(np.median(latencies_s[queued - 1 :: queued])),
        "gb_per_s": count * table.blob_bytes / wall_s / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--file", type=lambda text: parse_bytes(text, "--file"), default=2 << 30)
    options = parser.parse_args()
    ledger = Ledger(1 << 40)
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "blobs.bin"
        write_file(path, options.file)
        print("blob      chunk     threads queued  first ms  last ms   GB/s")
        for blob_bytes in (512 << 10, 1 << 20, 4 << 20):
            arena = Arena(ledger, SLOTS * blob_bytes)
            slots = [arena.carve(ledger.account("experts"), blob_bytes) for _ in range(SLOTS)]
            table = RandomBlobs(path, options.file, blob_bytes)
            for chunk_bytes in sorted({512 << 10, min(1 << 20, blob_bytes), blob_bytes}):
                for threads, queued in ((1, 1), (1, SLOTS), (2, SLOTS), (4, SLOTS)):
                    row = measure(table, slots, LoaderOptions(threads, chunk_bytes), queued)
                    rows.append({"blob_bytes": blob_bytes, "chunk_bytes": chunk_bytes, "threads": threads} | row)
                    print(
                        f"{format_bytes(blob_bytes):9s} {format_bytes(chunk_bytes):9s} {threads:7d} {queued:6d}"
                        f"  {row['first_ms']:8.2f} {row['last_ms']:8.2f} {row['gb_per_s']:6.2f}"
                    )
            arena.close()
    print(json.dumps({"benchmark": "loader", "rows": rows}))


if __name__ == "__main__":
    main()

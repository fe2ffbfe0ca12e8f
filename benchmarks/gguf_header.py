"""GGUF: how fast a header with a large vocabulary is read, and how fast blocks become floats or our codes.

    python benchmarks/gguf_header.py [FILE]

Without FILE a header like a large model's is made up: 150,000 tokens and merges, 1,000 tensors. The last line is one JSON
object; rates are millions of weights a second on one core.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tidegate.checkpoint import gguf_blocks
from tidegate.checkpoint.gguf_header import read_header

TOKENS, TENSORS = 150_000, 1_000
ROWS, K = 1024, 2048


def best_s(run: Callable[[], object], tries: int = 7) -> float:
    """Seconds of the fastest of several tries."""
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def write_large_header(path: Path) -> None:
    rng = random.Random(0)
    words = [bytes(rng.choices(b"abcdefghijklmnop", k=rng.randint(1, 12))) for _ in range(TOKENS)]
    arrays = (b"tokens", words), (b"merges", [word + b" " + word for word in words])
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, TENSORS, len(arrays)))
        for name, values in arrays:
            file.write(text(b"tokenizer.ggml." + name) + struct.pack("<IIQ", 9, 8, len(values)))
            file.write(b"".join(map(text, values)))
        for n in range(TENSORS):
            file.write(text(f"blk.{n}.ffn_gate_exps.weight".encode()) + struct.pack("<IQQIQ", 2, 32, 8, 0, n * 1024))
        file.write(bytes(TENSORS * 1024 + 64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    path = parser.parse_args().file
    with tempfile.TemporaryDirectory() as folder:
        if path is None:
            path = Path(folder) / "large.gguf"
            write_large_header(path)
        header = read_header(path)
        header_ms = 1e3 * best_s(lambda: read_header(path))
        print(f"header of {header.data_offset:,} B, {len(header.tensors)} tensors: {header_ms:.1f} ms")
    rates = {}
    for name in filter(gguf_blocks.native_format, gguf_blocks.READABLE):
        kind = gguf_blocks.BLOCK_TYPES[name]
        raw = np.random.default_rng(0).integers(0, 50, ROWS * K // kind.weights * kind.nbytes, dtype=np.uint8)
        if name == "MXFP4":
            raw[:: kind.nbytes] = 120  # an exponent that real files have
        jobs = {
            "dequantize": lambda name=name, raw=raw: gguf_blocks.dequantize(name, raw, ROWS, K),
            "codes": lambda name=name, raw=raw: gguf_blocks.codes(name, raw, ROWS, K),
        }
        rates[name] = {job: round(ROWS * K / best_s(run) / 1e6) for job, run in jobs.items()}
        print(f"{name:6} " + ", ".join(f"{job} {rate} M weights/s" for job, rate in rates[name].items()))
    print(json.dumps({"header_ms": round(header_ms, 2), "header_bytes": header.data_offset, "mweights_per_s": rates}))


if __name__ == "__main__":
    main()

"""Speed of the packed products: GB/s of weights and GFLOP/s per format and number of tokens, beside the machine's ceiling.

    python benchmarks/kernels.py [--threads 2] [--isa avx512] [--formats int4-g32,int8-g32] [--moe] [--busy]

Weights lie in a block of huge pages far larger than the caches and each call takes other ones, so a product with one
token cannot beat the read bandwidth that is printed first. Medians; the last line is JSON. On a busy machine, --busy counts
the processor time of a single thread instead of the time on the clock.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import time

import numpy as np

from tidegate import _core
from tidegate.backends.cpu_linear import LinearOps
from tidegate.backends.operands import Linear, Routing
from tidegate.experts.base import Placement
from tidegate.quant import native
from tidegate.quant.formats import Format
from tidegate.quant.layout import ExpertLayout

BLOCK_BYTES = 512 << 20
FORMATS = "int4-g32,int4-g128,int4-g32-min,mxfp4-g32,int8-g32,bf16,f32"
TOKENS = (1, 2, 4, 8, 16, 64, 256)
ROWS, INPUTS = 4096, 2048
# name: hidden size, expert width, experts, experts per token
LAYERS = {"qwen3-30b-a3b": (2048, 768, 128, 8), "olmoe-1b-7b": (2048, 1024, 64, 8), "mixtral": (4096, 14336, 4, 2)}


clock = time.perf_counter


class Ops(LinearOps):
    """The products of the CPU backend without its attention."""


Ops.__abstractmethods__ = frozenset()


def huge_block(nbytes: int) -> np.ndarray:
    memory = mmap.mmap(-1, nbytes + (2 << 20))
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % (2 << 20)
    return whole[start : start + nbytes]


def median_seconds(call, rounds: int) -> float:
    times = []
    for i in range(rounds + 2):
        start = clock()
        call(i)
        times.append(clock() - start)
    return statistics.median(times[2:])


def copies_of(block: np.ndarray, one: np.ndarray, limit: int = 64) -> list[np.ndarray]:
    """As many copies of the bytes as fit, at most ``limit``, each 64-byte aligned."""
    stride = -(-one.size // 4096) * 4096
    views = [block[at : at + one.size] for at in range(0, block.size - stride + 1, stride)][:limit]
    for view in views:
        view[:] = one
    return views


def measure_linear(ops: Ops, block: np.ndarray, fmt: Format) -> dict[str, float]:
    rng = np.random.default_rng(0)
    packed = native.pack(rng.standard_normal((ROWS, INPUTS), np.float32), fmt)
    weights = [Linear("w", view, fmt, ROWS, INPUTS) for view in copies_of(block, packed)]
    out = {}
    for tokens in TOKENS:
        ops.compute.release(0)
        x = ops.compute.from_numpy(rng.standard_normal((tokens, INPUTS), np.float32))
        level = ops.compute.mark()

        def call(i: int, x=x, level=level) -> None:
            ops.linear(x, weights[i % len(weights)])
            ops.compute.release(level)

        seconds = median_seconds(call, 40 if tokens < 64 else 12)
        gbytes, gflops = packed.size / seconds / 1e9, 2 * tokens * ROWS * INPUTS / seconds / 1e9
        print(f"  {fmt!s:14} M={tokens:<4} {seconds * 1e6:8.0f} us {gbytes:6.1f} GB/s {gflops:7.0f} GFLOP/s")
        out[f"M{tokens}_gbytes_per_s"], out[f"M{tokens}_gflop_per_s"] = round(gbytes, 2), round(gflops, 1)
    return out


def measure_moe(ops: Ops, block: np.ndarray, name: str, fmt: Format) -> dict[str, float]:
    hidden, width, num_experts, top_k = LAYERS[name]
    layout = ExpertLayout.of(hidden, width, fmt, False)
    rng = np.random.default_rng(0)
    parts = [native.pack(rng.standard_normal(shape, np.float32), fmt) for shape in ((width, hidden), (hidden, width))]
    blob = np.zeros(layout.blob_bytes, np.uint8)
    for at, part in ((0, parts[0]), (layout.up_offset, parts[0]), (layout.down_offset, parts[1])):
        blob[at : at + part.size] = part
    slots = copies_of(block, blob, num_experts)
    source = _core.ReadySlots(slots)
    out = {}
    for tokens in (1, 4, 64, 256):
        ops.compute.release(0)
        x = ops.compute.from_numpy(rng.standard_normal((tokens, hidden), np.float32))
        level = ops.compute.mark()
        draws = []
        for _ in range(8):
            ids = np.array([rng.permutation(len(slots))[:top_k] for _ in range(tokens)], np.int32)
            routing = Routing(ids, np.full(ids.shape, 1 / top_k, np.float32))
            draws.append((routing, Placement(np.unique(ids).tolist(), np.unique(ids).tolist())))

        class Slots:
            native = source

        def call(i: int, x=x, level=level, draws=draws, slots=Slots) -> None:
            routing, placement = draws[i % len(draws)]
            ops.moe(x, routing, layout, [placement], slots, ("silu", 0.0, 0.0))
            ops.compute.release(level)

        seconds = median_seconds(call, 40 if tokens < 64 else 8)
        used = statistics.mean(len(placement.experts) for _, placement in draws)
        gbytes = used * layout.blob_bytes / seconds / 1e9
        gflops = 6 * tokens * top_k * hidden * width / seconds / 1e9
        print(f"  {name:14} T={tokens:<4} {seconds * 1e6:8.0f} us {gbytes:6.1f} GB/s {gflops:7.0f} GFLOP/s")
        out[f"T{tokens}_gbytes_per_s"], out[f"T{tokens}_gflop_per_s"] = round(gbytes, 2), round(gflops, 1)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default=_core.available_isas()[0], choices=_core.available_isas())
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--moe", action="store_true", help="whole expert layers in the first format only")
    parser.add_argument("--busy", action="store_true", help="processor time instead of the clock; with --threads 1")
    args = parser.parse_args()
    if args.busy:
        if args.threads != 1:
            parser.error("--busy needs --threads 1")
        global clock  # noqa: PLW0603
        clock = time.thread_time
    formats = [Format.parse(text) for text in args.formats.split(",")]
    block = huge_block(BLOCK_BYTES)
    block[:] = 1
    ops = Ops(_core.Compute(args.threads, huge_block(256 << 20), args.isa))
    seconds = median_seconds(lambda _: _core.read_all(ops.compute, block), 5)
    ceiling = block.size / seconds / 1e9
    print(f"{args.threads} threads, {args.isa}: reading memory takes {ceiling:.1f} GB/s")
    result = {"threads": args.threads, "isa": args.isa, "read_gbytes_per_s": round(ceiling, 2)}
    if args.moe:
        result |= {name: measure_moe(ops, block, name, formats[0]) for name in LAYERS}
    else:
        result |= {str(fmt): measure_linear(ops, block, fmt) for fmt in formats}
    print(json.dumps(result))


if __name__ == "__main__":
    main()

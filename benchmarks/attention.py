"""Speed of the cpu backend's attention: KV bytes a second at decode, GFLOP/s at prefill, per shape and instruction set.

    python benchmarks/attention.py [--threads 2] [--context 4096] [--chunk 512] [--isa avx512]

Decode walks through layers whose keys and values together are far larger than the caches, so its ceiling is the memory
bandwidth (printed first: a plain read of the same pages). The best of several rounds counts. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from tidegate import _core
from tidegate.backends.base import AttentionWeights, KvLayout, Rope, StepBatch
from tidegate.backends.cpu import CpuBackend
from tidegate.model_config import AttentionConfig

# name: query heads, KV heads, head dimension, window, layers
SHAPES = {
    "qwen3-30b-a3b": (32, 4, 128, 0, 24),
    "mixtral-8x7b": (32, 8, 128, 0, 12),
    "olmoe-1b-7b": (16, 16, 128, 0, 6),
    "gpt-oss-20b": (64, 8, 64, 0, 24),
    "gpt-oss-20b window": (64, 8, 64, 128, 24),
}


def aligned(num_bytes: int) -> np.ndarray:
    memory = np.zeros(num_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes]


def best_seconds(call, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def step(first: int, count: int, num_pages: int) -> StepBatch:
    positions = np.arange(first, first + count, dtype=np.int32)
    table = np.random.default_rng(0).permutation(num_pages).astype(np.int32)[None].copy()
    return StepBatch(
        np.zeros(count, np.int32), positions, np.zeros(count, np.int32), table, np.array([count - 1], np.int32)
    )


def measure(name: str, backend: CpuBackend, context: int, chunk: int, dtype: str) -> dict[str, float]:
    heads, kv_heads, dim, window, num_layers = SHAPES[name]
    layout = KvLayout(num_layers, kv_heads, dim, dim, dtype)
    pages = aligned(context // layout.page_tokens * layout.page_bytes)
    pages.view(np.float16 if dtype == "f16" else np.float32)[:] = 0.25
    backend.bind_kv(layout, pages)
    config = AttentionConfig(heads, kv_heads, dim, dim, dim**-0.5)
    rope = Rope((1 / 10000 ** (np.arange(0, dim, 2) / dim)).astype(np.float32))
    layers = [AttentionWeights(index, config, rope, window) for index in range(num_layers)]
    width = (heads + 2 * kv_heads) * dim

    def forward(first: int, count: int, used: list[AttentionWeights]) -> float:
        qkv = np.random.default_rng(0).normal(size=(count, width)).astype(np.float32)
        backend.begin(step(first, count, context // layout.page_tokens))
        x = backend.compute.from_numpy(qkv)
        mark = backend.mark()

        def run() -> None:
            for layer in used:
                backend.attend(x, layer)
                backend.release(mark)

        return best_seconds(run, 12 if count == 1 else 4) / len(used)

    decode_s = forward(context - 1, 1, layers)
    seen = min(window or context, context)
    prefill_s = forward(context - chunk, chunk, layers[:2])
    keys = sum(min(window or position + 1, position + 1) for position in range(context - chunk, context))
    return {
        "decode_us": decode_s * 1e6,
        "decode_gb_per_s": seen * layout.token_bytes / num_layers / decode_s / 1e9,
        "prefill_ms": prefill_s * 1e3,
        "prefill_gflop_per_s": 4 * keys * heads * dim / prefill_s / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--dtype", choices=["f16", "f32"], default="f16")
    parser.add_argument("--isa", choices=_core.available_isas())
    options = parser.parse_args()
    CpuBackend.__abstractmethods__ = frozenset()
    backend = CpuBackend(options.threads, aligned(1 << 28), options.isa)
    block = np.ones(1 << 25)
    ceiling = block.nbytes / best_seconds(block.sum, 8) / 1e9
    print(f"{backend.compute.isa}, {options.threads} threads; one thread reads {ceiling:.1f} GB/s")
    print(f"{'shape':20} {'decode us':>10} {'GB/s':>6} {'prefill ms':>11} {'GFLOP/s':>8}")
    results = {}
    for name in SHAPES:
        row = results[name] = measure(name, backend, options.context, options.chunk, options.dtype)
        print("{:20} {:10.1f} {:6.1f} {:11.2f} {:8.1f}".format(name, *row.values()), flush=True)
    print(
        json.dumps(
            {"isa": backend.compute.isa, **vars(options), "one_thread_read_gb_per_s": ceiling, "shapes": results}
        )
    )


if __name__ == "__main__":
    main()

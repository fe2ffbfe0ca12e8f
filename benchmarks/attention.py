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
from tidegate.backends.cpu import CpuBackend
from tidegate.backends.operands import AttentionWeights, KvLayout, Linear, Norm, Rope, StepBatch
from tidegate.model_config import AttentionConfig
from tidegate.quant.formats import Format

# name: query heads, KV heads, head dimension, window, layers
SHAPES = {
    "qwen3-30b-a3b": (32, 4, 128, 0, 24),
    "mixtral-8x7b": (32, 8, 128, 0, 12),
    "olmoe-1b-7b": (16, 16, 128, 0, 6),
    "gpt-oss-20b": (64, 8, 64, 0, 24),
    "gpt-oss-20b window": (64, 8, 64, 128, 24),
}
# name: heads, latent rank, nope, rope and value dimensions, layers (multi-head latent attention)
LATENT_SHAPES = {
    "deepseek-v2-lite": (16, 512, 128, 64, 128, 24),
    "deepseek-v3": (128, 512, 128, 64, 128, 4),
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


def grouped(name: str, dtype: str) -> tuple[KvLayout, list[AttentionWeights], list[int], int]:
    """Layout, layers, widths of the inputs, and flop per query token and key."""
    heads, kv_heads, dim, window, num_layers = SHAPES[name]
    config = AttentionConfig(heads, kv_heads, dim, dim, dim**-0.5)
    layers = [AttentionWeights(index, config, rope_of(dim), window) for index in range(num_layers)]
    return KvLayout(num_layers, kv_heads, dim, dim, dtype), layers, [(heads + 2 * kv_heads) * dim], 4 * heads * dim


def latent(name: str, dtype: str) -> tuple[KvLayout, list[AttentionWeights], list[int], int]:
    heads, rank, nope, rope_dims, v_dim, num_layers = LATENT_SHAPES[name]
    config = AttentionConfig(heads, heads, nope + rope_dims, v_dim, 0.1, kv_lora_rank=rank, qk_nope_dim=nope)
    fmt = Format("int8", 32)

    def up(n: int, k: int) -> Linear:
        return Linear("up", aligned(fmt.packed_bytes(n, k)), fmt, n, k)

    norm = Norm(np.ones(rank, np.float32), None, 1e-6)
    layers = [
        AttentionWeights(
            index,
            config,
            rope_of(rope_dims),
            0,
            kv_norm=norm,
            k_up=up(heads * rank, nope),
            v_up=up(heads * v_dim, rank),
        )
        for index in range(num_layers)
    ]
    widths = [heads * (nope + rope_dims), rank + rope_dims]
    return KvLayout(num_layers, 1, rank + rope_dims, 0, dtype), layers, widths, 2 * heads * (2 * rank + rope_dims)


def rope_of(dims: int) -> Rope:
    return Rope((1 / 10000 ** (np.arange(0, dims, 2) / dims)).astype(np.float32))


def measure(name: str, backend: CpuBackend, context: int, chunk: int, dtype: str) -> dict[str, float]:
    """Decode and prefill of a layer at ``context``; latent attention includes its k_up and v_up."""
    is_latent = name in LATENT_SHAPES
    layout, layers, widths, flop = (latent if is_latent else grouped)(name, dtype)
    pages = aligned(context // layout.page_tokens * layout.page_bytes)
    pages.view({"f16": np.float16, "int8": np.uint8, "f32": np.float32}[dtype])[:] = 1 if dtype == "int8" else 0.25
    backend.bind_kv(layout, pages)

    def forward(first: int, count: int, used: list[AttentionWeights]) -> float:
        generator = np.random.default_rng(0)
        backend.begin(step(first, count, context // layout.page_tokens))
        x = [backend.compute.from_numpy(generator.normal(size=(count, width)).astype(np.float32)) for width in widths]
        mark = backend.mark()

        def run() -> None:
            for layer in used:
                (backend.attend_latent if is_latent else backend.attend)(*x, layer)  # type: ignore[operator]
                backend.release(mark)

        return best_seconds(run, 12 if count == 1 else 4) / len(used)

    decode_s = forward(context - 1, 1, layers)
    window = layers[0].window or context
    prefill_s = forward(context - chunk, chunk, layers[:2])
    keys = sum(min(window, position + 1) for position in range(context - chunk, context))
    return {
        "decode_us": decode_s * 1e6,
        "decode_gb_per_s": min(window, context) * layout.token_bytes / layout.num_layers / decode_s / 1e9,
        "decode_gflop_per_s": min(window, context) * flop / decode_s / 1e9,
        "prefill_ms": prefill_s * 1e3,
        "prefill_gflop_per_s": keys * flop / prefill_s / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--dtype", choices=["f16", "int8", "f32"], default="f16")
    parser.add_argument("--isa", choices=_core.available_isas())
    options = parser.parse_args()
    backend = CpuBackend(options.threads, aligned(1 << 28), options.isa)
    block = np.ones(1 << 25)
    ceiling = block.nbytes / best_seconds(block.sum, 8) / 1e9
    print(f"{backend.compute.isa}, {options.threads} threads; one thread reads {ceiling:.1f} GB/s")
    print(f"{'shape':20} {'decode us':>10} {'GB/s':>6} {'GFLOP/s':>8} {'prefill ms':>11} {'GFLOP/s':>8}")
    results = {}
    for name in [*SHAPES, *LATENT_SHAPES]:
        row = results[name] = measure(name, backend, options.context, options.chunk, options.dtype)
        print("{:20} {:10.1f} {:6.1f} {:8.1f} {:11.2f} {:8.1f}".format(name, *row.values()), flush=True)
    print(
        json.dumps(
            {"isa": backend.compute.isa, **vars(options), "one_thread_read_gb_per_s": ceiling, "shapes": results}
        )
    )


if __name__ == "__main__":
    main()

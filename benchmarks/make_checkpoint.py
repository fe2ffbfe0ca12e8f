"""Writes a random Q4_0 GGUF checkpoint at real sizes, for measuring speed: the same numbers for every engine.

    python benchmarks/make_checkpoint.py OUT.gguf --shape qwen3-moe --tokenizer SOME.gguf

Nibbles are drawn from 1..15, so weights have zero mean (otherwise a deep random net collapses to one direction), and
scales give every matrix a gain of about one. The tokenizer (names, merges, kind) is copied from a real GGUF file, so that
real text can be fed to it. Routing of a random net is not a trained model's: see docs/log.md for its overlap.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np

from tidegate.terminal import StatusLine, bar

BLOCK = 32
NIBBLE_STD = np.sqrt(np.mean(np.arange(-7, 8) ** 2))
BYTE_OF_PAIR = np.array([low | high << 4 for low in range(1, 16) for high in range(1, 16)], np.uint8)


@dataclass(frozen=True)
class Shape:
    """Sizes under GGUF's terms."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top: int
    width: int
    qk_norm: str  # "head", "full" or "none"


SHAPES = {
    "qwen3-moe": Shape("qwen3moe", 12, 2048, 32, 4, 128, 128, 8, 768, "head"),
    "olmoe": Shape("olmoe", 16, 2048, 16, 16, 128, 64, 8, 1024, "full"),
    "mixtral": Shape("llama", 5, 4096, 32, 8, 128, 8, 2, 14336, "none"),
}


def q4_0(rng: np.random.Generator, rows: int, inputs: int, gain: float = 1.0) -> np.ndarray:
    """Random Q4_0 blocks, uint8 [rows, inputs / 32 * 18], standard deviation gain / sqrt(inputs)."""
    blocks = rows * inputs // BLOCK
    out = np.empty((blocks, 18), np.uint8)
    scale = gain / (NIBBLE_STD * np.sqrt(inputs)) * rng.uniform(0.7, 1.3, blocks)
    out[:, :2] = scale.astype(np.float16).view(np.uint8).reshape(blocks, 2)
    out[:, 2:] = BYTE_OF_PAIR[rng.integers(0, len(BYTE_OF_PAIR), (blocks, 16), dtype=np.uint8)]
    return out.reshape(rows, -1)


def tensors(shape: Shape, vocab: int) -> list[tuple[str, tuple[int, ...], str, float]]:
    """(name, shape outermost first, kind, gain or value) of every tensor in file order."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    out = [("token_embd.weight", (vocab, shape.hidden), "q4_0", shape.hidden**0.5)]
    for layer in range(shape.layers):
        p = f"blk.{layer}."
        out += [
            (p + "attn_norm.weight", (shape.hidden,), "ones", 1.0),
            (p + "attn_q.weight", (q, shape.hidden), "q4_0", 1.0),
            (p + "attn_k.weight", (kv, shape.hidden), "q4_0", 1.0),
            (p + "attn_v.weight", (kv, shape.hidden), "q4_0", 1.0),
            (p + "attn_output.weight", (shape.hidden, q), "q4_0", 1.0),
            (p + "ffn_norm.weight", (shape.hidden,), "ones", 1.0),
            (p + "ffn_gate_inp.weight", (shape.experts, shape.hidden), "f32", 2.0),
            (p + "ffn_gate_exps.weight", (shape.experts, shape.width, shape.hidden), "q4_0", 1.0),
            (p + "ffn_up_exps.weight", (shape.experts, shape.width, shape.hidden), "q4_0", 1.0),
            (p + "ffn_down_exps.weight", (shape.experts, shape.hidden, shape.width), "q4_0", 1.5),
        ]
        norm_widths = {"head": (shape.head_dim, shape.head_dim), "full": (q, kv), "none": ()}[shape.qk_norm]
        out += [(p + f"attn_{n}_norm.weight", (w,), "ones", 1.0) for n, w in zip("qk", norm_widths, strict=False)]
    out += [("output_norm.weight", (shape.hidden,), "ones", 1.0)]
    return [*out, ("output.weight", (vocab, shape.hidden), "q4_0", 3.0)]


def add_metadata(writer: gguf.GGUFWriter, shape: Shape, tokenizer: Path) -> int:
    """Sizes, and every tokenizer key of the donor; returns the vocabulary size."""
    writer.add_block_count(shape.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.width)
    writer.add_expert_feed_forward_length(shape.width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    vocab = 0
    for name, field in gguf.GGUFReader(tokenizer).fields.items():
        if name.startswith("tokenizer."):
            value = field.contents()
            vocab = len(value) if name == "tokenizer.ggml.tokens" else vocab
            kind = field.types[0]
            writer.add_key_value(name, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    return vocab


def write(out: Path, shape: Shape, tokenizer: Path, seed: int) -> None:
    """Stream the file: one tensor in memory at a time."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(out, shape.architecture)
    items = tensors(shape, add_metadata(writer, shape, tokenizer))
    for name, dims, kind, _ in items:
        count = int(np.prod(dims))
        if kind == "q4_0":
            stored = (*dims[:-1], dims[-1] // BLOCK * 18)
            q4 = gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), count // BLOCK * 18, raw_dtype=q4)
        else:
            writer.add_tensor_info(name, dims, np.dtype(np.float32), count * 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    status = StatusLine()
    for number, (name, dims, kind, gain) in enumerate(items):
        status.show(f"{bar(number / len(items), 30)} {out}  {name}")
        rows = int(np.prod(dims[:-1]))
        if kind == "q4_0":
            writer.write_tensor_data(q4_0(rng, rows, dims[-1], gain))
        elif kind == "ones":
            writer.write_tensor_data(np.ones(dims, np.float32))
        else:
            writer.write_tensor_data(rng.standard_normal(dims, np.float32) * np.float32(gain / dims[-1] ** 0.5))
    status.close()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-moe")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a GGUF file whose tokenizer is copied")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    write(args.out, replace(shape, layers=args.layers or shape.layers), args.tokenizer, args.seed)
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

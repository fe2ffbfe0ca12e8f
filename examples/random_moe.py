"""Writes a seeded random Mixture-of-Experts checkpoint in Hugging Face's form (Qwen3-MoE), with numpy alone.

    python examples/random_moe.py OUT [--layers 8] [--experts 32] [--hidden 512] [--expert-width 256]

Its text is noise, but every byte takes the real path: safetensors, tokenizer, conversion, budget, cache, kernels.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[1]


def write_tokenizer(folder: Path, vocab_size: int) -> int:
    """Train a byte-level BPE on this project's own prose; returns its vocabulary size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted(ROOT.glob("*.md"))], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return tokenizer.get_vocab_size()


def tensors(config: dict, seed: int):
    """Yield (name, float32 array) of every tensor, variances kept near one through the layers."""
    rng = np.random.default_rng(seed)
    hidden, width, head = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale / shape[-1] ** 0.5)

    yield "model.embed_tokens.weight", normal(config["vocab_size"], hidden, scale=hidden**0.5)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", np.ones(hidden, np.float32)
        yield prefix + "post_attention_layernorm.weight", np.ones(hidden, np.float32)
        yield prefix + "self_attn.q_proj.weight", normal(config["num_attention_heads"] * head, hidden)
        yield prefix + "self_attn.k_proj.weight", normal(config["num_key_value_heads"] * head, hidden)
        yield prefix + "self_attn.v_proj.weight", normal(config["num_key_value_heads"] * head, hidden)
        yield prefix + "self_attn.o_proj.weight", normal(hidden, config["num_attention_heads"] * head)
        yield prefix + "self_attn.q_norm.weight", np.ones(head, np.float32)
        yield prefix + "self_attn.k_norm.weight", np.ones(head, np.float32)
        yield prefix + "mlp.gate.weight", normal(config["num_experts"], hidden, scale=2.0)
        for expert in range(config["num_experts"]):
            for part, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
                yield f"{prefix}mlp.experts.{expert}.{part}_proj.weight", normal(*shape)
    yield "model.norm.weight", np.ones(hidden, np.float32)
    yield "lm_head.weight", normal(config["vocab_size"], hidden, scale=2.0)


def as_bf16(values: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, to nearest even, kept as uint16."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path: Path, items) -> None:
    """One pass: data to the file, then the header that the format wants in front of it."""
    arrays = {name: as_bf16(values) for name, values in items}
    header, offset = {}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(array.tobytes())


def make(folder: Path, layers: int, experts: int, hidden: int, expert_width: int, seed: int = 0) -> None:
    """Write the checkpoint folder; an existing one is overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": write_tokenizer(folder, 1024),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 256),
        "head_dim": 64,
        "num_experts": experts,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": expert_width,
        "intermediate_size": 4 * expert_width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_safetensors(folder / "model.safetensors", tensors(config, seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    for flag, default in (
        ("--layers", 8),
        ("--experts", 32),
        ("--hidden", 512),
        ("--expert-width", 256),
        ("--seed", 0),
    ):
        parser.add_argument(flag, type=int, default=default)
    args = parser.parse_args()
    make(args.out, args.layers, args.experts, args.hidden, args.expert_width, args.seed)
    print(f"{args.out}: {sum(f.stat().st_size for f in args.out.iterdir()):,} bytes")


if __name__ == "__main__":
    main()

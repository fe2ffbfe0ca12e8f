"""Tiny Hugging Face checkpoints (tests/checkpoints.py) rewritten as GGUF files, the way llama.cpp's converter does it:
names from the `gguf` package's own table, experts stacked, q and k permuted for llama and granite, kv_b split for DeepSeek.

``converted("qwen3_moe")`` returns (folder, GGUF path), made once a process. GGUF cannot say everything a config can, so
some variants are made with other settings (``REPRESENTABLE``).
"""

import functools
import json
import math

import gguf
import numpy as np
from safetensors.numpy import load_file

import checkpoints
from gguf_files import write_gguf

ARCH = gguf.MODEL_ARCH
ARCHITECTURES = {
    "mixtral": ARCH.LLAMA, "llama": ARCH.LLAMA, "qwen2_moe": ARCH.QWEN2MOE, "qwen3_moe": ARCH.QWEN3MOE, "qwen3": ARCH.QWEN3,
    "olmoe": ARCH.OLMOE, "deepseek_v2": ARCH.DEEPSEEK2, "deepseek_v3": ARCH.DEEPSEEK2, "gpt_oss": ARCH.GPT_OSS,
    "glm4_moe": ARCH.GLM4_MOE, "granitemoe": ARCH.GRANITE_MOE,
}  # fmt: skip
# variant -> settings of its config that GGUF has no room for, set to what the architecture means
REPRESENTABLE = {
    "mixtral": {}, "qwen2_moe": {"mlp_only_layers": []}, "qwen3_moe": {},
    "qwen3_moe_linear": {"norm_topk_prob": True, "decoder_sparse_step": 1, "attention_bias": False},
    "olmoe": {}, "deepseek_v2": {}, "deepseek_v2_lite": {}, "deepseek_v3": {},
    "gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}, "glm4_moe": {}, "granitemoe": {}, "llama": {},
    "qwen3": {"use_sliding_window": False},
}  # fmt: skip
EXPERT_NAMES = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


@functools.cache
def converted(variant, stacked=True, absorbed=True, seed=0):
    """``stacked``: experts in one tensor (or one each, as old files have them); ``absorbed``: DeepSeek's kv_b split in two."""
    folder = checkpoints._root() / f"gguf-{variant}-{seed}"
    if not folder.exists():
        checkpoints.build(variant, seed, **REPRESENTABLE[variant]).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    name = gguf.MODEL_ARCH_NAMES[arch]
    tensors = dict(rename(load_file(folder / "model.safetensors"), config, arch, stacked, absorbed))
    tensors = {key: w.squeeze() for key, w in tensors.items()}  # as the converter does, so [1, D] becomes [D]
    tensors.update(rope_factors(config))
    path = write_gguf(folder / f"{stacked}-{absorbed}.gguf", name, metadata(config, name, absorbed), tensors)
    return folder, path


def rename(weights, config, arch, stacked, absorbed):
    table = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    permuted = config["model_type"] in ("llama", "mixtral", "granitemoe")
    experts = {}
    for name, w in weights.items():
        layer = name.split(".")[2] if ".layers." in name else None
        if ".experts." in name and name.split(".experts.")[1][0].isdigit():
            index, kind = name.split(".experts.")[1].split(".")[:2]
            experts.setdefault((layer, EXPERT_NAMES[kind]), {})[int(index)] = w
        elif name.endswith("input_linear.weight"):
            half = w.shape[1] // 2
            yield f"blk.{layer}.ffn_gate_exps.weight", w[:, :half].copy()
            yield f"blk.{layer}.ffn_up_exps.weight", w[:, half:].copy()
        elif ".mlp.experts." in name:
            yield from gpt_oss_experts(f"blk.{layer}.ffn_", name, w)
        elif name.endswith("e_score_correction_bias"):
            yield f"blk.{layer}.exp_probs_b.bias", w
        elif name.endswith(".sinks"):
            yield f"blk.{layer}.attn_sinks.weight", w
        elif name.endswith("kv_b_proj.weight") and absorbed:
            heads = w.reshape(config["num_attention_heads"], -1, w.shape[1])
            nope = config["qk_nope_head_dim"]
            yield f"blk.{layer}.attn_k_b.weight", heads[:, :nope].transpose(0, 2, 1).copy()
            yield f"blk.{layer}.attn_v_b.weight", heads[:, nope:].copy()
        else:
            if permuted and (".q_proj." in name or ".k_proj." in name):
                heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
                w = w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
            yield table.get_name(name, try_suffixes=(".weight", ".bias")), w
    for (layer, kind), parts in experts.items():
        if stacked:
            yield f"blk.{layer}.ffn_{kind}_exps.weight", np.stack([parts[e] for e in range(len(parts))])
        else:
            yield from ((f"blk.{layer}.ffn_{kind}.{e}.weight", w) for e, w in parts.items())


def gpt_oss_experts(prefix, name, w):
    suffix = "bias" if name.endswith("_bias") else "weight"
    rows = w if suffix == "bias" else w.transpose(0, 2, 1)
    if "gate_up" in name:
        yield f"{prefix}gate_exps.{suffix}", rows[:, 0::2].copy()
        yield f"{prefix}up_exps.{suffix}", rows[:, 1::2].copy()
    else:
        yield f"{prefix}down_exps.{suffix}", rows.copy()


def rope_factors(config):
    rope = config["rope_parameters"]
    if rope["rope_type"] != "llama3":
        return {}
    dims = config["head_dim"]
    frequencies = rope["rope_theta"] ** -(np.arange(0, dims, 2) / dims)
    wavelengths = 2 * math.pi / frequencies
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    factors = 1 / ((1 - smooth.clip(0, 1)) / rope["factor"] + smooth.clip(0, 1))
    return {"rope_freqs.weight": factors.astype(np.float32)}


def metadata(config, arch, absorbed):
    get = config.get
    heads = config["num_attention_heads"]
    head_dim = get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    out = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "vocab_size": config["vocab_size"],
        "expert_count": get("num_experts") or get("num_local_experts") or get("n_routed_experts"),
        "expert_used_count": get("num_experts_per_tok"),
        "expert_feed_forward_length": get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": get("shared_expert_intermediate_size"),
        "expert_shared_count": get("n_shared_experts"),
        "expert_weights_scale": get("routed_scaling_factor"),
        "expert_group_count": get("n_group"),
        "expert_group_used_count": get("topk_group"),
        "leading_dense_block_count": get("first_k_dense_replace"),
        "attention.sliding_window": get("sliding_window") if arch == "gpt-oss" else None,
        "attention.clamp_kqv": get("clip_qkv"),
        "attention.scale": get("attention_multiplier"),
        "embedding_scale": get("embedding_multiplier"),
        "residual_scale": get("residual_multiplier"),
        "logit_scale": get("logits_scaling"),
    }
    if arch in ("deepseek2", "glm4moe"):
        out["expert_weights_norm"] = bool(get("norm_topk_prob"))
        out["expert_gating_func"] = 1 if config["model_type"] == "deepseek_v2" else 2
    if rope["rope_type"] in ("yarn", "linear"):
        out["rope.scaling.type"] = rope["rope_type"]
        out["rope.scaling.factor"] = float(rope["factor"])
        out["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    if rope.get("mscale_all_dim"):
        out["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if arch == "deepseek2":
        out |= latent(config, absorbed)
    found = {f"{arch}.{key}": value for key, value in out.items() if value is not None}
    return {**found, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}


def latent(config, absorbed):
    rank, rope, nope = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    out = {
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config.get("q_lora_rank"),
        "rope.dimension_count": rope,
    }
    if not absorbed:
        return {**out, "attention.key_length": nope + rope, "attention.value_length": config["v_head_dim"]}
    return {
        **out,
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": config["v_head_dim"],
    }

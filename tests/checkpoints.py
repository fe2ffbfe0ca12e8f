"""Tiny seeded checkpoints of every supported family, written by transformers' ``save_pretrained``.

``checkpoint("qwen3_moe")`` returns a folder with config.json and model.safetensors, made once a process and removed at
exit; ``load("qwen3_moe")`` the transformers model of it in float32, the oracle of the parity tests. The configs are chosen
so that the family's own branches run: grouped heads, biases, q/k norms, windows shorter than the test prompts, sinks,
leading dense layers, group-limited routing, shared experts, both ``norm_topk_prob`` contracts, every rope scaling, expert
widths that are no multiple of 16, tied and untied heads.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

torch.set_num_threads(min(2, torch.get_num_threads()))
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 251,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "intermediate_size": 88,
    "first_k_dense_replace": 1,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.8, 2.0],
    "long_factor": [1.0, 1.2, 1.6, 2.2, 3.0, 4.5, 6.0, 8.0],
    "short_mscale": 1.05,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 128,
    "factor": 2.0,
}

# name -> (transformers config class, its arguments beside SMALL)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"intermediate_size": 72, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "mixtral_window": (
        "MixtralConfig",
        {"intermediate_size": 40, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 9},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "intermediate_size": 88,
            "num_experts": 12,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2_moe_window": (
        "Qwen2MoeConfig",
        {
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 32,
            "intermediate_size": 88,
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 2,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "hidden_size": 48,
            "head_dim": 32,
            "moe_intermediate_size": 40,
            "intermediate_size": 88,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
    ),
    "qwen3_moe_linear": (
        "Qwen3MoeConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "intermediate_size": 72,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        {
            "intermediate_size": 40,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "clip_qkv": 1.5,
        },
    ),
    "olmoe_norm": (
        "OlmoeConfig",
        {"intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **LATENT,
            "q_lora_rank": 20,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v2_lite": (
        "DeepseekV2Config",
        {**LATENT, "q_lora_rank": None, "n_shared_experts": 1, "topk_method": "greedy", "norm_topk_prob": False},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **LATENT,
            "q_lora_rank": 20,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 0,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "hidden_size": 64,
            "head_dim": 16,
            "intermediate_size": 40,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "swiglu_alpha": 1.5,
            "swiglu_limit": 1.25,
            "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False},
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "head_dim": 16,
            "moe_intermediate_size": 40,
            "intermediate_size": 88,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.3,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        {
            "intermediate_size": 40,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.18,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "phimoe": (
        "PhimoeConfig",
        {
            "intermediate_size": 72,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.2,
            "rope_parameters": LONG,
        },
    ),
    "llama": (
        "LlamaConfig",
        {
            "intermediate_size": 88,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3": (
        "Qwen3Config",
        {
            "hidden_size": 48,
            "head_dim": 16,
            "intermediate_size": 72,
            "use_sliding_window": True,
            "sliding_window": 13,
            "max_window_layers": 1,
        },
    ),
}
FAMILIES = tuple(VARIANTS)
DENSE = ("llama", "qwen3")
MOE = tuple(name for name in VARIANTS if name not in DENSE)


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="tidegate-checkpoints-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def _scale(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """(mean, standard deviation) of a parameter: unit variance forward, router logits that spread by about two."""
    if name.endswith("layernorm.weight") or "norm.weight" in name:
        return 1.0, 0.1
    if len(shape) == 1:
        return 0.0, 1.0 if name.endswith("sinks") else 0.1
    if "embed_tokens" in name:
        return 0.0, 0.3
    fan_in = shape[1] if name.endswith(("experts.gate_up_proj", "experts.down_proj")) else shape[-1]
    gain = 2.0 if name.endswith(("gate.weight", "router.weight", "router.layer.weight")) else 1.0
    return 0.0, gain / fan_in**0.5


def build(name: str, seed: int = 0, **overrides: Any) -> Any:
    """A seeded float32 transformers model of variant ``name``, eager attention and eager experts."""
    class_name, arguments = VARIANTS[name]
    config = getattr(transformers, class_name)(**{**SMALL, **arguments, **overrides})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        named = [*model.named_parameters(), *(b for b in model.named_buffers() if b[0].endswith("correction_bias"))]
        for parameter_name, parameter in named:
            mean, deviation = _scale(parameter_name, tuple(parameter.shape))
            parameter.normal_(mean, deviation, generator=generator)
    return model


def checkpoint(name: str, dtype: str = "float32", seed: int = 0, shard_size: str = "1GB") -> Path:
    """Folder of variant ``name`` saved in ``dtype`` (float32, float16, bfloat16). Made once: copy it before changing it."""
    folder = _root() / f"{name}-{dtype}-{seed}-{shard_size}"
    if not folder.exists():
        build(name, seed).to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)
    return folder


@functools.cache
def load(name: str, dtype: str = "float32", seed: int = 0) -> Any:
    """The oracle: the saved checkpoint, loaded by transformers and computed in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint(name, dtype, seed),
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()

"""Facts about published models: the config keys that decide sizes, their parameter counts and KV bytes a token.

``parameters`` and ``active`` are the published figures, to their published digits. ``active_leaves_out`` names what the
publisher does not count as active. ``kv_bytes`` is computed by hand from the config: layers x 2 (K and V) x KV heads x
head width x 2 bytes of float16; for latent attention layers x (kv_lora_rank + qk_rope_head_dim) x 2.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from tidegate.checkpoint.base import Checkpoint, TensorInfo
from tidegate.model_config import ModelConfig
from tidegate.models.families import model_config
from tidegate.models.families_hf import HfWeights


@dataclass(frozen=True)
class Published:
    config: dict[str, Any]
    parameters: float
    active: float
    digits: float  # both figures are rounded to a multiple of this
    kv_bytes: int
    active_leaves_out: tuple[str, ...] = field(default=())


_QWEN3 = {
    "model_type": "qwen3_moe", "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 151936, "max_position_embeddings": 40960, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "tie_word_embeddings": False, "rope_theta": 1e6, "attention_bias": False,
}  # fmt: skip
_GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 2880, "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128,
    "max_position_embeddings": 131072, "rope_theta": 150000, "attention_bias": True, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4"},
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip

MODELS = {
    "Mixtral-8x7B": Published(
        {
            "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
            "vocab_size": 32000, "max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": False,
        },
        46.7e9, 12.9e9, 0.1e9, 32 * 2 * 8 * 128 * 2,
    ),
    "Qwen3-30B-A3B": Published(
        {
            **_QWEN3, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "intermediate_size": 6144,
            "moe_intermediate_size": 768,
        },
        30.5e9, 3.3e9, 0.1e9, 48 * 2 * 4 * 128 * 2,
    ),
    "Qwen3-235B-A22B": Published(
        {
            **_QWEN3, "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
        },
        235e9, 22e9, 1e9, 94 * 2 * 4 * 128 * 2,
    ),
    "DeepSeek-V3": Published(
        {
            "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
            "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 2048, "intermediate_size": 18432,
            "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
            "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "vocab_size": 129280,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "max_position_embeddings": 163840, "rope_theta": 10000,
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "tie_word_embeddings": False,
            "rope_scaling": {
                "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
        671e9, 37e9, 1e9, 61 * (512 + 64) * 2, ("embed",),
    ),
    "gpt-oss-20b": Published(
        {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
        20.91e9, 3.61e9, 0.01e9, 24 * 2 * 8 * 64 * 2, ("embed",),
    ),
    "gpt-oss-120b": Published(
        {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
        116.83e9, 5.13e9, 0.01e9, 36 * 2 * 8 * 64 * 2, ("embed",),
    ),
    "OLMoE-1B-7B": Published(
        {
            "model_type": "olmoe", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
            "num_key_value_heads": 16, "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
            "vocab_size": 50304, "max_position_embeddings": 4096, "norm_topk_prob": False, "tie_word_embeddings": False,
        },
        6.9e9, 1.3e9, 0.1e9, 16 * 2 * 16 * 128 * 2,
    ),
    "GLM-4.5-Air": Published(
        {
            "model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 10944, "moe_intermediate_size": 1408,
            "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
            "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "vocab_size": 151552, "attention_bias": True,
            "partial_rotary_factor": 0.5, "max_position_embeddings": 131072, "rope_theta": 1e6, "use_qk_norm": False,
            "tie_word_embeddings": False,
        },
        106e9, 12e9, 1e9, 46 * 2 * 8 * 128 * 2, ("embed", "head"),
    ),
}  # fmt: skip


class _NoTensors(Checkpoint):
    """Nothing but a config, to ask which tensors a model has."""

    kind = "hf"

    def __init__(self, config: dict[str, Any]) -> None:
        self.path, self.config, self.tensors = Path("none"), config, dict[str, TensorInfo]()

    def read_raw(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        raise NotImplementedError

    read_f32 = read_raw

    def tokenizer_json(self) -> str | None:
        return None

    chat_template = tokenizer_json

    def special_tokens(self) -> dict[str, Any]:
        return {"eos_token_ids": []}


def write_headers(folder: Path, keys: dict[str, Any], shards: int = 4) -> int:
    """A checkpoint in bfloat16 as published (a tensor an expert), its shards empty files of full length; returns the bytes
    of all tensors."""
    config: ModelConfig = model_config(keys)
    weights = HfWeights(_NoTensors(keys), config)
    wanted = dict(weights.wanted)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in keys.items() if k != "quantization_config"}))
    names, total, index = list(wanted), 0, {}
    for shard in range(shards):
        header, at = {}, 0
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        for name in names[shard::shards]:
            nbytes = 2 * prod(wanted[name])
            header[name] = {"dtype": "BF16", "shape": list(wanted[name]), "data_offsets": [at, at + nbytes]}
            index[name] = file
            at += nbytes
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + at)
        total += at
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return total

"""GGUF metadata and tensor table -> a config with Hugging Face's keys, so that models/families.py reads one vocabulary.

Beyond Hugging Face's keys: ``tidegate_gguf_architecture`` (the name in the file) and ``tidegate_rope_interleaved``: true
where the rows of q and k are stored for rotating neighbours (2i, 2i+1), which converters do for llama and granitemoe
by permuting them, and which is DeepSeek's own order.

What GGUF does not store is taken from the tensors (widths, biases, tied output, which layers have experts) or from the
architecture's contract in transformers (``norm_topk_prob`` of the Qwens, gpt-oss's alternating windows).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.checkpoint.base import F32Array, TensorInfo
from tidegate.checkpoint.gguf_header import LazyArray, Value
from tidegate.errors import CheckpointError, UnknownArchitecture

Config = dict[str, Any]
_SIGMOID = 2  # expert_gating_func
_MOST_LAYERS = 4096
# Files made before group counts were written: published models by (experts, sigmoid router) -> (n_group, topk_group)
_UNWRITTEN_GROUPS = {(256, True): (8, 4), (160, False): (8, 3)}
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def translate(
    path: Path, metadata: Mapping[str, Value], tensors: Mapping[str, TensorInfo], read_f32: Callable[[str], F32Array]
) -> Config:
    """The config. ``read_f32`` reads a whole tensor (only rope factors, a few hundred bytes). Raises UnknownArchitecture,
    and CheckpointError for metadata that is missing or of the wrong type."""
    return _Translator(path, metadata, tensors, read_f32).translate()


class _Translator:
    """One file's metadata with typed look-ups; ``arch`` prefixes the keys."""

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, Value],
        tensors: Mapping[str, TensorInfo],
        read_f32: Callable[[str], F32Array],
    ) -> None:
        self.path, self.metadata, self.tensors, self.read_f32 = path, metadata, tensors, read_f32
        self.arch = str(metadata.get("general.architecture", ""))

    def translate(self) -> Config:
        if self.arch not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise UnknownArchitecture(
                f"{self.path}: GGUF architecture {self.arch!r} is not supported; supported are {known}"
            )
        config = self._common()
        config.update(_ARCHITECTURES[self.arch](self, config))
        config["tidegate_rope_interleaved"] = self.arch in _INTERLEAVED
        return config

    def _common(self) -> Config:
        embed = self.tensors.get("token_embd.weight")
        if embed is None or len(embed.shape) != 2:
            raise CheckpointError(f"{self.path}: token_embd.weight is missing or no matrix")
        hidden, heads = self.integer("embedding_length"), self.integer("attention.head_count")
        head_dim = self.integer("attention.key_length", hidden // heads if heads else 0)
        if head_dim <= 0 or self.integer("attention.value_length", head_dim) <= 0:
            raise CheckpointError(f"{self.path}: heads of {head_dim} dimensions")
        config: Config = {
            "tidegate_gguf_architecture": self.arch,
            "hidden_size": hidden,
            "num_hidden_layers": self._num_layers(),
            "vocab_size": embed.shape[0],
            "max_position_embeddings": self.integer("context_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.integer("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "intermediate_size": self.integer("feed_forward_length", 0),
            "hidden_act": "silu",
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self.number("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": stop_token_ids(self.metadata),
        }
        rotary = self.integer("rope.dimension_count", head_dim)
        if rotary != head_dim and self.arch != "deepseek2":
            factor = rotary / head_dim
            config["partial_rotary_factor"] = (
                factor if int(head_dim * factor) == rotary else float(np.nextafter(factor, 2))
            )
        return config

    def _num_layers(self) -> int:
        """``block_count`` without the trailing multi-token-prediction layers, which are no part of the decoder."""
        count = self.integer("block_count")
        if not 1 <= count <= _MOST_LAYERS:
            raise CheckpointError(f"{self.path}: {self.arch}.block_count must be 1 to {_MOST_LAYERS}, got {count}")
        while count > 1 and any(name.startswith(f"blk.{count - 1}.nextn.") for name in self.tensors):
            count -= 1
        return count

    def _rope_scaling(self) -> Config | None:
        factors = {kind: self._rope_factors(f"rope_factors_{kind}.weight") for kind in ("short", "long")}
        frequencies = self._rope_factors("rope_freqs.weight")
        kind = self.text("rope.scaling.type", "none")
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0))
        original = self.integer("rope.scaling.original_context_length", 0)
        scaling: Config = {"rope_type": kind, "factor": factor}
        if original:
            scaling["original_max_position_embeddings"] = original
        if frequencies is not None:  # llama3's scaling, worked out: divides each frequency, as longrope's factors do
            return {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0,
                    "short_factor": frequencies, "long_factor": frequencies}  # fmt: skip
        if factors["short"] is not None and factors["long"] is not None:
            scaling |= {"rope_type": "longrope", "short_factor": factors["short"], "long_factor": factors["long"]}
            if "rope.scaling.attn_factor" in self:
                scaling["attention_factor"] = self.number("rope.scaling.attn_factor")
            return scaling
        if kind == "yarn":
            return scaling | self._yarn()
        if kind == "linear" or (kind == "none" and factor != 1.0):
            return {"rope_type": "linear", "factor": factor}
        if kind != "none":
            raise CheckpointError(
                f"{self.path}: rope scaling {kind!r} is not supported; supported are linear, yarn, longrope"
            )
        return None

    def _yarn(self) -> Config:
        """Numbers that the file does not give keep transformers' defaults."""
        out: Config = {}
        for key in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{key}" in self:
                out[key] = self.number(f"rope.scaling.yarn_{key}")
        if "rope.scaling.yarn_log_multiplier" in self:  # 0.1 * mscale_all_dim; published models have mscale the same
            out["mscale"] = out["mscale_all_dim"] = round(self.number("rope.scaling.yarn_log_multiplier") / 0.1, 6)
        if self.arch == "gpt-oss":
            out["truncate"] = False
        return out

    def _rope_factors(self, name: str) -> list[float] | None:
        return [float(value) for value in self.read_f32(name).ravel()] if name in self.tensors else None

    def __contains__(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._look_up(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{self.path}: {self.arch}.{key} must be a whole number, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """float32 numbers become the shortest decimal that means the same float32 (1e-05, not 9.99999974e-06)."""
        value = self._look_up(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self.path}: {self.arch}.{key} must be a number, got {value!r}")
        return float(str(np.float32(value)))

    def flag(self, key: str, default: bool) -> bool:
        value = self._look_up(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {self.arch}.{key} must be true or false, got {value!r}")
        return value

    def text(self, key: str, default: str) -> str:
        return str(self._look_up(key, default))

    def _look_up(self, key: str, default: Any) -> Any:
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if value is None:
            raise CheckpointError(f"{self.path}: {self.arch}.{key} is missing")
        if isinstance(value, LazyArray):  # one number a layer
            values = set(np.asarray(value.load()).tolist())
            if len(values) != 1:
                raise CheckpointError(
                    f"{self.path}: {self.arch}.{key} differs between layers ({sorted(values)}); not supported"
                )
            return values.pop()
        return value

    def rows(self, suffix: str) -> int:
        """Outputs of the first layer's tensor of this name (stacked experts: of one expert), 0 without one."""
        for layer in range(self.integer("block_count")):
            info = self.tensors.get(f"blk.{layer}.{suffix}.weight") or self.tensors.get(
                f"blk.{layer}.{suffix}.0.weight"
            )
            if info is not None:
                return info.shape[-2] if len(info.shape) > 1 else 0
        return 0

    def dense_layers(self, config: Config) -> list[int]:
        return [n for n in range(config["num_hidden_layers"]) if f"blk.{n}.ffn_gate_inp.weight" not in self.tensors]

    def experts(self, name: str) -> Config:
        return {name: self.integer("expert_count"), "num_experts_per_tok": self.integer("expert_used_count")}

    def expert_width(self) -> int:
        return self.integer("expert_feed_forward_length", self.rows("ffn_gate_exps") or self.rows("ffn_gate"))


def stop_token_ids(metadata: Mapping[str, Value]) -> list[int]:
    """The ids that the metadata names as ends: of sequence, of turn, of message."""
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in _STOP_KEYS]
    return list(dict.fromkeys(i for i in ids if isinstance(i, int) and not isinstance(i, bool)))


def _llama(file: _Translator, config: Config) -> Config:
    if file.integer("expert_count", 0) == 0:
        return {"model_type": "llama", "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}
    return {"model_type": "mixtral", **file.experts("num_local_experts")}


def _qwen3(file: _Translator, config: Config) -> Config:
    return {"model_type": "qwen3"}


def _qwen_moe(file: _Translator, config: Config) -> Config:
    out: Config = {
        **file.experts("num_experts"),
        "moe_intermediate_size": file.expert_width(),
        "decoder_sparse_step": 1,
        "mlp_only_layers": file.dense_layers(config),
        "norm_topk_prob": file.flag("expert_weights_norm", file.arch == "qwen3moe"),
    }
    if file.arch == "qwen3moe":
        return {"model_type": "qwen3_moe", **out}
    shared = file.integer("expert_shared_feed_forward_length", file.rows("ffn_gate_shexp"))
    bias = config["attention_bias"]
    return {"model_type": "qwen2_moe", **out, "shared_expert_intermediate_size": shared, "qkv_bias": bias}


def _olmoe(file: _Translator, config: Config) -> Config:
    clip = file.number("attention.clamp_kqv") if "attention.clamp_kqv" in file else None
    norm = file.flag("expert_weights_norm", default=False)
    return {
        "model_type": "olmoe",
        **file.experts("num_experts"),
        "intermediate_size": file.expert_width(),
        "norm_topk_prob": norm,
        "clip_qkv": clip,
    }


def _deepseek2(file: _Translator, config: Config) -> Config:
    rope = file.integer("rope.dimension_count")
    head = file.integer("attention.key_length_mla", config["head_dim"])
    is_v3 = file.integer("expert_gating_func", 1) == _SIGMOID or any(
        n.endswith(".exp_probs_b.bias") for n in file.tensors
    )
    experts = file.experts("n_routed_experts")
    unwritten = _UNWRITTEN_GROUPS.get((experts["n_routed_experts"], is_v3), (1, 1))
    groups = file.integer("expert_group_count", unwritten[0])
    out: Config = {
        **experts,
        "head_dim": rope,
        "num_key_value_heads": config["num_attention_heads"],
        "kv_lora_rank": file.integer("attention.kv_lora_rank"),
        "q_lora_rank": file.integer("attention.q_lora_rank") if "blk.0.attn_q_a.weight" in file.tensors else None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": head - rope,
        "v_head_dim": file.integer("attention.value_length_mla", file.integer("attention.value_length", head - rope)),
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in file.tensors,
        "n_group": groups,
        "topk_group": file.integer("expert_group_used_count", unwritten[1]),
        **_shared_and_dense(file),
        "rope_interleave": True,
    }
    if is_v3:
        return {"model_type": "deepseek_v3", **out, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    method = "group_limited_greedy" if groups > 1 else "greedy"
    return {"model_type": "deepseek_v2", **out, "scoring_func": "softmax", "topk_method": method}


def _shared_and_dense(file: _Translator) -> Config:
    """Keys that DeepSeek's and GLM's configs share."""
    return {
        "moe_intermediate_size": file.expert_width(),
        "n_shared_experts": file.integer("expert_shared_count", 0),
        "first_k_dense_replace": file.integer("leading_dense_block_count", 0),
        "moe_layer_freq": 1,
        "norm_topk_prob": file.flag("expert_weights_norm", default=False),
        "routed_scaling_factor": file.number("expert_weights_scale", 1.0),
    }


def _glm4_moe(file: _Translator, config: Config) -> Config:
    return {
        "model_type": "glm4_moe",
        **file.experts("n_routed_experts"),
        **_shared_and_dense(file),
        "norm_topk_prob": file.flag("expert_weights_norm", default=True),
        "n_group": file.integer("expert_group_count", 1),
        "topk_group": file.integer("expert_group_used_count", 1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _gpt_oss(file: _Translator, config: Config) -> Config:
    layers = config["num_hidden_layers"]
    return {
        "model_type": "gpt_oss",
        **file.experts("num_local_experts"),
        "intermediate_size": file.expert_width(),
        "sliding_window": file.integer("attention.sliding_window"),
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)],
        "swiglu_limit": 7.0,
    }


def _granite(file: _Translator, config: Config) -> Config:
    out: Config = {
        "attention_multiplier": file.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": file.number("embedding_scale", 1.0),
        "residual_multiplier": file.number("residual_scale", 1.0),
        "logits_scaling": file.number("logit_scale", 1.0),
    }
    out |= {**file.experts("num_local_experts"), "intermediate_size": file.expert_width()}
    shared = file.integer("expert_shared_feed_forward_length", file.rows("ffn_gate_shexp"))
    if shared == 0:
        return {"model_type": "granitemoe", **out}
    return {"model_type": "granitemoeshared", **out, "shared_intermediate_size": shared}


_ARCHITECTURES: dict[str, Callable[[_Translator, Config], Config]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen2moe": _qwen_moe,
    "qwen3moe": _qwen_moe,
    "olmoe": _olmoe,
    "deepseek2": _deepseek2,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "granitemoe": _granite,
}
_INTERLEAVED = ("llama", "granitemoe", "deepseek2")

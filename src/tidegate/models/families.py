"""Model families: from a checkpoint's config to a ModelConfig. The only reader of Hugging Face's config keys.

One function a family, with the defaults of transformers 5.23 for absent keys. Weight names are in families_hf.py and
families_gguf.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tidegate.checkpoint.base import Checkpoint
from tidegate.errors import UnknownArchitecture
from tidegate.model_config import AttentionConfig, ModelConfig, MoeConfig, RopeConfig
from tidegate.models.config_keys import ConfigKeys
from tidegate.models.families_gguf import GgufWeights
from tidegate.models.families_hf import HfWeights
from tidegate.models.families_parts import (
    grouped_attention,
    latent_attention,
    leading_dense,
    routed_experts,
    sparse_layers,
    window_everywhere,
    windows_by_type,
)
from tidegate.models.families_rope import rope_config
from tidegate.models.families_weights import FamilyWeights

_QUANTIZATIONS = ("fp8", "mxfp4")


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """The description of the model that ``config`` (Hugging Face keys) names.

    Raises UnknownArchitecture for a family we do not have, CheckpointError for a missing or contradictory key.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise UnknownArchitecture(
            f"model_type {family!r} is not supported; supported are {', '.join(sorted(_FAMILIES))}"
        )
    keys = ConfigKeys(config, f"config of {family}")
    method = keys.section("quantization_config").get("quant_method")
    if method is not None and method not in _QUANTIZATIONS:
        raise keys.error(f"quant_method {method!r} is not supported; supported are {', '.join(_QUANTIZATIONS)}")
    result = _FAMILIES[family](keys)
    _check(keys, result)
    return result


def weight_map(checkpoint: Checkpoint, config: ModelConfig) -> FamilyWeights:
    """Where every weight is in ``checkpoint``. Raises BadTensor (file, tensor, wanted, got) unless every tensor that the
    model needs is there with its shape, and nothing else that would change the answer. Reads headers only."""
    weights: FamilyWeights = (GgufWeights if checkpoint.kind == "gguf" else HfWeights)(checkpoint, config)
    weights.check()
    return weights


def _model(
    keys: ConfigKeys,
    attention: AttentionConfig,
    rope: RopeConfig,
    moe: MoeConfig | None,
    *,
    norm_eps: float = 1e-6,
    moe_layers: tuple[bool, ...] | None = None,
    windows: tuple[int, ...] | None = None,
) -> ModelConfig:
    """What every family shares; ``norm_eps`` is the family's default, ``moe_layers`` and ``windows`` default to all and none."""
    num_layers = keys.num_layers()
    if moe_layers is None:
        moe_layers = (moe is not None,) * num_layers
    return ModelConfig(
        family=keys.raw["model_type"],
        num_layers=num_layers,
        hidden_size=keys.integer("hidden_size"),
        vocab_size=keys.integer("vocab_size"),
        max_positions=keys.integer("max_position_embeddings"),
        norm_eps=keys.number("rms_norm_eps", default=norm_eps),
        attention=attention,
        rope=rope,
        moe=moe if any(moe_layers) else None,
        moe_layers=moe_layers,
        windows=windows or (0,) * num_layers,
        dense_dim=0 if all(moe_layers) else keys.integer("intermediate_size"),
        activation=keys.activation(),  # type: ignore[arg-type]  # ConfigKeys checks the names
        tied_embeddings=keys.flag("tie_word_embeddings", default=False),
        bos_token_id=keys.token_id("bos_token_id"),
        eos_token_ids=keys.token_ids("eos_token_id"),
    )


def _mixtral(keys: ConfigKeys) -> ModelConfig:
    attention = grouped_attention(keys)
    rope = rope_config(keys, attention.head_dim, theta=1e6)
    moe = routed_experts(keys, "intermediate_size", scoring="topk_softmax")
    return _model(keys, attention, rope, moe, norm_eps=1e-5, windows=window_everywhere(keys))


def _qwen2_moe(keys: ConfigKeys) -> ModelConfig:
    attention = grouped_attention(keys)
    slides = keys.flag("use_sliding_window", default=False)
    last = keys.integer("max_window_layers", default=28, minimum=0)
    moe = routed_experts(
        keys,
        "moe_intermediate_size",
        normalize_topk=keys.flag("norm_topk_prob", default=False),
        shared_dim=keys.integer("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    result = _model(
        keys,
        attention,
        rope_config(keys, attention.head_dim),
        moe,
        moe_layers=sparse_layers(keys),
        windows=windows_by_type(keys, lambda layer: slides and (layer + 1) % 2 == 1 and layer < last),
    )
    return replace(result, has_attention_bias=keys.flag("qkv_bias", default=True))


def _qwen3_moe(keys: ConfigKeys) -> ModelConfig:
    attention = grouped_attention(keys, qk_norm="head")
    bias = keys.flag("attention_bias", default=False)
    slides = keys.flag("use_sliding_window", default=False)
    result = _model(
        keys,
        attention,
        rope_config(keys, attention.head_dim),
        routed_experts(keys, "moe_intermediate_size", normalize_topk=keys.flag("norm_topk_prob", default=False)),
        moe_layers=sparse_layers(keys),
        windows=window_everywhere(keys) if slides else None,
    )
    return replace(result, has_attention_bias=bias, has_output_bias=bias)


def _olmoe(keys: ConfigKeys) -> ModelConfig:
    clip = keys.number("clip_qkv") if keys.has("clip_qkv") else None
    attention = grouped_attention(keys, qk_norm="full", clip_qkv=clip)
    bias = keys.flag("attention_bias", default=False)
    moe = routed_experts(keys, "intermediate_size", normalize_topk=keys.flag("norm_topk_prob", default=False))
    result = _model(keys, attention, rope_config(keys, attention.head_dim), moe, norm_eps=1e-5)
    return replace(result, has_attention_bias=bias, has_output_bias=bias)


def _deepseek(keys: ConfigKeys, *, interleaved: bool, dense_layers: int, **routing: Any) -> ModelConfig:
    bias = keys.flag("attention_bias", default=False)
    keys.require("mlp_bias", wanted=False)
    rope = rope_config(keys, keys.integer("qk_rope_head_dim"), interleaved=interleaved)
    width = keys.integer("moe_intermediate_size")
    moe = routed_experts(
        keys,
        "moe_intermediate_size",
        shared_dim=width * keys.integer("n_shared_experts", default=0, minimum=0),
        routed_scaling=keys.number("routed_scaling_factor", default=1.0),
        **routing,
    )
    result = _model(keys, latent_attention(keys, rope), rope, moe, moe_layers=leading_dense(keys, dense_layers))
    return replace(result, has_attention_bias=bias, has_output_bias=bias)


def _deepseek_v2(keys: ConfigKeys) -> ModelConfig:
    keys.require("scoring_func", "softmax")
    keys.require("norm_topk_prob", wanted=False)  # transformers ignores it; no published V2 sets it
    method = keys.raw.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise keys.error(f"topk_method {method!r} is not supported; supported are greedy, group_limited_greedy")
    groups = {}
    if method == "group_limited_greedy":
        groups = {"num_groups": keys.integer("n_group"), "topk_groups": keys.integer("topk_group")}
    return _deepseek(keys, interleaved=True, dense_layers=0, group_score="max", **groups)


def _sigmoid_routing(keys: ConfigKeys, groups: int, topk_groups: int) -> dict[str, Any]:
    """DeepSeek-V3's and GLM-4's router: sigmoid scores, a correction bias for choosing, groups ranked by their best two."""
    keys.require("scoring_func", "sigmoid")
    keys.require("topk_method", "noaux_tc")
    return {
        "scoring": "sigmoid",
        "normalize_topk": keys.flag("norm_topk_prob", default=True),
        "has_correction_bias": True,
        "num_groups": keys.integer("n_group", default=groups),
        "topk_groups": keys.integer("topk_group", default=topk_groups),
        "group_score": "top2_sum",
    }


def _deepseek_v3(keys: ConfigKeys) -> ModelConfig:
    interleaved = keys.flag("rope_interleave", default=True)
    return _deepseek(keys, interleaved=interleaved, dense_layers=3, **_sigmoid_routing(keys, 8, 4))


def _gpt_oss(keys: ConfigKeys) -> ModelConfig:
    attention = grouped_attention(keys, has_sinks=True)
    moe = routed_experts(keys, "intermediate_size", scoring="topk_softmax", has_router_bias=True, has_expert_bias=True)
    bias = keys.flag("attention_bias", default=True)
    result = _model(
        keys,
        attention,
        rope_config(keys, attention.head_dim, theta=150000.0),
        moe,
        norm_eps=1e-5,
        windows=windows_by_type(keys, lambda layer: layer % 2 == 0),
    )
    return replace(
        result,
        activation="clamped_swiglu",
        activation_alpha=keys.number("swiglu_alpha", default=1.702),
        activation_limit=keys.number("swiglu_limit", default=7.0),
        has_attention_bias=bias,
        has_output_bias=bias,
    )


def _glm4_moe(keys: ConfigKeys) -> ModelConfig:
    attention = grouped_attention(keys, qk_norm="head" if keys.flag("use_qk_norm", default=False) else "none")
    width = keys.integer("moe_intermediate_size")
    moe = routed_experts(
        keys,
        "moe_intermediate_size",
        shared_dim=width * keys.integer("n_shared_experts", default=1, minimum=0),
        routed_scaling=keys.number("routed_scaling_factor", default=1.0),
        **_sigmoid_routing(keys, 1, 1),
    )
    rope = rope_config(keys, attention.head_dim, partial=0.5)
    result = _model(keys, attention, rope, moe, norm_eps=1e-5, moe_layers=leading_dense(keys, 1))
    return replace(result, has_attention_bias=keys.flag("attention_bias", default=False))


def _granitemoe(keys: ConfigKeys) -> ModelConfig:
    attention = grouped_attention(keys, scale=keys.number("attention_multiplier", default=1.0))
    bias = keys.flag("attention_bias", default=False)
    moe = routed_experts(keys, "intermediate_size", scoring="topk_softmax")
    return replace(
        _model(keys, attention, rope_config(keys, attention.head_dim), moe),
        has_attention_bias=bias,
        has_output_bias=bias,
        embedding_multiplier=keys.number("embedding_multiplier", default=1.0),
        residual_multiplier=keys.number("residual_multiplier", default=1.0),
        logits_divisor=keys.number("logits_scaling", default=1.0),
    )


def _phimoe(keys: ConfigKeys) -> ModelConfig:
    attention = grouped_attention(keys)
    bias = keys.flag("attention_bias", default=False)
    jitter = keys.number("router_jitter_noise", default=0.01, positive=False)
    moe = routed_experts(keys, "intermediate_size", scoring="sparsemixer", router_jitter=jitter)
    if moe.num_experts_per_tok != 2:
        raise keys.error(f"num_experts_per_tok is {moe.num_experts_per_tok}; PhiMoE's router always chooses 2")
    rope = rope_config(keys, attention.head_dim, theta=1e6)
    return replace(
        _model(keys, attention, rope, moe, norm_eps=1e-5, windows=window_everywhere(keys)),
        norm="layer",
        has_attention_bias=bias,
        has_output_bias=bias,
        has_head_bias=keys.flag("lm_head_bias", default=False),
    )


def _llama(keys: ConfigKeys) -> ModelConfig:
    attention = grouped_attention(keys)
    bias = keys.flag("attention_bias", default=False)
    keys.require("mlp_bias", wanted=False)
    result = _model(keys, attention, rope_config(keys, attention.head_dim), None)
    return replace(result, has_attention_bias=bias, has_output_bias=bias)


def _qwen3(keys: ConfigKeys) -> ModelConfig:
    attention = grouped_attention(keys, qk_norm="head")
    bias = keys.flag("attention_bias", default=False)
    slides = keys.flag("use_sliding_window", default=False)
    first = keys.integer("max_window_layers", default=28, minimum=0)
    windows = windows_by_type(keys, lambda layer: layer >= first) if slides else None
    result = _model(keys, attention, rope_config(keys, attention.head_dim), None, windows=windows)
    return replace(result, has_attention_bias=bias, has_output_bias=bias)


_FAMILIES: dict[Any, Callable[[ConfigKeys], ModelConfig]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
    "granitemoe": _granitemoe,
    "phimoe": _phimoe,
    "llama": _llama,
    "qwen3": _qwen3,
}


def _check(keys: ConfigKeys, config: ModelConfig) -> None:
    """Contradictions between keys that each look right alone."""
    att, moe = config.attention, config.moe
    if att.num_heads % att.num_kv_heads:
        raise keys.error(
            f"num_attention_heads {att.num_heads} is no multiple of num_key_value_heads {att.num_kv_heads}"
        )
    if moe is None:
        return
    if moe.num_experts_per_tok > moe.num_experts:
        raise keys.error(f"num_experts_per_tok {moe.num_experts_per_tok} of only {moe.num_experts} experts")
    if moe.num_experts % moe.num_groups or moe.topk_groups > moe.num_groups:
        groups = f"n_group {moe.num_groups}, topk_group {moe.topk_groups}"
        raise keys.error(f"{groups} do not divide {moe.num_experts} experts")
    reachable = moe.num_experts // moe.num_groups * moe.topk_groups
    if reachable < moe.num_experts_per_tok:
        raise keys.error(f"num_experts_per_tok {moe.num_experts_per_tok} of {reachable} experts in topk_group groups")

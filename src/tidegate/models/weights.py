"""The dense weights of a model as the objects backends take: views into memory that somebody else filled.

D hidden, V vocabulary, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tidegate.backends.operands import AttentionHalf, AttentionWeights, ByteArray, F32Array, Linear, Norm, Rope, Router
from tidegate.model_config import ModelConfig
from tidegate.models.rope import rope_table
from tidegate.quant.formats import Format

_LATENT_NORM_EPS = 1e-6  # DeepSeek's norms inside attention do not follow rms_norm_eps


class DenseTensors(Protocol):
    """The tensors of checkpoint/inventory.py, in memory. The views must outlive the weights made from them."""

    def matrix(self, name: str) -> tuple[ByteArray, Format]:
        """Packed bytes (uint8, 64-byte aligned) and their format."""

    def plain(self, name: str) -> F32Array:
        """float32, contiguous, in the inventory's shape."""


@dataclass(frozen=True)
class LatentAttentionWeights:
    """``q`` maps the hidden state to the queries, or, with ``q_norm``, to the query latent that ``q_b`` expands."""

    norm: Norm
    q: Linear
    q_norm: Norm | None
    q_b: Linear | None
    kv: Linear
    attention: AttentionWeights
    out: Linear


@dataclass(frozen=True)
class MlpWeights:
    norm: Norm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class MoeWeights:
    """``layer`` counts MoE layers from 0. The shared expert is None in models without one."""

    layer: int
    norm: Norm
    router: Router
    shared_gate_up: Linear | None
    shared_down: Linear | None
    shared_gate: Linear | None


@dataclass(frozen=True)
class LayerWeights:
    attention: AttentionHalf | LatentAttentionWeights
    feed_forward: MlpWeights | MoeWeights


@dataclass(frozen=True)
class ModelWeights:
    """``head`` is the embedding table's Linear when the two are tied (and the head has no bias)."""

    embed: Linear
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: Linear


def moe_weights(weights: ModelWeights) -> list[MoeWeights]:
    """The MoE layers, in order."""
    return [layer.feed_forward for layer in weights.layers if isinstance(layer.feed_forward, MoeWeights)]


def model_weights(
    config: ModelConfig, tensors: DenseTensors, context_tokens: int, *, wide_inputs: bool = False
) -> ModelWeights:
    """Every dense weight of the model. ``context_tokens``: the longest sequence it will serve (see rope_table);
    ``wide_inputs``: as in Linear, for all of them."""
    return _Builder(config, tensors, rope_table(config.rope, context_tokens), wide_inputs).build()


class _Builder:
    def __init__(self, config: ModelConfig, tensors: DenseTensors, rope: Rope, wide_inputs: bool) -> None:
        self._config, self._tensors, self._rope, self._wide_inputs = config, tensors, rope, wide_inputs

    def build(self) -> ModelWeights:
        config = self._config
        embed = self._linear("embed", config.vocab_size, config.hidden_size)
        head = embed
        if not config.tied_embeddings or config.has_head_bias:
            name = "embed" if config.tied_embeddings else "head"
            bias = "head_bias" if config.has_head_bias else None
            head = self._linear(name, config.vocab_size, config.hidden_size, bias)
        return ModelWeights(
            embed=embed,
            layers=tuple(self._layer(layer) for layer in range(config.num_layers)),
            final_norm=self._norm("final_norm"),
            head=head,
        )

    def _layer(self, layer: int) -> LayerWeights:
        prefix = f"layers.{layer}."
        attention = self._latent if self._config.attention.is_mla else self._grouped
        feed_forward = self._moe if self._config.moe_layers[layer] else self._mlp
        return LayerWeights(attention(layer, prefix), feed_forward(layer, prefix))

    def _grouped(self, layer: int, prefix: str) -> AttentionHalf:
        config, att = self._config, self._config.attention
        rows = (att.num_heads + att.num_kv_heads) * att.head_dim + att.num_kv_heads * att.v_head_dim
        has_norms = att.qk_norm != "none"
        weights = AttentionWeights(
            index=layer,
            config=att,
            rope=self._rope,
            window=config.windows[layer],
            q_norm=self._rms(prefix + "q_norm", config.norm_eps) if has_norms else None,
            k_norm=self._rms(prefix + "k_norm", config.norm_eps) if has_norms else None,
            sinks_H=self._tensors.plain(prefix + "sinks") if att.has_sinks else None,
        )
        bias = prefix + "qkv_bias" if config.has_attention_bias else None
        qkv = self._linear(prefix + "qkv", rows, config.hidden_size, bias)
        return AttentionHalf(self._norm(prefix + "attn_norm"), qkv, weights, self._out(prefix))

    def _latent(self, layer: int, prefix: str) -> LatentAttentionWeights:
        config, att, rope_dims = self._config, self._config.attention, self._rope.dims
        rows, has_bias = att.num_heads * (att.qk_nope_dim + rope_dims), config.has_attention_bias
        q_norm = q_b = None
        if att.q_lora_rank:
            bias = prefix + "q_a_bias" if has_bias else None
            q = self._linear(prefix + "q_a", att.q_lora_rank, config.hidden_size, bias)
            q_norm = self._rms(prefix + "q_a_norm", _LATENT_NORM_EPS)
            q_b = self._linear(prefix + "q_b", rows, att.q_lora_rank)
        else:
            q = self._linear(prefix + "q", rows, config.hidden_size)
        weights = AttentionWeights(
            index=layer,
            config=att,
            rope=self._rope,
            window=config.windows[layer],
            kv_norm=self._rms(prefix + "kv_norm", _LATENT_NORM_EPS),
            k_up=self._linear(prefix + "k_up", att.num_heads * att.kv_lora_rank, att.qk_nope_dim),
            v_up=self._linear(prefix + "v_up", att.num_heads * att.v_head_dim, att.kv_lora_rank),
        )
        bias = prefix + "kv_a_bias" if has_bias else None
        kv = self._linear(prefix + "kv_a", att.kv_lora_rank + rope_dims, config.hidden_size, bias)
        return LatentAttentionWeights(self._norm(prefix + "attn_norm"), q, q_norm, q_b, kv, weights, self._out(prefix))

    def _out(self, prefix: str) -> Linear:
        config, att = self._config, self._config.attention
        bias = prefix + "o_bias" if config.has_output_bias else None
        return self._linear(prefix + "o", config.hidden_size, att.num_heads * att.v_head_dim, bias)

    def _mlp(self, layer: int, prefix: str) -> MlpWeights:
        config = self._config
        gate_up = self._linear(prefix + "gate_up", 2 * config.dense_dim, config.hidden_size)
        down = self._linear(prefix + "down", config.hidden_size, config.dense_dim)
        return MlpWeights(self._norm(prefix + "mlp_norm"), gate_up, down)

    def _moe(self, layer: int, prefix: str) -> MoeWeights:
        config, moe, hidden = self._config, self._config.moe, self._config.hidden_size
        assert moe is not None
        router = Router(
            weight_ED=self._tensors.plain(prefix + "router"),
            bias_E=self._tensors.plain(prefix + "router_bias") if moe.has_router_bias else None,
            correction_E=self._tensors.plain(prefix + "router_correction") if moe.has_correction_bias else None,
            config=moe,
        )
        shared = moe.shared_dim
        return MoeWeights(
            layer=sum(config.moe_layers[:layer]),
            norm=self._norm(prefix + "mlp_norm"),
            router=router,
            shared_gate_up=self._linear(prefix + "shared_gate_up", 2 * shared, hidden) if shared else None,
            shared_down=self._linear(prefix + "shared_down", hidden, shared) if shared else None,
            shared_gate=self._linear(prefix + "shared_gate", 1, hidden) if moe.has_shared_gate else None,
        )

    def _linear(self, name: str, n: int, k: int, bias: str | None = None) -> Linear:
        packed, fmt = self._tensors.matrix(name)
        assert packed.size == fmt.packed_bytes(n, k), (name, packed.size, fmt, n, k)
        values = None if bias is None else self._tensors.plain(bias)
        return Linear(name, packed, fmt, n, k, values, self._wide_inputs)

    def _norm(self, name: str) -> Norm:
        """One of the norms on the residual stream."""
        bias = self._tensors.plain(f"{name}_bias") if self._config.norm == "layer" else None
        return Norm(self._tensors.plain(name), bias, self._config.norm_eps, self._config.norm)

    def _rms(self, name: str, eps: float) -> Norm:
        return Norm(self._tensors.plain(name), None, eps)

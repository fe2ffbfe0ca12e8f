"""Norm, attention and routing of the CPU backend. Weights are checked and their native handles made at first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from tidegate import _core
from tidegate._core import Matrix
from tidegate.backends.base import Gate, Ranking
from tidegate.backends.cpu_linear import LinearOps, native_activation
from tidegate.backends.handles import kept
from tidegate.backends.operands import (
    AttentionHalf,
    AttentionWeights,
    ByteArray,
    DecoderLayer,
    F32Array,
    KvLayout,
    Linear,
    MoeLayer,
    Norm,
    Rope,
    Router,
    Routing,
    StepBatch,
)
from tidegate.quant.layout import ExpertLayout

_Norms = Callable[[Norm], _core.NormWeights]
_Ropes = Callable[[Rope], _core.RopeTable]
_Packed = Callable[[Linear], _core.PackedMatrix]


class _NativeGate(Gate[Matrix]):
    def __init__(self, compute: _core.Compute, native: _core.Gate) -> None:
        self._compute, self.native = compute, native

    def scores(self, x: Matrix) -> F32Array:
        mark = self._compute.mark()
        scores = np.array(self._compute.numpy(self.native.scores(x)))
        self._compute.release(mark)
        return scores

    def guess(self, x: Matrix) -> Ranking:
        return self.native.guess(x)

    def follow(self, heard_E: F32Array) -> None:
        self.native.follow(heard_E)


class AttentionOps(LinearOps):
    """The other part of CpuBackend."""

    def __init__(self, compute: _core.Compute) -> None:
        super().__init__(compute)
        # What makes a handle is given others, not the backend: so nothing keeps its threads alive but its user.
        norm, rope, packed = kept(_norm_weights), kept(_rope_table), self.packed
        self._norm, self._router = norm, kept(_router_params)
        self._grouped = kept(partial(_grouped_attention, norm, rope))
        self._latent = kept(partial(_latent_attention, norm, rope, packed))
        self._half = kept(partial(_attention_half, norm, packed, self._grouped))
        self._moe_layer = kept(partial(_moe_layer, norm, packed, self._router, self._layout))
        self._layers = kept(partial(_layers, self._half, self._moe_layer))

    def bind_kv(self, layout: KvLayout, pages: ByteArray) -> None:
        assert layout.page_tokens == _core.PAGE_TOKENS, f"the cpu backend has pages of {_core.PAGE_TOKENS} positions"
        self._kv = _core.KvPages(pages, layout.num_layers, layout.kv_heads, layout.k_dim, layout.v_dim, layout.dtype)

    def _begin_attention(self, batch: StepBatch) -> None:
        """The step's pages; bind_kv must have been called."""
        self._step = _core.Step(batch.positions_T, batch.sequence_T, batch.block_tables, self._kv.num_pages)

    def norm(self, x: Matrix, norm: Norm) -> Matrix:
        return _core.norm(self.compute, x, self._norm(norm))

    def attend(self, qkv: Matrix, weights: AttentionWeights) -> Matrix:
        return _core.attend(self.compute, self._kv, self._step, self._grouped(weights), qkv)

    def attention(self, x: Matrix, half: AttentionHalf) -> Matrix:
        return _core.attention(self.compute, self._kv, self._step, x, self._half(half))

    def attend_latent(self, q: Matrix, kv: Matrix, weights: AttentionWeights) -> Matrix:
        return _core.attend_latent(self.compute, self._kv, self._step, self._latent(weights), q, kv)

    def route(self, x: Matrix, router: Router) -> Routing:
        return Routing(*_core.route(self.compute, x, self._router(router)))

    def norm_route(self, x: Matrix, norm: Norm, router: Router) -> tuple[Matrix, Routing]:
        normed, ids_TK, weights_TK, said_E = _core.norm_route(self.compute, x, self._norm(norm), self._router(router))
        return normed, Routing(ids_TK, weights_TK, said_E)

    def run_moe(
        self, x: Matrix, layer: MoeLayer, cache: _core.LayerCache, sight: _core.Sight | None
    ) -> tuple[Matrix, Matrix | None, Matrix | None, _core.Routed | None]:
        return _core.run_moe(self.compute, x, self._moe_layer(layer), cache, sight)

    def run_layers(
        self, x: Matrix, layers: tuple[DecoderLayer, ...], scale: float, sights: Sequence[_core.Sight] = ()
    ) -> tuple[int, int]:
        return _core.run_layers(self.compute, self._kv, self._step, x, self._layers(layers), scale, sights)

    def rank(self, scores: Matrix, top_k: int, most: int) -> Ranking:
        return _core.rank(scores, top_k, most)

    def make_gate(self, linear: Linear, norm: Norm | None, top_k: int, most: int) -> Gate[Matrix]:
        assert linear.bias is not None
        weights = None if norm is None else self._norm(norm)
        return _NativeGate(
            self.compute, _core.Gate(self.compute, self.packed(linear), linear.bias, weights, top_k, most)
        )

    def make_sight(
        self,
        odds: _core.Odds,
        layer: int,
        gates: tuple[Gate[Matrix] | None, Gate[Matrix] | None, Gate[Matrix] | None],
        caches: tuple[_core.LayerCache, _core.LayerCache | None],
    ) -> _core.Sight:
        start, before, following = (gate.native if isinstance(gate, _NativeGate) else None for gate in gates)
        return _core.Sight(odds, layer, start, before, following, *caches)


def _norm_weights(norm: Norm) -> _core.NormWeights:
    bias = norm.bias
    if norm.kind == "layer" and bias is None:
        bias = np.zeros_like(norm.weight)
    assert norm.kind == "layer" or bias is None, "an RMSNorm has no bias"
    return _core.NormWeights(norm.weight, bias, norm.eps)


def _rope_table(rope: Rope) -> _core.RopeTable:
    return _core.RopeTable(rope.inv_freq, rope.factor, rope.interleaved)


def _router_params(router: Router) -> _core.RouterParams:
    moe = router.config
    return _core.RouterParams(
        weight_ED=router.weight_ED,
        bias_E=router.bias_E,
        correction_E=router.correction_E,
        top_k=moe.num_experts_per_tok,
        scoring=moe.scoring,
        normalize=moe.normalize_topk,
        scaling=moe.routed_scaling,
        num_groups=moe.num_groups,
        topk_groups=moe.topk_groups,
        group_best=2 if moe.group_score == "top2_sum" else 1,
        jitter=moe.router_jitter,
    )


def _grouped_attention(norm: _Norms, rope: _Ropes, weights: AttentionWeights) -> _core.GroupedAttention:
    config = weights.config
    return _core.GroupedAttention(
        layer=weights.index,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        v_head_dim=config.v_head_dim,
        scale=config.scale,
        clip=config.clip_qkv or 0.0,
        window=weights.window,
        qk_norm=config.qk_norm,
        q_norm=norm(weights.q_norm) if weights.q_norm else None,
        k_norm=norm(weights.k_norm) if weights.k_norm else None,
        sinks=weights.sinks_H,
        rope=rope(weights.rope) if weights.rope.dims else None,
    )


def _latent_attention(norm: _Norms, rope: _Ropes, packed: _Packed, weights: AttentionWeights) -> _core.LatentAttention:
    config = weights.config
    assert weights.kv_norm and weights.k_up and weights.v_up
    return _core.LatentAttention(
        layer=weights.index,
        num_heads=config.num_heads,
        kv_lora_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_dim,
        v_head_dim=config.v_head_dim,
        scale=config.scale,
        window=weights.window,
        kv_norm=norm(weights.kv_norm),
        sinks=weights.sinks_H,
        rope=rope(weights.rope),
        k_up=packed(weights.k_up),
        v_up=packed(weights.v_up),
    )


def _attention_half(
    norm: _Norms, packed: _Packed, grouped: Callable[[AttentionWeights], _core.GroupedAttention], half: AttentionHalf
) -> _core.AttentionHalf:
    return _core.AttentionHalf(norm(half.norm), packed(half.qkv), grouped(half.attention), packed(half.out))


def _moe_layer(
    norm: _Norms,
    packed: _Packed,
    router: Callable[[Router], _core.RouterParams],
    layout: Callable[[ExpertLayout], _core.ExpertLayout],
    layer: MoeLayer,
) -> _core.MoeLayer:
    return _core.MoeLayer(
        norm=norm(layer.norm),
        router=router(layer.router),
        layout=layout(layer.layout),
        activation=native_activation(layer.activation),
        shared_gate_up=packed(layer.shared_gate_up) if layer.shared_gate_up else None,
        shared_down=packed(layer.shared_down) if layer.shared_down else None,
    )


def _layers(
    half: Callable[[AttentionHalf], _core.AttentionHalf],
    moe: Callable[[MoeLayer], _core.MoeLayer],
    layers: tuple[DecoderLayer, ...],
) -> _core.Layers:
    return _core.Layers([_core.DecoderLayer(half(one.attention), moe(one.moe), one.cache) for one in layers])

"""Norm, attention and routing of the CPU backend. Weights are checked and their native handles made at first use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tidegate import _core
from tidegate._core import Matrix
from tidegate.backends.base import Gate, Ranking
from tidegate.backends.cpu_linear import LinearOps
from tidegate.backends.operands import (
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
    """The other part of CpuBackend; handles are kept as there."""

    def __init__(self, compute: _core.Compute) -> None:
        super().__init__(compute)
        self._norms: dict[int, tuple[_core.NormWeights, Norm]] = {}
        self._ropes: dict[int, tuple[_core.RopeTable, Rope]] = {}
        self._halves: dict[
            int, tuple[_core.GroupedAttention, _core.NormWeights, _core.PackedMatrix, _core.PackedMatrix]
        ] = {}
        self._grouped: dict[int, tuple[_core.GroupedAttention, AttentionWeights]] = {}
        self._latent: dict[int, tuple[_core.LatentAttention, AttentionWeights]] = {}
        self._layers: dict[int, tuple[_core.Layers, tuple[DecoderLayer, ...]]] = {}
        self._moe_layers: dict[int, tuple[_core.MoeLayer, MoeLayer]] = {}
        self._routers: dict[int, tuple[_core.RouterParams, Router]] = {}

    def bind_kv(self, layout: KvLayout, pages: ByteArray) -> None:
        assert layout.page_tokens == _core.PAGE_TOKENS, f"the cpu backend has pages of {_core.PAGE_TOKENS} positions"
        self._kv = _core.KvPages(pages, layout.num_layers, layout.kv_heads, layout.k_dim, layout.v_dim, layout.dtype)

    def _begin_attention(self, batch: StepBatch) -> None:
        """The step's pages; bind_kv must have been called."""
        self._step = _core.Step(batch.positions_T, batch.sequence_T, batch.block_tables, self._kv.num_pages)

    def norm(self, x: Matrix, norm: Norm) -> Matrix:
        return _core.norm(self.compute, x, self._norm(norm))

    def attend(self, qkv: Matrix, weights: AttentionWeights) -> Matrix:
        known = self._grouped.get(id(weights))
        layer = known[0] if known else self._make_grouped(weights)
        return _core.attend(self.compute, self._kv, self._step, layer, qkv)

    def attention(self, x: Matrix, norm: Norm, qkv: Linear, weights: AttentionWeights, out: Linear) -> Matrix:
        parts = self._halves.get(id(weights))
        if parts is None:
            layer = self._make_grouped(weights)
            parts = self._halves[id(weights)] = layer, self._norm(norm), self.packed(qkv), self.packed(out)
        return _core.attention(self.compute, self._kv, self._step, parts[0], x, *parts[1:])

    def attend_latent(self, q: Matrix, kv: Matrix, weights: AttentionWeights) -> Matrix:
        known = self._latent.get(id(weights))
        layer = known[0] if known else self._make_latent(weights)
        return _core.attend_latent(self.compute, self._kv, self._step, layer, q, kv)

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
        known = self._layers.get(id(layers))
        if known is None:
            known = self._layers[id(layers)] = _core.Layers([self._layer(layer) for layer in layers]), layers
        return _core.run_layers(self.compute, self._kv, self._step, x, known[0], scale, sights)

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

    def _norm(self, norm: Norm) -> _core.NormWeights:
        known = self._norms.get(id(norm))
        if known:
            return known[0]
        bias = norm.bias
        if norm.kind == "layer" and bias is None:
            bias = np.zeros_like(norm.weight)
        assert norm.kind == "layer" or bias is None, "an RMSNorm has no bias"
        handle = _core.NormWeights(norm.weight, bias, norm.eps)
        self._norms[id(norm)] = handle, norm
        return handle

    def _rope(self, rope: Rope) -> _core.RopeTable:
        known = self._ropes.get(id(rope))
        if known:
            return known[0]
        handle = _core.RopeTable(rope.inv_freq, rope.factor, rope.interleaved)
        self._ropes[id(rope)] = handle, rope
        return handle

    def _make_grouped(self, weights: AttentionWeights) -> _core.GroupedAttention:
        config = weights.config
        handle = _core.GroupedAttention(
            layer=weights.index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            v_head_dim=config.v_head_dim,
            scale=config.scale,
            clip=config.clip_qkv or 0.0,
            window=weights.window,
            qk_norm=config.qk_norm,
            q_norm=self._norm(weights.q_norm) if weights.q_norm else None,
            k_norm=self._norm(weights.k_norm) if weights.k_norm else None,
            sinks=weights.sinks_H,
            rope=self._rope(weights.rope) if weights.rope.dims else None,
        )
        self._grouped[id(weights)] = handle, weights
        return handle

    def _make_latent(self, weights: AttentionWeights) -> _core.LatentAttention:
        config = weights.config
        assert weights.kv_norm and weights.k_up and weights.v_up
        handle = _core.LatentAttention(
            layer=weights.index,
            num_heads=config.num_heads,
            kv_lora_rank=config.kv_lora_rank,
            nope_dim=config.qk_nope_dim,
            v_head_dim=config.v_head_dim,
            scale=config.scale,
            window=weights.window,
            kv_norm=self._norm(weights.kv_norm),
            sinks=weights.sinks_H,
            rope=self._rope(weights.rope),
            k_up=self.packed(weights.k_up),
            v_up=self.packed(weights.v_up),
        )
        self._latent[id(weights)] = handle, weights
        return handle

    def _moe_layer(self, layer: MoeLayer) -> _core.MoeLayer:
        known = self._moe_layers.get(id(layer))
        if known:
            return known[0]
        handle = _core.MoeLayer(
            norm=self._norm(layer.norm),
            router=self._router(layer.router),
            layout=self._layout(layer.layout),
            activation=self._activation(layer.activation),
            shared_gate_up=self.packed(layer.shared_gate_up) if layer.shared_gate_up else None,
            shared_down=self.packed(layer.shared_down) if layer.shared_down else None,
        )
        self._moe_layers[id(layer)] = handle, layer
        return handle

    def _layer(self, layer: DecoderLayer) -> _core.DecoderLayer:
        return _core.DecoderLayer(
            attention_norm=self._norm(layer.attention_norm),
            qkv=self.packed(layer.qkv),
            attention=self._make_grouped(layer.attention),
            out=self.packed(layer.out),
            moe=self._moe_layer(layer.moe),
            cache=layer.cache,
        )

    def _router(self, router: Router) -> _core.RouterParams:
        known = self._routers.get(id(router))
        if known:
            return known[0]
        moe = router.config
        handle = _core.RouterParams(
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
        self._routers[id(router)] = handle, router
        return handle

"""Weight names of Hugging Face checkpoints. E experts, F expert width, D hidden."""

from __future__ import annotations

import re
from functools import cached_property

from tidegate.checkpoint.sources import ExpertSources, Part, Source
from tidegate.models.families_weights import FamilyWeights, Wanted

_BLOCK_SPARSE = ("mixtral", "phimoe")
# Buffers that old checkpoints carry along and nobody reads.
_IGNORED = re.compile(r"\.(rotary_emb\.inv_freq|attn\.(masked_)?bias|[kv]_scale)$")
_SIMPLE = {
    "attn_norm": "input_layernorm.weight",
    "attn_norm_bias": "input_layernorm.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp_norm_bias": "post_attention_layernorm.bias",
    "o": "self_attn.o_proj.weight",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "sinks": "self_attn.sinks",
    "q": "self_attn.q_proj.weight",
    "q_a": "self_attn.q_a_proj.weight",
    "q_a_bias": "self_attn.q_a_proj.bias",
    "q_a_norm": "self_attn.q_a_layernorm.weight",
    "q_b": "self_attn.q_b_proj.weight",
    "kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_a_bias": "self_attn.kv_a_proj_with_mqa.bias",
    "kv_norm": "self_attn.kv_a_layernorm.weight",
    "router_correction": "mlp.gate.e_score_correction_bias",
    "router_bias": "mlp.router.bias",
    "shared_gate": "mlp.shared_expert_gate.weight",
}
_TOP = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "final_norm_bias": "model.norm.bias",
    "head": "lm_head.weight",
    "head_bias": "lm_head.bias",
}


class HfWeights(FamilyWeights):
    """Layouts: a tensor an expert (Mixtral's w1, w3, w2 or gate, up, down), stacked (Granite, and what transformers 5 keeps
    in memory), gpt-oss's interleaved ones in bf16 and MXFP4."""

    def whole_tensors(self, name: str) -> list[Wanted]:
        shape = self.shapes[name]
        if name in _TOP:
            return [(_TOP[name], shape)]
        _, layer, suffix = name.split(".")
        prefix = f"model.layers.{layer}."
        if suffix in _SIMPLE:
            return [(prefix + _SIMPLE[suffix], shape)]
        if suffix in ("qkv", "qkv_bias"):
            kind = "weight" if suffix == "qkv" else "bias"
            names = (f"{prefix}self_attn.{p}_proj.{kind}" for p in "qkv")
            return [(name, (n, *shape[1:])) for name, n in zip(names, self.qkv_rows(), strict=True)]
        if suffix in ("k_up", "v_up"):
            return [(prefix + "self_attn.kv_b_proj.weight", self.kv_b_shape())]
        return self._feed_forward(prefix, suffix, shape)

    def _feed_forward(self, prefix: str, suffix: str, shape: tuple[int, ...]) -> list[Wanted]:
        if suffix == "router":
            return [(prefix + self._router_name(), shape)]
        base = prefix + "mlp."
        if suffix.startswith("shared_"):
            assert self.config.moe is not None
            base += "shared_expert." if self.config.moe.has_shared_gate else "shared_experts."
        if suffix.endswith("gate_up"):
            half = (shape[0] // 2, shape[1])
            return [(base + "gate_proj.weight", half), (base + "up_proj.weight", half)]
        return [(base + "down_proj.weight", shape)]

    def _router_name(self) -> str:
        if self.config.family in _BLOCK_SPARSE:
            return "block_sparse_moe.gate.weight"
        names = {"granitemoe": "block_sparse_moe.router.layer.weight", "gpt_oss": "mlp.router.weight"}
        return names.get(self.config.family, "mlp.gate.weight")

    def layer_experts(self, decoder_layer: int) -> dict[str, tuple[int, ...]]:
        moe, d = self.config.moe, self.config.hidden_size
        assert moe is not None
        e, f = moe.num_experts, moe.expert_dim
        if self.config.family == "gpt_oss":
            out: dict[str, tuple[int, ...]] = {}
            base = f"model.layers.{decoder_layer}.mlp.experts."
            for name, rows, cols in (("gate_up_proj", 2 * f, d), ("down_proj", d, f)):
                out[base + name] = (e, rows, cols) if self._is_mxfp4(base + name) else (e, cols, rows)
                out[f"{base}{name}_bias"] = (e, rows)
            return out
        gate_up, down = self._stacked_names(decoder_layer)
        if self._is_stacked(gate_up):
            return {gate_up: (e, 2 * f, d), down: (e, d, f)}
        prefix = self._experts_prefix(decoder_layer)
        return {prefix + name: shape for name, shape in self._expert_tensors.items()}

    @cached_property
    def _expert_tensors(self) -> dict[str, tuple[int, ...]]:
        """Of every layer whose experts have tensors of their own, without its prefix."""
        moe, d = self.config.moe, self.config.hidden_size
        assert moe is not None
        shapes = ((moe.expert_dim, d), (moe.expert_dim, d), (d, moe.expert_dim))
        parts = list(zip(self._expert_parts(), shapes, strict=True))
        return {f"{expert}.{part}.weight": shape for expert in range(moe.num_experts) for part, shape in parts}

    def expert_of(self, decoder_layer: int, expert: int) -> ExpertSources:
        if self.config.family == "gpt_oss":
            return self._gpt_oss_expert(f"model.layers.{decoder_layer}.mlp.experts.", expert)
        gate_up, down = self._stacked_names(decoder_layer)
        if self._is_stacked(gate_up):
            return self.stacked(gate_up, down, expert)
        prefix = f"{self._experts_prefix(decoder_layer)}{expert}."
        return ExpertSources(*(Source.of(f"{prefix}{part}.weight") for part in self._expert_parts()))

    def is_ignored(self, tensor: str) -> bool:
        """A head that is tied anyway, layers of multi-token prediction behind the last one, old buffers."""
        if self.config.tied_embeddings and tensor == _TOP["head"]:
            return True
        match = re.match(r"model\.layers\.(\d+)\.", tensor)
        return bool(match and int(match[1]) >= self.config.num_layers) or _IGNORED.search(tensor) is not None

    def _stacked_names(self, layer: int) -> tuple[str, str]:
        if self.config.family == "granitemoe":
            prefix = f"model.layers.{layer}.block_sparse_moe."
            return prefix + "input_linear.weight", prefix + "output_linear.weight"
        prefix = f"model.layers.{layer}.mlp.experts."
        return prefix + "gate_up_proj", prefix + "down_proj"

    def _is_stacked(self, gate_up: str) -> bool:
        return self.config.family == "granitemoe" or gate_up in self.checkpoint.tensors

    def _experts_prefix(self, layer: int) -> str:
        block = "block_sparse_moe" if self.config.family in _BLOCK_SPARSE else "mlp"
        return f"model.layers.{layer}.{block}.experts."

    def _expert_parts(self) -> tuple[str, str, str]:
        """Gate, up, down of the layout with a tensor an expert."""
        return ("w1", "w3", "w2") if self.config.family in _BLOCK_SPARSE else ("gate_proj", "up_proj", "down_proj")

    def _gpt_oss_expert(self, prefix: str, e: int) -> ExpertSources:
        """Gate and up interleaved; transposed ([E, D, 2F]) in bf16, by rows ([E, 2F, D]) in MXFP4."""
        even, odd = (0, None, 2), (1, None, 2)
        gate_up, down, bias = prefix + "gate_up_proj", prefix + "down_proj", prefix + "gate_up_proj_bias"
        if self._is_mxfp4(gate_up):
            gate, up = Part(gate_up, index=e, rows=even), Part(gate_up, index=e, rows=odd)
        else:
            gate = Part(gate_up, index=e, cols=even, transpose=True)
            up = Part(gate_up, index=e, cols=odd, transpose=True)
        return ExpertSources(
            gate=Source.of(gate),
            up=Source.of(up),
            down=Source.of(Part(down, index=e, transpose=not self._is_mxfp4(down))),
            gate_bias=Source.of(Part(bias, index=e, rows=even)),
            up_bias=Source.of(Part(bias, index=e, rows=odd)),
            down_bias=Source.of(Part(prefix + "down_proj_bias", index=e)),
        )

    def _is_mxfp4(self, tensor: str) -> bool:
        info = self.checkpoint.tensors.get(tensor)
        return info is not None and info.dtype == "MXFP4"

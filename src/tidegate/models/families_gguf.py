"""Weight names of GGUF files, as llama.cpp's converters write them. H heads, E experts, F expert width, D hidden.

Rows of q and k stay in the file's order: where a converter permuted them for rotating neighbours, the config says
``tidegate_rope_interleaved`` and the rotation follows.
"""

from __future__ import annotations

import re

from tidegate.checkpoint.sources import ExpertSources, Part, Source
from tidegate.models.families_weights import FamilyWeights, Wanted

# Rope factors are in the config already.
_IGNORED = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight$")
_TOP = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "final_norm_bias": "output_norm.bias",
    "head": "output.weight",
    "head_bias": "output.bias",
}
_SIMPLE = {
    "attn_norm": "attn_norm.weight",
    "attn_norm_bias": "attn_norm.bias",
    "mlp_norm": "ffn_norm.weight",
    "mlp_norm_bias": "ffn_norm.bias",
    "o": "attn_output.weight",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "sinks": "attn_sinks.weight",
    "q": "attn_q.weight",
    "q_a": "attn_q_a.weight",
    "q_a_bias": "attn_q_a.bias",
    "q_a_norm": "attn_q_a_norm.weight",
    "q_b": "attn_q_b.weight",
    "kv_a": "attn_kv_a_mqa.weight",
    "kv_a_bias": "attn_kv_a_mqa.bias",
    "kv_norm": "attn_kv_a_norm.weight",
    "router": "ffn_gate_inp.weight",
    "router_bias": "ffn_gate_inp.bias",
    "router_correction": "exp_probs_b.bias",
    "shared_gate": "ffn_gate_inp_shexp.weight",
    "shared_down": "ffn_down_shexp.weight",
    "down": "ffn_down.weight",
}
_POST_ATTENTION_NORM = ("gpt_oss", "glm4_moe")


class GgufWeights(FamilyWeights):
    """Layouts of experts: stacked by kind (``ffn_gate_exps`` ...), gate and up together (``ffn_gate_up_exps``), or a tensor
    an expert (``ffn_gate.0`` ..., early Mixtral files)."""

    def dense(self, name: str) -> Source:
        suffix = name.rpartition(".")[2]
        tensors = [tensor for tensor, _ in self.whole_tensors(name)]
        if suffix == "shared_gate" and self._is_vector(tensors[0]):
            return Source.of(Part(tensors[0], transpose=True))
        if suffix in ("k_up", "v_up") and not tensors[0].endswith("kv_b.weight"):
            return Source.of(*tensors)
        return super().dense(name)

    def whole_tensors(self, name: str) -> list[Wanted]:
        shape = self.shapes[name]
        if name in _TOP:
            return [(_TOP[name], shape)]
        _, layer, suffix = name.split(".")
        prefix = f"blk.{layer}."
        if suffix in ("qkv", "qkv_bias"):
            kind = "weight" if suffix == "qkv" else "bias"
            names = (f"{prefix}attn_{p}.{kind}" for p in "qkv")
            return [(name, (n, *shape[1:])) for name, n in zip(names, self.qkv_rows(), strict=True)]
        if suffix in ("k_up", "v_up"):
            return [self._latent_up(prefix, suffix)]
        if suffix in ("gate_up", "shared_gate_up"):
            kind = "_shexp" if suffix == "shared_gate_up" else ""
            half = (shape[0] // 2, shape[1])
            return [(f"{prefix}ffn_{w}{kind}.weight", half) for w in ("gate", "up")]
        if suffix == "mlp_norm" and self.config.family in _POST_ATTENTION_NORM:
            return [(prefix + "post_attention_norm.weight", shape)]
        name = prefix + _SIMPLE[suffix]
        return [(name, shape[1:] if suffix == "shared_gate" and self._is_vector(name) else shape)]

    def _is_vector(self, tensor: str) -> bool:
        """The gate of the shared expert is a matrix [1, D] in some files and a vector in others."""
        info = self.checkpoint.tensors.get(tensor)
        return info is not None and len(info.shape) == 1

    def _latent_up(self, prefix: str, suffix: str) -> Wanted:
        """Newer files hold k_b [H, kv_lora, nope] and v_b [H, v, kv_lora], split and transposed as we want them."""
        att = self.config.attention
        if prefix + "attn_kv_b.weight" in self.checkpoint.tensors:
            return prefix + "attn_kv_b.weight", self.kv_b_shape()
        if suffix == "k_up":
            return prefix + "attn_k_b.weight", (att.num_heads, att.kv_lora_rank, att.qk_nope_dim)
        return prefix + "attn_v_b.weight", (att.num_heads, att.v_head_dim, att.kv_lora_rank)

    def layer_experts(self, decoder_layer: int) -> dict[str, tuple[int, ...]]:
        moe, d = self.config.moe, self.config.hidden_size
        assert moe is not None
        prefix, e, f = f"blk.{decoder_layer}.ffn_", moe.num_experts, moe.expert_dim
        shapes = {"gate_up": (2 * f, d), "gate": (f, d), "up": (f, d), "down": (d, f)}
        out: dict[str, tuple[int, ...]] = {}
        for kind in self._kinds(prefix):
            if f"{prefix}{kind}.0.weight" in self.checkpoint.tensors:
                out.update((f"{prefix}{kind}.{expert}.weight", shapes[kind]) for expert in range(e))
            else:
                out[f"{prefix}{kind}_exps.weight"] = (e, *shapes[kind])
            if moe.has_expert_bias:
                out[f"{prefix}{kind}_exps.bias"] = (e, shapes[kind][0])
        return out

    def expert_of(self, decoder_layer: int, expert: int) -> ExpertSources:
        prefix = f"blk.{decoder_layer}.ffn_"
        if self._kinds(prefix)[0] == "gate_up":
            return self.stacked(f"{prefix}gate_up_exps.weight", f"{prefix}down_exps.weight", expert)
        weights = [self._expert_source(prefix + kind, expert) for kind in ("gate", "up", "down")]
        assert self.config.moe is not None
        if not self.config.moe.has_expert_bias:
            return ExpertSources(*weights)
        biases = [Source.of(Part(f"{prefix}{kind}_exps.bias", index=expert)) for kind in ("gate", "up", "down")]
        return ExpertSources(*weights, *biases)

    def is_ignored(self, tensor: str) -> bool:
        """Rope factors, layers of multi-token prediction behind the last one, either form of kv_b beside the other."""
        match = re.match(r"blk\.(\d+)\.", tensor)
        if match and int(match[1]) >= self.config.num_layers:
            return True
        return _IGNORED.search(tensor) is not None or tensor.endswith((".attn_k_b.weight", ".attn_v_b.weight"))

    def _kinds(self, prefix: str) -> tuple[str, ...]:
        return (
            ("gate_up", "down") if f"{prefix}gate_up_exps.weight" in self.checkpoint.tensors else ("gate", "up", "down")
        )

    def _expert_source(self, name: str, expert: int) -> Source:
        if f"{name}.{expert}.weight" in self.checkpoint.tensors:
            return Source.of(f"{name}.{expert}.weight")
        return Source.of(Part(f"{name}_exps.weight", index=expert))

"""From a training checkpoint to a Hugging Face folder: config.json, model.safetensors (bfloat16), tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tidegate.errors import UsageError
from tidegate.train import checkpoint
from tidegate.train.options import Architecture, TrainOptions
from tidegate.train.quantization import fake_int4
from tidegate.train.tokenizer import CHAT_TEMPLATE, END_OF_TEXT, SPECIAL_TOKENS
from tidegate.train.weights import Buffers, parameters_of


def hub_config(architecture: Architecture) -> dict[str, Any]:
    """``config.json`` of the Qwen3-MoE architecture."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden_size,
        "intermediate_size": architecture.expert_size * architecture.num_experts_per_tok,
        "moe_intermediate_size": architecture.expert_size,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_kv_heads,
        "head_dim": architecture.head_dim,
        "num_experts": architecture.num_experts,
        "num_experts_per_tok": architecture.num_experts_per_tok,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "max_position_embeddings": architecture.max_positions,
        "rms_norm_eps": architecture.norm_eps,
        "rope_theta": architecture.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "bos_token_id": None,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def hub_tensors(
    masters: dict[str, torch.Tensor], architecture: Architecture, quantized: bool
) -> dict[str, torch.Tensor]:
    """Hugging Face names, bfloat16, one tensor per expert. ``quantized``: experts at their int4 values."""
    result = {"model.embed_tokens.weight": masters["embedding"], "model.norm.weight": masters["final_norm"]}
    query, kv, width = architecture.query_size, architecture.kv_size, architecture.expert_size
    for layer in range(architecture.num_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        attention, moe = theirs + "self_attn.", theirs + "mlp."
        q, k, v = masters[ours + "qkv"].split([query, kv, kv])
        result |= {
            theirs + "input_layernorm.weight": masters[ours + "attention_norm"],
            theirs + "post_attention_layernorm.weight": masters[ours + "moe_norm"],
            attention + "q_proj.weight": q,
            attention + "k_proj.weight": k,
            attention + "v_proj.weight": v,
            attention + "q_norm.weight": masters[ours + "query_norm"],
            attention + "k_norm.weight": masters[ours + "key_norm"],
            attention + "o_proj.weight": masters[ours + "output"],
            moe + "gate.weight": masters[ours + "router"],
        }
        gate_up, down = masters[ours + "gate_up"], masters[ours + "down"]
        if quantized:
            gate_up, down = fake_int4(gate_up), fake_int4(down)
        for expert in range(architecture.num_experts):
            at = f"{moe}experts.{expert}."
            result[at + "gate_proj.weight"], result[at + "up_proj.weight"] = gate_up[expert].split(width)
            result[at + "down_proj.weight"] = down[expert]
    return {name: tensor.bfloat16().add(0.0).contiguous() for name, tensor in result.items()}  # no negative zeros


def export(source: Path, tokenizer: Path, destination: Path) -> None:
    """Write the checkpoint file ``source`` as a Hugging Face folder that ``transformers`` loads unchanged.

    Experts are written at their int4 values where the run trained with them. A router temperature other than one and a
    centered router input are folded into the router; raises UsageError for routers that Qwen3-MoE cannot express.
    """
    state = checkpoint.load(source)
    options = TrainOptions.from_json(json.loads(state["options"]))
    if options.router.bias_rate or options.router.capacity_factor:
        raise UsageError(f"{source}: a model balanced by bias or capacity routes as Qwen3-MoE cannot; train without")
    if options.router.input == "standard":
        raise UsageError(f"{source}: Qwen3-MoE has no --router-input standard; train with centered or plain")
    masters = Buffers(parameters_of(options.architecture), "master")
    masters.full.copy_(state["masters"])
    views = masters.views()
    temperature = options.router_temperature(state["step"])
    for layer in range(options.architecture.num_layers):
        router_ED = views[f"layers.{layer}.router"].div_(temperature)
        if options.router.input == "centered":  # W (h - mean h) = (W - its rows' means) h
            router_ED.sub_(router_ED.mean(-1, keepdim=True))
    quantized = 0 <= options.qat_from_step <= state["step"]
    destination.mkdir(parents=True, exist_ok=True)
    tensors = hub_tensors(views, options.architecture, quantized)
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    (destination / "config.json").write_text(json.dumps(hub_config(options.architecture), indent=1) + "\n")
    (destination / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    (destination / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]), "clean_up_tokenization_spaces": False,
        "model_max_length": options.architecture.max_positions, "chat_template": CHAT_TEMPLATE,
    }, indent=1) + "\n")  # fmt: skip
    (destination / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}) + "\n")

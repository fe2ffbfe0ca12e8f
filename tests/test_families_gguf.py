"""Weight names and conventions of GGUF files: the tiny checkpoints, rewritten as llama.cpp's converter does, give
transformers' logits."""

import shutil

import pytest
import torch
import transformers

from gguf_convert import REPRESENTABLE, converted
from gguf_files import write_gguf
from in_memory import BACKENDS, tiny_model
from test_parity import TOLERANCE, error, prefill_and_decode, token_ids
from tidegate.checkpoint.gguf import GgufCheckpoint
from tidegate.errors import BadTensor
from tidegate.models.families import model_config, weight_map

LAYOUTS = [
    *((name, True, True) for name in REPRESENTABLE),
    *((name, True, False) for name in REPRESENTABLE if name.startswith("deepseek")),
    ("mixtral", False, True),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("variant", "stacked", "absorbed"), LAYOUTS)
def test_gguf_gives_the_logits_of_the_source(variant, stacked, absorbed, backend):
    folder, path = converted(variant, stacked, absorbed)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = token_ids()
    with torch.no_grad():
        wanted = oracle(torch.tensor(ids)[None].long()).logits[0].numpy()
    model = tiny_model(GgufCheckpoint(path), BACKENDS[backend])
    assert error(prefill_and_decode(model, ids), wanted) < TOLERANCE


@pytest.fixture
def parts(tmp_path):
    """A function that rewrites the tensors of a GGUF file, and the config of the original."""
    checkpoint = GgufCheckpoint(converted("qwen3_moe")[1])
    tensors = {name: checkpoint.read_f32(name).reshape(info.shape) for name, info in checkpoint.tensors.items()}
    metadata = {key: value for key, value in checkpoint.metadata.items() if not key.startswith(("GGUF.", "general."))}

    def rewrite() -> GgufCheckpoint:
        return GgufCheckpoint(write_gguf(tmp_path / "edited.gguf", "qwen3moe", metadata, tensors))

    yield tensors, rewrite, model_config(checkpoint.config)
    shutil.rmtree(tmp_path)


def test_tensors_that_do_not_fit_the_config_are_named(parts):
    tensors, rewrite, config = parts
    name = "blk.1.ffn_down_exps.weight"
    whole = tensors[name]
    tensors[name] = whole[:, :-1].copy()
    with pytest.raises(
        BadTensor, match=r"edited\.gguf: blk\.1\.ffn_down_exps\.weight: wanted .*16, 48, 40.* got .*16, 47, 40"
    ):
        weight_map(rewrite(), config)
    del tensors[name]
    with pytest.raises(BadTensor, match=r"edited\.gguf: tensor blk\.1\.ffn_down_exps\.weight is missing"):
        weight_map(rewrite(), config)
    tensors[name] = whole
    tensors["blk.0.attn_q.bias"] = whole[0, 0]
    with pytest.raises(BadTensor, match=r"edited\.gguf: blk\.0\.attn_q\.bias .* is no part of a qwen3_moe model"):
        weight_map(rewrite(), config)

"""FP8 and MXFP4 checkpoints, written by hand: the decoder on them against transformers on the dequantized weights."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import checkpoints
from in_memory import BACKENDS, tiny_model
from test_parity import TOLERANCE, error, prefill_and_decode, token_ids
from tidegate.quant.formats import Format

BLOCK = (24, 16)  # of FP8 scales; published checkpoints have 128 x 128
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def write(folder, source, tensors, quantization):
    """A copy of ``source`` with other tensors."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    if quantization:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def oracle(folder):
    """transformers' logits of the test tokens on the plain checkpoint in ``folder``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(torch.tensor(token_ids())[None].long()).logits[0].numpy()


def fp8(weight):
    """(FP8 weight, scale_inv of every block, the weight they stand for)."""
    rows, cols = weight.shape
    (bn, bk), shape = BLOCK, (-(-rows // BLOCK[0]), -(-cols // BLOCK[1]))
    padded = torch.zeros(shape[0] * bn, shape[1] * bk)
    padded[:rows, :cols] = weight
    scale = padded.view(shape[0], bn, shape[1], bk).abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(bn, 0)[:rows].repeat_interleave(bk, 1)[:, :cols]
    quantized = (weight / spread).to(torch.float8_e4m3fn)
    return quantized, scale, quantized.float() * spread


def fp8_checkpoint(tmp_path):
    source = checkpoints.checkpoint("deepseek_v3")
    stored, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = plain[name] = tensor
        if "_proj" in name:
            stored[name], stored[f"{name}_scale_inv"], plain[name] = fp8(tensor)
    quantization = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    return write(tmp_path / "fp8", source, stored, quantization), write(tmp_path / "plain", source, plain, None)


def mxfp4(weight):
    """(blocks, scales) of a weight [..., K]: two nibbles a byte, low first, one power of two for 32 inputs."""
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    scaled = groups / torch.exp2(exponents)[..., None]
    nibbles = (scaled.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).to(torch.uint8)
    return blocks, (exponents + 127).to(torch.uint8)


def mxfp4_checkpoint(tmp_path):
    model = checkpoints.build("gpt_oss", intermediate_size=96)
    model.save_pretrained(tmp_path / "source")
    stored, plain = {}, {}
    for name, tensor in load_file(tmp_path / "source" / "model.safetensors").items():
        stored[name] = plain[name] = tensor
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = mxfp4(tensor.transpose(1, 2))
            plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            assert torch.allclose(plain[name], tensor, atol=0.35 * tensor.abs().max())
            del stored[name]
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    mine = write(tmp_path / "mxfp4", tmp_path / "source", stored, quantization)
    return mine, write(tmp_path / "plain", tmp_path / "source", plain, None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [fp8_checkpoint, mxfp4_checkpoint])
def test_quantized_checkpoints_agree_with_their_dequantized_twin(make, backend, tmp_path):
    quantized, plain = make(tmp_path)
    model = tiny_model(quantized, BACKENDS[backend])
    assert error(prefill_and_decode(model, token_ids()), oracle(plain)) < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
def test_mxfp4_experts_stay_as_they_are(backend, tmp_path):
    """Packed as mxfp4 the weights lose nothing; only the activations are rounded to int8."""
    quantized, plain = mxfp4_checkpoint(tmp_path)
    model = tiny_model(quantized, BACKENDS[backend], experts=Format("mxfp4", 32))
    got, wanted = prefill_and_decode(model, token_ids()), oracle(plain)
    assert error(got, wanted) < 0.05
    assert np.corrcoef(got.ravel(), wanted.ravel())[0, 1] > 0.999

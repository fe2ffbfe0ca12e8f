"""Conversion of quantized GGUF files: each layer keeps its own formats, and Q4_0, Q8_0 and MXFP4 every bit."""

import gguf
import numpy as np
import pytest

from conversions import check_store
from gguf_files import write_gguf
from test_gguf_blocks import random_blocks
from tidegate.checkpoint import gguf_blocks
from tidegate.checkpoint.convert import ConvertOptions, convert
from tidegate.cli import main
from tidegate.experts.base import ExpertKey
from tidegate.quant import pack as tw
from tidegate.quant.formats import Format

D, F, E, LAYERS, VOCAB, HEADS, KV, HEAD_DIM = 256, 256, 3, 2, 48, 4, 2, 64
METADATA = {
    "qwen3moe.block_count": LAYERS, "qwen3moe.context_length": 128, "qwen3moe.embedding_length": D,
    "qwen3moe.feed_forward_length": 512, "qwen3moe.expert_feed_forward_length": F, "qwen3moe.expert_count": E,
    "qwen3moe.expert_used_count": 2, "qwen3moe.attention.head_count": HEADS, "qwen3moe.attention.head_count_kv": KV,
    "qwen3moe.attention.key_length": HEAD_DIM, "qwen3moe.attention.value_length": HEAD_DIM,
    "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6, "qwen3moe.rope.freq_base": 10000.0,
}  # fmt: skip


def quantized(kind, seed, *shape):
    """(raw bytes as GGUFWriter wants them, kind): random blocks of a tensor of this shape."""
    rows, k = int(np.prod(shape[:-1])), shape[-1]
    return random_blocks(kind, seed, rows, k).reshape(*shape[:-1], -1), kind


def mixed_model(path, gate_up, down, dense):
    """A Qwen3-MoE; ``gate_up`` and ``down`` name the types of each layer's experts, ``dense`` of q, k, v, o and embeddings."""
    ones, tensors = np.ones(D, np.float32), {}
    tensors["token_embd.weight"] = quantized(dense["embed"], 1, VOCAB, D)
    tensors["output.weight"] = quantized(dense["embed"], 2, VOCAB, D)
    tensors["output_norm.weight"] = ones
    for layer in range(LAYERS):
        p, seed = f"blk.{layer}.", 10 * layer
        tensors |= {p + "attn_norm.weight": ones, p + "ffn_norm.weight": ones}
        tensors |= {p + f"attn_{x}_norm.weight": np.ones(HEAD_DIM, np.float32) for x in "qk"}
        rows = {"q": HEADS * HEAD_DIM, "k": KV * HEAD_DIM, "v": KV * HEAD_DIM}
        tensors |= {p + f"attn_{x}.weight": quantized(dense[x], seed + 3, n, D) for x, n in rows.items()}
        tensors[p + "attn_output.weight"] = quantized(dense["o"], seed + 4, D, HEADS * HEAD_DIM)
        tensors[p + "ffn_gate_inp.weight"] = np.random.default_rng(seed).standard_normal((E, D)).astype(np.float32)
        tensors[p + "ffn_gate_exps.weight"] = quantized(gate_up[layer], seed + 5, E, F, D)
        tensors[p + "ffn_up_exps.weight"] = quantized(gate_up[layer], seed + 6, E, F, D)
        tensors[p + "ffn_down_exps.weight"] = quantized(down[layer], seed + 7, E, D, F)
    return write_gguf(path, "qwen3moe", METADATA, tensors), tensors


def matrix(raw_and_kind, expert):
    raw, kind = raw_and_kind
    return gguf.quants.dequantize(raw[expert], gguf.GGMLQuantizationType[kind])


def test_info_names_the_types(tmp_path, capsys):
    src, _ = mixed_model(
        tmp_path / "x.gguf", ["Q4_0", "Q4_0"], ["Q4_0", "Q6_K"], dict.fromkeys("qkvo", "Q8_0") | {"embed": "Q8_0"}
    )
    assert main(["info", str(src)]) == 0
    formats = capsys.readouterr().out.splitlines()[-1].split(None, 1)
    assert formats[0] == "formats" and [one.split()[0] for one in formats[1].split(", ")] == [
        "Q4_0",
        "Q8_0",
        "Q6_K",
        "F32",
    ]


def test_a_mix_keeps_each_matrix_in_its_own_format(tmp_path):
    dense = {"embed": "Q6_K", "q": "Q4_K", "k": "Q4_K", "v": "Q6_K", "o": "Q5_K"}
    src, _ = mixed_model(tmp_path / "mix.gguf", ["Q4_K", "Q2_K"], ["Q6_K", "Q3_K"], dense)
    store = check_store(src, convert(src, tmp_path / "dst"))
    formats = [(str(layout.fmt), str(layout.down_fmt)) for layout in store.layouts]
    assert formats == [("int4-g32-min", "int8-g16"), ("int4-g16-min", "int4-g16")]
    assert str(store.dense["embed"].fmt) == "int8-g16" and str(store.dense["layers.0.o"].fmt) == "int8-g32-min"
    assert str(store.dense["layers.0.qkv"].fmt) == "int8-g32"  # its parts disagree
    store = check_store(src, convert(src, tmp_path / "other", ConvertOptions(experts="int8", dense="bf16")))
    assert {layout.fmt for layout in store.layouts} == {Format("int8", 32)}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_simple_types_are_kept_to_the_bit(tmp_path, kind):
    src, tensors = mixed_model(
        tmp_path / "x.gguf", [kind] * LAYERS, [kind] * LAYERS, dict.fromkeys("qkvo", "Q8_0") | {"embed": "Q4_0"}
    )
    store = check_store(src, convert(src, tmp_path / "dst"))
    for layer, layout in enumerate(store.layouts):
        assert layout.fmt == layout.down_fmt == gguf_blocks.native_format(kind)
        size = layout.fmt.packed_bytes(F, D)
        for expert in range(E):
            blob = store.read_blob(ExpertKey(layer, expert))
            for name, offset in (("gate", 0), ("up", layout.up_offset), ("down", layout.down_offset)):
                got = tw.unpack(blob[offset : offset + size], layout.fmt, F, D)
                np.testing.assert_array_equal(got, matrix(tensors[f"blk.{layer}.ffn_{name}_exps.weight"], expert))
    embed = tw.unpack(store.read_dense("embed"), store.dense["embed"].fmt, VOCAB, D)
    np.testing.assert_array_equal(
        embed, gguf.quants.dequantize(tensors["token_embd.weight"][0], gguf.GGMLQuantizationType.Q4_0)
    )


def test_q4_0_is_kept_unless_int4_is_asked_for(tmp_path):
    src, tensors = mixed_model(
        tmp_path / "x.gguf", ["Q4_0"] * LAYERS, ["Q4_0"] * LAYERS, dict.fromkeys("qkvo", "Q8_0") | {"embed": "Q4_0"}
    )
    want = matrix(tensors["blk.1.ffn_up_exps.weight"], 2)
    for asked, name in (("auto", "int4-g32"), ("q4_0", "int4-g32"), ("int4", "int4-g32-m8")):
        store = check_store(src, convert(src, tmp_path / asked, ConvertOptions(experts=asked)))
        layout = store.layouts[1]
        assert str(layout.fmt) == str(layout.down_fmt) == name
        blob = store.read_blob(ExpertKey(1, 2))[layout.up_offset : layout.up_offset + layout.fmt.packed_bytes(F, D)]
        loss = np.linalg.norm(tw.unpack(blob, layout.fmt, F, D) - want) / np.linalg.norm(want)
        assert loss < 0.05 if asked == "int4" else loss == 0  # a random group's largest code is not always -8 or 7


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_lose_less_than_a_thousandth(tmp_path, kind):
    src, tensors = mixed_model(
        tmp_path / "x.gguf", [kind] * LAYERS, [kind] * LAYERS, dict.fromkeys("qkvo", "Q8_0") | {"embed": "Q4_0"}
    )
    store = check_store(src, convert(src, tmp_path / "dst"))
    layout = store.layouts[1]
    blob = store.read_blob(ExpertKey(1, 2))[layout.up_offset : layout.up_offset + layout.fmt.packed_bytes(F, D)]
    got, want = tw.unpack(blob, layout.fmt, F, D), matrix(tensors["blk.1.ffn_up_exps.weight"], 2)
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 1e-3

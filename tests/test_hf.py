"""Hugging Face folders: every dtype against an oracle, and every way a folder can be broken."""

import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tidegate.checkpoint.hf import HfCheckpoint
from tidegate.errors import BadTensor, CheckpointError, CorruptFile, ReadFailed
from tidegate.quant import pack as tw
from tidegate.quant.formats import Format


def folder(tmp_path, tensors, config=None, **files):
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config or {"model_type": "x"}))
    for name, content in files.items():
        (tmp_path / name.replace("__", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


def sharded(tmp_path, **shards):
    weight_map = {}
    for shard, tensors in shards.items():
        save_file(tensors, tmp_path / f"{shard}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{shard}.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


PLAIN = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
         torch.float8_e4m3fn, torch.float8_e5m2]  # fmt: skip


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_plain_dtypes_read_as_torch_reads_them(tmp_path, dtype):
    x = (torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
    checkpoint = HfCheckpoint(folder(tmp_path, {"x": x, "v": x[0, 0].clone()}))
    wanted = x.to(torch.float32).numpy().reshape(15, 7)
    np.testing.assert_array_equal(checkpoint.read_f32("x"), wanted)
    np.testing.assert_array_equal(checkpoint.read_f32("x", 4, 9), wanted[4:9])
    np.testing.assert_array_equal(checkpoint.read_f32("v", 2, 6), wanted[0, 2:6, None])
    assert (
        checkpoint.read_raw("x", 4, 9).tobytes()
        == x.reshape(15, 7)[4:9].contiguous().view(torch.uint8).numpy().tobytes()
    )


@pytest.mark.filterwarnings("ignore:invalid value")
def test_every_e4m3_and_e5m2_value(tmp_path):
    every = torch.arange(256, dtype=torch.uint8)
    tensors = {"a": every.view(torch.float8_e4m3fn), "b": every.clone().view(torch.float8_e5m2)}
    checkpoint = HfCheckpoint(folder(tmp_path, {k: v.reshape(2, 128) for k, v in tensors.items()}))
    for name, x in tensors.items():
        np.testing.assert_array_equal(checkpoint.read_f32(name).reshape(-1), x.float().numpy())


@given(n=st.integers(1, 300), k=st.integers(1, 300), cut=st.tuples(st.floats(0, 1), st.floats(0, 1)))
@settings(max_examples=25, deadline=None)
def test_fp8_blocks(tmp_path_factory, n, k, cut):
    rng = torch.Generator().manual_seed(n)
    w = torch.randn(n, k, generator=rng).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-n // 128), -(-k // 128), generator=rng)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    path = folder(tmp_path_factory.mktemp("fp8"), {"w": w, "w_scale_inv": scales}, config)
    checkpoint = HfCheckpoint(path)
    assert list(checkpoint.tensors) == ["w"]
    wanted = (w.float() * scales.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]).numpy()
    start, stop = sorted(int(c * n) for c in cut)
    np.testing.assert_array_equal(checkpoint.read_f32("w", start, stop), wanted[start:stop])


def test_fp8_without_its_scales_is_refused(tmp_path):
    config = {"quantization_config": {"quant_method": "fp8"}}
    checkpoint = HfCheckpoint(folder(tmp_path, {"w": torch.ones(4, 4).to(torch.float8_e4m3fn)}, config))
    with pytest.raises(BadTensor, match="w_scale_inv is missing"):
        checkpoint.read_f32("w")


def test_mxfp4_as_transformers_reads_it_and_as_codes(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: PLC0415

    rng = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8, generator=rng)
    scales = torch.randint(110, 135, (2, 6, 3), dtype=torch.uint8, generator=rng)
    checkpoint = HfCheckpoint(folder(tmp_path, {"w_blocks": blocks, "w_scales": scales}))
    assert checkpoint.tensors["w"].shape == (2, 6, 96) and checkpoint.tensors["w"].dtype == "MXFP4"
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2).reshape(12, 96).numpy()
    np.testing.assert_array_equal(checkpoint.read_f32("w"), wanted)
    fmt = checkpoint.native_format("w")
    assert fmt == Format("mxfp4", 32)
    np.testing.assert_array_equal(tw.dequantize(*checkpoint.read_codes("w", 3, 8), fmt), wanted[3:8])
    np.testing.assert_array_equal(checkpoint.read_raw("w_scales", 1, 3), scales.reshape(12, 3)[1:3].numpy().reshape(-1))
    with pytest.raises(BadTensor, match="w_blocks"):
        checkpoint.read_raw("w")


def test_shards_are_found_through_the_index(tmp_path):
    a, b = torch.ones(2, 3), torch.zeros(4)
    checkpoint = HfCheckpoint(sharded(tmp_path, one={"a": a}, two={"b": b}))
    assert sorted(checkpoint.tensors) == ["a", "b"]
    np.testing.assert_array_equal(checkpoint.read_f32("a"), a.numpy())


def test_missing_shard_missing_tensor_duplicate(tmp_path):
    path = sharded(tmp_path, one={"a": torch.ones(2)}, two={"b": torch.ones(2)})
    index = path / "model.safetensors.index.json"
    good = index.read_text()
    index.write_text(good.replace('"b"', '"c"'))
    with pytest.raises(BadTensor, match=r"two.safetensors: c is missing"):
        HfCheckpoint(path)
    index.write_text(good)
    (path / "two.safetensors").rename(path / "away")
    with pytest.raises(CheckpointError, match=r"1 of 2 shards are missing: two.safetensors"):
        HfCheckpoint(path)
    index.unlink()
    save_file({"a": torch.ones(2)}, path / "three.safetensors")
    with pytest.raises(BadTensor, match="a is a duplicate"):
        HfCheckpoint(path)


@pytest.mark.parametrize("keep", ["all but one byte", "half", "the header only", "7 bytes", "nothing"])
def test_truncated_shard(tmp_path, keep):
    path = folder(tmp_path, {"a": torch.ones(64, 64), "b": torch.ones(64)}) / "model.safetensors"
    data = path.read_bytes()
    sizes = {"all but one byte": len(data) - 1, "half": len(data) // 2, "7 bytes": 7, "nothing": 0}
    sizes["the header only"] = 8 + struct.unpack("<Q", data[:8])[0]
    path.write_bytes(data[: sizes[keep]])
    with pytest.raises(CorruptFile) as error:
        HfCheckpoint(tmp_path)
    assert str(path) in str(error.value) and "wanted" in str(error.value) and f"{sizes[keep]:,}" in str(error.value)


def test_shard_that_shrinks_after_opening(tmp_path):
    checkpoint = HfCheckpoint(folder(tmp_path, {"a": torch.ones(64, 64)}))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(8000)
    offset = checkpoint.tensors["a"].offset
    with pytest.raises(ReadFailed, match=rf"offset {offset}: wanted 16,384 bytes, got {8000 - offset:,}"):
        checkpoint.read_f32("a")


def raw_file(tmp_path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


BROKEN = {
    "not json": (b"{nope", "JSON"),
    "not an object": (b"[1]", "an object"),
    "overlap": (
        {n: {"dtype": "F32", "shape": [2], "data_offsets": [o, o + 8]} for n, o in (("a", 0), ("b", 4))},
        r"start of b \(overlap or gap\)",
    ),
    "gap": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}}, "overlap or gap"),
    "wrong size": (
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 16]}},
        r"size of a \(F32 \[3\]\).*wanted 12",
    ),
    "backwards": ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}, "size of a"),
    "negative": ({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}, "header entry of a"),
    "negative twice": ({"a": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}, "header entry of a"),
    "a float beside the same integer": (
        {n: {"dtype": "F32", "shape": [s], "data_offsets": [o, o + 8]} for n, s, o in (("a", 2, 0), ("b", 2.0, 8))},
        "header entry of b",
    ),
    "true for 1": ({"a": {"dtype": "U8", "shape": [True, 16], "data_offsets": [False, 16]}}, "header entry of a"),
    "three offsets": ({"a": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16, 16]}}, "header entry of a"),
    "a list for a dtype": ({"a": {"dtype": ["U8"], "shape": [16], "data_offsets": [0, 16]}}, "header entry of a"),
    "text for an entry": ({"a": "U8"}, "header entry of a"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 16]}}, "header entry of a"),
    "extra bytes": ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}, "bytes behind the last tensor"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_headers(tmp_path, name):
    header, message = BROKEN[name]
    with pytest.raises(CorruptFile, match=message):
        HfCheckpoint(raw_file(tmp_path, header, b"\0" * 16))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_flipped_header_byte_is_an_error_of_ours_or_harmless(tmp_path_factory, data):
    path = folder(tmp_path_factory.mktemp("flip"), {"a": torch.ones(4, 4), "b": torch.ones(3)})
    raw = bytearray((path / "model.safetensors").read_bytes())
    at = data.draw(st.integers(0, 8 + struct.unpack("<Q", raw[:8])[0] - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    (path / "model.safetensors").write_bytes(raw)
    try:
        checkpoint = HfCheckpoint(path)
        for name in checkpoint.tensors:
            checkpoint.read_f32(name)
    except CheckpointError:
        pass


def test_unknown_dtype_unknown_name_rows_out_of_range(tmp_path):
    with pytest.raises(BadTensor, match="dtype F4"):
        HfCheckpoint(raw_file(tmp_path, {"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"\0"))
    checkpoint = HfCheckpoint(folder(tmp_path, {"a": torch.ones(2, 3)}))
    with pytest.raises(BadTensor, match="no tensor b"):
        checkpoint.read_f32("b")
    with pytest.raises(BadTensor, match="2 rows, 1:3"):
        checkpoint.read_f32("a", 1, 3)


def test_folders_that_are_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read"):
        HfCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no \*.safetensors"):
        HfCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    with pytest.raises(CheckpointError, match="quantized with 'awq'"):
        HfCheckpoint(tmp_path)


def test_tokenizer_files(tmp_path):
    tokenizer = {
        "added_tokens": [{"id": 5, "content": "<eos>"}],
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}]},
    }
    config = {"bos_token": {"content": "<s>"}, "eos_token": "<eos>", "chat_template": "from config"}
    path = folder(tmp_path, {"a": torch.ones(1)}, tokenizer__json=tokenizer, tokenizer_config__json=config)
    checkpoint = HfCheckpoint(path)
    assert checkpoint.special_tokens() == {
        "bos_token": "<s>", "eos_token": "<eos>", "eos_token_ids": [5], "add_bos": True,
    }  # fmt: skip
    assert checkpoint.chat_template() == "from config"
    assert json.loads(checkpoint.tokenizer_json()) == tokenizer
    (path / "chat_template.jinja").write_text("from file")
    (path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert checkpoint.chat_template() == "from file"
    assert checkpoint.special_tokens()["eos_token_ids"] == [7, 8]


ODD_TEXTS = [
    b"", b"{", b"[]", b"{}", b"null", b"\xff\xfe", b'{"chat_template": 7, "eos_token_id": "x"}', b'{"eos_token_id": [null]}',
    b'{"eos_token_id": 1e999}', b'{"chat_template": [{"name": 1}, 3]}', b'{"added_tokens": [1]}', b'{"added_tokens": null}',
    b'{"post_processor": 5}', b'{"post_processor": {"type": "TemplateProcessing", "single": 3}}', b'{"model": 5}',
]  # fmt: skip
SIDE_FILES = [
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "chat_template.json",
]  # fmt: skip


@pytest.mark.parametrize("name", SIDE_FILES)
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_an_odd_side_file_is_understood_or_an_error_of_ours(tmp_path, name, text):
    path = folder(tmp_path, {"a": torch.ones(1)}, tokenizer_config__json={"bos_token": "<s>"})
    (path / name).write_bytes(text)
    checkpoint = HfCheckpoint(path)
    for read in (checkpoint.tokenizer_kind, checkpoint.chat_template, checkpoint.special_tokens):
        try:
            read()
        except CheckpointError as error:
            assert str(path) in str(error)


def test_folder_without_tokenizer(tmp_path):
    checkpoint = HfCheckpoint(folder(tmp_path, {"a": torch.ones(1)}, {"eos_token_id": 3}))
    assert checkpoint.tokenizer_json() is None and checkpoint.chat_template() is None
    assert checkpoint.special_tokens() == {"bos_token": None, "eos_token": None, "eos_token_ids": [3], "add_bos": False}

"""The planner counts: published models, sums of headers to the byte, the store that a conversion writes to the byte."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import gguf
import pytest

import checkpoints
import gguf_convert
from published import MODELS, write_headers
from test_quantized_checkpoints import fp8_checkpoint, mxfp4_checkpoint
from tidegate.backends.operands import KvLayout
from tidegate.checkpoint.convert import ConvertOptions, convert
from tidegate.checkpoint.inventory import count_parameters, dense_tensors
from tidegate.checkpoint.store import ExpertStore
from tidegate.config import EngineOptions, parse_options
from tidegate.errors import CheckpointError
from tidegate.memory.budget import Budget
from tidegate.models.families import model_config
from tidegate.planner.card import Card, embedding_parameters, expert_formats, make_card
from tidegate.planner.headers import ModelHeaders, read_headers
from tidegate.planner.machine import assumed_machine
from tidegate.planner.owners import blob_parts

DEFAULT = ConvertOptions()


def header_bytes(path: Path) -> int:
    """The sizes of all tensors, by other code than ours."""
    if path.suffix == ".gguf":
        return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
    total = 0
    for file in path.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        total += sum(
            e["data_offsets"][1] - e["data_offsets"][0] for name, e in header.items() if name != "__metadata__"
        )
    return total


def card_of(headers: ModelHeaders, memory: int = 1 << 40, **options: object) -> Card:
    parsed = parse_options(EngineOptions, options)
    return make_card(headers, parsed, Budget(memory, "by the test"), assumed_machine(2), 2)


def check_counts(path: Path, tmp_path: Path, options: ConvertOptions = DEFAULT) -> None:
    """Source bytes equal the headers', planned files equal what convert writes, owners add up, the store says the same."""
    planned = read_headers(str(path), options)
    assert planned.source_bytes is not None
    assert sum(planned.source_bytes.values()) == header_bytes(path)
    store = ExpertStore.open(convert(path, tmp_path / "store", options))
    assert planned.dense_bytes == (tmp_path / "store" / "dense.bin").stat().st_size
    assert planned.expert_bytes == (tmp_path / "store" / "experts.bin").stat().st_size
    assert sum(planned.packed_bytes.values()) == planned.dense_bytes + planned.expert_bytes
    again = read_headers(str(store.path), DEFAULT)
    assert again.packed_bytes == planned.packed_bytes and again.layouts == planned.layouts
    for layout in planned.layouts:
        assert sum(blob_parts(layout).values()) == layout.blob_bytes and min(blob_parts(layout).values()) >= 0


@pytest.mark.parametrize("name", MODELS)
def test_published_models(name: str, tmp_path: Path) -> None:
    facts = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(facts.config))
    headers = read_headers(str(tmp_path / "config.json"), DEFAULT)
    assert headers.kind == "config"
    total, active = count_parameters(headers.config)
    left_out = [tensor for tensor in dense_tensors(headers.config) if tensor.name in facts.active_leaves_out]
    active -= sum(prod(tensor.shape) for tensor in left_out)
    # Publishers round, or cut, to these digits.
    assert abs(total - facts.parameters) <= facts.digits
    assert abs(active - facts.active) <= facts.digits
    kv = KvLayout.of(headers.config.attention, headers.config.rope, headers.config.num_layers)
    assert kv.token_bytes == facts.kv_bytes
    config = headers.config
    eight = KvLayout.of(config.attention, config.rope, config.num_layers, "int8").token_bytes
    areas = 1 if config.attention.is_mla else 2
    assert eight == facts.kv_bytes // 2 + 4 * areas * kv.kv_heads * config.num_layers, (
        "a scale a position, head and area"
    )
    card = card_of(headers, context=2048).to_json()
    assert card["parameters"] == total and card["kv_bytes_per_token"] == facts.kv_bytes
    assert card["kv_bytes"] == 2048 * facts.kv_bytes
    assert card["active_parameters"] - embedding_parameters(headers) == card["active_parameters_without_embedding"]


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Mixtral-8x7B", "OLMoE-1B-7B", "GLM-4.5-Air"])
def test_headers_of_full_size_equal_the_config(name: str, tmp_path: Path) -> None:
    """Empty files of full length with real headers: two bytes a parameter, and the same plan as from the config alone."""
    keys = MODELS[name].config
    total = write_headers(tmp_path / "model", keys)
    planned = read_headers(str(tmp_path / "model"), DEFAULT)
    assert planned.source_bytes is not None
    assert sum(planned.source_bytes.values()) == total == 2 * count_parameters(model_config(keys))[0]
    moe = planned.config.moe
    assert moe is not None and planned.source_bytes["unused"] == 0
    experts = planned.config.num_moe_layers * moe.num_experts * 3 * moe.expert_dim * planned.config.hidden_size
    assert planned.source_bytes["routed experts"] == 2 * experts
    (tmp_path / "config.json").write_text(json.dumps(keys))
    alone = read_headers(str(tmp_path / "config.json"), DEFAULT)
    assert alone.packed_bytes == planned.packed_bytes
    assert (alone.dense_bytes, alone.layouts) == (planned.dense_bytes, planned.layouts)


@pytest.mark.parametrize("variant", checkpoints.FAMILIES)
def test_hugging_face_folders(variant: str, tmp_path: Path) -> None:
    check_counts(checkpoints.checkpoint(variant, "bfloat16"), tmp_path)


@pytest.mark.parametrize("make", [fp8_checkpoint, mxfp4_checkpoint])
def test_quantized_folders(make, tmp_path: Path) -> None:
    check_counts(make(tmp_path)[0], tmp_path)


@pytest.mark.parametrize("variant", gguf_convert.REPRESENTABLE)
def test_gguf_files(variant: str, tmp_path: Path) -> None:
    check_counts(gguf_convert.converted(variant)[1], tmp_path)


def test_gguf_with_a_tensor_an_expert(tmp_path: Path) -> None:
    check_counts(gguf_convert.converted("mixtral", stacked=False)[1], tmp_path)


@pytest.mark.parametrize(
    "options", [ConvertOptions("int8", "int4", 64), ConvertOptions("bf16", "f32"), ConvertOptions("mxfp4")]
)
def test_other_formats(options: ConvertOptions, tmp_path: Path) -> None:
    check_counts(checkpoints.checkpoint("qwen3_moe"), tmp_path, options)


def test_shards_and_a_model_without_experts(tmp_path: Path) -> None:
    check_counts(checkpoints.checkpoint("olmoe", shard_size="100KB"), tmp_path)
    card = card_of(read_headers(str(checkpoints.checkpoint("llama")), DEFAULT), context=64)
    assert card.verdict == "fits" and not expert_formats(card.headers)
    assert card.forecast is not None and card.forecast.step.experts_s == card.forecast.step.wait_s == 0


def mixtral(tmp_path: Path) -> ModelHeaders:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Mixtral-8x7B"].config))
    return read_headers(str(tmp_path / "config.json"), DEFAULT)


def test_verdicts_and_edges(tmp_path: Path) -> None:
    headers = mixtral(tmp_path)
    needs = card_of(headers).needs
    assert card_of(headers, needs.largest_useful_bytes).verdict == "fits"
    edge = card_of(headers, needs.smallest_bytes)
    assert edge.verdict == "streams" and edge.plan is not None and set(edge.plan.slots) == {2}
    below = card_of(headers, needs.smallest_bytes - 1)
    assert below.verdict == "too small" and below.shortfall_bytes == 1 and below.plan is below.forecast is None
    enough = [way for way in below.ways_out if way.smallest_bytes <= needs.smallest_bytes - 1]
    assert enough and below.ways_out[: len(enough)] == tuple(enough), "ways that suffice come first"
    assert all(way.tokens_per_s for way in enough)
    assert any(way.flag == "--kv int8" and "perplexity" in way.cost for way in below.ways_out)
    lossless = [not way.flag.startswith(("--experts", "--dense", "--kv int8")) for way in enough]
    assert lossless == sorted(lossless, reverse=True)


CHANGES = {
    "context": 1024, "sequences": 4, "prefill_chunk": 32, "threads": 1, "io_threads": 8, "kv": "int8",
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_memory_flags_change_the_plan(name: str, tmp_path: Path) -> None:
    headers = mixtral(tmp_path)
    options = parse_options(EngineOptions, {"threads": 2})
    before = make_card(headers, options, Budget(8 << 30, ""), assumed_machine(2), 2)
    changed = replace(options, **{name: CHANGES[name]})
    after = make_card(headers, changed, Budget(8 << 30, ""), assumed_machine(2), changed.threads or 2)
    assert after.needs != before.needs


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"num_experts_per_tok": 99}, "num_experts_per_tok 99 of only 8 experts"),
        ({"num_key_value_heads": 7}, "no multiple of num_key_value_heads 7"),
        ({"num_experts": 16}, "contradiction"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"model_type": "bert"}, "'bert' is not supported"),
    ],
)
def test_bad_configs_say_what_is_wrong(keys: dict[str, object], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["Mixtral-8x7B"].config, **keys}))
    with pytest.raises(CheckpointError, match=said):
        read_headers(str(tmp_path), DEFAULT)

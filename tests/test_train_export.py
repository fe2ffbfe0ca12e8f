"""From a checkpoint to a Hugging Face folder and its compact form and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from tidegate.errors import UsageError  # noqa: E402
from tidegate.train import checkpoint  # noqa: E402
from tidegate.train.compact import pack, unpack  # noqa: E402
from tidegate.train.evaluate import load_model  # noqa: E402
from tidegate.train.export import export  # noqa: E402
from tidegate.train.options import Architecture, RouterOptions, TrainOptions  # noqa: E402
from tidegate.train.tokenizer import train_tokenizer  # noqa: E402
from tidegate.train.trainer import Trainer  # noqa: E402

MICRO = Architecture(
    vocab_size=300, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    num_experts=4, num_experts_per_tok=2, expert_size=32, max_positions=64,
)  # fmt: skip
OPTIONS = TrainOptions(
    architecture=MICRO, batch_sequences=2, sequence_length=16, world_size=1, compile=False, qat_from_step=0, steps=10,
    router=RouterOptions(temperature_end=0.5, input="centered"),
)  # fmt: skip


def checkpoint_file(folder: Path, options: TrainOptions = OPTIONS) -> Path:
    """The checkpoint of a run that has not trained a step."""
    for split in ("train", "heldout"):
        (folder / f"x.{split}.u16").write_bytes(torch.arange(200).to(torch.uint16).numpy().tobytes())
    trainer = Trainer(folder / "run", folder, options, {"x": 1.0})
    trainer.step = 5
    return checkpoint.save(folder / "run", 5, trainer._state())


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    train_tokenizer(iter(["some text to train on, some text"]), 270).save(str(path))
    return path


def test_transformers_loads_the_export_and_computes_the_same(tmp_path: Path, tokenizer: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source = checkpoint_file(tmp_path)
    export(source, tokenizer, tmp_path / "model")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    model = load_model(checkpoint.load(source))
    ids = torch.randint(0, 270, (2, 17), generator=torch.Generator().manual_seed(0))
    nll_T, _ = model.evaluate(ids[:, :-1], ids[:, 1:], OPTIONS.router_temperature(5))
    with torch.no_grad():
        logits = oracle(input_ids=ids[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, 300), ids[:, 1:].reshape(-1), reduction="none")
    assert (nll_T - expected).abs().mean() < 0.02
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert loaded.decode(loaded("some 😀 text").input_ids) == "some 😀 text"
    chat = loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_compact_form_gives_back_every_bit(tmp_path: Path, tokenizer: Path) -> None:
    export(checkpoint_file(tmp_path), tokenizer, tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "compact.safetensors")
    unpack(tmp_path / "compact.safetensors", tmp_path / "again")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.int16), after[name].view(torch.int16)) for name in before)
    assert (tmp_path / "compact.safetensors").stat().st_size < (tmp_path / "model" / "model.safetensors").stat().st_size
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert json.loads((tmp_path / "again" / name).read_text()) == json.loads(
            (tmp_path / "model" / name).read_text()
        )


def test_experts_off_their_int4_values_are_not_packed(tmp_path: Path, tokenizer: Path) -> None:
    export(checkpoint_file(tmp_path, replace(OPTIONS, qat_from_step=-1)), tokenizer, tmp_path / "model")
    with pytest.raises(UsageError, match="--qat-from-step"):
        pack(tmp_path / "model", tmp_path / "compact.safetensors")


def test_routing_that_qwen3_cannot_express_is_not_exported(tmp_path: Path, tokenizer: Path) -> None:
    source = checkpoint_file(tmp_path, replace(OPTIONS, router=RouterOptions(bias_rate=0.1)))
    with pytest.raises(UsageError, match="bias or capacity"):
        export(source, tokenizer, tmp_path / "model")


@pytest.mark.parametrize(
    "router", [RouterOptions(input="standard"), RouterOptions(bias_rate=0.01)], ids=["input", "bias"]
)
def test_routers_without_a_qwen3_moe_form_are_not_exported(
    tmp_path: Path, tokenizer: Path, router: RouterOptions
) -> None:
    source = checkpoint_file(tmp_path, replace(OPTIONS, router=router))
    with pytest.raises(UsageError, match="Qwen3-MoE"):
        export(source, tokenizer, tmp_path / "model")

"""The model that comes with Tidegate: small enough, whole, language in every domain, and as good as its card says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tidegate
from engines import fixed_process
from tidegate.checkpoint.convert import ConvertOptions, convert
from tidegate.checkpoint.open import BUILTIN_STORE, detect
from tidegate.checkpoint.store import ExpertStore
from tidegate.cli import main
from tidegate.engine import evaluate

__all__ = ["fixed_process"]
ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "models" / "builtin"
PROMPT = "It was a bright morning in May, and Miss Bennet"
ODD_TEXTS = {
    "emoji": "😀🏳️‍🌈" * 40,
    "one symbol": "§§",
    "4 KB of one character": "a" * 4096,
    "control characters": "\x00\x01\x1b[31m\x7f" * 40,
    "right to left": "שלום עולם، مرحبا. " * 20,
}


def test_it_is_whole_and_at_most_20_mb() -> None:
    ExpertStore.open(BUILTIN_STORE).verify()
    assert sum(path.stat().st_size for path in BUILTIN_STORE.iterdir()) <= 20_000_000


def test_the_name_is_the_model_and_a_path_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "builtin").mkdir()
    assert detect("builtin") == ("store", BUILTIN_STORE)
    for path in ("./builtin", Path("builtin")):
        with pytest.raises(tidegate.errors.CheckpointError, match="nothing to run here"):
            detect(path)


@pytest.mark.parametrize("command", ["info", "plan", "run", "bench", "doctor", "eval", "trace"])
def test_every_command_takes_the_name(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "text.txt").write_text("The tide comes in. " * 20)
    rest = {
        "info": [], "plan": ["--memory", "100MiB"], "run": [PROMPT, "--max-tokens", "3", "--memory", "400MiB"],
        "bench": ["--prefill", "32", "--decode", "4", "--memory", "400MiB"], "doctor": ["--memory", "400MiB"],
        "eval": ["text.txt", "--memory", "400MiB"], "trace": ["text.txt", "-o", "trace", "--memory", "400MiB"],
    }[command]  # fmt: skip
    assert main([command, "builtin", *rest]) == 0, capsys.readouterr().err
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").glob("*/manifest.json"))


def test_bits_per_byte_are_those_of_the_card() -> None:
    card = (FOLDER / "README.md").read_text()
    rows = {Path(row["text"]).stem: row for row in json.loads((FOLDER / "eval.json").read_text())["texts"]}
    assert len(rows) == 6
    for name, row in rows.items():
        assert re.search(rf"\| {name} \|.*\| {row['bits_per_byte']:.3f} \|", card), name
    name, text = "instructions", (FOLDER / "heldout" / "instructions.txt").read_text()
    with tidegate.load("builtin", memory="400MiB", context=272) as model:
        found = evaluate.score(model, name, text, 256)
    assert found.bits_per_byte == pytest.approx(rows[name]["bits_per_byte"], rel=0.002)
    assert found.num_tokens == rows[name]["tokens"]


def test_it_beats_five_grams_in_every_domain() -> None:
    rows = re.findall(
        r"^\| (\w+) \| [\d,]+ \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \|$", (FOLDER / "README.md").read_text(), re.M
    )
    assert len(rows) == 6
    assert all(float(ours) < 0.95 * float(theirs) for _, ours, theirs in rows), rows


def test_the_bfloat16_form_has_the_logits_of_transformers(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tidegate.train.compact import unpack  # noqa: PLC0415  (torch)

    unpack(FOLDER / "model-int4.safetensors", tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "store", ConvertOptions("bf16", "bf16"))
    with tidegate.load(tmp_path / "store", memory="2GiB", context=256, kv="f32") as model:
        ids = model.encode((FOLDER / "heldout" / "prose.txt").read_text()[:600])
        ours = model.logits(ids)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        theirs = oracle(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(ours - theirs).max() < 1e-3
    # the shipped store is this model: its experts hold the very same values
    again = convert_experts(tmp_path)
    assert (again / "experts.bin").read_bytes() == (BUILTIN_STORE / "experts.bin").read_bytes()


def convert_experts(folder: Path) -> Path:
    convert(folder / "model", folder / "int4", ConvertOptions("q4_0"))
    return folder / "int4"


def test_the_answer_is_the_same_with_two_fifths_of_the_experts() -> None:
    texts = []
    with tidegate.load("builtin", memory="400MiB", context=272) as model:
        needs = model.plan.needs
        texts.append(model.generate(model.encode(PROMPT), max_tokens=40, temperature=0.7, top_p=0.9, seed=1).text)
    budget = needs.budget_for(int(0.4 * needs.num_layers * needs.num_experts))
    with tidegate.load("builtin", memory=budget, context=272) as model:
        texts.append(model.generate(model.encode(PROMPT), max_tokens=40, temperature=0.7, top_p=0.9, seed=1).text)
        assert model.stats()["misses"] > 0
    assert texts[0] == texts[1]
    words = re.findall(r"[a-z]+", texts[0].lower())
    assert len(set(words) & {"the", "of", "and", "to", "a", "her", "she", "was", "in", "had", "that"}) >= 3


@pytest.mark.parametrize("name", ODD_TEXTS)
def test_odd_texts_give_numbers_and_spikes_are_named(name: str) -> None:
    with tidegate.load("builtin", memory="400MiB", context=272) as model:
        assert np.isfinite(model.logits(model.encode(ODD_TEXTS[name])[:256])).all()
        found = evaluate.score(model, name, ODD_TEXTS[name], 256)
    assert np.isfinite(found.bits_per_byte)
    assert found.busiest is not None
    assert found.busiest.token_ratio > 4 / 32


def test_chat_template() -> None:
    with tidegate.load("builtin", memory="400MiB", context=272) as model:
        assert model.has_chat_template
        ids = model.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
        assert model.generate(ids, max_tokens=12).text.strip()


def test_the_demo_shows_ledger_texts_counts_and_the_check() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    for part in (
        "expert slots",
        "12 to 13 of 32",
        "[prose]",
        "[classical Chinese]",
        "tokens/s",
        "misses",
        "read, peak",
    ):
        assert part in done.stdout, done.stdout
    assert done.stdout.endswith("check: all texts are the same in both budgets\n")

"""``tidegate eval``: every token predicted once, bits and agreement as defined, and the command's report."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from engines import fixed_process, load_model
from stores import qwen_config, write_store
from tidegate.cli import main
from tidegate.engine import evaluate
from tidegate.errors import UsageError

__all__ = ["fixed_process"]
TEXT = "Weights flow, memory is a cache, the ledger is law. 潮汐之門。 " * 3


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One model with int4 and with int8 experts: the reference."""
    folder = tmp_path_factory.mktemp("eval")
    return (
        write_store(folder / "int4", qwen_config(), "int4-g32", seed=4),
        write_store(folder / "int8", qwen_config(), "int8-g32", seed=4),
    )


def test_windows_predict_every_token_but_the_first_once(stores: tuple[Path, Path]) -> None:
    with load_model(stores[0]) as model:
        ids = model.encode(TEXT)
        for window in (1, 7, len(ids) - 1, len(ids) + 5):
            parts = evaluate.cut(model, "text", TEXT, window)
            assert [token for part in parts for token in part.targets] == ids[1:]
            assert all(len(part.inputs) == len(part.targets) <= window for part in parts)
            assert all(part.inputs[1:] == part.targets[:-1] for part in parts)
        with pytest.raises(UsageError, match="at least 2"):
            evaluate.cut(model, "text", "a", 8)


def test_score_is_the_sum_of_the_log_probabilities(stores: tuple[Path, Path]) -> None:
    with load_model(stores[0]) as model:
        ids = model.encode(TEXT)
        found = evaluate.score(model, "text", TEXT, len(ids))
        logits = model.logits(ids[:-1]).astype(np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = -log_probs[np.arange(len(ids) - 1), ids[1:]].sum()
    assert found.nll == pytest.approx(expected, rel=1e-5)
    assert found.num_bytes == len(TEXT.encode())
    assert found.busiest is not None
    assert found.bits_per_byte == pytest.approx(expected / math.log(2) / len(TEXT.encode()), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(expected / (len(ids) - 1)), rel=1e-5)


def test_shorten_keeps_as_many_whole_characters_as_fit(stores: tuple[Path, Path]) -> None:
    with load_model(stores[0]) as model:
        assert evaluate.shorten(model, TEXT, 10_000) == TEXT
        for count in (1, 50, 53, 54, 55, 56):
            kept = evaluate.shorten(model, TEXT, count)
            assert TEXT.startswith(kept)
            assert count - 3 < len(model.encode(kept)) <= count  # a token is a byte here, a character at most 3


def test_a_model_agrees_with_itself_and_less_with_another(stores: tuple[Path, Path]) -> None:
    recordings = []
    for store in (stores[0], stores[0], stores[1]):
        with load_model(store) as model:
            recordings.append(evaluate.Recording(model, evaluate.cut(model, "text", TEXT, 32)))
    same = evaluate.compare(recordings[0], recordings[1])
    assert (same.kl_nats, same.top1_ratio, same.routing_ratio) == (0.0, 1.0, 1.0)
    other = evaluate.compare(recordings[0], recordings[2])
    assert other.kl_nats > 1e-6
    assert 0.2 < (other.routing_ratio or 0.0) < 1.0
    assert other.num_tokens == same.num_tokens
    for recording in recordings:
        recording.close()


def test_the_command_reports_texts_and_agreement(
    stores: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("prose", "code"):
        (tmp_path / f"{name}.txt").write_text(TEXT)
    texts = [str(tmp_path / f"{name}.txt") for name in ("prose", "code")]
    common = ["--memory", "1GiB", "--window", "32", "--max-tokens", "64"]
    assert main(["eval", str(stores[0]), *texts, "--reference", str(stores[1]), *common, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["text"] for row in report["texts"]] == texts
    assert report["texts"][0]["bits_per_byte"] == report["bits_per_byte"]
    assert 0 < report["top1_agreement_ratio"] <= 1
    assert 0 < report["texts"][0]["busiest_expert"]["token_ratio"] <= 1
    assert report["compared_tokens"] == 2 * (report["texts"][0]["tokens"])
    assert main(["eval", str(stores[0]), *texts, *common]) == 0
    assert "bits per byte" in capsys.readouterr().out
    assert main(["eval", str(stores[0]), texts[0], texts[0], *common]) == 2
    (tmp_path / "same.txt").write_text("a" * 300)
    assert main(["eval", str(stores[0]), str(tmp_path / "same.txt"), *common]) == 0
    assert re.search(r"100% of its tokens use expert \d+ of layer \d+", " ".join(capsys.readouterr().out.split()))
    (tmp_path / "bad.txt").write_bytes(b"text \xff")
    assert main(["eval", str(stores[0]), str(tmp_path / "bad.txt"), *common]) == 2
    assert "byte 5" in capsys.readouterr().err

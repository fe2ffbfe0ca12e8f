"""A fitted predictor: made from texts, found beside its model, refused by another one, and no influence on any answer."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engines import fixed_process, load_model
from stores import deepseek_config, qwen_config, write_store
from tidegate import _core
from tidegate.checkpoint.manifest import PREDICTOR_FILE
from tidegate.checkpoint.store import ExpertStore
from tidegate.cli import main
from tidegate.errors import CorruptFile, UsageError
from tidegate.experts.gates_file import find_gates, fingerprint
from tidegate.experts.lookahead import OWN_CURVES
from tidegate.experts.predictor_file import find_predictor

__all__ = ["fixed_process"]
WORDS = ["tide", "gate", "the", "of", "slot", "expert", "0.5", "\n", "router", "x = y;"]


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v2"])
def fitted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """A store with its predictor, and what the command printed."""
    folder = tmp_path_factory.mktemp(request.param)
    config = qwen_config() if request.param == "qwen3_moe" else deepseek_config()
    store = write_store(folder / "store", config, parity=request.param == "qwen3_moe")
    text = folder / "text.txt"
    text.write_text(" ".join(random.Random(1).choices(WORDS, k=900)))
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *parts, **_: printed.append(str(parts[0])))
        assert main(["fit-predictor", str(store), str(text), "--memory", "1GiB", "--context", "256", "--json"]) == 0
    return store, json.loads(printed[-1])


def test_a_trace_cannot_be_replayed_with_gates_and_the_error_says_what_can(
    fitted: tuple[Path, dict[str, object]],
) -> None:
    path = fitted[0] / PREDICTOR_FILE
    with pytest.raises(UsageError, match=f"{path}: holds gates.*--predictor gates replays them"):
        find_predictor(str(path), 2, 8)


def test_it_finds_more_than_the_routers_alone(fitted: tuple[Path, dict[str, object]]) -> None:
    store, said = fitted
    recall = said["recall"]
    assert isinstance(recall, dict)
    for distance in range(2):
        for which in ("", "_misses"):
            assert 0 < recall["own" + which][distance] <= recall["fitted" + which][distance] + 0.02 <= 1.02
    assert recall["fitted"][0] > recall["own"][0]
    assert 0 < recall["embedded"] <= 1
    assert said["file_bytes"] == (store / PREDICTOR_FILE).stat().st_size
    assert [path.name for path in store.glob("*.partial")] == []


def test_it_is_found_counted_and_can_be_turned_off(fitted: tuple[Path, dict[str, object]]) -> None:
    store, _ = fitted
    with load_model(store) as model:
        needs = model.plan.needs
        assert model.runtime.experts.lookahead is None  # everything fits; traces still want guesses
        assert model.runtime.experts.curves != OWN_CURVES and model.runtime.decoder.guess_width > 0
    tight = needs.budget_for(needs.num_layers * (needs.min_slots + 2))
    with load_model(store, memory=tight) as model:
        ledger = model.runtime.ledger.accounts()
        assert model.runtime.experts.curves != OWN_CURVES
        assert 0 < ledger["predictor"] <= model.plan.accounts()["predictor"] == needs.predictor_bytes
    with load_model(store, memory=tight, predictor="gates") as model:
        assert model.runtime.experts.curves == OWN_CURVES
        own_bytes = model.plan.needs.predictor_bytes
        assert 0 < model.runtime.ledger.accounts()["predictor"] == own_bytes <= needs.predictor_bytes
    elsewhere = store.parent / "elsewhere.safetensors"
    shutil.copy(store / PREDICTOR_FILE, elsewhere)
    with load_model(store, memory=tight, predictor=str(elsewhere)) as model:
        assert model.runtime.experts.curves != OWN_CURVES


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_answers_do_not_depend_on_it(
    fitted: tuple[Path, dict[str, object]], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tight cache, reads of random duration, and a channel that seems idle."""
    monkeypatch.setattr("tidegate.experts.loader.NativeLoader.busy_ratio", lambda self: 0.1)
    store, _ = fitted
    answers = {}
    for options in ({"prefetch": "off"}, {"predictor": "gates"}, {}):
        with load_model(store, backend=backend) as model:
            needs = model.plan.needs
        memory = needs.budget_for(needs.num_layers * (needs.min_slots + 2))
        reader = _core.FaultyReader(seed=5, max_delay_us=200)
        with load_model(store, reader, backend=backend, memory=memory, **options) as model:
            answer = model.generate([1, 2, 3, 4, 5], max_tokens=60, ignore_eos=True, logprobs=1)
            model.runtime.cache.check_integrity()
            answers[str(options)] = [(one.token_id, np.float64(one.logprob).tobytes()) for one in answer.logprobs]
            issued = model.stats()["prefetch_issued"]
            assert issued == 0 if options.get("prefetch") == "off" else issued > 0 or options
    assert len(set(map(tuple, answers.values()))) == 1


def test_another_model_refuses_it_by_name(fitted: tuple[Path, dict[str, object]], tmp_path: Path) -> None:
    store, _ = fitted
    other = write_store(tmp_path / "other", ExpertStore.open(store).config, seed=9)
    shutil.copy(store / PREDICTOR_FILE, other / PREDICTOR_FILE)
    with pytest.raises(UsageError, match=r"was fitted to .* not to .*other .*--predictor gates"):
        load_model(other)
    with pytest.raises(UsageError, match="no such file"):
        load_model(other, predictor=str(tmp_path / "nothing"))


def test_routers_are_the_same_in_other_formats(tmp_path: Path) -> None:
    """So one predictor serves every conversion of a model."""
    prints = [
        fingerprint(ExpertStore.open(write_store(tmp_path / one, qwen_config(), one))) for one in ("int4-g32", "bf16")
    ]
    other = fingerprint(ExpertStore.open(write_store(tmp_path / "other", qwen_config(), seed=1)))
    assert prints[0] == prints[1] != other


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-64],
        lambda data: data[:100],
        lambda data: b"",
        lambda data: data.replace(b"tidegate-predictor", b"tidegate-predictoR"),
        lambda data: data.replace(b'"version": "2"', b'"version": "7"'),
        lambda data: data.replace(b'"curves": "[[', b'"curves": "[{['),
        lambda data: data.replace(b'"next.0"', b'"next.9"'),
    ],
)
def test_damage_is_refused(
    fitted: tuple[Path, dict[str, object]], tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    store, _ = fitted
    broken = tmp_path / "broken"
    broken.write_bytes(damage((store / PREDICTOR_FILE).read_bytes()))
    with pytest.raises(CorruptFile, match="broken"):
        find_gates(ExpertStore.open(store), str(broken))


def test_too_little_text(
    fitted: tuple[Path, dict[str, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "short.txt"
    text.write_text("hardly anything")
    assert main(["fit-predictor", str(fitted[0]), str(text), "--context", "256"]) == 2
    assert "too few" in capsys.readouterr().err
    assert main(["fit-predictor", str(fitted[0])]) == 2
    assert "at least one text" in capsys.readouterr().err

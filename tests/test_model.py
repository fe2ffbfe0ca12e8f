"""The Python interface: ``tidegate.load`` and what a Model does."""

from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tidegate
from engines import fixed_process, load_model, record_logits
from stores import END, TURN, VOCAB, deepseek_config, qwen_config, write_store
from tidegate.errors import UsageError

__all__ = ["fixed_process"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("model") / "store", qwen_config())


@pytest.fixture(scope="module")
def model(store: Path):
    with tidegate.load(store, memory="1GiB", context=128, sequences=3) as model:
        yield model


def test_list_in_list_out(model: tidegate.Model) -> None:
    one = model.generate("hello", max_tokens=6, ignore_eos=True)
    many = model.generate(["hello", "other", "third", "hello"], max_tokens=6, ignore_eos=True)
    assert isinstance(one, tidegate.Completion) and [len(c.token_ids) for c in many] == [6] * 4
    assert many[0] == replace(one, first_token_s=many[0].first_token_s)
    assert many[3].token_ids == one.token_ids and many[1].token_ids != one.token_ids
    ids = model.encode("hello")
    assert model.generate(ids, max_tokens=6, ignore_eos=True).token_ids == one.token_ids
    assert model.generate([np.int64(i) for i in ids], max_tokens=6, ignore_eos=True).token_ids == one.token_ids
    assert [c.token_ids for c in model.generate([ids], max_tokens=6, ignore_eos=True)] == [one.token_ids]
    assert model.generate([]) == []
    assert one.num_prompt_tokens == 5 and one.finish_reason == "length" and one.first_token_s > 0


def test_stream_gives_the_text_of_generate(model: tidegate.Model) -> None:
    whole = model.generate("tide", max_tokens=20, ignore_eos=True).text
    pieces = list(model.stream("tide", max_tokens=20, ignore_eos=True))
    assert "".join(pieces) == whole and len(pieces) == 20
    first, second = (model.stream(text, max_tokens=20, ignore_eos=True) for text in ("tide", "gate"))
    mixed = ["", ""]
    for a, b in zip_longest(first, second, fillvalue=""):
        mixed = [mixed[0] + a, mixed[1] + b]
    assert mixed == [whole, model.generate("gate", max_tokens=20, ignore_eos=True).text]


@pytest.mark.parametrize("options", [{}, {"kv": "int8"}, {"config": deepseek_config()}, {"prefill_chunk": 3}])
def test_a_turn_of_a_chat_costs_only_what_is_new_and_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    store = write_store(tmp_path / "store", options.pop("config", qwen_config()))
    rows = record_logits(monkeypatch)
    messages, asked = [], []
    with load_model(store, **options) as model:
        for text in ("the tide", "and the gate", "so"):
            messages.append({"role": "user", "content": text})
            asked.append(model.chat_prompt(messages))
            before = model.stats()["prefill_tokens"]
            answer = model.chat(messages, max_tokens=5, ignore_eos=True)
            computed = model.stats()["prefill_tokens"] - before
            assert computed < len(asked[-1]) - (len(asked[-2]) - 1 if asked[:-1] else -1)
            messages.append({"role": "assistant", "content": answer.text})
        with model.trace(tmp_path / "t"):
            model.chat(messages[:5], max_tokens=1)
        assert model.stats()["prefill_tokens"] - before - computed == len(asked[-1]), "a trace has every token"
    turns = [rows[number + 1] for number in range(3)]
    for ids, turn in zip(asked, turns, strict=True):
        rows.clear()
        with load_model(store, **options) as model:
            model.generate(ids, max_tokens=5, ignore_eos=True)
        np.testing.assert_array_equal(np.stack(rows[1]), np.stack(turn))


def test_stop_strings_cut_the_text(model: tidegate.Model) -> None:
    whole = model.generate("tide", max_tokens=20, ignore_eos=True).text
    done = model.generate("tide", max_tokens=20, ignore_eos=True, stop=["@@", whole[4:6]])
    assert done.finish_reason == "stop" and done.text == whole[: whole.index(whole[4:6])]


def test_chat_goes_through_the_template(model: tidegate.Model) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "?"},
    ]
    ids = model.chat_prompt(messages)
    assert ids == [
        *model.encode("u:hi"),
        TURN,
        *model.encode("a:yo"),
        TURN,
        *model.encode("u:?"),
        TURN,
        *model.encode("a:"),
    ]
    wanted = model.generate(ids, max_tokens=4, ignore_eos=True)
    assert model.chat(messages, max_tokens=4, ignore_eos=True).token_ids == wanted.token_ids


def test_logits_and_logprobs_agree(model: tidegate.Model) -> None:
    done = model.generate("hello", max_tokens=5, ignore_eos=True, logprobs=3)
    rows = model.logits(model.encode("hello") + done.token_ids[:-1])
    assert rows.shape == (9, VOCAB) and rows.dtype == np.float32
    answer = rows[4:].astype(np.float64)
    logprobs = answer - np.log(np.exp(answer).sum(axis=1, keepdims=True))
    for row, sampled in zip(logprobs, done.logprobs, strict=True):
        assert sampled.token_id == row.argmax() == sampled.top[0][0] and len(sampled.top) == 3
        assert sampled.logprob == pytest.approx(row.max(), abs=1e-6)


def test_the_end_token_ends(model: tidegate.Model, store: Path) -> None:
    free = model.generate("hello", max_tokens=30, ignore_eos=True)
    with load_model(store) as other:
        other._runtime.eos_token_ids = frozenset([free.token_ids[3], END])
        done = other.generate("hello", max_tokens=30)
    assert (
        done.finish_reason == "stop" and done.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[3]) + 1]
    )


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ("", {}, "prompt is empty"),
        ([], {}, None),
        ([VOCAB], {}, f"token id {VOCAB}: the vocabulary has ids 0 to {VOCAB - 1}"),
        ([-1], {}, "token id -1"),
        ("x" * 128, {}, "raise --context"),
        (
            "x" * 100,
            {"max_tokens": 29},
            "100 tokens of prompt and up to 29 of the answer are more than the context of 128",
        ),
        ("x", {"temprature": 1.0}, "did you mean 'temperature'"),
        ("x", {"top_p": 2}, "--top-p 2"),
    ],
)
def test_bad_requests(model: tidegate.Model, prompt: object, options: dict[str, object], said: str | None) -> None:
    if said is None:
        assert model.generate(prompt) == []
        return
    with pytest.raises(UsageError) as caught:
        model.generate(prompt, **options)
    assert said in str(caught.value)
    assert model._runtime.engine.scheduler.is_idle


def test_one_bad_prompt_of_a_list_runs_none(model: tidegate.Model) -> None:
    before = model.stats()["steps"]
    with pytest.raises(UsageError):
        model.generate(["good", "x" * 200], max_tokens=5)
    assert model.stats()["steps"] == before and model._runtime.engine.scheduler.is_idle


def test_bad_loads(store: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'memory'"):
        tidegate.load(store, memroy="1GiB")
    with pytest.raises(UsageError, match=r"--context 4096: the model was made for 2048 positions"):
        tidegate.load(store, context=4096)
    with pytest.raises(UsageError, match="--experts has no effect"):
        tidegate.load(store, experts="int8")


def test_a_closed_model_says_so(store: Path) -> None:
    model = tidegate.load(store, memory="1GiB")
    model.close()
    model.close()
    with pytest.raises(UsageError, match="closed"):
        model.generate("x")

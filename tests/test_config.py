"""Options: one table, strict parsing, errors that name the flag."""

import pytest

from tidegate.config import EngineOptions, SamplingOptions, markdown_table, option_table, parse_options, split_options
from tidegate.errors import UsageError
from tidegate.experts.policy import POLICIES


def test_memory_parses_units_and_plain_bytes() -> None:
    assert parse_options(EngineOptions, {"memory": "8GiB"}).memory_bytes == 8 << 30
    assert parse_options(EngineOptions, {"memory": 123456}).memory_bytes == 123456
    assert parse_options(EngineOptions, {}).memory_bytes is None


@pytest.mark.parametrize(
    ("keyword", "value", "said"),
    [
        ("memory", "8", "--memory '8'"),
        ("memory", 0, "--memory 0"),
        ("memory", -5, "at least 1"),
        ("context", 1, "at least 2"),
        ("sequences", 2.5, "whole number"),
        ("threads", True, "whole number"),
        ("kv", "f23", "did you mean 'f32'?"),
        ("policy", "lruu", "did you mean 'lru'?"),
        ("page_cache", "yes", "True or False"),
        ("sequences", None, "must not be None"),
    ],
)
def test_bad_engine_values_name_the_flag(keyword: str, value: object, said: str) -> None:
    with pytest.raises(UsageError, match="--") as caught:
        parse_options(EngineOptions, {keyword: value})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("stop", ["", "a"]),
        ("seed", -1),
    ],
)
def test_bad_sampling_values(keyword: str, value: object) -> None:
    with pytest.raises(UsageError):
        parse_options(SamplingOptions, {keyword: value})


def test_unknown_keyword_names_the_closest() -> None:
    with pytest.raises(UsageError, match=r"'memroy'.*did you mean 'memory'"):
        parse_options(EngineOptions, {"memroy": "1GiB"})
    with pytest.raises(UsageError, match=r"'temprature'.*did you mean 'temperature'"):
        split_options({"temprature": 1.0}, EngineOptions, SamplingOptions)


def test_split_deals_every_keyword_once() -> None:
    engine, sampling = split_options({"context": 64, "seed": 3}, EngineOptions, SamplingOptions)
    assert engine == {"context": 64} and sampling == {"seed": 3}
    assert not set(option_table(EngineOptions)) & set(option_table(SamplingOptions))


def test_stop_takes_one_string_or_many() -> None:
    assert parse_options(SamplingOptions, {"stop": "END"}).stop == ("END",)
    assert parse_options(SamplingOptions, {"stop": ["a", "b"]}).stop == ("a", "b")


def test_policies_of_the_table_are_those_of_the_cache() -> None:
    assert set(option_table(EngineOptions)["policy"].choices) == set(POLICIES)


def test_markdown_lists_every_option() -> None:
    text = markdown_table(EngineOptions)
    assert all(row.flag in text and row.help for row in option_table(EngineOptions).values())

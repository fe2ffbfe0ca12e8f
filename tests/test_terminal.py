"""What people see on a terminal: columns line up, a status line is rewritten, and a command line is what a signature says."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated

import click
import pytest

from tidegate.cli.arguments import Argument, Flag, command_line
from tidegate.terminal import StatusLine, bar, table, width


def test_columns_line_up_with_wide_characters() -> None:
    text = table(
        ["text", "bytes", "kind"], [["prose.txt", "1,024", "a"], ["散文.txt", "7", "bc"]], "texts", left=("kind",)
    )
    title, *lines = text.split("\n")
    assert title == "texts"
    assert lines[0] == "text       bytes  kind"
    assert lines[3] == "散文.txt       7  bc"
    assert {width(line[: line.index(word)]) for line, word in zip(lines[2:], ("1,024", "7"), strict=True)} == {11, 15}
    assert width("e\u0301") == 1


def test_bars() -> None:
    assert [bar(ratio, 4) for ratio in (-1, 0, 0.5, 1, 2)] == ["░░░░", "░░░░", "██░░", "████", "████"]


def test_a_status_line_shows_the_last_text_and_keeps_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    out = io.StringIO()
    status = StatusLine(out)
    status.show("first", now=True)
    status.show("too soon")
    status.say("stays")
    status.show("a text that is too long")
    status.close()
    status.close()
    drawn = out.getvalue()
    assert "stays\n" in drawn
    assert drawn.endswith("\ra text that\x1b[K\n")


def called(*arguments: str) -> dict[str, object]:
    """What a function with every kind of parameter gets from a command line."""

    def function(
        model: Annotated[str, Argument(help="a model")],
        texts: Annotated[list[Path] | None, Argument(help="texts")] = None,
        count: Annotated[int, Flag(min=1, help="a count")] = 3,
        ratio: Annotated[float | None, Flag("--share", "-s", max=1.0, help="a share")] = None,
        as_json: Annotated[bool, Flag("--json", help="JSON", group="Output")] = False,
        stop: Annotated[list[str] | None, Flag(help="several")] = None,
    ) -> dict[str, object]:
        return {"model": model, "texts": texts, "count": count, "ratio": ratio, "json": as_json, "stop": stop}

    command = command_line("do", function, "Does it.")
    with command.make_context("do", list(arguments)) as context:
        found: dict[str, object] = command.invoke(context)
    return found


def test_a_function_gets_what_was_typed_and_its_own_defaults() -> None:
    assert called("m") == {"model": "m", "texts": None, "count": 3, "ratio": None, "json": False, "stop": None}
    given = called(
        "m", "--count", "5", "a.txt", "-s", "0.5", "b.txt", "--json", "--stop", "x", "--stop", "y", "--", "-c"
    )
    assert given["texts"] == [Path("a.txt"), Path("b.txt"), Path("-c")]
    assert (given["count"], given["ratio"], given["json"], given["stop"]) == (5, 0.5, True, ["x", "y"])


@pytest.mark.parametrize(
    "bad", [[], ["m", "--count", "0"], ["m", "--share", "2"], ["m", "--cuont", "1"], ["m", "--count", "x"]]
)
def test_mistakes_are_usage_errors(bad: list[str]) -> None:
    with pytest.raises(click.UsageError):
        called(*bad)


def test_help_has_a_title_for_each_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.exceptions.Exit):
        called("--help")
    text = capsys.readouterr().out
    places = [
        text.index(part)
        for part in ("\nArguments:", "\n  [TEXTS]...", "\nOptions:", "--count", "[default: 3", "\nOutput:", "--json")
    ]
    assert places == sorted(places)

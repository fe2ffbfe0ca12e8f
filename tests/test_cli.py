"""The command line as a user meets it: real child processes."""

import json
import subprocess
import sys

import pytest

from tidegate import __version__
from tidegate.cli import COMMANDS, main
from tidegate.config import EngineOptions, SamplingOptions, option_table


def tidegate(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidegate", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        **options,
    )  # type: ignore[call-overload]


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, json; from tidegate.cli import main; code = main(['--help']); "
        "print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    exit_code, modules = json.loads(done.stderr.splitlines()[-1])
    assert exit_code == 0
    assert all(name in done.stdout for name in COMMANDS)
    heavy = {"numpy", "tokenizers", "torch", "jinja2", "huggingface_hub", "tidegate._core", "safetensors"}
    assert not heavy & set(modules)


def test_a_bare_package_import_is_light() -> None:
    code = "import tidegate, sys; assert not {'numpy', 'click', 'tidegate._core'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_arguments_is_help_and_version_is_the_packages() -> None:
    assert "Usage: tidegate" in tidegate().stdout
    done = tidegate("--version")
    assert (done.returncode, done.stdout) == (0, f"tidegate {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rnu"], "'run'"),
        (["run"], "MODEL"),
        (["run", "x", "--memry", "1GiB"], "--memory"),
        (["run", "x", "hello", "--memory", "8"], "--memory '8'"),
        (["run", "x", "hello", "--top-p", "7"], "--top-p 7"),
        (["run", "x", "hello", "--top-k", "many"], "--top-k"),
        (["run", "x", "hello", "--policy", "lruu"], "'lru'"),
        (["run", "x", "hello", "--file", "f"], "not both"),
        (["run", "x", "hello", "--chat", "--raw"], "--raw"),
        (["run", "x", "hello", "--seed", "-1"], "between 0 and 9223372036854775807"),
        (["run", "x", "hello", "--trace", "/no/such/t"], "--trace /no/such/t: there is no folder /no/such"),
        (["run", "x", "hello", "--trace", "/"], "--trace /: is a folder"),
        (["bench", "x", "--trace", "/"], "--trace /: is a folder"),
        (["trace", "x", "text", "-o", "/no/such/t"], "--output /no/such/t: there is no folder /no/such"),
        (["train", "run", "--tokens", "t", "--workers", "0"], "--workers 0: must be at least 1"),
        (["run", "/no/such/model", "hello"], "/no/such/model"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2_or_1(arguments: list[str], said: str) -> None:
    done = tidegate(*arguments)
    assert done.returncode == (1 if "/no/such/model" in arguments else 2)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("tidegate: error: ") and said.lower() in lines[0].lower(), lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["bench", "builtin", "--prefill", "5000"],
            "--prefill 5000 and --decode 64: the model was made for 1024 positions",
        ),
        (["bench", "builtin", "--context", "5000"], "--context 5000: the model was made for 1024 positions"),
        (["doctor", "builtin", "--answer", "5000"], "--prompt 64 and --answer 5000: the model was made for"),
        (["eval", "builtin", __file__, "--window", "5000"], "--window 5000: the model was made for"),
    ],
)
def test_a_context_that_is_too_long_names_the_flags_that_were_given(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_run_has_a_flag_for_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    left_out = {"sequences", "logprobs"}
    for cls in (EngineOptions, SamplingOptions):
        for name, row in option_table(cls).items():
            assert (row.flag in text) == (name not in left_out), name

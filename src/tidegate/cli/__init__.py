"""The ``tidegate`` command: one thin file a subcommand, imported only when it is called.

``tidegate/cli/NAME.py`` (with underscores for dashes) has ``def command(...)`` with typer annotations; the table below
has its line in the help.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer

from tidegate import __version__
from tidegate.errors import TidegateError

COMMANDS = {
    "run": "Answer a prompt, a file or a chat with a model, inside a memory budget.",
    "convert": "Turn a checkpoint into an expert store: packed, checked, ready to stream.",
    "info": "Show what is in a checkpoint or a store.",
    "plan": "Say what a model needs and how fast it will be, from its headers alone.",
    "hardware": "Measure this machine once: memory, kernels, disk; forecasts use it.",
    "doctor": "Run a model for a moment, compare plan and reality, and say what would help.",
    "bench": "Measure prefill and decode of a text, with the ceiling that the machine allows beside it.",
    "eval": "Score a model on texts: perplexity, bits per byte, agreement with a reference.",
    "trace": "Record which experts a model uses on texts; or import recorded arrays.",
    "analyze": "Show what a trace says about a model's routing, with a report and a verdict.",
    "simulate": "Replay a trace against a clock: policies, predictors, budgets, widths, without the model.",
    "fit-predictor": "Fit a predictor of expert use to a trace, and score it.",
    "train": "Train a small MoE model on the CPU; stop, kill and resume it at will.",
}
INTERRUPTED = 130
# The root of what typer raises about a command line; which class that is depends on typer's version.
_BadCommandLine = next(cls for cls in reversed(typer.BadParameter.__mro__) if hasattr(cls, "format_message"))


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code. Errors print one line on stderr."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        return int(_root()(arguments or ["--help"], prog_name="tidegate", standalone_mode=False) or 0)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away; there is nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except TidegateError as error:
        return _complain(str(error), error.exit_code)
    except OSError as error:
        return _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)
    except Exception as error:
        if not isinstance(error, _BadCommandLine):
            raise
        return _complain(error.format_message(), 2)  # type: ignore[attr-defined]  # see _BadCommandLine


def _complain(message: str, exit_code: int) -> int:
    print("tidegate: error:", " ".join(message.splitlines()), file=sys.stderr)
    return exit_code


def _root() -> typer.Typer:
    app = _app("Runs Mixture-of-Experts language models that are larger than memory, inside a hard byte budget.")
    app.callback()(_root_flags)
    for name, text in COMMANDS.items():
        app.command(
            name,
            help=text,
            add_help_option=False,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_call_subcommand)
    return app


def _app(text: str | None = None) -> typer.Typer:
    return typer.Typer(help=text, add_completion=False, pretty_exceptions_enable=False)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"tidegate {__version__}")
        raise typer.Exit


def _root_flags(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Flags that go before a command."""


def _call_subcommand(ctx: typer.Context) -> int:
    name = str(ctx.info_name)
    app = _app()
    app.command(help=COMMANDS[name])(import_module("tidegate.cli." + name.replace("-", "_")).command)
    result: Any = app(ctx.args, prog_name=f"tidegate {name}", standalone_mode=False)
    return int(result or 0)

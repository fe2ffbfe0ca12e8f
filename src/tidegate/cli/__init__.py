"""The ``tidegate`` command: one thin file a subcommand, imported only when it is called.

``tidegate/cli/NAME.py`` (with underscores for dashes) has ``def command(...)`` with the annotations of arguments.py; the table
below has its line in the help.
"""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from importlib import import_module

import click

from tidegate import __version__
from tidegate.cli.arguments import WIDEST_HELP, command_line
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
    "fit-predictor": "Fit a predictor of expert use to a model's texts or to a trace, and score it.",
    "train": "Train a small MoE model on the CPU; stop, kill and resume it at will.",
}
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code. Errors print one line on stderr."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        with _Root().make_context("tidegate", list(arguments) or ["--help"]) as context:
            return int(context.command.invoke(context) or 0)
    except click.exceptions.Exit as done:
        return done.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away; there is nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (TidegateError, OSError, click.ClickException) as error:
        return _complain(error)


def _complain(error: TidegateError | OSError | click.ClickException) -> int:
    """One line on standard error. Returns the exit code."""
    message, exit_code = str(error), 1
    if isinstance(error, TidegateError):
        exit_code = error.exit_code
    elif isinstance(error, click.ClickException):
        message, exit_code = error.format_message(), 2
    elif error.filename:
        message = f"{error.filename}: {error.strerror}"
    print("tidegate: error:", " ".join(message.splitlines()), file=sys.stderr)
    return exit_code


def load_command(name: str) -> click.Command:
    """One of COMMANDS, imported now."""
    module = import_module("tidegate.cli." + name.replace("-", "_"))
    return command_line(name, module.command, COMMANDS[name])


class _Root(click.Group):
    """``tidegate`` itself: its help comes from the table, a command is imported when it is called."""

    def __init__(self) -> None:
        text = "Runs Mixture-of-Experts language models that are larger than memory, inside a hard byte budget."
        super().__init__("tidegate", help=text, context_settings={"max_content_width": WIDEST_HELP})
        click.version_option(__version__, message="tidegate %(version)s", help="Print the version and exit.")(self)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            close = get_close_matches(args[0], COMMANDS, 1)
            ctx.fail(f"there is no command '{args[0]}'" + (f"; did you mean '{close[0]}'?" if close else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

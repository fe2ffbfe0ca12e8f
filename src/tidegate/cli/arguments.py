"""From a function's signature to a command line: parameters annotated with :class:`Argument` or :class:`Flag` are what a
user types. The types are str, int, float, bool, Path, these or None, and lists of them; the function gets its own defaults
for what was not given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import click

WIDEST_HELP = 120


class Argument:
    """Given by position."""

    def __init__(self, *, help: str) -> None:
        self.help = help


class Flag:
    """Given by name: ``names``, or the parameter's name with dashes. ``group`` is the title above it in the help."""

    def __init__(
        self,
        *names: str,
        help: str,
        group: str = "Options",
        metavar: str | None = None,
        min: float | None = None,
        max: float | None = None,
        show_default: bool = True,
    ) -> None:
        self.names, self.help, self.group, self.metavar = names, help, group, metavar
        self.min, self.max, self.show_default = min, max, show_default


class _Positional(click.Argument):
    def __init__(self, *, text: str, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.help = self.text = text
        self.group = "Arguments"

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), self.text


class _Named(click.Option):
    def __init__(self, *, group: str, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.group = group


class _Command(click.Command):
    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Newer versions of click list arguments here; all do it in format_options, under our titles."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                groups.setdefault(getattr(parameter, "group", "Options"), []).append(record)
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def command_line(name: str, function: Callable[..., Any], text: str) -> click.Command:
    """The command ``name`` that calls ``function``; ``text`` is its line in the help."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    lists = {item.name: item.default for item in parameters if get_origin(_kind(item)) is list}

    def call(**values: Any) -> Any:
        for key, default in lists.items():
            values[key] = list(values[key]) or (None if default is inspect.Parameter.empty else default)
        return function(**values)

    return _Command(
        name,
        params=[_parameter(item) for item in parameters],
        callback=call,
        help=text,
        context_settings={"max_content_width": WIDEST_HELP},
    )


def _kind(item: inspect.Parameter) -> Any:
    """The annotated type, without None."""
    kind = get_args(item.annotation)[0]
    if NoneType in get_args(kind):
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    return kind


def _parameter(item: inspect.Parameter) -> click.Parameter:
    kind, spec = _kind(item), get_args(item.annotation)[1]
    is_list = get_origin(kind) is list
    one = get_args(kind)[0] if is_list else kind
    is_required = item.default is inspect.Parameter.empty
    common = {} if is_required or is_list else {"default": item.default}
    if isinstance(spec, Argument):
        return _Positional(
            text=spec.help, param_decls=[item.name], type=_type(one), required=is_required, nargs=-1 if is_list else 1,
            **common,
        )  # fmt: skip
    return _Named(
        group=spec.group, param_decls=[item.name, *(spec.names or ["--" + item.name.replace("_", "-")])],
        type=_type(one, spec.min, spec.max), required=is_required, is_flag=one is bool, multiple=is_list, help=spec.help,
        metavar=spec.metavar, show_default=spec.show_default and item.default not in (None, False), **common,
    )  # fmt: skip


def _type(kind: type, low: float | None = None, high: float | None = None) -> Any:
    if low is not None or high is not None:
        return click.IntRange(low, high) if kind is int else click.FloatRange(low, high)  # type: ignore[arg-type]
    if kind is Path:
        return click.Path(path_type=Path)
    return {int: click.INT, float: click.FLOAT, bool: click.BOOL, str: click.STRING}[kind]

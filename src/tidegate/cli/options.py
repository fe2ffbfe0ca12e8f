"""Flags from the option tables: a command takes ``**options`` and gets what the user gave, by keyword."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import MappingProxyType
from typing import Annotated, Any, Optional

from tidegate.cli.arguments import Flag
from tidegate.config import Option, option_table
from tidegate.errors import UsageError

_TYPES: dict[str, Any] = {"bytes": str, "int": int, "float": float, "flag": bool, "text": str, "texts": list[str]}


def flags(
    panels: dict[str, type[Any]], without: Collection[str] = (), aliases: Mapping[str, str] = MappingProxyType({})
) -> Callable[..., Callable[..., Any]]:
    """Decorator: replace ``**options`` of a command by one flag for each row of the tables (panel title -> class).
    Flags that the user did not give are left out of ``options``. ``aliases``: a second flag for a row, by keyword."""
    rows = [
        (panel, row) for panel, cls in panels.items() for row in option_table(cls).values() if row.name not in without
    ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.kind != p.VAR_KEYWORD]
        added = [_parameter(panel, row, *filter(None, [aliases.get(row.name)])) for panel, row in rows]
        names = {row.name for _, row in rows}

        @wraps(function)
        def command(**values: Any) -> Any:
            was_given = {k: v is not None and v is not False and v != [] for k, v in values.items()}  # 0 is given
            given = {k: v for k, v in values.items() if k in names and was_given[k]}
            return function(**{k: v for k, v in values.items() if k not in names}, **given)

        command.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in [*own, *added]}
        return command

    return decorate


@contextmanager
def context_from(flags: str, options: dict[str, Any], context_tokens: int) -> Iterator[None]:
    """Fill in a --context that the user did not give. If the model has no such context, the error inside the ``with`` names
    ``flags``, from which it follows."""
    was_given = "context" in options
    options.setdefault("context", context_tokens)
    try:
        yield
    except UsageError as error:
        name, colon, why = str(error).partition(":")
        if was_given or name != f"--context {context_tokens}":
            raise
        raise UsageError(f"{flags}{colon}{why}") from None


def _parameter(panel: str, row: Option, *more_flags: str) -> inspect.Parameter:
    metavar = "|".join(row.choices) if row.choices else {"bytes": "BYTES", "text": "TEXT"}.get(row.kind)
    default = "" if row.default is None or row.kind in ("flag", "texts") else f"  [default: {_plain(row.default)}]"
    text = f"{row.help[0].upper()}{row.help[1:]}.{default}"
    option = Flag(row.flag, *more_flags, help=text, metavar=metavar, group=panel, show_default=False)
    kind = _TYPES[row.kind] if row.kind == "flag" else Optional[_TYPES[row.kind]]  # noqa: UP045  (a runtime type)
    default_value = False if row.kind == "flag" else None
    return inspect.Parameter(
        row.name, inspect.Parameter.KEYWORD_ONLY, default=default_value, annotation=Annotated[kind, option]
    )


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

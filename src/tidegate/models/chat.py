"""Chat templates: conversations to the text that a model was trained on, rendered by jinja2 in a sandbox.

Templates come with a checkpoint and are somebody else's code: they see no attributes that start with an underscore, cannot
change what they are given, and have only the names that Hugging Face gives them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidegate.errors import CheckpointError, UsageError

_DEFAULT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


class ChatTemplate:
    """``template`` and ``special`` are what a Checkpoint's ``chat_template`` and ``special_tokens`` return."""

    def __init__(self, template: str | None, special: Mapping[str, Any], where: str = "the checkpoint") -> None:
        """Raises CheckpointError for a template that jinja2 cannot parse."""
        self._where = where
        self.is_default = template is None
        self._special = {name: special.get(name) or "" for name in ("bos_token", "eos_token")}
        try:
            self._template = _environment().from_string(_DEFAULT if template is None else template)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{where}: chat template, line {error.lineno}: {error.message}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **options: Any) -> str:
        """The text, which holds its special tokens by name. ``options`` reach the template by name (``tools``,
        ``enable_thinking``, ...). Raises UsageError for messages that are no messages or that the template refuses, and
        CheckpointError for a template that fails."""
        _check(messages)
        names = {"tools": None, "documents": None, **self._special, **options}
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **names)
        except _Refused as error:
            raise UsageError(f"the chat template of {self._where} refuses these messages: {error}") from None
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise CheckpointError(f"{self._where}: the chat template failed: {error}") from None


class _Refused(Exception):
    """A template called ``raise_exception``."""


class _Generation(Extension):
    """``{% generation %}`` ... ``{% endgeneration %}`` marks answers for training; here its content is just text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> ImmutableSandboxedEnvironment:
    """trim_blocks and lstrip_blocks as transformers has them: templates are written for that."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Not jinja2's own filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)


def _check(messages: Iterable[Mapping[str, Any]]) -> None:
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(f'message {index} must look like {{"role": "user", "content": "..."}}, got {message!r}')
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise UsageError(f"message {index}: content must be text, got {content!r}")

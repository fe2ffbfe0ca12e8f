"""``tidegate run``: load a model inside the budget and answer a prompt, a file, standard input, or a chat."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

from tidegate.cli import INTERRUPTED
from tidegate.cli.answer import write_answer
from tidegate.cli.arguments import Argument, Flag
from tidegate.cli.files import check_output, read_utf8
from tidegate.cli.options import flags
from tidegate.cli.progress import converting
from tidegate.cli.report import closing_line, forecast_line, plan_table
from tidegate.config import EngineOptions, SamplingOptions, parse_options, split_options
from tidegate.engine.model import Model, load
from tidegate.errors import UsageError
from tidegate.planner.card import forecast_loaded


@flags({"Model and memory": EngineOptions, "Sampling": SamplingOptions}, without=("sequences", "logprobs"))
def command(
    model: Annotated[str, Argument(help="An expert store, a Hugging Face folder, a GGUF file, or builtin.")],
    prompt: Annotated[
        str | None, Argument(help="What to answer; without it: --file, standard input or a chat.")
    ] = None,
    file: Annotated[Path | None, Flag(help="Read the prompt from this file.")] = None,
    chat: Annotated[bool, Flag("--chat", help="Talk on, even when the input is no terminal.")] = False,
    raw: Annotated[bool, Flag("--raw", help="Continue the prompt as plain text, without the chat template.")] = False,
    as_json: Annotated[bool, Flag("--json", help="Print one JSON object at the end instead of text.")] = False,
    trace: Annotated[Path | None, Flag(help="Record which experts every token used in this file.")] = None,
    **options: Any,
) -> int:
    """The answer goes to standard output, everything else to standard error. A prompt is a message to the model's chat
    template when it has one, unless --raw is given."""
    engine_options, sampling = split_options(options, EngineOptions, SamplingOptions)
    if chat and (raw or as_json):
        raise UsageError(f"--chat does not go with {'--raw' if raw else '--json'}")
    parse_options(SamplingOptions, sampling)  # a bad value is refused before anything is loaded
    text = _prompt(prompt, file, chat)
    if trace is not None:
        check_output(trace, "--trace")
    with converting(model) as progress:
        loaded = load(model, say=_say, progress=progress, **engine_options)
    with loaded:
        if not as_json:
            _say(plan_table(loaded.plan, loaded.budget_explanation))
            if found := forecast_loaded(loaded.runtime):
                _say(forecast_line(found))
        exit_code = 0
        with loaded.trace(trace, model) if trace else nullcontext():
            if text is None or chat:
                from tidegate.cli.chat import talk_with  # noqa: PLC0415  (needs readline)

                talk_with(loaded, text, sampling)
            else:
                exit_code = _answer(loaded, text, raw, as_json, sampling)
        if not as_json:
            _say(closing_line(loaded.stats()))
    return exit_code


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _prompt(prompt: str | None, file: Path | None, chat: bool) -> str | None:
    """The text to answer; None for a chat that asks for it."""
    if prompt is not None and file is not None:
        raise UsageError("give a prompt or --file, not both")
    if prompt is None and file is None and (chat or sys.stdin.isatty()):
        return None
    text = read_utf8(file) if file else sys.stdin.read() if prompt is None else prompt
    if not text.strip():
        raise UsageError("the prompt is empty")
    return text


def _answer(model: Model, text: str, raw: bool, as_json: bool, sampling: dict[str, Any]) -> int:
    """One answer; 130 if Ctrl-C ended it."""
    ids = text if raw or not model.has_chat_template else model.chat_prompt([{"role": "user", "content": text}])
    text, was_interrupted = write_answer(model, ids, sampling, is_shown=not as_json)
    if as_json:
        print(json.dumps({"text": text, **model.stats(), "plan": model.plan.to_json()}))
    return INTERRUPTED if was_interrupted else 0

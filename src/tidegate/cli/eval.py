"""``tidegate eval``: perplexity and bits per byte of a model on texts, and its agreement with a reference model."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any

from tidegate.cli.arguments import Argument, Flag
from tidegate.cli.files import read_utf8
from tidegate.cli.options import context_from, flags
from tidegate.cli.progress import converting, counted
from tidegate.config import EngineOptions
from tidegate.engine import evaluate
from tidegate.engine.model import Model, load
from tidegate.errors import UsageError
from tidegate.terminal import table
from tidegate.units import align_up

_SPIKE_RATIO = 0.6  # one expert takes more of a text's tokens than this: said to the user


@flags({"Model and memory": EngineOptions}, without=("sequences", "context"))
def command(
    model: Annotated[str, Argument(help="An expert store, a Hugging Face folder, a GGUF file, or builtin.")],
    texts: Annotated[list[Path], Argument(help="Text files, one domain each.")],
    reference: Annotated[
        str | None, Flag(help="Also compare with this model: KL divergence, top-1 and routing agreement.")
    ] = None,
    window: Annotated[int, Flag(min=1, help="Most tokens that a prediction sees.")] = 256,
    max_tokens: Annotated[int, Flag(min=1, help="Most tokens of a text.")] = 16384,
    compare_tokens: Annotated[int, Flag(min=1, help="Most tokens of a text in the comparison.")] = 1024,
    as_json: Annotated[bool, Flag("--json", help="Print one JSON object instead of a table.")] = False,
    **options: Any,
) -> int:
    """Every token of a text but the first is predicted once. The models are loaded one after the other."""
    contents = {str(path): read_utf8(path) for path in texts}
    if len(contents) < len(texts):
        raise UsageError("a text is given twice")
    recordings = []
    with ExitStack() as temporary:
        with _load(model, window, options) as loaded:
            parts = {name: evaluate.shorten(loaded, text, max_tokens) for name, text in contents.items()}
            with counted("tokens scored") as progress:
                advance = progress.of(sum(len(loaded.encode(part)) - 1 for part in parts.values()))
                scores = [evaluate.score(loaded, name, part, window, advance) for name, part in parts.items()]
            if reference is not None:
                windows = _windows(loaded, parts, compare_tokens, window)
                recordings.append(temporary.enter_context(_record(loaded, windows, "the model")))
        if reference is not None:
            with _load(reference, window, options) as loaded:
                recordings.append(temporary.enter_context(_record(loaded, windows, "the reference")))
        agreement = evaluate.compare(*recordings) if recordings else None
    report = _report(scores, agreement)
    print(json.dumps(report)) if as_json else _print_table(report)
    return 0


def _load(path: str, window: int, given: dict[str, Any]) -> Model:
    options = dict(given)
    with context_from(f"--window {window}", options, align_up(window + 1, 16)), converting(path) as progress:
        return load(path, progress=progress, **options)


def _windows(model: Model, texts: dict[str, str], max_tokens: int, window: int) -> list[evaluate.Window]:
    """Of the beginning of every text."""
    return [
        one
        for name, text in texts.items()
        for one in evaluate.cut(model, name, evaluate.shorten(model, text, max_tokens), window)
    ]


def _record(model: Model, windows: list[evaluate.Window], whose: str) -> closing[evaluate.Recording]:
    with counted(f"tokens of {whose} recorded") as progress:
        advance = progress.of(sum(len(window.inputs) for window in windows))
        return closing(evaluate.Recording(model, windows, advance))


def _report(scores: list[evaluate.TextScore], agreement: evaluate.Agreement | None) -> dict[str, Any]:
    nll, num_bytes = sum(score.nll for score in scores), sum(score.num_bytes for score in scores)
    return {
        "texts": [score.to_json() for score in scores],
        "bits_per_byte": round(nll / math.log(2) / num_bytes, 5),
        **(agreement.to_json() if agreement else {}),
    }


def _print_table(report: dict[str, Any]) -> None:
    rows = [
        [
            Path(row["text"]).name, f"{row['tokens']:,}", f"{row['bytes']:,}", f"{row['perplexity']:.2f}",
            f"{row['bits_per_byte']:.3f}", f"{row['busiest_expert']['token_ratio']:.0%}" if "busiest_expert" in row else "-",
        ]
        for row in report["texts"]
    ]  # fmt: skip
    print(table(["text", "tokens", "bytes", "perplexity", "bits per byte", "busiest expert"], rows))
    print(f"all texts: {report['bits_per_byte']:.3f} bits per byte")
    for row in report["texts"]:
        spike = row.get("busiest_expert", {"token_ratio": 0})
        if spike["token_ratio"] > _SPIKE_RATIO:
            where = f"expert {spike['expert']} of layer {spike['layer']}"
            print(f"{Path(row['text']).name}: {spike['token_ratio']:.0%} of its tokens use {where}")
    if "kl_nats" in report:
        routing = report["routing_agreement_ratio"]
        print(
            f"reference, over {report['compared_tokens']:,} tokens: KL {report['kl_nats']:.5f} nats, same top token "
            f"{report['top1_agreement_ratio']:.2%}, same experts {'-' if routing is None else f'{routing:.2%}'}"
        )

"""``tidegate bench``: how fast a model runs in a budget, and how fast this machine would allow it to."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

from tidegate.cli.arguments import Argument, Flag
from tidegate.cli.files import check_output, read_utf8
from tidegate.cli.options import context_from, flags
from tidegate.cli.progress import converting
from tidegate.cli.report import forecast_line, plan_table
from tidegate.config import EngineOptions
from tidegate.engine import bench
from tidegate.engine.model import load
from tidegate.errors import UsageError
from tidegate.planner.card import forecast_loaded
from tidegate.units import align_up, format_bytes, format_seconds

_TEXT = Path(bench.__file__).with_suffix(".txt")


@flags({"Model and memory": EngineOptions}, without=("sequences",))
def command(
    model: Annotated[str, Argument(help="An expert store, a Hugging Face folder, a GGUF file, or builtin.")],
    prefill: Annotated[int, Flag(min=1, help="Tokens computed as a prompt.")] = 256,
    decode: Annotated[int, Flag(min=1, help="Tokens after them, computed one by one.")] = 64,
    text: Annotated[Path | None, Flag(help="Text to read; default: a few pages of novels.")] = None,
    tokens: Annotated[Path | None, Flag(help="Token ids to read, a JSON list, instead of a text.")] = None,
    warm: Annotated[
        bool, Flag("--warm", help="Compute it all once before measuring, so that the experts are loaded.")
    ] = False,
    choices: Annotated[
        bool,
        Flag("--choices", help="Also print the tokens that the model would have chosen, and how clear that was."),
    ] = False,
    trace: Annotated[Path | None, Flag(help="Record which experts every token used in this file.")] = None,
    **options: Any,
) -> int:
    """The text is given, not generated, so every engine and budget computes the same. The last line of standard output is one
    JSON object."""
    if text is not None and tokens is not None:
        raise UsageError("give --text or --tokens, not both")
    if trace is not None:
        check_output(trace, "--trace")
    asked = f"--prefill {prefill} and --decode {decode}"
    with context_from(asked, options, align_up(prefill + decode + 1, 16)), converting(model) as progress:
        loaded = load(model, progress=progress, **options)
    with loaded:
        ids = _tokens(tokens) if tokens else loaded.encode(read_utf8(text or _TEXT))
        if len(ids) < prefill + decode:
            raise UsageError(f"the text has {len(ids)} tokens, fewer than {asked}")
        print(plan_table(loaded.plan, loaded.budget_explanation))
        forecast = forecast_loaded(loaded.runtime)
        if forecast:
            print(forecast_line(forecast))
        card = bench.make_card(loaded.runtime, prefill + decode // 2)
        print(_card_lines(card), flush=True)
        ids = ids[: prefill + decode]
        if warm:
            bench.measure(loaded.runtime, card, ids, prefill)
        with loaded.trace(trace, model) if trace else nullcontext():
            found = bench.measure(loaded.runtime, card, ids, prefill, margins=choices)
        print(_result_lines(found, loaded.runtime.budget.limit_bytes))
    chosen = {"greedy_token_ids": found.choices, "greedy_margins": found.margins} if choices else {}
    expected = {"forecast": forecast.to_json()} if forecast else {}
    print(json.dumps(found.to_json() | expected | chosen))
    return 0


def _tokens(path: Path) -> list[int]:
    try:
        ids = json.loads(path.read_text())
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise UsageError(f"{path}: must be a JSON list of token ids")
    return ids


def _card_lines(card: bench.Card) -> str:
    rates = card.rates
    lines = [
        f"a token reads {format_bytes(card.active_bytes)}; memory gives {_rate(rates.memory_bytes_per_s)} "
        f"({_rate(rates.memory_one_thread_bytes_per_s)} to one thread): {1 / card.compute_s:.1f} tokens/s when all is here"
    ]
    if card.num_moe_layers:
        ceiling, binding = card.ceiling(card.uniform_misses)
        lines.append(
            f"an expert has {format_bytes(card.expert_bytes)}; disk gives {_rate(rates.disk_bytes_per_s)}, one load takes "
            f"{format_seconds(rates.load_s)}: R = {card.load_ratio:.2f}"
        )
        lines.append(
            f"if every expert were equally likely: {card.uniform_misses:.1f} misses a token, at most {ceiling:.1f} tokens/s; "
            f"{binding} binds"
        )
    return "\n".join(lines)


def _result_lines(found: bench.Measurement, budget_bytes: int) -> str:
    lines = []
    for name, phase in (("prefill", found.prefill), ("decode", found.decode)):
        counters = phase.counters
        lines.append(
            f"{name:8}{phase.tokens_per_s:8.1f} tokens/s  {counters['demand_hits']:,} hits, {counters['prefetch_hits']:,} "
            f"prefetched, {counters['misses']:,} misses; {format_bytes(counters['read_bytes'])} read; "
            f"{phase.stall_ratio:.1%} of the time waiting for loads"
        )
        if counters["prefetch_issued"]:
            lines.append(
                f"{'':8}prefetch: {counters['prefetch_hits']:,} useful ({counters['prefetch_late']:,} late), "
                f"{counters['prefetch_wasted']:,} wasted, {counters['prefetch_dropped']:,} dropped; "
                f"{format_bytes(counters['wasted_bytes'])} read in vain; about {format_seconds(phase.stall_removed_s)} of "
                "waiting removed"
            )
        if found.card.num_moe_layers and phase is found.decode:
            visit_us, guess_us = (
                counters[key] / 1e3 / phase.tokens / found.card.num_moe_layers for key in ("visit_ns", "guess_ns")
            )
            lines.append(
                f"{'':8}bookkeeping: {phase.bookkeeping_ratio:.1%} of the time; a layer {visit_us:.0f} us for cache and policy, "
                f"{guess_us:.0f} us for guesses and prefetch"
            )
    ceiling, binding = found.ceiling
    lines.append(
        f"ceiling with these loads {ceiling:.1f} tokens/s ({binding}); reached {found.decode.tokens_per_s / ceiling:.0%}"
    )
    lines.append(f"peak memory {format_bytes(found.peak_bytes)} of {format_bytes(budget_bytes)}")
    return "\n".join(lines)


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(round(bytes_per_s))}/s"

"""``tidegate plan``: what a model needs and how fast it will be, from its headers alone."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

from tidegate.checkpoint.convert.options import ConvertOptions
from tidegate.cli.arguments import Argument, Flag
from tidegate.cli.options import flags
from tidegate.cli.plan_text import advice_lines, comparison_lines, device_lines, markdown, plain, print_colored
from tidegate.config import EngineOptions, parse_options
from tidegate.engine.reserve import budget_of
from tidegate.errors import BudgetTooSmall, CheckpointError, UsageError
from tidegate.memory.budget import budget_of_machine
from tidegate.planner.advise import choices, comparison_row, rule_of_thumb
from tidegate.planner.card import Card, make_card, with_device
from tidegate.planner.headers import read_headers
from tidegate.planner.machine import Machine, load_machine
from tidegate.units import format_bytes, parse_bytes


@flags({"Model and memory": EngineOptions}, aliases={"sequences": "--batch"})
def command(
    model: Annotated[
        str,
        Argument(help="A store, a Hugging Face folder, a GGUF file, builtin, a config.json, or OWNER/NAME on the hub."),
    ],
    ram: Annotated[str | None, Flag(metavar="BYTES", help="Plan for a machine with this much memory.")] = None,
    vram: Annotated[
        str | None, Flag(metavar="BYTES", help="Also plan for a CUDA device with this much memory, on paper.")
    ] = None,
    vram_bandwidth: Annotated[
        str | None, Flag(metavar="BYTES/s", help="Its memory bandwidth, like 1000GB/s; with --vram.")
    ] = None,
    link_bandwidth: Annotated[
        str | None, Flag(metavar="BYTES/s", help="Bandwidth of its link to the host, like 25GB/s; with --vram.")
    ] = None,
    memory_bandwidth: Annotated[
        str | None, Flag(metavar="BYTES/s", help="Forecast for this memory bandwidth, like 40GB/s.")
    ] = None,
    disk_bandwidth: Annotated[
        str | None, Flag(metavar="BYTES/s", help="Forecast for this disk bandwidth, like 3GB/s.")
    ] = None,
    prompt: Annotated[int | None, Flag(min=1, help="Prompt of the forecast, in tokens.")] = None,
    trace: Annotated[Path | None, Flag(help="Take the hit rate from this trace, by replaying it.")] = None,
    advise: Annotated[
        bool, Flag("--advise", help="Compare expert formats and numbers of sequences in this budget.")
    ] = False,
    as_json: Annotated[bool, Flag("--json", help="Print one JSON object.")] = False,
    as_markdown: Annotated[bool, Flag("--markdown", help="Print Markdown.")] = False,
    **options: Any,
) -> int:
    """Reads no weights. Without measured rates (tidegate hardware) the forecast says that its rates are assumed. --experts takes
    several formats as well, like int4,int8: the card is of the first, a table compares them."""
    if as_json and as_markdown:
        raise UsageError("--json or --markdown, not both")
    if vram is None and (vram_bandwidth or link_bandwidth):
        raise UsageError("--vram-bandwidth and --link-bandwidth: only with --vram")
    kinds = str(options.pop("experts")).split(",") if "experts" in options else [None]
    machine = load_machine(model).with_rates(
        _rate(memory_bandwidth, "--memory-bandwidth"), _rate(disk_bandwidth, "--disk-bandwidth")
    )
    cards = []
    for kind in kinds:
        card = _card(model, options | ({"experts": kind} if kind is not None else {}), ram, machine, prompt, trace)
        if vram is not None:
            rates = _rate(vram_bandwidth, "--vram-bandwidth"), _rate(link_bandwidth, "--link-bandwidth")
            card = with_device(card, machine, parse_bytes(vram, "--vram"), *rates, prompt)
        cards.append(card)
    card, rows = cards[0], [comparison_row(one) for one in cards] if len(cards) > 1 else []
    found = choices(card, machine) if advise else []
    if as_json:
        advice = {"choices": [one.to_json() for one in found], "rule_of_thumb": rule_of_thumb(card)} if advise else {}
        print(json.dumps(card.to_json() | advice | ({"formats": rows} if rows else {})))
    else:
        _show(card, as_markdown)
        if rows:
            print("\n".join(comparison_lines(rows, as_markdown)))
        if advise:
            print("\n".join(advice_lines(card, found)))
    if not any(_fits(one) for one in cards):
        _refuse(card)
    return 0


def _card(
    model: str, options: dict[str, Any], ram: str | None, machine: Machine, prompt: int | None, trace: Path | None
) -> Card:
    parsed = parse_options(EngineOptions, options)
    convert = ConvertOptions(parsed.experts or "auto", parsed.dense or "auto", parsed.group)
    if ram:
        budget = budget_of_machine(parsed.memory_bytes, parse_bytes(ram, "--ram"), parsed.reserve)
    else:
        budget = budget_of(parsed, is_for_here=False)
    threads = parsed.threads or len(os.sched_getaffinity(0))
    try:
        headers = read_headers(model, convert, not {"experts", "dense", "group"}.isdisjoint(options))
        if prompt is not None and prompt > (parsed.context or headers.config.max_positions):
            raise UsageError(f"--prompt {prompt}: longer than the context; raise --context")
        return make_card(headers, parsed, budget, machine, threads, prompt_tokens=prompt, trace=trace)
    except CheckpointError as error:
        raise UsageError(str(error)) from None


def _show(card: Card, as_markdown: bool) -> None:
    if as_markdown:
        print(markdown(card))
    elif sys.stdout.isatty():
        print_colored(card)
    else:
        print(plain(card))
    if card.device is not None:
        lines = device_lines(card.device)
        print("\n".join(["", *(f"- {line.strip()}" for line in lines)] if as_markdown else lines))


def _fits(card: Card) -> bool:
    return not card.device.shortfall_bytes if card.device is not None else card.plan is not None


def _refuse(card: Card) -> NoReturn:
    """Raises BudgetTooSmall; with a device UsageError, because its memory is too small."""
    if card.device is not None:
        missing = format_bytes(card.device.shortfall_bytes)
        raise UsageError(f"--vram: {missing} are missing; use fewer bits, a shorter --context or more VRAM")
    enough = [way.flag for way in card.ways_out if way.smallest_bytes <= card.budget.limit_bytes]
    more = "use more --ram" if card.options.memory_bytes is None else "raise --memory"
    hint = f"it fits with {' or '.join(enough)}" if enough else f"{more} or use fewer bits"
    raise BudgetTooSmall(card.budget.limit_bytes, card.needs.smallest_bytes, hint)


def _rate(text: str | None, flag: str) -> int | None:
    return parse_bytes(text.removesuffix("/s"), flag, "3GB/s") if text else None

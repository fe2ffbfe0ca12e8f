"""The advisor: which bits and how many sequences run a model fastest in a budget on this machine, under a quality bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tidegate.checkpoint.inventory import count_parameters
from tidegate.engine.needs import Repacked, needs_of, sizes_of
from tidegate.plan import make_plan
from tidegate.planner.card import QUALITY_COST, Card, expected_process
from tidegate.planner.forecast import Forecast, make_forecast
from tidegate.planner.machine import Machine
from tidegate.planner.routing import expected_hits
from tidegate.quant.formats import Format

KINDS, SEQUENCES = ("bf16", "int8", "mxfp4", "int4"), (1, 2, 4, 8, 16)
QUALITY_BOUND = 2.0  # % of perplexity


@dataclass(frozen=True)
class Choice:
    """``experts`` None: the format of the store, which cannot be changed."""

    experts: str | None
    sequences: int
    resident_ratio: float
    quality_cost: float
    forecast: Forecast

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "forecast": self.forecast.to_json()}


def choices(card: Card, machine: Machine) -> list[Choice]:
    """Everything that fits the card's budget, fastest first; those within the quality bound before the others."""
    found = list(_choices(card, machine))
    return sorted(found, key=lambda one: (one.quality_cost > QUALITY_BOUND, -one.forecast.decode_tokens_per_s))


def rule_of_thumb(card: Card) -> str:
    """What others go by: compares the model in bfloat16 with the memory."""
    ratio = 2 * count_parameters(card.headers.config)[0] / card.budget.limit_bytes
    if ratio <= 1:
        return f"bfloat16 weights are {ratio:.2f} of the budget: run as it is"
    if ratio < 1.2:
        return f"bfloat16 weights are {ratio:.2f} of the budget, below 1.2: quantize"
    return f"bfloat16 weights are {ratio:.2f} of the budget, " + (
        "above 1.5: offload" if ratio > 1.5 else "in between: both"
    )


def _choices(card: Card, machine: Machine) -> Iterator[Choice]:
    headers = card.headers
    process = expected_process(machine, headers.config.vocab_size)
    fixed = headers.kind == "store" or not headers.layouts
    for kind in [None] if fixed else KINDS:
        fmt = Format.parse(kind if kind == "bf16" else f"{kind}-g32") if kind else None
        model = Repacked.of(headers, experts=fmt)
        for sequences in SEQUENCES:
            options = replace(card.options, sequences=sequences)
            needs = needs_of(model, options, process, card.threads)
            if needs.smallest_bytes > card.budget.limit_bytes:
                break
            plan, sizes = make_plan(card.budget.limit_bytes, needs), sizes_of(headers.config, options)
            hits = expected_hits(headers.config.family, plan.resident_ratio)
            prompt = max(1, sizes.context_tokens // 4)
            found = make_forecast(model, plan, sizes, machine, hits, threads=card.threads, prompt_tokens=prompt)
            yield Choice(kind, sequences, plan.resident_ratio, QUALITY_COST.get(kind or "", 0.0), found)

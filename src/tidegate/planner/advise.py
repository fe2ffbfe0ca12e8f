"""The advisor: which bits and how many sequences run a model fastest in a budget on this machine, under a quality bound."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tidegate.checkpoint.convert.options import ConvertOptions
from tidegate.checkpoint.inventory import count_parameters
from tidegate.engine.needs import Repacked, needs_of, sizes_of
from tidegate.plan import Plan, make_plan
from tidegate.planner.card import QUALITY_COST, Card, expected_process
from tidegate.planner.forecast import Forecast, make_forecast
from tidegate.planner.machine import Machine
from tidegate.planner.routing import expected_hits

KINDS, SEQUENCES = ("bf16", "int8", "mxfp4", "int4"), (1, 2, 4, 8, 16)
QUALITY_BOUND = 2.0  # % of perplexity


@dataclass(frozen=True)
class Choice:
    """``experts`` None: the format of the store, which cannot be changed. ``prefetch_layers``: how many layers before its own a
    load must start to be hidden; ``staging_experts``: loads that are on their way then. Both 0 if nothing is ever missing."""

    experts: str | None
    sequences: int
    resident_ratio: float
    quality_cost: float
    prefetch_layers: int
    staging_experts: int
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
        fmt = ConvertOptions(experts=kind).expert_format(None) if kind else None
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
            cost, distance = QUALITY_COST.get(kind or "", 0.0), prefetch_layers(found, plan)
            staging = math.ceil(distance * found.distinct_per_layer * (1 - found.hits.expected))
            yield Choice(kind, sequences, plan.resident_ratio, cost, distance, staging, found)


def prefetch_layers(found: Forecast, plan: Plan) -> int:
    """R, rounded up: the layers that are computed during one load."""
    return math.ceil(found.load_ratio) if plan.resident_ratio < 1 else 0


def comparison_row(card: Card) -> dict[str, Any]:
    """One expert format beside others, in the same budget; the forecast's entries are None where it does not fit."""
    layouts, found = card.headers.layouts, card.forecast
    return {
        "experts": str(layouts[0].fmt) if layouts else "none",
        "store_bytes": card.disk_bytes,
        "smallest_bytes": card.needs.smallest_bytes,
        "verdict": card.verdict,
        "resident_ratio": card.plan.resident_ratio if card.plan else None,
        "decode_tokens_per_s": found.decode_tokens_per_s if found else None,
        "prefill_tokens_per_s": found.prefill_tokens_per_s if found else None,
        "quality_cost": QUALITY_COST[layouts[0].fmt.kind] if layouts else 0.0,
    }

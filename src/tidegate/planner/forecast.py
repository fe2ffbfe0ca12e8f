"""Forecast of speed: what a decode step and prompts take, which resource binds, and a band. docs/planner.md has the formulas."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tidegate.engine.needs import PackedModel, Sizes
from tidegate.plan import Plan
from tidegate.planner.machine import Machine
from tidegate.planner.routing import HitRates
from tidegate.planner.step_clock import StepClock, StepTimes

_COMPUTE_BAND = 0.10  # how far the computed part has been off, see the table in docs/planner.md


@dataclass(frozen=True)
class Forecast:
    """Tokens a second are of all sequences together, prompts of ``prompt_tokens`` each that start at once included;
    ``first_token_s`` is the first one's. ``low`` and ``high`` are the band. ``load_ratio`` is R: the time to load one expert
    over the time to compute one layer. ``tokens_per_load``: tokens that an expert must serve for its computation to take as long
    as its load; ``distinct_per_layer``: experts that a step needs of a layer. ``is_measured``: the rates are this machine's."""

    decode_tokens_per_s: float
    low_tokens_per_s: float
    high_tokens_per_s: float
    prefill_tokens_per_s: float
    first_token_s: float
    prompt_tokens: int
    hits: HitRates
    step: StepTimes
    load_ratio: float
    tokens_per_load: float
    distinct_per_layer: float
    is_measured: bool

    def to_json(self) -> dict[str, Any]:
        numbers = {key: round(value, 6) if isinstance(value, float) else value for key, value in vars(self).items()}
        return {**numbers, "hits": asdict(self.hits), "step": asdict(self.step), "binding": self.step.binding}


def make_forecast(
    model: PackedModel,
    plan: Plan,
    sizes: Sizes,
    machine: Machine,
    hits: HitRates,
    *,
    threads: int,
    prompt_tokens: int,
    prefetch: bool = True,
) -> Forecast:
    """Decode at half the context, all sequences running; a prompt of ``prompt_tokens`` of each sequence."""
    clock = StepClock(model, plan, sizes, machine, threads, prefetch)
    steps = [clock.decode(rate, hits.distinct) for rate in (hits.expected, hits.low, hits.high)]
    rates = [sizes.sequences / step.total_s for step in steps]
    prompts_s, first_s = clock.prompts(prompt_tokens)
    layer_s = (steps[0].total_s - steps[0].wait_s) / model.config.num_layers
    return Forecast(
        rates[0],
        min(rates) * (1 - _COMPUTE_BAND),
        max(rates) * (1 + _COMPUTE_BAND),
        sizes.sequences * prompt_tokens / prompts_s,
        first_s,
        prompt_tokens,
        hits,
        steps[0],
        clock.load_s / layer_s,
        clock.tokens_per_load,
        hits.distinct or clock.distinct,
        machine.is_measured,
    )

"""What a run says about itself on standard error: the plan before, one line after."""

from __future__ import annotations

from typing import Any

from tidegate.plan import Plan
from tidegate.planner.forecast import Forecast
from tidegate.units import format_bytes, format_seconds


def plan_table(plan: Plan, explanation: str) -> str:
    """The split of the budget. ``explanation``: where the budget comes from."""
    notes = {"expert slots": _slots_note(plan)}
    lines = [f"memory: {explanation}"]
    for owner, size in plan.accounts().items():
        if size:
            lines.append(f"  {owner:<14}{format_bytes(size):>10}  {notes.get(owner, '')}".rstrip())
    return "\n".join(lines)


def forecast_line(found: Forecast) -> str:
    """What the planner expects."""
    return (
        f"forecast: {found.decode_tokens_per_s:.1f} tokens/s ({found.low_tokens_per_s:.1f} to "
        f"{found.high_tokens_per_s:.1f}; hit rate {found.hits.expected:.0%}), {found.step.binding} binds"
    )


def _slots_note(plan: Plan) -> str:
    if not plan.slots:
        return ""
    low, high = min(plan.slots), max(plan.slots)
    each = f"{low}" if low == high else f"{low} to {high}"
    return f"{each} of {plan.needs.num_experts} experts a layer ({plan.resident_ratio:.0%})"


def closing_line(stats: dict[str, Any]) -> str:
    """tokens/s and first token, if there were any; hits/misses, bytes read, peak memory of budget."""
    hits, misses = stats["demand_hits"] + stats["prefetch_hits"], stats["misses"]
    visits = hits + misses
    rate = f" ({hits / visits:.1%} of {visits:,} expert visits hit)" if visits else ""
    decode_s, first_s = stats["decode_s"], stats["first_token_s"]
    parts = [
        *([f"{stats['decode_tokens'] / decode_s:.1f} tokens/s"] if decode_s else []),
        *([f"first token {format_seconds(first_s)}"] if first_s else []),
        f"{hits:,} hits / {misses:,} misses{rate}",
        f"{format_bytes(stats['read_bytes'])} read",
        f"peak {format_bytes(stats['peak_bytes'])} of {format_bytes(stats['budget_bytes'])}",
    ]
    return ", ".join(parts)

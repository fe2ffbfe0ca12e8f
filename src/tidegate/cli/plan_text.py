"""The card as text: a table with bars in a terminal, Markdown, or plain lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tidegate.checkpoint.inventory import count_parameters
from tidegate.planner.advise import QUALITY_BOUND, Choice, rule_of_thumb
from tidegate.planner.card import Card, expert_formats
from tidegate.planner.device import NOTE, DevicePlan
from tidegate.planner.forecast import Forecast
from tidegate.terminal import styled
from tidegate.units import format_bytes, format_seconds

_BAR_CELLS = 24
Row = tuple[str, int, str]  # owner, bytes, note


def packed_rows(card: Card) -> list[Row]:
    """What the model is made of."""
    return [(owner, size, "") for owner, size in card.headers.packed_bytes.items() if size]


def memory_rows(card: Card) -> list[Row]:
    """Where the budget goes; of a budget that is too small, what the smallest one would hold."""
    needs = card.needs
    if card.plan:
        accounts = card.plan.accounts()
    else:
        slots_bytes = needs.num_layers * needs.min_slots * needs.slot_bytes
        accounts = needs.accounts(needs.smallest_bytes, slots_bytes)
    notes = {
        "runtime": "expected; measured when a model is loaded",
        "KV cache": f"{format_bytes(card.sizes.kv.token_bytes)} a token, {card.sizes.context_tokens:,} tokens"
        + (f" x {card.sizes.sequences}" if card.sizes.sequences > 1 else ""),
        "expert slots": _slots_note(card),
        "workspace": _activations_note(card),
    }
    return [(owner, size, notes.get(owner, "")) for owner, size in accounts.items() if size]


def headline(card: Card) -> list[str]:
    """Model, disk, verdict."""
    config, moe = card.headers.config, card.headers.config.moe
    total, active = count_parameters(config)
    model = f"{config.family}, {_count(total)} parameters"
    if moe:
        model += f", {_count(active)} active; {config.num_moe_layers} layers of {moe.num_experts} experts, "
        model += f"{moe.num_experts_per_tok} a token"
    lines = [f"{card.headers.path}: {model}", f"disk: {format_bytes(card.disk_bytes)} of store" + _source_note(card)]
    for kind in expert_formats(card.headers):
        lines.append(
            f"experts: {kind['format']}, {kind['bits_per_weight']:.3f} bits a weight, {format_bytes(kind['blob_bytes'])} each "
            f"({kind['codes_bytes']:,} B codes, {kind['scales_bytes']:,} scales, {kind['biases_bytes']:,} biases, "
            f"{kind['padding_bytes']:,} padding) in {kind['layers']} layers"
        )
    return [*lines, f"memory: {card.budget.explanation}"]


def verdict(card: Card) -> str:
    """One sentence."""
    edge = f"the smallest budget that works is {_exact(card.needs.smallest_bytes)}"
    if card.plan is None:
        return f"does not fit: {_exact(card.shortfall_bytes)} are missing; {edge}"
    if card.verdict == "fits":
        return f"fits: every expert stays in memory; {edge}"
    everything = f"{format_bytes(card.needs.largest_useful_bytes)} would hold every expert"
    return f"runs: {card.plan.resident_ratio:.0%} of the experts stay in memory, the rest is read on demand; {edge}, {everything}"


def forecast_lines(found: Forecast) -> list[str]:
    """Speed, what binds, and where the numbers come from."""
    step, hits = found.step, found.hits
    source = "measured rates" if found.is_measured else "ASSUMED rates: run tidegate hardware on this machine"
    return [
        f"decode {found.decode_tokens_per_s:.1f} tokens/s ({found.low_tokens_per_s:.1f} to {found.high_tokens_per_s:.1f}), "
        f"{step.binding} binds; prompt {found.prefill_tokens_per_s:.0f} tokens/s, first token after "
        f"{format_seconds(found.first_token_s)} for {found.prompt_tokens:,} tokens",
        f"a token: weights {format_seconds(step.weights_s)}, KV {format_seconds(step.kv_s)}, experts "
        f"{format_seconds(step.experts_s)}, waiting for loads {format_seconds(step.wait_s)}, overhead "
        f"{format_seconds(step.overhead_s)}",
        f"hit rate {hits.expected:.0%} ({hits.low:.0%} to {hits.high:.0%}; {hits.source}); R = {found.load_ratio:.2f}; "
        f"an expert must serve {found.tokens_per_load:.0f} tokens to hide its load; {source}",
    ]


def way_lines(card: Card) -> list[str]:
    """What would make it fit, most useful first."""
    lines = []
    for way in card.ways_out:
        fits = f"{way.tokens_per_s:.1f} tokens/s" if way.tokens_per_s else f"needs {format_bytes(way.smallest_bytes)}"
        lines.append(f"{way.flag}: {fits}, {way.cost}")
    return lines


def device_lines(found: DevicePlan) -> list[str]:
    """The tiers, the forecast, and that it is on paper only."""
    lines = [f"with {format_bytes(found.vram_bytes)} of VRAM, {NOTE}:"]
    for tier, owners in (("VRAM", found.vram), ("RAM", found.ram), ("disk", found.disk)):
        parts = ", ".join(f"{owner} {format_bytes(size)}" for owner, size in owners.items() if size)
        lines.append(f"  {tier}: {parts or 'nothing'}")
    rates = found.rates
    source = f"{rates.vram_bytes_per_s / 1e9:.0f} GB/s of VRAM, {rates.link_bytes_per_s / 1e9:.0f} GB/s of link, {rates.source}"
    if found.forecast is None:
        return [*lines, f"  does not fit: {_exact(found.shortfall_bytes)} of VRAM are missing"]
    if found.slots:
        lines.append(
            f"  of a layer's experts at least {min(found.slots)} in VRAM, {min(found.ram_slots)} in RAM; the hottest first"
        )
    return [
        *lines,
        f"  decode {found.forecast.decode_tokens_per_s:.1f} tokens/s ({found.forecast.low_tokens_per_s:.1f} to "
        f"{found.forecast.high_tokens_per_s:.1f}), {found.binding} binds; prompt "
        f"{found.forecast.prefill_tokens_per_s:.0f} tokens/s ({source})",
    ]


def comparison_lines(rows: list[dict[str, Any]], as_markdown: bool) -> list[str]:
    """Expert formats side by side."""
    head = ["experts", "store", "smallest", "verdict", "resident", "decode", "prompts", "perplexity lost"]
    cells = [head]
    for row in rows:
        fits = row["decode_tokens_per_s"] is not None
        cells.append(
            [
                row["experts"],
                format_bytes(row["store_bytes"]),
                format_bytes(row["smallest_bytes"]),
                row["verdict"],
                f"{row['resident_ratio']:.0%}" if fits else "",
                f"{row['decode_tokens_per_s']:.1f} tokens/s" if fits else "",
                f"{row['prefill_tokens_per_s']:.0f} tokens/s" if fits else "",
                f"about {row['quality_cost']:g} %",
            ]
        )
    if as_markdown:
        lines = [f"| {' | '.join(row)} |" for row in cells]
        return ["", lines[0], "|---" * len(head) + "|", *lines[1:]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return ["formats:"] + [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    ]


def advice_lines(card: Card, found: list[Choice]) -> list[str]:
    """The choices, best first, and what others would go by."""
    lines = [f"advice (quality bound {QUALITY_BOUND:g} % of perplexity; the best comes first):"]
    if not found:
        lines.append("  nothing fits this budget, in whatever format; see the ways out")
    for one in found:
        kind = one.experts or "as converted"
        lines.append(
            f"  --experts {kind} --sequences {one.sequences}: {one.forecast.decode_tokens_per_s:.1f} tokens/s in all, "
            f"{one.resident_ratio:.0%} resident, {one.forecast.step.binding} binds, about {one.quality_cost:g} % perplexity"
            + (
                f"; loads {_layers(one.prefetch_layers)} ahead, {one.staging_experts} at once"
                if one.prefetch_layers
                else ""
            )
        )
    return [*lines, f"rule of thumb, for comparison: {rule_of_thumb(card)}"]


def plain(card: Card) -> str:
    """For pipes and files."""
    lines = [*headline(card), "model:", *_table(packed_rows(card)), "budget:" if card.plan else "smallest budget:"]
    lines += [*_table(memory_rows(card)), verdict(card)]
    if card.forecast:
        lines += forecast_lines(card.forecast)
    if card.ways_out:
        lines += ["ways out:", *(f"  {line}" for line in way_lines(card))]
    return "\n".join(lines)


def markdown(card: Card) -> str:
    """For documents."""
    lines = [f"- {line}" for line in headline(card)]
    for title, rows in (("model", packed_rows(card)), ("budget", memory_rows(card))):
        lines += ["", f"| {title} | bytes | | |", "|---|---:|---:|---|"]
        lines += [f"| {owner} | {size:,} | {format_bytes(size)} | {note} |" for owner, size, note in rows]
    lines += ["", f"**{verdict(card)}**", ""]
    lines += [f"- {line}" for line in (forecast_lines(card.forecast) if card.forecast else way_lines(card))]
    return "\n".join(lines)


def print_colored(card: Card) -> None:
    """For terminals: the same with bars."""
    print("\n".join(headline(card)))
    for title, rows in (
        ("model", packed_rows(card)),
        ("budget" if card.plan else "smallest budget", memory_rows(card)),
    ):
        print(styled(title, "bold"))
        total = sum(size for _, size, _ in rows)
        for owner, size, note in rows:
            bar = styled(_bar(size, total).ljust(_BAR_CELLS), "cyan")
            print(f"  {owner:<16}{format_bytes(size):>10}  {bar}" + (f"  {styled(note, 'dim')}" if note else ""))
    print(styled(verdict(card), {"fits": "green", "streams": "yellow"}.get(card.verdict, "red")))
    if card.ways_out:
        print(styled("ways out", "bold"))
    for line in forecast_lines(card.forecast) if card.forecast else way_lines(card):
        print(f"  {line}")


def _layers(count: int) -> str:
    return f"{count} layer" + ("s" if count > 1 else "")


def _table(rows: list[Row]) -> Iterator[str]:
    for owner, size, note in rows:
        yield f"  {owner:<16}{format_bytes(size):>10}{size:>20,} B  {note}".rstrip()


def _bar(size: int, total: int) -> str:
    return "█" * max(1, round(_BAR_CELLS * size / max(total, 1)))


def _slots_note(card: Card) -> str:
    needs = card.needs
    if not needs.num_layers:
        return ""
    if card.plan is None:
        return f"{needs.min_slots} of {needs.num_experts} experts a layer"
    low, high = min(card.plan.slots), max(card.plan.slots)
    each = f"{low}" if low == high else f"{low} to {high}"
    return f"{each} of {needs.num_experts} experts a layer ({card.plan.resident_ratio:.0%})"


def _activations_note(card: Card) -> str:
    found = card.activations
    how = "counted"
    if found.measured_bytes:
        how = f"the larger of {format_bytes(found.counted_bytes)} counted and {format_bytes(found.measured_bytes)} measured"
    unshared = format_bytes(found.unshared_bytes)
    return f"activations of {card.sizes.step_tokens:,} tokens, {how}; {unshared} without reuse between operators"


def _source_note(card: Card) -> str:
    source = card.headers.source_bytes
    return f", made once from {format_bytes(sum(source.values()))} of source" if source is not None else ""


def _exact(size: int) -> str:
    return f"{format_bytes(size)} ({size:,} B)"


def _count(count: int) -> str:
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"

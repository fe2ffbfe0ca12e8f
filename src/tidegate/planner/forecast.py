"""Forecast of speed: seconds of a decode step and of a prompt, from bytes, rates and a hit rate. docs/planner.md has the
formulas with their sources.

B sequences of a step, E experts, K experts per token, n distinct experts of a step in one layer, m of them missing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import comb
from typing import Any

from tidegate.engine.needs import PackedModel, Sizes
from tidegate.plan import Plan
from tidegate.planner.machine import Machine
from tidegate.planner.routing import HitRates
from tidegate.quant.layout import ExpertLayout

# Of the time that prefetch could hide (loads during other layers), the share that it does hide; docs/planner.md.
_HIDDEN_BY_PREFETCH = 0.25
_COMPUTE_BAND = 0.10  # how far the computed part has been off, see the table in docs/planner.md


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step. ``weights_s``: dense weights; ``kv_s``: cached keys and values; ``experts_s``: experts, as if all
    were here; ``wait_s``: what loads add to that; ``overhead_s``: everything that is not proportional to bytes."""

    weights_s: float
    kv_s: float
    experts_s: float
    wait_s: float
    overhead_s: float

    @property
    def total_s(self) -> float:
        return self.weights_s + self.kv_s + self.experts_s + self.wait_s + self.overhead_s

    @property
    def binding(self) -> str:
        """What takes most of the time."""
        parts = {
            "memory bandwidth": self.weights_s + self.kv_s + self.experts_s,
            "disk": self.wait_s,
            "overhead of layers": self.overhead_s,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Forecast:
    """Tokens a second are of all sequences together; ``low`` and ``high`` are the band. ``load_ratio`` is R: the time to
    load one expert over the time to compute one layer. ``tokens_per_load``: tokens that an expert must serve for its
    computation to take as long as its load. ``is_measured``: the rates are this machine's, not assumed."""

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
    """Decode at half the context, all sequences running; a prompt of ``prompt_tokens`` by one sequence."""
    clock = _Clock(model, plan, sizes, machine, threads, prefetch)
    steps = [clock.decode(rate, hits.distinct) for rate in (hits.expected, hits.low, hits.high)]
    rates = [sizes.sequences / step.total_s for step in steps]
    prompt_s = clock.prompt(prompt_tokens)
    layer_s = (steps[0].total_s - steps[0].wait_s) / model.config.num_layers
    return Forecast(
        rates[0],
        min(rates) * (1 - _COMPUTE_BAND),
        max(rates) * (1 + _COMPUTE_BAND),
        prompt_tokens / prompt_s,
        prompt_s,
        prompt_tokens,
        hits,
        steps[0],
        clock.load_s / layer_s,
        clock.tokens_per_load,
        machine.is_measured,
    )


class _Clock:
    def __init__(
        self, model: PackedModel, plan: Plan, sizes: Sizes, machine: Machine, threads: int, prefetch: bool
    ) -> None:
        self._model, self._plan, self._sizes, self._machine = model, plan, sizes, machine
        self._memory = machine.memory_bytes_per_s(threads)
        self._scale = min(1.0, self._memory / machine.memory_bytes_per_s(machine.threads))
        self._hidden_ratio = _HIDDEN_BY_PREFETCH if prefetch else 0.0
        self._blob_bytes = plan.needs.slot_bytes
        self.load_s = machine.load_s(self._blob_bytes) if model.layouts else 0.0

    @property
    def tokens_per_load(self) -> float:
        """Tokens whose computation by one expert takes as long as loading it."""
        if not self._model.layouts:
            return 0.0
        layout = self._model.layouts[0]
        macs = 3 * layout.hidden_size * layout.expert_dim
        return self.load_s * self._machine.prefill_macs_per_s(layout.fmt) * self._scale / macs

    def decode(self, hit_rate: float, distinct: float | None) -> StepTimes:
        """One token of every sequence, at half the context. ``distinct`` experts a layer; None: by chance."""
        model, batch = self._model, self._sizes.sequences
        kv_s = batch * self._sizes.context_tokens / 2 * self._sizes.kv.token_bytes / self._memory
        experts_s = wait_s = loads_s = 0.0
        moe = model.config.moe
        for layout in model.layouts:
            assert moe is not None
            needed = distinct or expected_union(moe.num_experts, moe.num_experts_per_tok, batch)
            expert_s = self._expert_s(layout)
            alone = needed * expert_s
            experts_s += alone
            wait_s += self._layer_s(needed, expert_s, hit_rate, layout.blob_bytes) - alone
            loads_s += self._loads_s(needed * (1 - hit_rate), layout.blob_bytes)
        found = StepTimes(self._dense_s(batch), kv_s, experts_s, wait_s, self._overhead_s())
        cannot_hide_s = max(0.0, loads_s - (found.total_s - wait_s))
        return replace(found, wait_s=wait_s - self._hidden_ratio * max(0.0, wait_s - cannot_hide_s))

    def prompt(self, tokens: int) -> float:
        """Seconds until a prompt's last token has been computed, from a start with no expert in memory."""
        chunk, done, total_s = self._sizes.prefill_chunk, 0, 0.0
        while done < tokens:
            count = min(chunk, tokens - done)
            total_s += self._chunk_s(count, done + count, is_first=done == 0)
            done += count
        return total_s

    def _overhead_s(self) -> float:
        return self._model.config.num_layers * self._machine.layer_s

    def _dense_s(self, tokens: int) -> float:
        """Dense weights: read once, or as long as their multiplications take."""
        model, total_s = self._model, 0.0
        for entry in model.dense.values():
            if entry.name == "embed" and not model.config.tied_embeddings:
                continue
            rows = 1 if entry.name in ("embed", "head") else tokens
            read_s = entry.nbytes / (self._machine.decode_bytes_per_s(entry.fmt) * self._scale)
            macs = rows * entry.nbytes // 4 if entry.fmt is None else rows * entry.shape[0] * entry.shape[1]
            total_s += max(read_s, macs / (self._machine.prefill_macs_per_s(entry.fmt) * self._scale))
        return total_s

    def _expert_s(self, layout: ExpertLayout, tokens: float = 1.0) -> float:
        """One expert on ``tokens`` of its own."""
        read_s = layout.blob_bytes / (self._machine.decode_bytes_per_s(layout.fmt, experts=True) * self._scale)
        macs = tokens * 3 * layout.hidden_size * layout.expert_dim
        return max(read_s, macs / (self._machine.prefill_macs_per_s(layout.fmt) * self._scale))

    def _layer_s(self, distinct: float, expert_s: float, hit_rate: float, blob_bytes: int) -> float:
        """Hits compute while misses load, the last miss computes after its arrival: the mean over how many of n are missing,
        each with the same probability."""
        n = max(1, round(distinct))
        scale = distinct / n
        total_s = 0.0
        for misses in range(n + 1):
            chance = comb(n, misses) * (1 - hit_rate) ** misses * hit_rate ** (n - misses)
            before_last_s = (n - 1 if misses else n) * expert_s
            total_s += chance * (max(before_last_s, self._loads_s(misses, blob_bytes)) + n * expert_s - before_last_s)
        return total_s * scale

    def _loads_s(self, count: float, blob_bytes: int) -> float:
        """``count`` loads on demand, queued together."""
        if count <= 0:
            return 0.0
        return max(self._machine.load_s(blob_bytes), count * blob_bytes / self._machine.disk_bytes_per_s(blob_bytes))

    def _chunk_s(self, tokens: int, context: int, *, is_first: bool) -> float:
        """A piece of a prompt: every needed expert is loaded once, in file order, while others compute."""
        model, config = self._model, self._model.config
        att = config.attention
        width = att.kv_lora_rank + config.rope.dims + att.kv_lora_rank if att.is_mla else att.head_dim + att.v_head_dim
        attention_macs = config.num_layers * tokens * context * att.num_heads * width
        total_s = self._dense_s(tokens) + self._overhead_s()
        total_s += attention_macs / (self._machine.prefill_macs_per_s(None) * self._scale)
        moe = config.moe
        for slots, layout in zip(self._plan.slots, model.layouts, strict=True):
            assert moe is not None
            needed = expected_union(moe.num_experts, moe.num_experts_per_tok, tokens)
            compute_s = needed * self._expert_s(layout, tokens * moe.num_experts_per_tok / needed)
            missing = needed if is_first else needed * (1 - slots / moe.num_experts)
            total_s += max(compute_s, self._loads_s(missing, layout.blob_bytes))
        return total_s


def expected_union(num_experts: int, per_token: int, tokens: int) -> float:
    """Distinct experts that ``tokens`` tokens need, if they choose independently and evenly."""
    return num_experts * (1 - (1 - per_token / num_experts) ** tokens)

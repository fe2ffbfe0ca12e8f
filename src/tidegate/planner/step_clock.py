"""Seconds of a decode step and of prompts, part by part, from bytes, rates and a hit rate. docs/planner.md has the formulas.

B sequences of a step, T tokens, E experts, K experts per token, n distinct experts of a step in one layer, m of them missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import comb

from tidegate.engine.needs import PackedModel, Sizes
from tidegate.experts.gates_file import GATES_FORMAT
from tidegate.experts.lookahead import DISTANCES, most_rows
from tidegate.plan import Plan
from tidegate.planner.machine import Machine
from tidegate.quant.formats import Format
from tidegate.quant.layout import ExpertLayout

# Of the time that prefetch could hide (loads during other layers), the share that it does hide; docs/planner.md.
_HIDDEN_BY_PREFETCH = 0.3
_MOST_SPREAD = 64
_Segment = tuple[int, int]  # of a prompt: tokens, and the position they end at


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


class StepClock:
    """One model under one plan on one machine."""

    def __init__(
        self, model: PackedModel, plan: Plan, sizes: Sizes, machine: Machine, threads: int, prefetch: bool
    ) -> None:
        self._model, self._plan, self._sizes, self._machine = model, plan, sizes, machine
        self._memory = machine.memory_bytes_per_s(threads)
        self._scale = min(1.0, self._memory / machine.memory_bytes_per_s(machine.threads))
        self._is_scarce = plan.resident_ratio < 1
        self._prefetches = prefetch and self._is_scarce and _has_guesses(plan, sizes)
        self._chunks_s: dict[tuple[int, int, int], float] = {}
        resident_bytes = sum(slots * layout.blob_bytes for slots, layout in zip(plan.slots, model.layouts, strict=True))
        self._is_cached = machine.keeps_in_cache(sum(entry.nbytes for entry in model.dense.values()) + resident_bytes)
        self.load_s = machine.load_s(plan.needs.slot_bytes) if model.layouts else 0.0

    @property
    def tokens_per_load(self) -> float:
        """Tokens whose computation by one expert takes as long as loading it."""
        if not self._model.layouts:
            return 0.0
        layout, many = self._model.layouts[0], 1 << 12
        return self.load_s / (self._expert_s(layout, many) / many)

    @property
    def distinct(self) -> float:
        """Experts that a step needs of a layer, by chance."""
        moe = self._model.config.moe
        return expected_union(moe.num_experts, moe.num_experts_per_tok, self._sizes.sequences) if moe else 0.0

    def decode(self, hit_rate: float, distinct: float | None) -> StepTimes:
        """One token of every sequence, at half the context. ``distinct`` experts a layer; None: by chance."""
        model, batch, moe = self._model, self._sizes.sequences, self._model.config.moe
        kv_s = batch * self._sizes.context_tokens / 2 * self._sizes.kv.token_bytes / self._memory
        experts_s = wait_s = loads_s = 0.0
        for (slots, layout), count in Counter(zip(self._plan.slots, model.layouts, strict=True)).items():
            assert moe is not None
            needed = distinct or expected_union(moe.num_experts, moe.num_experts_per_tok, batch)
            expert_s = self._expert_s(layout, batch * moe.num_experts_per_tok / needed)
            guesses_s = self._guesses_s(moe.num_experts, layout.hidden_size)
            alone_s = needed * expert_s + guesses_s
            layer_s = self._layer_s(needed, expert_s, guesses_s, hit_rate, layout.blob_bytes, slots)
            experts_s += count * alone_s
            wait_s += count * (layer_s - alone_s)
            loads_s += count * self._loads_s(needed * (1 - hit_rate), layout.blob_bytes)
        found = StepTimes(self._dense_s(batch, batch), kv_s, experts_s, wait_s, self._overhead_s(batch))
        if not self._prefetches:
            return found
        cannot_hide_s = max(0.0, loads_s - (found.total_s - wait_s))
        return replace(found, wait_s=wait_s - _HIDDEN_BY_PREFETCH * max(0.0, wait_s - cannot_hide_s))

    def prompts(self, tokens: int) -> tuple[float, float]:
        """Seconds until the last token of every sequence's prompt has been computed, and of the first one's alone, from a start
        with no expert in memory."""
        seen, total_s, first_s = 0, 0.0, 0.0
        for number, chunk in enumerate(_chunks(tokens, self._sizes.sequences, self._sizes.prefill_chunk)):
            total_s += self._chunk_s(chunk, seen)
            seen += sum(count for count, _ in chunk)
            if number < -(-tokens // self._sizes.prefill_chunk):
                first_s = total_s
        return total_s, first_s

    def _overhead_s(self, rows: int) -> float:
        config, machine = self._model.config, self._machine
        chosen = config.moe.num_experts_per_tok * config.num_moe_layers / config.num_layers if config.moe else 0.0
        further_s = (rows - 1) * machine.row_overhead.of(config.num_layers, chosen)
        access_s = config.num_moe_layers * machine.bookkeeping.access.of(self.distinct)
        return machine.overhead.of(config.num_layers, chosen) + further_s + (access_s if self._is_scarce else 0.0)

    def _dense_s(self, tokens: int, logit_rows: int) -> float:
        """Dense weights that serve so many tokens; the head only those whose logits are wanted, the input table is not read."""
        sizes: dict[tuple[int, Format | None], int] = {}
        for entry in self._model.dense.values():
            if entry.name != "embed" or self._model.config.tied_embeddings:
                rows = logit_rows if entry.name in ("embed", "head") else tokens
                sizes[rows, entry.fmt] = sizes.get((rows, entry.fmt), 0) + entry.nbytes
        return sum(nbytes / self.bytes_per_s(fmt, rows) for (rows, fmt), nbytes in sizes.items())

    def bytes_per_s(self, fmt: Format | None, tokens: float, *, experts: bool = False) -> float:
        """Of weights that serve so many tokens."""
        rate = self._machine.decode_bytes_per_s(fmt, experts=experts, tokens=max(1.0, tokens), cached=self._is_cached)
        return rate * self._scale

    def _expert_s(self, layout: ExpertLayout, tokens: float) -> float:
        """One expert on ``tokens`` of its own."""
        return layout.blob_bytes / self.bytes_per_s(layout.fmt, tokens, experts=True)

    def _guesses_s(self, num_experts: int, hidden: int) -> float:
        """The gates that guess, for prefetch."""
        if not self._prefetches:
            return 0.0
        packed_bytes = GATES_FORMAT.packed_bytes(num_experts, hidden)
        weights_s = packed_bytes / self.bytes_per_s(GATES_FORMAT, self._sizes.sequences)
        return DISTANCES * (weights_s + self._machine.bookkeeping.gate.base_s)

    def _layer_s(
        self, distinct: float, expert_s: float, guesses_s: float, hit_rate: float, blob_bytes: int, slots: int
    ) -> float:
        """The mean over how many of n are missing, each with the same probability; of many, their mean number is missing."""
        n = max(1, round(distinct))
        if n > _MOST_SPREAD:
            misses = distinct * (1 - hit_rate)
            return self._experts_s(distinct - misses, misses, expert_s, blob_bytes, slots) + guesses_s
        total_s = 0.0
        for misses in range(n + 1):
            chance = comb(n, misses) * (1 - hit_rate) ** misses * hit_rate ** (n - misses)
            total_s += chance * self._experts_s(n - misses, misses, expert_s, blob_bytes, slots)
        return total_s * distinct / n + guesses_s

    def _experts_s(self, hits: float, misses: float, expert_s: float, blob_bytes: int, slots: int) -> float:
        """Experts that are here compute while the others load, and the last one computes after its arrival. Where more are needed
        than there are slots, those that are here come first, and loads wait for their slots."""
        if misses <= 0:
            return hits * expert_s
        first_s = hits * expert_s if hits + misses > slots else 0.0
        meanwhile_s = max(0.0, hits + misses - 1) * expert_s - first_s
        return first_s + self._overlapped_s(max(0.0, meanwhile_s), misses, blob_bytes) + min(1.0, misses) * expert_s

    def _overlapped_s(self, compute_s: float, loads: float, blob_bytes: int) -> float:
        """Computation and loads at the same time, each slowed by the other while both last."""
        loads_s, machine = self._loads_s(loads, blob_bytes), self._machine
        load_speed = machine.beside_bytes_per_s(blob_bytes) / machine.disk_bytes_per_s(blob_bytes)
        compute_speed = machine.beside_loads_ratio
        both_s = min(compute_s / compute_speed, loads_s / load_speed)
        return both_s + max(0.0, compute_s - both_s * compute_speed) + max(0.0, loads_s - both_s * load_speed)

    def _loads_s(self, count: float, blob_bytes: int) -> float:
        """``count`` loads on demand, queued together."""
        if count <= 1:
            return max(0.0, count) * self._machine.load_s(blob_bytes)
        behind_s = (count - 1) * blob_bytes / self._machine.disk_bytes_per_s(blob_bytes)
        return self._machine.load_s(blob_bytes) + behind_s

    def _chunk_s(self, chunk: tuple[_Segment, ...], seen: int) -> float:
        """A step of prompts. ``seen``: tokens computed before."""
        config, tokens = self._model.config, sum(count for count, _ in chunk)
        att = config.attention
        width = att.kv_lora_rank + config.rope.dims + att.kv_lora_rank if att.is_mla else att.head_dim + att.v_head_dim
        pairs = sum(count * stop for count, stop in chunk)
        attention_macs = config.num_layers * pairs * att.num_heads * width
        attention_s = attention_macs / (self._machine.prefill_macs_per_s(None) * self._scale)
        most_seen = 16 * config.moe.num_experts if config.moe else 0  # every expert has been seen by then
        key = (tokens, len(chunk), min(seen, most_seen))
        if key not in self._chunks_s:
            self._chunks_s[key] = self._dense_s(*key[:2]) + self._chunk_experts_s(tokens, key[2])
        return self._chunks_s[key] + attention_s + self._overhead_s(len(chunk))

    def _chunk_experts_s(self, tokens: int, seen: int) -> float:
        """Every expert that is needed and missing is loaded once."""
        moe, total_s = self._model.config.moe, 0.0
        for (slots, layout), count in Counter(zip(self._plan.slots, self._model.layouts, strict=True)).items():
            assert moe is not None
            needed = expected_union(moe.num_experts, moe.num_experts_per_tok, tokens)
            here = min(slots, expected_union(moe.num_experts, moe.num_experts_per_tok, seen))
            hits = needed * here / moe.num_experts
            expert_s = self._expert_s(layout, tokens * moe.num_experts_per_tok / needed)
            total_s += count * self._experts_s(hits, needed - hits, expert_s, layout.blob_bytes, slots)
        return total_s


def _chunks(tokens: int, sequences: int, most: int) -> Iterator[tuple[_Segment, ...]]:
    """How the scheduler deals the prompts of sequences that start together: in order, ``most`` tokens a step."""
    chunk, left = list[_Segment](), most
    for _ in range(sequences):
        done = 0
        while done < tokens:
            count = min(left, tokens - done)
            done, left = done + count, left - count
            chunk.append((count, done))
            if not left:
                yield tuple(chunk)
                chunk, left = [], most
    if chunk:
        yield tuple(chunk)


def expected_union(num_experts: int, per_token: int, tokens: int) -> float:
    """Distinct experts that ``tokens`` tokens need, if they choose independently and evenly."""
    return num_experts * (1 - (1 - per_token / num_experts) ** tokens)


def _has_guesses(plan: Plan, sizes: Sizes) -> bool:
    needs = plan.needs
    return sizes.sequences <= most_rows(sum(plan.slots) / max(1, needs.num_layers), max(1, needs.min_slots))

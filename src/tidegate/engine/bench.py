"""Measures a loaded model: the card with its ceiling first, then prefill and teacher-forced decode of given tokens.

Teacher-forced: the engine chooses every token as always, and then reads on with the text's own, so that every engine and
every budget computes the same thing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from tidegate.config import SamplingOptions
from tidegate.engine.build import Runtime
from tidegate.engine.engine import StepTimes
from tidegate.engine.sequence import Sequence, check_token_ids
from tidegate.errors import UsageError
from tidegate.experts.base import CacheCounters
from tidegate.hardware import Rates, disk_rate, memory_rate
from tidegate.memory.probe import process_memory

_LOADER_COUNTERS = ("read_bytes", "waits", "wait_ns", "busy_ns")
_BOOKKEEPING_COUNTERS = ("visit_ns", "guess_ns")


@dataclass(frozen=True)
class Card:
    """What a decode step costs by arithmetic, before it is measured. ``load_ratio`` is R: the time to load one expert over
    the time to compute one layer; ``uniform_misses`` are a token's misses if every expert were equally likely."""

    active_bytes: int
    expert_bytes: int
    experts_per_token: int
    num_moe_layers: int
    resident_ratio: float
    rates: Rates

    @property
    def compute_s(self) -> float:
        """A token's weights at the measured bandwidth."""
        return self.active_bytes / self.rates.memory_bytes_per_s

    @property
    def load_ratio(self) -> float:
        return self.rates.load_s * self.num_moe_layers / self.compute_s

    @property
    def uniform_misses(self) -> float:
        return self.experts_per_token * self.num_moe_layers * (1 - self.resident_ratio)

    def ceiling(self, loads_per_token: float) -> tuple[float, str]:
        """(tokens a second, what binds) when loads, prefetched ones included, and computation overlap perfectly."""
        disk_s = loads_per_token * self.expert_bytes / self.rates.disk_bytes_per_s if loads_per_token else 0.0
        slowest_s = max(self.compute_s, disk_s)
        return 1 / slowest_s, "disk" if disk_s > self.compute_s else "memory bandwidth"

    def to_json(self) -> dict[str, Any]:
        ceiling, binding = self.ceiling(self.uniform_misses)
        return {
            "active_bytes_per_token": self.active_bytes,
            "expert_bytes": self.expert_bytes,
            "resident_ratio": round(self.resident_ratio, 4),
            "memory_bytes_per_s": round(self.rates.memory_bytes_per_s),
            "memory_one_thread_bytes_per_s": round(self.rates.memory_one_thread_bytes_per_s),
            "disk_bytes_per_s": round(self.rates.disk_bytes_per_s),
            "expert_load_s": round(self.rates.load_s, 6),
            "load_over_layer_ratio": round(self.load_ratio, 3),
            "resident_ceiling_tokens_per_s": round(1 / self.compute_s, 2),
            "uniform_routing_ceiling_tokens_per_s": round(ceiling, 2),
            "uniform_routing_binding": binding,
        }


def make_card(runtime: Runtime, context_tokens: int) -> Card:
    """Measures the machine, for a decode step at ``context_tokens``. Call it before anything was computed: it writes into
    free slots. Raises ReadFailed or CorruptFile."""
    needs, weights, config = runtime.plan.needs, runtime.decoder.weights, runtime.config
    dense = needs.dense_bytes if weights.head is weights.embed else needs.dense_bytes - weights.embed.packed.nbytes
    per_token = config.moe.num_experts_per_tok if config.moe else 0
    active = dense + needs.num_layers * per_token * needs.slot_bytes + context_tokens * runtime.sizes.kv.token_bytes
    threads = runtime.threads
    disk, load_s = 0.0, 0.0
    if runtime.loader is not None:
        disk, load_s = disk_rate(runtime.loader, sum(runtime.plan.slots), needs.slot_bytes, needs.num_experts)
    memory = runtime.largest_memory
    rates = Rates(memory_rate(memory, threads), memory_rate(memory, 1), disk, load_s)
    return Card(active, needs.slot_bytes, per_token, needs.num_layers, runtime.plan.resident_ratio, rates)


@dataclass(frozen=True)
class Phase:
    """Counters of one phase of a measurement: differences between its end and its start. ``wasted_bytes``: read, but not for an
    expert that was needed in it."""

    tokens: int
    elapsed_s: float
    counters: dict[str, int]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def stall_ratio(self) -> float:
        """Share of the time in which compute waited for a load."""
        return self.counters["wait_ns"] / 1e9 / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def bookkeeping_ratio(self) -> float:
        """Share of the time that cache, policy, predictor and prefetch took."""
        spent_ns = sum(self.counters[name] for name in _BOOKKEEPING_COUNTERS)
        return spent_ns / 1e9 / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def stall_removed_s(self) -> float:
        """Estimate: every prefetched expert that was there in time saved what the others were waited for on average."""
        waited = self.counters["misses"] + self.counters["prefetch_late"]
        in_time = self.counters["prefetch_hits"] - self.counters["prefetch_late"]
        return in_time * self.counters["wait_ns"] / 1e9 / waited if waited else 0.0

    def to_json(self, name: str) -> dict[str, Any]:
        misses = self.counters["misses"]
        visits = self.counters["demand_hits"] + self.counters["prefetch_hits"] + misses
        return {
            f"{name}_tokens": self.tokens,
            f"{name}_s": round(self.elapsed_s, 6),
            f"{name}_tokens_per_s": round(self.tokens_per_s, 3),
            f"{name}_stall_ratio": round(self.stall_ratio, 4),
            f"{name}_stall_removed_s": round(self.stall_removed_s, 6),
            f"{name}_bookkeeping_ratio": round(self.bookkeeping_ratio, 4),
            f"{name}_hit_ratio": round((visits - misses) / visits, 4) if visits else None,
            **{f"{name}_{key}": value for key, value in self.counters.items()},
        }


@dataclass(frozen=True)
class Measurement:
    """``choices``: the greedy token after the prefill and after every decoded token; ``margins``: by how much its log
    probability is above the next one's, if asked for."""

    card: Card
    prefill: Phase
    decode: Phase
    choices: list[int]
    margins: list[float]
    peak_bytes: int
    budget_bytes: int

    @property
    def ceiling(self) -> tuple[float, str]:
        """Of decoding, with the bytes that were read."""
        read = self.decode.counters["read_bytes"]
        return self.card.ceiling(read / self.card.expert_bytes / self.decode.tokens if read else 0.0)

    def to_json(self) -> dict[str, Any]:
        ceiling, binding = self.ceiling
        return {
            **self.card.to_json(),
            **self.prefill.to_json("prefill"),
            **self.decode.to_json("decode"),
            "decode_ceiling_tokens_per_s": round(ceiling, 2),
            "decode_binding": binding,
            "decode_of_ceiling_ratio": round(self.decode.tokens_per_s / ceiling, 4),
            "peak_bytes": self.peak_bytes,
            "budget_bytes": self.budget_bytes,
        }


def measure(
    runtime: Runtime, card: Card, token_ids: list[int], prefill_tokens: int, *, margins: bool = False
) -> Measurement:
    """Compute the first ``prefill_tokens`` as a prompt and the rest one by one; ``margins`` cost a little time.

    Raises UsageError for too few tokens, one that the vocabulary lacks, or too short a context; ReadFailed or CorruptFile.
    """
    if not 0 < prefill_tokens < len(token_ids):
        raise UsageError(f"{len(token_ids)} tokens of text: more than the {prefill_tokens} of the prompt are needed")
    if len(token_ids) > runtime.sizes.context_tokens:
        raise UsageError(f"{len(token_ids)} tokens: more than the context of {runtime.sizes.context_tokens}")
    check_token_ids(token_ids, runtime.config.vocab_size)
    engine, decoded = runtime.engine, token_ids[prefill_tokens:]
    sampling = SamplingOptions(ignore_eos=True, logprobs=2 if margins else None)
    sequence = Sequence(0, token_ids[:prefill_tokens], len(decoded) + 1, sampling)
    choices: list[int] = []
    engine.scheduler.add(sequence)
    start = _snapshot(runtime)
    try:
        while len(sequence.tokens) == prefill_tokens:
            _step(runtime, sequence)
        middle = _snapshot(runtime)
        for token in decoded:
            choices.append(sequence.tokens[-1])
            sequence.tokens[-1] = token
            _step(runtime, sequence)
        choices.append(sequence.tokens[-1])
    finally:
        engine.scheduler.end(sequence, "cancelled")
    end = _snapshot(runtime)
    return Measurement(
        card,
        _phase(start, middle, "prefill", card.expert_bytes),
        _phase(middle, end, "decode", card.expert_bytes),
        choices,
        [round(sampled.top[0][1] - sampled.top[1][1], 4) for sampled in sequence.logprobs],
        process_memory().peak_rss_bytes,
        runtime.budget.limit_bytes,
    )


def _step(runtime: Runtime, sequence: Sequence) -> None:
    runtime.engine.step()
    if sequence.error is not None:
        raise sequence.error


_Snapshot = tuple[StepTimes, dict[str, int]]


def _snapshot(runtime: Runtime) -> _Snapshot:
    cache = runtime.cache.counters if runtime.cache else CacheCounters()
    counters = {item.name: int(getattr(cache, item.name)) for item in fields(cache)}
    native = runtime.loader.counters() if runtime.loader else None
    counters |= {name: int(getattr(native, name, 0)) for name in _LOADER_COUNTERS}
    counters |= {name: int(getattr(runtime.experts, name, 0)) for name in _BOOKKEEPING_COUNTERS}
    return StepTimes(**asdict(runtime.engine.times)), counters


def _phase(start: _Snapshot, end: _Snapshot, name: str, expert_bytes: int) -> Phase:
    times = [getattr(end[0], f"{name}_{what}") - getattr(start[0], f"{name}_{what}") for what in ("tokens", "s")]
    counters = {key: value - start[1][key] for key, value in end[1].items()}
    needed_bytes = (counters["misses"] + counters["prefetch_hits"]) * expert_bytes
    counters["wasted_bytes"] = max(0, counters["read_bytes"] - needed_bytes)
    return Phase(times[0], times[1], counters)

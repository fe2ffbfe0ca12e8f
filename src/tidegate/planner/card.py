"""The card: everything that is known about running a model in a budget before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.backends.cpu_workspace import Activations
from tidegate.checkpoint.inventory import count_parameters, dense_tensors
from tidegate.config import EngineOptions
from tidegate.engine.needs import PackedModel, Sizes, activations_of, alternatives, needs_of, sizes_of, with_chunk
from tidegate.memory.budget import Budget
from tidegate.memory.probe import ProcessMemory
from tidegate.plan import Needs, Plan, make_plan
from tidegate.planner.device import DevicePlan, device_rates, make_device_plan
from tidegate.planner.forecast import Forecast, make_forecast
from tidegate.planner.headers import ModelHeaders
from tidegate.planner.machine import RUNTIME_BYTES_PER_TOKEN, Machine, load_machine
from tidegate.planner.owners import blob_parts
from tidegate.planner.routing import HitRates, expected_hits

if TYPE_CHECKING:
    from tidegate.engine.build import Runtime  # the engine and its libraries, which a plan can do without

# Perplexity lost by rounding the routed experts, % (OLMoE-1B-7B, 1,024 examples; docs/planner.md).
QUALITY_COST = {"f32": 0.0, "bf16": 0.0, "int8": 0.1, "int4": 1.6, "mxfp4": 2.3}


@dataclass(frozen=True)
class WayOut:
    """A flag that lowers the smallest budget; what that becomes, the forecast if the budget suffices then, and what it
    costs in quality (% of perplexity) or use."""

    flag: str
    smallest_bytes: int
    tokens_per_s: float | None
    cost: str


@dataclass(frozen=True)
class Card:
    """``plan`` and ``forecast`` are None when the budget is too small; ``ways_out`` says what to do then. ``device``: on paper,
    for --vram."""

    headers: ModelHeaders
    options: EngineOptions
    threads: int
    budget: Budget
    sizes: Sizes
    needs: Needs
    plan: Plan | None
    forecast: Forecast | None
    ways_out: tuple[WayOut, ...]
    device: DevicePlan | None = None

    @property
    def shortfall_bytes(self) -> int:
        return max(0, self.needs.smallest_bytes - self.budget.limit_bytes)

    @property
    def verdict(self) -> str:
        """One word: fits (everything resident), streams (experts are read as they are needed), too small."""
        if self.plan is None:
            return "too small"
        return "fits" if self.plan.resident_ratio == 1 else "streams"

    @cached_property
    def activations(self) -> Activations:
        return activations_of(self.headers, self.sizes, self.threads)

    @property
    def disk_bytes(self) -> int:
        """What the store takes, without its manifest and tokenizer."""
        return self.headers.dense_bytes + self.headers.expert_bytes

    def to_json(self) -> dict[str, Any]:
        config, moe = self.headers.config, self.headers.config.moe
        total, active = count_parameters(config)
        return {
            "model": self.headers.path,
            "kind": self.headers.kind,
            "family": config.family,
            "parameters": total,
            "active_parameters": active,
            "active_parameters_without_embedding": active - embedding_parameters(self.headers),
            "num_layers": config.num_layers,
            "num_moe_layers": config.num_moe_layers,
            "num_experts": moe.num_experts if moe else 0,
            "num_experts_per_tok": moe.num_experts_per_tok if moe else 0,
            "source_bytes": dict(self.headers.source_bytes) if self.headers.source_bytes is not None else None,
            "store_bytes": {"dense.bin": self.headers.dense_bytes, "experts.bin": self.headers.expert_bytes},
            "packed_bytes": self.headers.packed_bytes,
            "expert_formats": expert_formats(self.headers),
            "kv_bytes_per_token": self.sizes.kv.token_bytes,
            "kv_bytes": self.needs.kv_bytes,
            "activation_bytes": self.needs.workspace_bytes,
            "activation_bytes_counted": self.activations.counted_bytes,
            "activation_bytes_measured": self.activations.measured_bytes or None,
            "activation_bytes_without_reuse": self.activations.unshared_bytes,
            "context": self.sizes.context_tokens,
            "sequences": self.sizes.sequences,
            "budget_bytes": self.budget.limit_bytes,
            "budget": self.budget.explanation,
            "reserve_bytes": self.budget.reserve_bytes,
            "smallest_bytes": self.needs.smallest_bytes,
            "largest_useful_bytes": self.needs.largest_useful_bytes,
            "verdict": self.verdict,
            "shortfall_bytes": self.shortfall_bytes,
            "tiers_bytes": {"host": self.plan.planned_bytes if self.plan else self.needs.smallest_bytes, "disk": self.disk_bytes},
            "plan": self.plan.to_json() if self.plan else None,
            "forecast": self.forecast.to_json() if self.forecast else None,
            "device": self.device.to_json() if self.device else None,
            "ways_out": [vars(way) for way in self.ways_out],
            "options": vars(self.options) | {"threads": self.threads},
        }  # fmt: skip


def make_card(
    headers: ModelHeaders,
    options: EngineOptions,
    budget: Budget,
    machine: Machine,
    threads: int,
    *,
    prompt_tokens: int | None = None,
    trace: Path | None = None,
) -> Card:
    """``prompt_tokens``: of the forecast's prompt; None: a quarter of the context. Raises UsageError for options that do not
    fit the model or a trace of another one."""
    process = expected_process(machine, headers.config.vocab_size)
    options = with_chunk(headers, options, process, threads, budget.limit_bytes)
    sizes = sizes_of(headers.config, options)
    needs = needs_of(headers, options, process, threads)
    prompt = prompt_tokens or max(1, sizes.context_tokens // 4)
    plan = forecast = None
    if budget.limit_bytes >= needs.smallest_bytes:
        plan = make_plan(budget.limit_bytes, needs)
        forecast = _forecast(headers, plan, sizes, options, machine, threads, prompt, trace)
    ways = () if plan else _ways_out(headers, options, budget, machine, process, threads, prompt)
    return Card(headers, options, threads, budget, sizes, needs, plan, forecast, ways)


def with_device(
    card: Card,
    machine: Machine,
    vram_bytes: int,
    vram_bytes_per_s: int | None,
    link_bytes_per_s: int | None,
    prompt: int | None,
) -> Card:
    """The card with the same model beside a CUDA device; the budget is that of the host's memory."""
    return replace(
        card,
        device=make_device_plan(
            card.headers,
            card.needs,
            card.sizes,
            machine,
            device_rates(machine, vram_bytes_per_s, link_bytes_per_s),
            vram_bytes=vram_bytes,
            ram_bytes=card.budget.limit_bytes,
            prompt_tokens=prompt or max(1, card.sizes.context_tokens // 4),
        ),
    )


def expected_process(machine: Machine, vocab_size: int) -> ProcessMemory:
    """What the engine will measure of its own process before the arena; a run measures instead."""
    rss = machine.runtime_bytes + RUNTIME_BYTES_PER_TOKEN * vocab_size
    return ProcessMemory(rss, rss, rss, 0, 0, 0, rss, 1)


def hits_of(model: PackedModel, plan: Plan, options: EngineOptions, trace: Path | None) -> HitRates:
    """The hit rate of a plan: replayed from a trace, or from a curve."""
    if trace is not None and plan.slots:
        from tidegate.planner.replayed import replayed_hits  # noqa: PLC0415  (the cache and the reader of traces)

        return replayed_hits(trace, plan.slots, plan.needs.num_experts, options.policy, options.sequences)
    return expected_hits(model.config.family, plan.resident_ratio)


def forecast_loaded(runtime: Runtime) -> Forecast | None:
    """Of a loaded model's own plan; None on a machine that nobody has measured."""
    machine, sizes = load_machine(runtime.store.path), runtime.sizes
    if not machine.is_measured:
        return None
    hits = expected_hits(runtime.config.family, runtime.plan.resident_ratio)
    prompt = max(1, sizes.context_tokens // 4)
    return make_forecast(
        runtime.store, runtime.plan, sizes, machine, hits, threads=runtime.threads, prompt_tokens=prompt
    )


def expert_formats(headers: ModelHeaders) -> list[dict[str, Any]]:
    """Of every kind of expert: format, bits a weight, and the parts of one blob in bytes."""
    kinds: dict[Any, int] = {}
    for layout in headers.layouts:
        kinds[layout] = kinds.get(layout, 0) + 1
    out = []
    for layout, count in kinds.items():
        weights = 3 * layout.hidden_size * layout.expert_dim
        name = str(layout.fmt) if layout.fmt == layout.down_fmt else f"{layout.fmt} + {layout.down_fmt}"
        out.append(
            {
                "format": name,
                "layers": count,
                "blob_bytes": layout.blob_bytes,
                "bits_per_weight": round(8 * layout.blob_bytes / weights, 3),
                **{f"{part}_bytes": size for part, size in blob_parts(layout).items()},
            }
        )
    return out


def embedding_parameters(headers: ModelHeaders) -> int:
    """Of the input table alone, of which a token reads one row; 0 when it is the output head as well."""
    shape = next(tensor.shape for tensor in dense_tensors(headers.config) if tensor.name == "embed")
    return 0 if headers.config.tied_embeddings else shape[0] * shape[1]


def _forecast(
    model: PackedModel,
    plan: Plan,
    sizes: Sizes,
    options: EngineOptions,
    machine: Machine,
    threads: int,
    prompt_tokens: int,
    trace: Path | None = None,
) -> Forecast:
    hits = hits_of(model, plan, options, trace)
    return make_forecast(
        model,
        plan,
        sizes,
        machine,
        hits,
        threads=threads,
        prompt_tokens=prompt_tokens,
        prefetch=options.prefetch == "auto",
    )


def _ways_out(
    headers: ModelHeaders,
    options: EngineOptions,
    budget: Budget,
    machine: Machine,
    process: ProcessMemory,
    threads: int,
    prompt_tokens: int,
) -> tuple[WayOut, ...]:
    """Ways that suffice first: those that cost no quality before those that do, the faster before the slower."""
    before = needs_of(headers, options, process, threads).smallest_bytes
    ways = []
    for way in alternatives(headers, options, process, threads, budget.limit_bytes):
        if headers.kind == "store" and "converting" in way.flag:
            continue
        needs = needs_of(way.model, way.options, process, threads)
        if needs.smallest_bytes >= before:
            continue
        rate = None
        if needs.smallest_bytes <= budget.limit_bytes:
            plan, sizes = make_plan(budget.limit_bytes, needs), sizes_of(headers.config, way.options)
            prompt = min(prompt_tokens, sizes.context_tokens)
            rate = _forecast(way.model, plan, sizes, way.options, machine, threads, prompt).decode_tokens_per_s
        flag = way.flag.removesuffix(" (when converting)")
        ways.append(WayOut(flag, needs.smallest_bytes, rate, _cost(flag)))
    ways.append(WayOut(f"--memory {-(-before >> 20)}MiB", before, None, "more memory"))
    return tuple(
        sorted(
            ways,
            key=lambda way: (
                way.tokens_per_s is None,
                way.flag.startswith(("--experts", "--dense", "--kv int8")),
                -(way.tokens_per_s or 0),
            ),
        )
    )


def _cost(flag: str) -> str:
    name, _, value = flag.partition(" ")
    if name == "--experts":
        return f"about {QUALITY_COST[value]} % perplexity"
    return {
        "--dense": "4-bit attention and head, a loss that is not measured",
        "--context": "shorter texts",
        "--prefill-chunk": "slower prompts",
        "--sequences": "one sequence at a time",
        "--kv": f"keys and values in {'half precision' if value == 'f16' else '8 bits, about 0.05 % perplexity'}",
    }[name]

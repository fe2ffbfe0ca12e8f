"""What one model with one set of options needs, in bytes by owner. Reads headers only.

T tokens of a step, R rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tidegate.backends.cpu_workspace import Activations, StepShape, activations
from tidegate.backends.operands import KvLayout
from tidegate.checkpoint.manifest import ALIGNMENT, DenseEntry, lay_out
from tidegate.checkpoint.store import ExpertStore
from tidegate.config import EngineOptions
from tidegate.engine.activation_peak import fingerprint, kept_peak
from tidegate.engine.predictors import PredictorChoice, choose_predictor
from tidegate.errors import UsageError
from tidegate.memory.arena import PAGE_BYTES
from tidegate.memory.probe import ProcessMemory
from tidegate.model_config import ModelConfig
from tidegate.plan import Needs, WayOut
from tidegate.quant.formats import Format
from tidegate.quant.layout import ExpertLayout
from tidegate.units import align_up

DEFAULT_CONTEXT_TOKENS = 4096
# Where not all experts fit, every chunk loads most of them once. A larger one may take this share more of the budget.
DEFAULT_CHUNK_TOKENS, LARGER_CHUNKS_TOKENS, CHUNK_BUDGET_SHARE = 256, (1024, 512), 32
SMALLEST_CONTEXT_TOKENS, SMALLEST_CHUNK_TOKENS = 256, 16  # that a message proposes
# Measured: what Python and the libraries still take after the measurement, and what one thread takes.
GROWTH_BYTES, THREAD_BYTES = 7 << 18, 64 << 10
# What the sampler holds of one row of logits at its peak; Python objects of one layer, and of one token of a sequence.
SAMPLER_BYTES_PER_LOGIT, OBJECT_BYTES_PER_LAYER, OBJECT_BYTES_PER_TOKEN = 16, 16 << 10, 48


class PackedModel(Protocol):
    """A store, or what a conversion would write."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def dense(self) -> Mapping[str, DenseEntry]: ...
    @property
    def dense_bytes(self) -> int: ...
    @property
    def layouts(self) -> Sequence[ExpertLayout]: ...


@dataclass(frozen=True)
class Sizes:
    """Options turned into numbers for one model."""

    context_tokens: int
    sequences: int
    prefill_chunk: int
    num_pages: int
    kv: KvLayout
    wide_inputs: bool

    @property
    def step_tokens(self) -> int:
        """The largest T."""
        return self.prefill_chunk + self.sequences - 1


def sizes_of(config: ModelConfig, options: EngineOptions) -> Sizes:
    """Raises UsageError for a context longer than the model was made for."""
    context = options.context or min(DEFAULT_CONTEXT_TOKENS, config.max_positions)
    if context > config.max_positions:
        raise UsageError(f"--context {context}: the model was made for {config.max_positions} positions")
    kv = KvLayout.of(config.attention, config.rope, config.num_layers, options.kv)
    chunk = min(options.prefill_chunk or DEFAULT_CHUNK_TOKENS, context)
    wide = options.activations == "int16" or (options.activations == "auto" and config.moe is None)
    return Sizes(context, options.sequences, chunk, options.sequences * -(-context // kv.page_tokens), kv, wide)


def needs_of(store: PackedModel, options: EngineOptions, process: ProcessMemory, threads: int) -> Needs:
    """``process``: a measurement after everything that is loaded before the arena; ``threads``: those that compute."""
    config, moe = store.config, store.config.moe
    sizes = sizes_of(config, options)
    predictor = _predictor(store, options)
    new_threads = threads - 1 + (options.io_threads if store.layouts else 0)
    growth = GROWTH_BYTES + new_threads * THREAD_BYTES + config.num_layers * OBJECT_BYTES_PER_LAYER
    growth += sizes.sequences * sizes.context_tokens * OBJECT_BYTES_PER_TOKEN
    return Needs(
        runtime_bytes=process.rss_bytes,
        growth_bytes=growth + SAMPLER_BYTES_PER_LOGIT * config.vocab_size,
        dense_bytes=store.dense_bytes,
        kv_bytes=align_up(sizes.num_pages * sizes.kv.page_bytes, PAGE_BYTES),
        workspace_bytes=align_up(activations_of(store, sizes, threads).peak_bytes, PAGE_BYTES),
        slot_bytes=max((layout.blob_bytes for layout in store.layouts), default=0),
        num_layers=len(store.layouts),
        num_experts=moe.num_experts if moe else 0,
        min_slots=moe.num_experts_per_tok if moe else 0,
        start_peak_bytes=process.peak_rss_bytes,
        predictor_bytes=align_up(predictor.arena_bytes, PAGE_BYTES),
        predictor_heap_bytes=predictor.heap_bytes,
    )


def with_chunk(
    model: PackedModel, options: EngineOptions, process: ProcessMemory, threads: int, budget_bytes: int
) -> EngineOptions:
    """The options with a prefill chunk chosen for this budget, if they leave it open."""
    if options.prefill_chunk is not None:
        return options
    usual = replace(options, prefill_chunk=DEFAULT_CHUNK_TOKENS)
    needs = needs_of(model, usual, process, threads)
    if not needs.num_layers or not needs.smallest_bytes <= budget_bytes < needs.largest_useful_bytes:
        return usual
    context, most_bytes = sizes_of(model.config, options).context_tokens, budget_bytes // CHUNK_BUDGET_SHARE
    for tokens in LARGER_CHUNKS_TOKENS:
        larger = replace(options, prefill_chunk=tokens)
        found = needs_of(model, larger, process, threads)
        fits = tokens <= context and found.smallest_bytes <= budget_bytes
        if fits and found.fixed_bytes - needs.fixed_bytes <= most_bytes:
            return larger
    return usual


@dataclass(frozen=True)
class Alternative:
    """Another way to run the same model: a flag, and what it makes of the model and the options."""

    flag: str
    model: PackedModel
    options: EngineOptions


def ways_out(
    store: PackedModel, options: EngineOptions, process: ProcessMemory, threads: int, budget_bytes: int
) -> list[WayOut]:
    """Flags that would lower the smallest budget, each alone: as little of it as makes the model fit."""
    found = alternatives(store, options, process, threads, budget_bytes)
    return [WayOut(way.flag, needs_of(way.model, way.options, process, threads).smallest_bytes) for way in found]


def alternatives(
    model: PackedModel, options: EngineOptions, process: ProcessMemory, threads: int, budget_bytes: int
) -> list[Alternative]:
    """One for every flag that can save memory: as little of it as makes the model fit, or as much as can be."""
    sizes = sizes_of(model.config, options)
    contexts = _halvings(sizes.context_tokens, SMALLEST_CONTEXT_TOKENS)
    chunks = _halvings(sizes.prefill_chunk, SMALLEST_CHUNK_TOKENS)
    families = [
        [Alternative(f"--context {n}", model, replace(options, context=n)) for n in contexts],
        [Alternative(f"--prefill-chunk {n}", model, replace(options, prefill_chunk=n)) for n in chunks],
        [Alternative("--sequences 1", model, replace(options, sequences=1))],
        [Alternative(f"--kv {kind}", model, replace(options, kv=kind)) for kind in _smaller_kv(options.kv)],
    ]
    predictor = _predictor(model, options)
    if predictor.gates or predictor.heap_bytes:
        families.append([Alternative("--predictor gates", model, replace(options, predictor="gates"))])
    out = []
    for family in families:
        tried = [way for way in family if way.options != options]
        fits = (w for w in tried if needs_of(w.model, w.options, process, threads).smallest_bytes <= budget_bytes)
        out += [next(fits, tried[-1])] if tried else []
    int4 = Format("int4", 32, two_level=True)
    if model.layouts:
        out.append(Alternative("--experts int4 (when converting)", Repacked.of(model, experts=int4), options))
    return [*out, Alternative("--dense int4 (when converting)", Repacked.of(model, dense=int4), options)]


@dataclass(frozen=True)
class Repacked:
    """A PackedModel in other formats, without looking at the source."""

    config: ModelConfig
    dense: Mapping[str, DenseEntry]
    dense_bytes: int
    layouts: tuple[ExpertLayout, ...]

    @staticmethod
    def of(model: PackedModel, *, experts: Format | None = None, dense: Format | None = None) -> Repacked:
        """None keeps what there is."""
        own = {entry.name: entry.fmt for entry in model.dense.values() if entry.fmt is not None}
        entries, layers = lay_out(
            model.config,
            dict.fromkeys(own, dense) if dense else own,
            [(experts or layout.fmt, experts or layout.down_fmt) for layout in model.layouts],
        )
        dense_bytes = align_up(entries[-1].offset + entries[-1].nbytes, ALIGNMENT)
        layouts = tuple(layer.layout for layer in layers)
        return Repacked(model.config, {entry.name: entry for entry in entries}, dense_bytes, layouts)


def _smaller_kv(kind: str) -> tuple[str, ...]:
    """Formats of the KV cache that take fewer bytes, the largest first."""
    kinds = ("f32", "f16", "int8")
    return kinds[kinds.index(kind) + 1 :]


def _halvings(start: int, floor: int) -> list[int]:
    """start/2, start/4, ... down to ``floor``."""
    out = []
    while start // 2 >= floor:
        start //= 2
        out.append(start)
    return out


def _predictor(model: PackedModel, options: EngineOptions) -> PredictorChoice:
    return choose_predictor(model.config, options, model if isinstance(model, ExpertStore) else None)


ActivationInputs = tuple[ModelConfig, dict[str, Format], Sequence[ExpertLayout], KvLayout, StepShape]


def activation_inputs(model: PackedModel, sizes: Sizes, threads: int) -> ActivationInputs:
    """Everything that the activations of the largest step depend on."""
    formats = {entry.name: entry.fmt for entry in model.dense.values() if entry.fmt is not None}
    shape = StepShape(sizes.step_tokens, sizes.sequences, sizes.context_tokens, threads, sizes.wide_inputs)
    return model.config, formats, model.layouts, sizes.kv, shape


def activations_of(model: PackedModel, sizes: Sizes, threads: int) -> Activations:
    """Of the largest step that these sizes allow: counted, and measured if there was a dry run of it."""
    inputs = activation_inputs(model, sizes, threads)
    peak = kept_peak(fingerprint(*inputs))
    return replace(activations(*inputs), measured_bytes=peak.nbytes if peak else 0)


def scored_rows(config: ModelConfig, sizes: Sizes, workspace: int) -> int:
    """How many rows of logits a step can have, when every array of the layers is gone; at least one a sequence."""
    left = workspace - 4 * sizes.step_tokens * config.hidden_size
    row = 2 * config.hidden_size + config.vocab_size
    if sizes.wide_inputs:
        row += 2 * (config.hidden_size + config.vocab_size)
    rows = left // (4 * row)
    return max(sizes.sequences, min(rows, sizes.prefill_chunk))

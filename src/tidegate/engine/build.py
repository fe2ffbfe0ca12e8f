"""From a path and options to a running engine: open -> plan -> ledger -> arena -> dense weights -> slots -> decoder.

The plan is made, and a budget that is too small refused, before any weight is read.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from tidegate import _core
from tidegate.backends.base import Backend
from tidegate.backends.cpu_workspace import kinds_of_layers
from tidegate.backends.operands import ByteArray
from tidegate.checkpoint.store import ExpertStore
from tidegate.config import EngineOptions
from tidegate.engine.activation_peak import fingerprint, keep_peak, kept_peak
from tidegate.engine.codec import TextCodec
from tidegate.engine.dense import DenseSection, read_dense
from tidegate.engine.dry_run import activation_peak, zero_experts
from tidegate.engine.engine import Engine
from tidegate.engine.kv_cache import KvCache
from tidegate.engine.needs import Sizes, activation_inputs, needs_of, scored_rows, sizes_of, ways_out, with_chunk
from tidegate.engine.predictors import PredictorChoice, choose_predictor
from tidegate.engine.reserve import budget_of, watch_others
from tidegate.engine.scheduler import Scheduler
from tidegate.errors import OverBudget
from tidegate.experts.base import CacheCounters
from tidegate.experts.cache import ExpertCache
from tidegate.experts.foreseer import Foreseer
from tidegate.experts.gates_file import GatesFile, pack_gates
from tidegate.experts.loader import LoaderOptions, NativeLoader
from tidegate.experts.lookahead import Lookahead
from tidegate.experts.policy import policy_factory
from tidegate.memory.arena import Arena
from tidegate.memory.budget import Budget
from tidegate.memory.ledger import Ledger
from tidegate.memory.probe import process_memory
from tidegate.model_config import ModelConfig
from tidegate.models.decoder import Decoder
from tidegate.models.guesses import Gates, own_gates
from tidegate.models.moe import Experts
from tidegate.models.weights import ModelWeights, model_weights, moe_weights
from tidegate.plan import Plan, make_plan

if TYPE_CHECKING:
    from tidegate.backends.cpu import CpuBackend

# Whoever embeds the library may use memory as well, as long as the budget holds: the ledger learns of it.
_OWN_GROWTH_RATIO = 1.0
# Of a model whose activations were counted wrong: each plan has room for the array that the one before had none for.
_MOST_PLANS = 4
_HINTS = {
    "dense weights": "raise --memory or convert with --dense int4",
    "KV cache": "raise --memory, or lower --context or --sequences",
    "expert slots": "raise --memory",
    "workspace": "raise --memory or lower --prefill-chunk",
    "predictor": "raise --memory or use --predictor gates",
}


class _CountedTooLittle(OverBudget):
    """Activations do not fit the workspace that was planned for them. What they asked for has been kept."""

    def __init__(self, asked_bytes: int, free_bytes: int) -> None:
        super().__init__("workspace", asked_bytes, free_bytes, _HINTS["workspace"])


@dataclass
class Runtime:
    """Everything a loaded model consists of. ``experts``, ``cache`` and ``loader`` are None without MoE layers.
    ``largest_memory`` is the largest part of the arena: the expert slots, or the dense weights."""

    store: ExpertStore
    config: ModelConfig
    sizes: Sizes
    budget: Budget
    plan: Plan
    ledger: Ledger
    engine: Engine
    decoder: Decoder[Any]
    threads: int
    largest_memory: ByteArray
    codec: TextCodec
    eos_token_ids: frozenset[int]
    experts: Experts | None
    cache: ExpertCache | None
    loader: NativeLoader | None
    resources: ExitStack

    def stats(self) -> dict[str, Any]:
        """Counters since the load, with units in the keys. ``ledger_bytes`` is what was planned, ``peak_bytes`` the
        kernel's high-water mark of the process."""
        counters = self.cache.counters if self.cache else CacheCounters()
        return {
            **asdict(self.engine.times),
            **asdict(counters),
            "read_bytes": self.loader.counters().read_bytes if self.loader else 0,
            "budget_bytes": self.budget.limit_bytes,
            "ledger_bytes": self.ledger.total_bytes,
            "peak_bytes": process_memory().peak_rss_bytes,
        }

    def close(self) -> None:
        """End the threads that read. Those that compute, and the arena, live as long as this object."""
        self.resources.close()


def build(store: ExpertStore, options: EngineOptions, reader: _core.BlockReader | None = None) -> Runtime:
    """Raises UsageError, BudgetTooSmall, CheckpointError and its kinds. ``reader`` replaces the system's reads of experts
    in tests. The first time that a model, batch and chunk are asked for, the largest step is tried, and if it takes more than was
    counted, the plan is made again with what it took."""
    for _ in range(_MOST_PLANS - 1):
        with suppress(_CountedTooLittle):
            return _build(store, options, reader)
    return _build(store, options, reader)


def _build(store: ExpertStore, options: EngineOptions, reader: _core.BlockReader | None) -> Runtime:
    config = store.config
    sizes_of(config, options)  # a context that cannot be is refused before anything is read
    codec = TextCodec(store)
    _core.trim_heap()
    Arena.forget_closed()
    threads = options.threads or len(os.sched_getaffinity(0))
    options, plan, budget = _plan(store, options, threads)
    sizes = sizes_of(config, options)
    ledger = _ledger(plan)
    with ExitStack() as resources:
        resources.callback(watch_others())
        arena = Arena(ledger, plan.arena_bytes, threads)
        resources.callback(arena.close)
        dense = _carve(arena, ledger, "dense weights", store.dense_bytes)
        read_dense(store, dense, page_cache=options.page_cache, verify=options.verify)
        slots = _carve(arena, ledger, "expert slots", plan.slots_bytes) if plan.slots else dense[:0]
        kv_pages = _carve(arena, ledger, "KV cache", sizes.num_pages * sizes.kv.page_bytes)
        workspace = _carve(arena, ledger, "workspace", plan.needs.workspace_bytes)
        backend = _backend(options, threads, workspace)
        backend.bind_kv(sizes.kv, kv_pages)
        loader = experts = gates = None
        if plan.slots:
            loader = _loader(store, plan, slots, options, reader)
            resources.callback(loader.close)
            experts, gates = _experts(store, options, plan, ledger, loader)
        tensors = DenseSection(store, dense)
        weights = model_weights(config, tensors, sizes.context_tokens, wide_inputs=sizes.wide_inputs)
        if options.backend == "cpu":
            nothing = zero_experts(slots, plan, store.layouts) if plan.slots else None
            _try_largest_step(store, plan, weights, cast("CpuBackend", backend), nothing, sizes, threads)
        if experts is not None and plan.needs.predictor_bytes:
            memory = _carve(arena, ledger, "predictor", plan.needs.predictor_bytes)
            experts.guesser = _guesser(config, weights, backend, gates, memory, threads)
        decoder = Decoder(config, weights, backend, experts)
        scheduler = Scheduler(
            KvCache(sizes.num_pages, sizes.kv.page_tokens),
            max_running=sizes.sequences,
            prefill_chunk=sizes.prefill_chunk,
            max_logit_rows=scored_rows(config, sizes, plan.needs.workspace_bytes),
        )
        engine = Engine(decoder, scheduler, lambda: ledger.check(tolerance_ratio=_OWN_GROWTH_RATIO))
        engine.watcher = experts if experts and experts.foreseer else None
        eos = frozenset(config.eos_token_ids)
        ledger.settle()
        kept = resources.pop_all()
    largest = slots if plan.slots else dense
    return Runtime(
        store,
        config,
        sizes,
        budget,
        plan,
        ledger,
        engine,
        decoder,
        threads,
        largest,
        codec,
        eos,
        experts,
        experts.cache if experts else None,
        loader,
        kept,
    )


def _try_largest_step(
    store: ExpertStore,
    plan: Plan,
    weights: ModelWeights,
    backend: CpuBackend,
    experts: Experts | None,
    sizes: Sizes,
    threads: int,
) -> None:
    """Unless this has been done before. Raises _CountedTooLittle."""
    inputs = activation_inputs(store, sizes, threads)
    key = fingerprint(*inputs)
    known = kept_peak(key)
    if known is None or not known.is_whole:
        layers = [kind.first for kind in kinds_of_layers(*inputs[:3])]
        peak = activation_peak(weights, layers, store.config, backend, experts, sizes)
        keep_peak(key, peak)
        if not peak.is_whole:
            raise _CountedTooLittle(peak.nbytes, plan.needs.workspace_bytes)


def _plan(store: ExpertStore, options: EngineOptions, threads: int) -> tuple[EngineOptions, Plan, Budget]:
    """The options come back with what they left open filled in."""
    budget, process = budget_of(options), process_memory()
    options = with_chunk(store, options, process, threads, budget.limit_bytes)
    needs = needs_of(store, options, process, threads)
    ways = (
        ways_out(store, options, process, threads, budget.limit_bytes)
        if budget.limit_bytes < needs.smallest_bytes
        else ()
    )
    return options, make_plan(budget.limit_bytes, needs, ways), budget


def _ledger(plan: Plan) -> Ledger:
    ledger = Ledger(plan.budget_bytes, plan.least_headroom_bytes)
    ledger.runtime.reserve(plan.needs.runtime_bytes + plan.needs.growth_bytes)
    return ledger


def _carve(arena: Arena, ledger: Ledger, owner: str, nbytes: int) -> ByteArray:
    return arena.carve(ledger.account(owner, _HINTS[owner]), nbytes)


def _loader(
    store: ExpertStore, plan: Plan, slots: ByteArray, options: EngineOptions, reader: _core.BlockReader | None
) -> NativeLoader:
    size = plan.needs.slot_bytes
    views = [slots[start : start + size] for start in range(0, slots.size, size)]
    how = LoaderOptions(threads=options.io_threads, verify=options.verify, page_cache=options.page_cache)
    return NativeLoader(store, views, how, reader)


def _experts(
    store: ExpertStore, options: EngineOptions, plan: Plan, ledger: Ledger, loader: NativeLoader
) -> tuple[Experts, GatesFile | None]:
    """Nobody is in memory yet, and nothing guesses. Also the gates that were fitted to the model, if there are any."""
    cache = ExpertCache(plan.slots, plan.needs.num_experts, policy_factory(options.policy), loader, share=True)
    experts = Experts(cache, loader, store.layouts)
    choice = choose_predictor(store.config, options, store)
    if choice.gates is not None:
        experts.curves = choice.gates.curves
    if options.prefetch == "auto" and min(plan.slots) < plan.needs.num_experts:
        _look_ahead(experts, loader, choice, plan, ledger, options.sequences)
    return experts, choice.gates


def _guesser(
    config: ModelConfig,
    weights: ModelWeights,
    backend: Backend[Any],
    fitted: GatesFile | None,
    memory: ByteArray,
    threads: int,
) -> Gates[Any]:
    """Of the fitted gates, or of the routers themselves, in ``memory``."""
    assert config.moe is not None
    layers = moe_weights(weights)
    linears = fitted.read(memory[: fitted.nbytes]) if fitted else pack_gates(own_gates(layers), memory, threads)
    return Gates(backend, layers, linears, config.moe)


def _look_ahead(
    experts: Experts, loader: NativeLoader, choice: PredictorChoice, plan: Plan, ledger: Ledger, sequences: int
) -> None:
    """Experts are prefetched from now on."""
    cache, per_token = experts.cache, plan.needs.min_slots
    if choice.source is None:
        experts.lookahead = Lookahead(cache, per_token, loader.busy_ratio, experts.curves, time.perf_counter)
        return
    ledger.account("predictor", _HINTS["predictor"]).reserve(choice.heap_bytes)
    predictor = choice.source.load()
    predictor.most_sequences = sequences
    experts.foreseer = Foreseer(cache, predictor, per_token, loader.busy_ratio, clock=time.perf_counter)


def _backend(options: EngineOptions, threads: int, workspace: ByteArray) -> Backend[Any]:
    """Backends are imported only when they are used."""
    if options.backend == "reference":
        from tidegate.backends.reference import ReferenceBackend  # noqa: PLC0415

        return ReferenceBackend()
    from tidegate.backends.cpu import CpuBackend  # noqa: PLC0415

    return CpuBackend(threads, workspace)

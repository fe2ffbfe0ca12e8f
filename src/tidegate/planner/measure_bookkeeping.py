"""What cache, guesses and loads cost the thread that computes. Mostly the model that comes with Tidegate, run for real, because
what such work takes depends on what the caches and the other threads do just then."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import numpy as np

import tidegate
from tidegate import _core
from tidegate.backends.cpu import CpuBackend
from tidegate.checkpoint.open import BUILTIN_STORE
from tidegate.config import SamplingOptions
from tidegate.engine import bench
from tidegate.engine.model import Model
from tidegate.engine.sequence import Sequence as Request
from tidegate.experts.base import CacheCounters
from tidegate.experts.cache import ExpertCache
from tidegate.experts.loader import NativeLoader
from tidegate.experts.lookahead import DISTANCES, Lookahead
from tidegate.experts.policy import DEFAULT_POLICY, policy_factory
from tidegate.models.moe import Experts
from tidegate.planner.costs import Bookkeeping, Cost, middle

_ROUNDS, _TOKENS, _PASSES = 100, 160, 3
_WORK_BYTES = 1 << 20
_TEXT = Path(bench.__file__).with_suffix(".txt")


def measure_bookkeeping(threads: int) -> Bookkeeping:
    """The built-in model decodes the same tokens with everything in memory, as if that were for good, or not, and with gates that
    are asked; and with half of its experts, without and with prefetch."""
    with tidegate.load(BUILTIN_STORE, memory="1GiB", context=_TOKENS + 1, threads=threads) as model:
        decoding = _Decoding(model)
        turns = [decoding.turn() for _ in range(_PASSES)]
        miss_s = decoding.miss_s()
    visits, gates = _TOKENS * decoding.num_layers, _TOKENS * DISTANCES * (decoding.num_layers - 1)

    def of_turn(alone: _Run, here: _Run, all_named: _Run, half_named: _Run, off: _Run, auto: _Run) -> Bookkeeping:
        few, many = ((run.missing, (run.total_s - here.total_s) / gates) for run in (all_named, half_named))
        gate, wakes_per_miss = Cost.through(few, many), off.wakes / max(1, off.misses)
        rouse_s = max(0.0, off.visit_s - here.visit_s - off.misses * miss_s) / max(1, off.wakes)
        strain_s = max(0.0, off.rest_s - here.rest_s) / max(1, off.misses)
        demand_s = auto.misses * (miss_s + strain_s + wakes_per_miss * rouse_s)
        ahead_s = auto.busy_s - here.busy_s - gates * gate.of(auto.missing) - demand_s
        return Bookkeeping(
            wake_s=auto.wake_s / max(1, auto.wakes),
            miss_s=miss_s,
            ahead_s=max(0.0, ahead_s) / max(1, auto.issued),
            rouse_s=rouse_s,
            strain_s=strain_s,
            gate=gate,
            access=Cost(max(0.0, here.total_s - alone.total_s) / visits, 0.0),
        )

    return Bookkeeping.from_json(middle([asdict(of_turn(*turn)) for turn in turns]))


@dataclass
class _Run:
    """Decoding the tokens once. ``busy_s``: all but waiting for loads; ``rest_s``: no bookkeeping either."""

    total_s: float
    wait_s: float
    visit_s: float
    guess_s: float
    wake_s: float
    wakes: int
    misses: int
    issued: int
    missing: float  # of a guess, on average

    @property
    def busy_s(self) -> float:
        return self.total_s - self.wait_s

    @property
    def rest_s(self) -> float:
        return self.busy_s - self.visit_s - self.guess_s


class _Decoding:
    """One model and its loader under one cache after the other."""

    def __init__(self, model: Model) -> None:
        self.runtime = model.runtime
        self._ids = model.encode(_TEXT.read_text(encoding="utf-8"))[:_TOKENS]
        experts, loader = self.runtime.experts, self.runtime.loader
        assert experts is not None and loader is not None
        self._experts: Experts = experts
        self._loader: NativeLoader = loader
        self.num_layers, self._num_experts = experts.cache.num_layers, experts.cache.num_experts
        self.per_token = self.runtime.plan.needs.min_slots

    def turn(self) -> tuple[_Run, _Run, _Run, _Run, _Run, _Run]:
        """Everything here for good; or as if some of it could be evicted; with gates asked, who name only experts that are here,
        or others, too; half of the experts here without prefetch, and with it."""
        count = self._num_experts
        self._set_cache(count)
        alone = self._run()
        self._set_cache(count, evicts=True)
        return (
            alone,
            self._run(),
            self._asking(range(count)),
            self._asking(range(0, count, 2)),
            self._half(prefetch=False),
            self._half(prefetch=True),
        )

    def miss_s(self) -> float:
        """See Bookkeeping."""
        backend = self.runtime.decoder.backend
        assert isinstance(backend, CpuBackend)
        return _miss_s(self._loader, self._num_experts, _Work(backend.compute))

    def _half(self, *, prefetch: bool) -> _Run:
        self._set_cache(self._num_experts // 2)
        if prefetch:
            self._experts.lookahead = Lookahead(self._experts.cache, self.per_token, self._loader.busy_ratio)
        return self._run()

    def _asking(self, here: Collection[int]) -> _Run:
        unmoved = _Unmoved(self.num_layers, here, self._num_experts, self._loader)
        self._experts.lookahead = _Asking(unmoved, self.per_token)
        run = self._run()
        self._experts.lookahead = None
        return run

    def _set_cache(self, slots: int, *, evicts: bool = False) -> None:
        """``evicts``: as if experts could be evicted, though there is a slot for each."""
        capacities, make_policy = [slots] * self.num_layers, policy_factory(DEFAULT_POLICY)
        capacities[-1] -= evicts
        cache = ExpertCache(capacities, self._num_experts, make_policy, self._loader, share=not evicts)
        if evicts:
            cache.book(self.num_layers - 1).take_slot(sum(capacities))
        self._experts.cache, self._experts.lookahead = cache, None

    def _run(self) -> _Run:
        lookahead = self._experts.lookahead
        self._decode()
        before = self._counts()
        self._decode()
        after = self._counts()
        missing = lookahead.odds.num_missing / max(1, lookahead.odds.num_guesses) if lookahead else 0.0
        spent: list[Any] = [*(now - then for now, then in zip(after, before, strict=True)), missing]
        return _Run(*spent)

    def _decode(self) -> None:
        engine, (first, *others) = self.runtime.engine, self._ids
        request = Request(1, [first], len(self._ids), SamplingOptions(ignore_eos=True))
        engine.scheduler.add(request)
        for token in [*others, 0]:  # whatever the model chooses, it reads on
            engine.step()
            request.tokens[-1] = token

    def _counts(self) -> tuple[float, ...]:
        times, loader, cache = self.runtime.engine.times, self._loader.counters(), self._experts.cache.counters
        seconds = (loader.wait_ns, self._experts.visit_ns, self._experts.guess_ns, loader.wake_ns)
        return (
            times.prefill_s + times.decode_s, *(ns * 1e-9 for ns in seconds), loader.wakes, cache.misses,
            cache.prefetch_issued,
        )  # fmt: skip


class _Unmoved:
    """A cache that has the experts ``here`` in every layer and gets no more."""

    is_complete = False

    def __init__(self, num_layers: int, here: Collection[int], num_experts: int, loader: NativeLoader) -> None:
        self.num_layers, self.num_experts, self._slots = num_layers, num_experts, len(here)
        self.counters, book = CacheCounters(), _core.LayerBook(num_experts, 0, len(here))
        for expert in here:
            book.insert(expert, False)
        uses = _core.Uses(_core.Worth.USES, num_experts)
        self._native = _core.LayerCache(
            0, book, _core.ExpertLoads(loader.native), _core.CacheCounts(), uses, None, always_used=1.0
        )

    def capacity(self, layer: int) -> int:
        return self._slots

    def native(self, layer: int) -> _core.LayerCache:
        return self._native


class _Asking(Lookahead):
    """Asks in every step, and finds nothing worth a load."""

    def __init__(self, cache: _Unmoved, per_token: int) -> None:
        super().__init__(cache, per_token, lambda: 0.0)  # type: ignore[arg-type]

    def begin_step(self, num_rows: int) -> None:
        self._idle_steps = 0
        super().begin_step(num_rows)
        self.odds.floor = 2.0


class _Work:
    """As a layer would: the threads are awake when loads are asked for, and other data is in the nearest caches."""

    def __init__(self, compute: _core.Compute) -> None:
        self._compute, self._bytes = compute, np.ones(_WORK_BYTES, np.uint8)

    def __call__(self) -> None:
        _core.read_all(self._compute, self._bytes)


def _miss_s(loader: NativeLoader, num_experts: int, work: _Work) -> float:
    """A further load of a visit, in a cache that has half of the experts. ``loader`` is used by nobody else."""
    cache = ExpertCache([num_experts // 2], num_experts, policy_factory(DEFAULT_POLICY), loader)
    native, following, took_s = cache.native(0), 0, dict[int, list[float]]()
    assert native is not None
    for _, count in product(range(_ROUNDS), (1, 4)):
        turn = chain(range(following, num_experts), range(following))
        absent = list(islice((expert for expert in turn if expert not in cache.residents(0)), count))
        following = absent[-1] + 1
        needed = sorted(cache.residents(0)[: 4 - count] + absent)
        work()
        start_s = time.perf_counter()
        native.visit(needed)  # the loads are on their way
        took_s.setdefault(count, []).append(time.perf_counter() - start_s)
        for expert in needed:
            loader.wait(cache.book(0).slot_of(expert))
        native.leave(needed)
    return max(0.0, statistics.median(took_s[4]) - statistics.median(took_s[1])) / 3

"""Native core (csrc/). One section a header, in the order of bindings.cc."""

from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.backends.operands import ByteArray, F32Array, I32Array

# ---- compute.h, workspace.h, tensor.h

class Matrix:
    rows: int
    cols: int

class Compute:
    def __init__(self, threads: int, memory: ByteArray, isa: str) -> None: ...
    threads: int
    isa: str
    peak_bytes: int
    def mark(self) -> int: ...
    def release(self, mark: int) -> None: ...
    def matrix(self, rows: int, cols: int) -> Matrix: ...
    def from_numpy(self, array: F32Array) -> Matrix: ...
    def numpy(self, x: Matrix) -> F32Array: ...

def available_isas() -> list[str]: ...

# ---- step.h, attention.h

PAGE_TOKENS: int

class KvPages:
    def __init__(
        self, memory: ByteArray, num_layers: int, kv_heads: int, k_dim: int, v_dim: int, format: str
    ) -> None: ...
    num_pages: int

class Step:
    def __init__(self, positions_T: I32Array, sequence_T: I32Array, block_tables: I32Array, num_pages: int) -> None: ...

class RopeTable:
    def __init__(self, inv_freq: F32Array, factor: float, interleaved: bool) -> None: ...

class NormWeights:
    def __init__(self, weight: F32Array, bias: F32Array | None, eps: float) -> None: ...

class GroupedAttention:
    def __init__(
        self,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        scale: float,
        clip: float,
        window: int,
        qk_norm: str,
        q_norm: NormWeights | None,
        k_norm: NormWeights | None,
        sinks: F32Array | None,
        rope: RopeTable | None,
    ) -> None: ...

class LatentAttention:
    def __init__(
        self,
        layer: int,
        num_heads: int,
        kv_lora_rank: int,
        nope_dim: int,
        v_head_dim: int,
        scale: float,
        window: int,
        kv_norm: NormWeights,
        sinks: F32Array | None,
        rope: RopeTable,
        k_up: PackedMatrix,
        v_up: PackedMatrix,
    ) -> None: ...

def norm(compute: Compute, x: Matrix, weights: NormWeights) -> Matrix: ...
def attend(compute: Compute, kv: KvPages, step: Step, layer: GroupedAttention, qkv: Matrix) -> Matrix: ...
def attend_latent(
    compute: Compute, pages: KvPages, step: Step, layer: LatentAttention, q: Matrix, kv: Matrix
) -> Matrix: ...

# ---- route.h

class RouterParams:
    def __init__(
        self,
        weight_ED: F32Array,
        bias_E: F32Array | None,
        correction_E: F32Array | None,
        top_k: int,
        scoring: str,
        normalize: bool,
        scaling: float,
        num_groups: int,
        topk_groups: int,
        group_best: int,
        jitter: float,
    ) -> None: ...

def route(compute: Compute, x: Matrix, router: RouterParams) -> tuple[I32Array, F32Array, F32Array]: ...
def norm_route(
    compute: Compute, x: Matrix, norm: NormWeights, router: RouterParams
) -> tuple[Matrix, I32Array, F32Array, F32Array]: ...
def norm_route_moe(
    compute: Compute,
    x: Matrix,
    norm: NormWeights,
    router: RouterParams,
    layout: ExpertLayout,
    activation: ActivationParams,
    book: LayerBook,
    source: SlotSource,
) -> tuple[Matrix, Matrix, int] | None: ...
def rank(scores: Matrix, top_k: int, most: int) -> tuple[list[list[int]], list[list[float]]]: ...

# ---- sample.h

def choose_token(
    logits_V: F32Array,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    seen: I32Array | None = None,
    counted: I32Array | None = None,
    counts: I32Array | None = None,
) -> int: ...
def log_probs(logits_V: F32Array, token: int, num_top: int) -> list[tuple[int, float]]: ...

# ---- host_memory.h, read_probe.h, block_reader.h, faulty_reader.h, file_set.h

def populate(memory: ByteArray, threads: int) -> int: ...
def trim_heap() -> None: ...
def fastest_read_s(memory: ByteArray, threads: int, rounds: int) -> float: ...
def crc32(bytes: ByteArray) -> int: ...

class BlockReader: ...

class PosixReader(BlockReader):
    def __init__(self) -> None: ...

class FaultyReader(BlockReader):
    def __init__(
        self,
        *,
        seed: int = 0,
        max_delay_us: int = 0,
        fail_at: int = -1,
        short_at: int = -1,
        end_at: int = -1,
        refuse_direct: bool = False,
    ) -> None: ...
    num_waiting: int
    def close_gate(self) -> None: ...
    def allow(self, reads: int) -> None: ...
    def open_gate(self) -> None: ...
    def log(self) -> list[tuple[int, int, bool]]: ...

class FileSet:
    def __init__(self, paths: Sequence[str], reader: BlockReader, page_cache: bool) -> None: ...
    def is_direct(self, file: int) -> bool: ...
    def read(self, file: int, offset: int, dest: ByteArray, chunk_bytes: int) -> tuple[int, int]: ...

# ---- slots.h, loader.h

class SlotSource: ...

class SlotState(Enum):
    EMPTY = 0
    LOADING = 1
    READY = 2
    FAILED = 3

class LoadFailure:
    file: int
    offset: int
    wanted_bytes: int
    got_bytes: int
    error: int
    wanted_crc32: int
    got_crc32: int
    layer: int
    expert: int

class LoaderCounters:
    demand_loads: int
    speculative_loads: int
    cancelled_loads: int
    failed_loads: int
    promoted_loads: int
    overtaken_loads: int
    read_bytes: int
    wasted_bytes: int
    waits: int
    wait_ns: int
    busy_ns: int
    wakes: int
    wake_ns: int

class Loader(SlotSource):
    def __init__(
        self,
        files: FileSet,
        addresses: Sequence[int],
        slot_bytes: int,
        threads: int,
        chunk_bytes: int,
        verify: bool,
    ) -> None: ...
    def load(
        self,
        slot: int,
        file: int,
        offset: int,
        nbytes: int,
        crc32: int,
        demand: bool,
        layer: int = -1,
        expert: int = -1,
    ) -> None: ...
    def cancel(self, slot: int) -> bool: ...
    def promote(self, slot: int) -> None: ...
    def wait(self, slot: int) -> bool: ...
    def is_ready(self, slot: int) -> bool: ...
    def state(self, slot: int) -> SlotState: ...
    def failure(self, slot: int) -> LoadFailure: ...
    def counters(self) -> LoaderCounters: ...
    def close(self) -> None: ...

# ---- bindings_kernels.cc: format.h, linear.h, elementwise.h, bandwidth.h

class WeightFormat:
    def __init__(self, kind: str, group: int, has_min: bool, two_level: bool) -> None: ...
    def packed_bytes(self, n: int, k: int) -> int: ...

class PackedMatrix:
    def __init__(
        self,
        data: ByteArray,
        format: WeightFormat,
        n: int,
        k: int,
        bias: F32Array | None,
        wide_inputs: bool = False,
    ) -> None: ...

class Activation(Enum):
    silu = ...
    gelu = ...
    gelu_tanh = ...
    clamped_swiglu = ...

class ActivationParams:
    def __init__(self, kind: Activation, alpha: float, limit: float) -> None: ...

def linear(compute: Compute, x: Matrix, weight: PackedMatrix) -> Matrix: ...
def gated_mlp(
    compute: Compute, x: Matrix, gate_up: PackedMatrix, down: PackedMatrix, activation: ActivationParams
) -> Matrix: ...
def embed(compute: Compute, table: PackedMatrix, ids: I32Array, multiplier: float) -> Matrix: ...
def gather_rows(compute: Compute, x: Matrix, rows: I32Array) -> Matrix: ...
def add(compute: Compute, x: Matrix, y: Matrix, scale: float) -> None: ...
def add_gated(compute: Compute, x: Matrix, y: Matrix, gates: Matrix) -> None: ...
def divide(compute: Compute, x: Matrix, divisor: float) -> None: ...
def read_all(compute: Compute, memory: ByteArray) -> int: ...

# ---- moe.h

class ReadySlots(SlotSource):
    def __init__(self, slots: Sequence[ByteArray]) -> None: ...

class ExpertLayout:
    def __init__(
        self,
        hidden_size: int,
        expert_dim: int,
        format: WeightFormat,
        down_format: WeightFormat,
        has_bias: bool,
        up_offset: int,
        down_offset: int,
        bias_offset: int,
    ) -> None: ...

class MoeStep:
    def __init__(
        self,
        compute: Compute,
        x: Matrix,
        ids: I32Array,
        weights: F32Array,
        layout: ExpertLayout,
        activation: ActivationParams,
    ) -> None: ...
    def run(self, experts: Sequence[int], slots: Sequence[int], source: SlotSource) -> int: ...
    def finish(self) -> Matrix: ...

# ---- moe_layer.h, layers.h

class MoeLayer:
    def __init__(
        self,
        norm: NormWeights,
        router: RouterParams,
        layout: ExpertLayout,
        activation: ActivationParams,
        shared_gate_up: PackedMatrix | None,
        shared_down: PackedMatrix | None,
    ) -> None: ...

class Routed:
    failed_slot: int
    def routing(self) -> tuple[I32Array, F32Array]: ...

def run_moe(
    compute: Compute, x: Matrix, layer: MoeLayer, cache: LayerCache, sight: Sight | None
) -> tuple[Matrix, Matrix | None, Matrix | None, Routed | None]: ...

class AttentionHalf:
    def __init__(
        self, norm: NormWeights, qkv: PackedMatrix, attention: GroupedAttention, out: PackedMatrix
    ) -> None: ...

class DecoderLayer:
    def __init__(
        self,
        attention: AttentionHalf,
        moe: MoeLayer,
        cache: LayerCache,
    ) -> None: ...

class Layers:
    def __init__(self, layers: Sequence[DecoderLayer]) -> None: ...

def attention(
    compute: Compute,
    kv: KvPages,
    step: Step,
    x: Matrix,
    half: AttentionHalf,
) -> Matrix: ...
def run_layers(
    compute: Compute,
    kv: KvPages,
    step: Step,
    x: Matrix,
    layers: Layers,
    scale: float,
    sights: Sequence[Sight],
) -> tuple[int, int]: ...

# ---- pack.h

U16Array = NDArray[np.uint16]

def pack(w: F32Array, format: WeightFormat, out: ByteArray, threads: int) -> None: ...
def pack_codes(
    codes: ByteArray, scales: U16Array, mins: U16Array | None, format: WeightFormat, out: ByteArray, threads: int
) -> None: ...
def unpack(packed: PackedMatrix, out: F32Array, threads: int) -> None: ...

# ---- uses.h, rank_counts.h, layer_book.h, layer_cache.h, odds.h, gate.h

class Worth(Enum):
    DECAYED_USES = 0
    LAST_USE = 1
    USES = 2
    USES_OVER_AGE = 3

class Uses:
    def __init__(self, worth: Worth, num_experts: int, half_life: float = 1.0) -> None: ...
    def use(self, experts: Sequence[int]) -> None: ...
    def value(self, expert: int) -> float: ...
    def set_resident(self, expert: int, is_resident: bool) -> None: ...
    def lowest(self, kept: Sequence[int]) -> int: ...
    def ranks(self, experts: Sequence[int]) -> list[int]: ...

class RankCounts:
    counts: list[list[float]]
    most_needed: int
    looks: int
    def __init__(self, num_layers: int, num_experts: int, sample_every: int) -> None: ...
    def wants(self, layer: int) -> bool: ...
    def observe(self, layer: int, ranks: Sequence[int]) -> None: ...
    def fade(self, factor: float) -> None: ...

class LayerBook:
    num_free: int
    num_pinned: int
    capacity: int
    has_pending: bool
    def __init__(self, num_experts: int, first_slot: int, capacity: int) -> None: ...
    def slot_of(self, expert: int) -> int: ...
    def is_here(self, expert: int) -> bool: ...
    def is_unused(self, expert: int) -> bool: ...
    def residents(self) -> list[int]: ...
    def pinned(self) -> list[int]: ...
    def insert(self, expert: int, is_unused: bool) -> int: ...
    def use(self, expert: int) -> None: ...
    def pin(self, expert: int) -> None: ...
    def unpin(self, expert: int) -> None: ...
    def drop(self, expert: int) -> None: ...
    def give_slot(self) -> int: ...
    def take_slot(self, slot: int) -> None: ...
    def take_pending(self) -> list[int]: ...

class CacheCounts:
    visit_ns: int
    guess_ns: int
    def __init__(self) -> None: ...
    def take(self) -> tuple[int, ...]: ...

class ExpertLoads:
    def __init__(self, loader: Loader) -> None: ...
    def add_layer(self, blobs: Sequence[tuple[int, int, int, int]]) -> None: ...

class LayerCache:
    def __init__(
        self,
        layer: int,
        book: LayerBook,
        loads: ExpertLoads,
        counts: CacheCounts,
        uses: Uses | None,
        ranks: RankCounts | None,
        always_used: float,
    ) -> None: ...
    def serves(self, needed: Sequence[int], num_rows: int) -> bool: ...
    def visit(self, needed: Sequence[int]) -> None: ...
    def leave(self, needed: Sequence[int]) -> None: ...
    def cancel_refuted(self) -> None: ...

class Odds:
    floor: float
    bar: float
    num_guesses: int
    num_missing: int
    num_worthy: int
    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        curves: Sequence[tuple[float, float, float]],
        half_life: float,
        least_heat: float,
        learning_rate: float,
        *,
        floor: float,
        rise: float,
        fall: float,
        early: float,
    ) -> None: ...
    def threshold(self, distance: int) -> float: ...
    def weigh(
        self,
        layer: int,
        distance: int,
        ranked: Sequence[int],
        margins: Sequence[float],
        here: LayerBook,
        per_token: int,
    ) -> tuple[list[tuple[int, float]], int]: ...
    def loaded(self, layer: int, expert: int) -> None: ...
    def learn(self, layer: int, needed: Sequence[int]) -> None: ...
    def forget(self) -> None: ...

class Gate:
    def __init__(
        self,
        compute: Compute,
        weight: PackedMatrix,
        bias_E: F32Array,
        norm: NormWeights | None,
        top_k: int,
        most: int,
    ) -> None: ...
    def scores(self, x: Matrix) -> Matrix: ...
    def guess(self, x: Matrix) -> tuple[list[list[int]], list[list[float]]]: ...
    def follow(self, heard_E: F32Array) -> None: ...

class Sight:
    def __init__(
        self,
        odds: Odds,
        layer: int,
        start: Gate | None,
        before: Gate | None,
        next: Gate | None,
        here: LayerCache,
        there: LayerCache | None,
    ) -> None: ...
    def at_start(self, x: Any) -> None: ...
    def after_route(self, x: Any, needed: Sequence[int], heard_E: F32Array) -> None: ...

"""The native MoE feed-forward: right numbers, and the same bits for every batch, placement, thread count and arrival order.

T tokens, D hidden, F expert width, E experts, K experts per token.
"""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import cpu_backend
from in_memory import FileOfBlobs
from kernel_cases import ISAS, OPS, make_ops
from tidegate import _core
from tidegate.backends.operands import ExpertSlots, MoeLayer, Norm, Router, Routing
from tidegate.backends.reference import ReferenceBackend
from tidegate.errors import ReadFailed
from tidegate.experts.base import ExpertKey, InstantLoader, Placement
from tidegate.experts.cache import ExpertCache
from tidegate.experts.loader import LoaderOptions, NativeLoader
from tidegate.experts.policy import DecayedLfu
from tidegate.model_config import MoeConfig
from tidegate.quant import pack
from tidegate.quant.formats import Format
from tidegate.quant.layout import ExpertLayout
from tidegate.units import align_up

SILU = ("silu", 0.0, 0.0)
ACTIVATIONS = [SILU, ("gelu_tanh", 0.0, 0.0), ("clamped_swiglu", 1.702, 7.0)]
NAMES = ["f32", "bf16", "int8-g32", "int4-g32", "int4-g16-min", "int4-g128", "int4-g32-m8", "int4-g64-m8", "mxfp4-g32"]
FORMATS = [Format.parse(name) for name in NAMES]


class MemorySlots(ExpertSlots):
    """Slot i holds expert i."""

    def __init__(self, blobs_EB):
        self.blobs_EB = blobs_EB

    def wait(self, slot):
        return self.blobs_EB[slot]


@dataclass
class Case:
    layout: ExpertLayout
    blobs_EB: np.ndarray
    x_TD: np.ndarray
    routing: Routing

    @property
    def num_experts(self):
        return len(self.blobs_EB)


def make_blobs(rng, layout, experts):
    d, f = layout.hidden_size, layout.expert_dim
    blobs = np.zeros((experts, layout.blob_bytes), np.uint8)
    for blob in blobs:
        parts = (
            (0, (f, d), layout.fmt),
            (layout.up_offset, (f, d), layout.fmt),
            (layout.down_offset, (d, f), layout.down_fmt),
        )
        for at, shape, fmt in parts:
            packed = pack.pack(rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[1])), fmt)
            blob[at : at + len(packed)] = packed
        if layout.has_bias:
            stride = align_up(4 * f, 64)
            for part, size in enumerate((f, f, d)):
                at = layout.bias_offset + part * stride
                blob[at : at + 4 * size] = rng.standard_normal(size, np.float32).view(np.uint8)
    return blobs


def make_case(seed, tokens, d, f, experts, k, fmt, down_fmt=None, bias=False, everyone=False):
    rng = np.random.default_rng(seed)
    layout = ExpertLayout.of(d, f, fmt, bias, down_fmt)
    ids = np.array([rng.permutation(experts)[:k] for _ in range(tokens)], np.int32).reshape(tokens, k)
    if everyone and tokens:
        ids[0] = np.arange(k)
    weights = rng.random((tokens, k)).astype(np.float32)
    x = rng.standard_normal((tokens, d), np.float32)
    return Case(layout, make_blobs(rng, layout, experts), x, Routing(ids, weights))


def moe(ops, case, placements=None, slots=None, activation=SILU, rows=slice(None)):
    ops.compute.release(0)
    everything = [Placement(list(range(case.num_experts)), list(range(case.num_experts)))]
    routing = Routing(case.routing.topk_expert_ids_TK[rows].copy(), case.routing.topk_weights_TK[rows].copy())
    x = ops.compute.from_numpy(case.x_TD[rows])
    level = ops.compute.mark()
    out = ops.moe(x, routing, case.layout, placements or everything, slots or MemorySlots(case.blobs_EB), activation)
    assert ops.compute.mark() == level + align_up(4 * out.rows * out.cols, 64), "only the result stays in the workspace"
    return ops.compute.numpy(out).copy()


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 40),
    st.tuples(st.integers(1, 70), st.integers(1, 90)),
    st.tuples(st.integers(1, 9), st.integers(1, 4)),
    st.sampled_from(FORMATS),
    st.sampled_from([None, *map(Format.parse, ("int8-g64", "int4-g128-m8", "bf16"))]),
    st.booleans(),
    st.sampled_from(ACTIVATIONS),
)
@settings(max_examples=80, deadline=None)
def test_agrees_with_the_reference_and_with_itself(seed, tokens, shape, counts, fmt, down_fmt, bias, activation):
    experts, k = counts[0], min(counts)
    case = make_case(seed, tokens, *shape, experts, k, fmt, down_fmt, bias, everyone=True)
    everything = [Placement(list(range(experts)), list(range(experts)))]
    slots = MemorySlots(case.blobs_EB)
    wanted = ReferenceBackend().moe(case.x_TD, case.routing, case.layout, everything, slots, activation)
    first = moe(OPS[ISAS[0], 1], case, activation=activation)
    # A hidden value near the middle between two int8 codes may fall on the other side in the twin.
    exact = not case.layout.down_fmt.is_integer
    size = np.linalg.norm(wanted) + np.linalg.norm(case.routing.topk_weights_TK) * np.sqrt(shape[0])
    assert np.linalg.norm(first - wanted) < size * (5e-6 if exact else 1e-2)
    rng = np.random.default_rng(seed)
    order = rng.permutation(experts).tolist()
    cut = int(rng.integers(experts + 1))
    split = [Placement(order[:cut], order[:cut]), Placement(order[cut:], order[cut:])]
    t = int(rng.integers(tokens))
    for key, ops in OPS.items():
        np.testing.assert_array_equal(moe(ops, case, split, activation=activation), first, err_msg=str(key))
        alone = moe(ops, case, activation=activation, rows=slice(t, t + 1))
        np.testing.assert_array_equal(alone[0], first[t], err_msg=str(key))


def test_many_tokens_on_one_expert():
    """More pairs than are gathered at once, on one expert and on all of them."""
    case = make_case(3, 1300, 32, 32, 4, 4, Format.parse("int8-g32"))
    out = [moe(OPS[ISAS[0], threads], case) for threads in (1, 3)]
    np.testing.assert_array_equal(out[0], out[1])
    np.testing.assert_array_equal(out[0][700], moe(OPS[ISAS[0], 1], case, rows=slice(700, 701))[0])


@given(
    st.integers(0, 2**32 - 1), st.integers(1, 20), st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 9)),
    st.sampled_from(FORMATS), st.sampled_from(ISAS),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_run_moe_is_norm_route_and_moe(seed, tokens, counts, fmt, isa):
    experts, k, capacity = counts[0], min(counts[:2]), min(counts[0], counts[2])
    case = make_case(seed, tokens, 40, 24, experts, k, fmt)
    rng = np.random.default_rng(seed)
    norm = Norm(rng.standard_normal(40).astype(np.float32), None, 1e-5)
    router = Router(rng.standard_normal((experts, 40), np.float32), None, None, MoeConfig(experts, k, 24, "softmax"))
    layer, backend = MoeLayer(norm, router, case.layout, SILU), cpu_backend(isa=isa)
    x, numpy = backend.compute.from_numpy(case.x_TD), backend.compute.numpy
    normed, routing = backend.norm_route(x, norm, router)
    needed = sorted(set(routing.topk_expert_ids_TK.ravel().tolist()))
    placements, slots = [Placement(list(range(experts)), list(range(experts)))], MemorySlots(case.blobs_EB)
    wanted = numpy(backend.moe(normed, routing, case.layout, placements, slots, SILU)).copy()
    with TemporaryDirectory() as folder:
        loader = make_loader(Path(folder), case, _core.FaultyReader(seed=1, max_delay_us=100), capacity)
        cache = ExpertCache([capacity], experts, DecayedLfu, loader)
        for _ in "ab":
            seen, total, shared, rest = backend.run_moe(x, layer, cache.native(0), None)
            np.testing.assert_array_equal(numpy(seen), numpy(normed))
            assert shared is None and (total is None) == (
                capacity < experts and (len(needed) > capacity or tokens > 16)
            )
            if total is None:
                ids_TK, weights_TK = rest.routing()
                np.testing.assert_array_equal(ids_TK, routing.topk_expert_ids_TK)
                np.testing.assert_array_equal(weights_TK, routing.topk_weights_TK)
            else:
                np.testing.assert_array_equal(numpy(total), wanted)
        counters, count = cache.counters, 0 if total is None else len(needed)
        assert (counters.demand_hits, counters.misses) == (count, count) and not cache.book(0).pinned()
        others = ExpertCache([1], experts + 1, DecayedLfu, InstantLoader())
        loads = loader.native_loads(1, experts)
        uses, book = _core.Uses(_core.Worth.USES, experts + 1), others.book(0)
        with pytest.raises(ValueError, match="cache of as many experts"):
            backend.run_moe(x, layer, _core.LayerCache(0, book, loads, _core.CacheCounts(), uses, None, 1.0), None)
        with pytest.raises(ValueError, match="their uses"):
            _core.LayerCache(0, book, loads, _core.CacheCounts(), None, None, 1.0)
        loader.close()


def test_an_expert_that_is_missing_or_given_twice_is_an_error():
    case = make_case(4, 3, 16, 16, 4, 2, Format.parse("f32"), everyone=True)
    with pytest.raises(RuntimeError, match="pairs were computed"):
        moe(OPS[ISAS[0], 1], case, [Placement([1, 2, 3], [1, 2, 3])])
    with pytest.raises(RuntimeError, match="pairs were computed"):
        moe(OPS[ISAS[0], 1], case, [Placement([0, 1, 2, 3], [0, 1, 2, 3]), Placement([0], [0])])


def make_loader(tmp_path, case, reader, num_slots):
    nbytes = case.layout.blob_bytes
    memory = np.zeros(num_slots * nbytes + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    slots = [memory[start + i * nbytes : start + (i + 1) * nbytes] for i in range(num_slots)]
    return NativeLoader(
        FileOfBlobs(tmp_path, [case.blobs_EB]), slots, LoaderOptions(threads=2, chunk_bytes=4096), reader
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 6])
def test_experts_that_arrive_late_change_no_bit(tmp_path, isa, tokens):
    case = make_case(5, tokens, 64, 64, 8, 4, Format.parse("int4-g32"))
    wanted = moe(OPS[ISAS[0], 1], case)
    ops = make_ops(isa, 2)
    for seed in range(15):
        loader = make_loader(tmp_path, case, _core.FaultyReader(seed=seed, max_delay_us=300), 8)
        try:
            order = np.random.default_rng(seed).permutation(8).tolist()
            for expert in order:
                loader.load(ExpertKey(0, expert), 7 - expert, demand=True)
            placed = [Placement(order, [7 - expert for expert in order])]
            np.testing.assert_array_equal(moe(ops, case, placed, loader), wanted)
        finally:
            loader.close()


def test_a_failed_load_is_the_loaders_error(tmp_path):
    case = make_case(6, 1, 64, 64, 2, 2, Format.parse("int8-g32"))
    loader = make_loader(tmp_path, case, _core.FaultyReader(fail_at=1), 2)
    try:
        for expert in range(2):
            loader.load(ExpertKey(0, expert), expert, demand=True)
        with pytest.raises(ReadFailed, match=r"experts\.bin: read at offset"):
            moe(OPS[ISAS[0], 1], case, [Placement([0, 1], [0, 1])], loader)
    finally:
        loader.close()

"""Multi-head latent attention of the cpu backend: right against the reference, and the same bits however the work is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import aligned, cpu_backend, cuts, run_chunks
from tidegate import _core
from tidegate.backends.operands import AttentionWeights, KvLayout, Linear, Norm, Rope
from tidegate.backends.reference import ReferenceBackend
from tidegate.model_config import AttentionConfig
from tidegate.quant.formats import Format
from tidegate.quant.pack import pack

ISAS = _core.available_isas()
FORMATS = ["f32", "bf16", "int8-g32", "int4-g32", "int4-g32-m8", "int8-g16-min"]


def normal(generator, *shape):
    return generator.normal(size=shape).astype(np.float32)


def linear(generator, name, n, k, fmt):
    packed = aligned(Format.parse(fmt).packed_bytes(n, k))
    packed[:] = pack(normal(generator, n, k) / np.float32(k**0.5), Format.parse(fmt))
    return Linear(name, packed, Format.parse(fmt), n, k)


def make_layer(seed=0, heads=4, rank=32, nope=16, rope_dims=8, v_head_dim=16, fmt="f32", window=0, interleaved=True):
    generator = np.random.default_rng(seed)
    config = AttentionConfig(
        heads, heads, nope + rope_dims, v_head_dim, (nope + rope_dims) ** -0.5, kv_lora_rank=rank, qk_nope_dim=nope
    )
    inv_freq = (1 / 10000 ** (np.arange(0, rope_dims, 2) / rope_dims)).astype(np.float32)
    return AttentionWeights(
        index=1,
        config=config,
        rope=Rope(inv_freq, 1.0, interleaved),
        window=window,
        kv_norm=Norm(normal(generator, rank) * np.float32(0.2) + np.float32(1), None, 1e-6),
        k_up=linear(generator, "k_up", heads * rank, nope, fmt),
        v_up=linear(generator, "v_up", heads * v_head_dim, rank, fmt),
    )


def inputs_of(weights, tokens, seed=1):
    generator, c, dims = np.random.default_rng(seed), weights.config, weights.rope.dims
    return [
        normal(generator, tokens, c.num_heads * (c.qk_nope_dim + dims)),
        normal(generator, tokens, c.kv_lora_rank + dims),
    ]


def attend_all(backend, weights, inputs, chunks, dtype="f16", others=(), pages_seed=0):
    layout = KvLayout(2, 1, weights.config.kv_lora_rank + weights.rope.dims, 0, dtype)
    return run_chunks(backend, layout, "attend_latent", weights, inputs, chunks, others, pages_seed)


@st.composite
def layers(draw):
    return make_layer(
        seed=draw(st.integers(0, 1000)),
        heads=draw(st.sampled_from([1, 2, 5, 16])),
        rank=draw(st.sampled_from([8, 20, 32, 64, 100])),
        nope=draw(st.sampled_from([4, 16, 24, 32])),
        rope_dims=draw(st.sampled_from([2, 8, 16])),
        v_head_dim=draw(st.sampled_from([4, 12, 16, 24])),
        fmt=draw(st.sampled_from(FORMATS)),
        window=draw(st.sampled_from([0, 0, 9])),
        interleaved=draw(st.booleans()),
    )


@given(
    layers(),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from(["f16", "int8", "f32"]),
    st.sampled_from(ISAS),
)
@settings(max_examples=60, deadline=None)
def test_agrees_with_the_reference(weights, chunks, dtype, isa):
    inputs = inputs_of(weights, sum(chunks))
    want = attend_all(ReferenceBackend(), weights, inputs, chunks, dtype)
    got = attend_all(cpu_backend(isa=isa), weights, inputs, chunks, dtype)
    # With integer weights a value on the edge of two codes may round to the other one.
    tolerance = 3e-2 if weights.k_up.fmt.is_integer or dtype == "int8" else 3e-3 if dtype == "f16" else 2e-5
    assert np.abs(got - want).max() < tolerance * np.abs(want).max()


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_bits_do_not_depend_on_chunks_batch_threads_or_isa(data):
    total = data.draw(st.sampled_from([40, 300, 1100]))
    weights = make_layer(
        heads=data.draw(st.sampled_from([1, 3, 16])),
        rank=data.draw(st.sampled_from([8, 20])),
        nope=8,
        rope_dims=4,
        v_head_dim=6,
        fmt=data.draw(st.sampled_from(FORMATS)),
        window=data.draw(st.sampled_from([0, 100])),
    )
    dtype = data.draw(st.sampled_from(["f16", "int8", "f32"]))
    inputs = inputs_of(weights, total)
    want = attend_all(cpu_backend(threads=1, isa=ISAS[0]), weights, inputs, [total], dtype)
    chunks, others = data.draw(cuts(total))
    backend = cpu_backend(data.draw(st.integers(1, 3)), data.draw(st.sampled_from(ISAS)))
    got = attend_all(backend, weights, inputs, chunks, dtype, others, pages_seed=5)
    assert got.tobytes() == want.tobytes()


def test_many_heads_go_in_passes():
    """Absorbed queries of all tokens at once would not fit the workspace."""
    weights = make_layer(heads=64, rank=256, nope=8, rope_dims=8, v_head_dim=8)
    inputs = inputs_of(weights, 300)
    small = cpu_backend(workspace_bytes=40 << 20)
    got = attend_all(small, weights, inputs, [300])
    want = attend_all(cpu_backend(threads=1), weights, inputs, [100] * 3)
    assert got.tobytes() == want.tobytes()


def test_weights_of_another_shape_are_refused():
    weights = make_layer()
    wrong = AttentionWeights(**{**vars(weights), "v_up": weights.k_up})
    with pytest.raises(ValueError, match="v_up has another shape"):
        attend_all(cpu_backend(), wrong, inputs_of(wrong, 3), [3])

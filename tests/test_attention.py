"""Attention of the cpu backend: right against the reference, and the same bits however the work is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import Pages, cpu_backend, cuts, run_chunks, run_step
from tidegate import _core
from tidegate.backends.operands import AttentionWeights, KvLayout, Norm, Rope
from tidegate.backends.reference import ReferenceBackend
from tidegate.model_config import AttentionConfig

ISAS = _core.available_isas()
rng = np.random.default_rng


def normal(generator, *shape, scale=1.0):
    return (generator.normal(size=shape) * scale).astype(np.float32)


def norm_weights(generator, width):
    return Norm(normal(generator, width) * np.float32(0.3) + np.float32(1), None, 1e-6)


def make_layer(
    seed=0, heads=4, kv_heads=2, head_dim=16, v_head_dim=16, window=0, sinks=False, qk_norm="none", clip=None,
    rope_dims=16, interleaved=False, index=1,
):  # fmt: skip
    generator = rng(seed)
    config = AttentionConfig(heads, kv_heads, head_dim, v_head_dim, head_dim**-0.5, qk_norm, clip, sinks)
    widths = (head_dim, head_dim) if qk_norm == "head" else (heads * head_dim, kv_heads * head_dim)
    has_norm = qk_norm != "none"
    inv_freq = (1 / 10000 ** (np.arange(0, rope_dims, 2) / max(rope_dims, 1))).astype(np.float32)
    return AttentionWeights(
        index=index,
        config=config,
        rope=Rope(inv_freq, 1.1, interleaved),
        window=window,
        q_norm=norm_weights(generator, widths[0]) if has_norm else None,
        k_norm=norm_weights(generator, widths[1]) if has_norm else None,
        sinks_H=normal(generator, heads) if sinks else None,
    )


def layout_of(weights, dtype="f16", num_layers=3):
    c = weights.config
    return KvLayout(num_layers, c.num_kv_heads, c.head_dim, c.v_head_dim, dtype)


def qkv_of(weights, tokens, seed=1):
    c = weights.config
    width = (c.num_heads + c.num_kv_heads) * c.head_dim + c.num_kv_heads * c.v_head_dim
    return normal(rng(seed), tokens, width)


def attend_all(backend, weights, qkv, chunks, dtype="f16", others=(), pages_seed=0):
    return run_chunks(backend, layout_of(weights, dtype), "attend", weights, [qkv], chunks, others, pages_seed)


def check_close(got, want):
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * float(np.abs(want).max() + 1e-6))


@st.composite
def layers(draw):
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    head_dim = draw(st.sampled_from([8, 10, 16, 24, 64, 80, 96, 128, 192, 256]))
    return make_layer(
        seed=draw(st.integers(0, 1000)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=draw(st.sampled_from([head_dim, 7, 8, 16, 72, 128])),
        window=draw(st.sampled_from([0, 0, 1, 7, 16, 40])),
        sinks=draw(st.booleans()),
        qk_norm=draw(st.sampled_from(["none", "head", "full"])),
        clip=draw(st.sampled_from([None, 0.7])),
        rope_dims=draw(st.sampled_from([0, 2, head_dim // 4 * 2, head_dim])),
        interleaved=draw(st.booleans()),
        index=draw(st.integers(0, 2)),
    )


@given(
    layers(),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from(["f16", "int8", "f32"]),
    st.sampled_from(ISAS),
)
@settings(max_examples=60, deadline=None)
def test_agrees_with_the_reference(weights, chunks, dtype, isa):
    qkv = qkv_of(weights, sum(chunks))
    want = attend_all(ReferenceBackend(), weights, qkv, chunks, "int8" if dtype == "int8" else "f32")
    got = attend_all(cpu_backend(isa=isa), weights, qkv, chunks, dtype)
    if dtype == "f32":
        check_close(got, want)
    else:  # keys and values are rounded to 11 bits; on the edge of two codes one of 8 bits may be the other one
        assert np.abs(got - want).max() < (6e-3 if dtype == "f16" else 2e-2) * np.abs(want).max()


@given(layers(), st.integers(1, 100))
@settings(max_examples=20, deadline=None)
def test_int8_is_near_float32(weights, tokens):
    qkv = qkv_of(weights, tokens)
    want = attend_all(ReferenceBackend(), weights, qkv, [tokens], "f32")
    got = attend_all(ReferenceBackend(), weights, qkv, [tokens], "int8")
    assert np.abs(got - want).max() < 0.1 * np.abs(want).max()


@pytest.mark.parametrize("dtype", ["f16", "int8", "f32"])
@pytest.mark.parametrize("window", [0, 300])
def test_a_long_sequence_agrees_with_the_reference(dtype, window):
    """Several blocks of keys and several runs of blocks, the last tokens one by one."""
    weights = make_layer(heads=4, kv_heads=1, head_dim=8, v_head_dim=8, window=window, sinks=True, rope_dims=8)
    qkv, chunks = qkv_of(weights, 1300), [1296, 1, 1, 1, 1]
    want = attend_all(ReferenceBackend(), weights, qkv, chunks, dtype)
    got = attend_all(cpu_backend(threads=3), weights, qkv, chunks, dtype)
    assert np.abs(got - want).max() < {"f32": 2e-5, "f16": 2e-3, "int8": 1e-2}[dtype] * np.abs(want).max()


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_bits_do_not_depend_on_chunks_batch_threads_or_isa(data):
    total = data.draw(st.sampled_from([50, 300, 1100, 2300]))
    group = data.draw(st.sampled_from([1, 3, 8]))
    weights = make_layer(
        heads=group,
        kv_heads=1,
        head_dim=8,
        v_head_dim=data.draw(st.sampled_from([8, 20])),
        window=data.draw(st.sampled_from([0, 30, 400])),
        sinks=data.draw(st.booleans()),
        rope_dims=8,
    )
    dtype = data.draw(st.sampled_from(["f16", "int8", "f32"]))
    qkv = qkv_of(weights, total)
    want = attend_all(cpu_backend(threads=1, isa=ISAS[0]), weights, qkv, [total], dtype)

    chunks, others = data.draw(cuts(total))
    backend = cpu_backend(data.draw(st.integers(1, 3)), data.draw(st.sampled_from(ISAS)))
    got = attend_all(backend, weights, qkv, chunks, dtype, others, pages_seed=7)
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("threads", [2, 3])
def test_decode_spread_over_threads_has_the_same_bits(threads):
    """Few queries, many keys: the only case in which runs of keys become items of their own."""
    weights = make_layer(heads=2, kv_heads=1, head_dim=8, v_head_dim=8, rope_dims=8)
    qkv = qkv_of(weights, 4200)
    want = attend_all(cpu_backend(threads=1), weights, qkv, [4200])
    got = attend_all(cpu_backend(threads=threads), weights, qkv, [4199, 1])
    assert got.tobytes() == want.tobytes()


def test_numbers_beyond_float16_are_stored_as_its_largest():
    weights = make_layer(heads=1, kv_heads=1, head_dim=8, v_head_dim=8, rope_dims=0)
    qkv = qkv_of(weights, 3)
    qkv[:, 16:] *= 1e6
    want = attend_all(ReferenceBackend(), weights, qkv, [3])
    check_close(attend_all(cpu_backend(), weights, qkv, [3]), want)
    assert np.abs(want).max() <= 65504


def test_a_cache_of_another_shape_is_refused():
    weights = make_layer()
    backend = cpu_backend()
    pages = Pages(KvLayout(3, 2, 8, 8), 4)
    backend.bind_kv(pages.layout, pages.memory)
    with pytest.raises(ValueError, match="KV cache has another shape"):
        run_step(backend, pages, [(0, 0, 1)], [qkv_of(weights, 1)], "attend", weights)


def test_pages_that_do_not_exist_are_refused():
    weights = make_layer()
    backend = cpu_backend()
    pages = Pages(layout_of(weights), 4)
    backend.bind_kv(pages.layout, pages.memory)
    pages.tables[0] = [3, 4]
    with pytest.raises(ValueError, match="KV page 4 is not one of 4"):
        run_step(backend, pages, [(0, 0, 17)], [qkv_of(weights, 17)], "attend", weights)

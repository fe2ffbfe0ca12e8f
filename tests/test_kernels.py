"""Native kernels against their numpy twins, on every instruction set: random shapes, batch invariance, same bits.

T tokens, N outputs, K inputs. Each speed test prints GB/s or GFLOP/s beside its check (pytest -s shows them).
"""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_cases import ISAS, OPS, make_ops, run
from tidegate import _core
from tidegate.backends.operands import Linear
from tidegate.backends.reference_math import PackedMatrix, gated_activation
from tidegate.errors import OverBudget
from tidegate.quant import native, pack
from tidegate.quant.formats import GROUPS, Format

INTEGER = [Format(kind, g, low) for kind in ("int8", "int4") for g in GROUPS for low in (False, True)]
TWO_LEVEL = [Format("int4", g, two_level=True) for g in GROUPS if g > 16]
FORMATS = [Format("f32"), Format("bf16"), Format("mxfp4", 32), *INTEGER, *TWO_LEVEL]
SILU = ("silu", 0.0, 0.0)


def random_linear(rng, n, k, fmt, bias=False):
    packed = pack.pack(rng.standard_normal((n, k), np.float32), fmt)
    return Linear("w", packed, fmt, n, k, rng.standard_normal(n, np.float32) if bias else None)


def random_inputs(rng, tokens, k):
    x = rng.standard_normal((tokens, k), np.float32) * np.exp(rng.standard_normal((tokens, 1), np.float32))
    x[rng.random((tokens, k)) < 0.1] = 0
    return x


shapes = st.tuples(st.integers(1, 70), st.integers(1, 90), st.integers(1, 300))


@given(shapes, st.sampled_from(FORMATS), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_linear_agrees_with_the_twin_on_every_isa(shape, fmt, bias, seed):
    tokens, n, k = shape
    rng = np.random.default_rng(seed)
    weight, x = random_linear(rng, n, k, fmt, bias), random_inputs(rng, tokens, k)
    wanted = PackedMatrix(weight.packed, fmt, n, k).product(x)
    wanted = wanted if weight.bias is None else wanted + weight.bias
    got = {key: run(ops, lambda a, ops=ops: ops.linear(a, weight), x) for key, ops in OPS.items()}
    first = got[ISAS[0], 1]
    for key, out in got.items():
        assert np.array_equal(out, first), f"{key} differs"
    if fmt.is_integer:
        np.testing.assert_array_equal(first, wanted)
    else:
        size = np.abs(x).max() * np.sqrt(k)
        np.testing.assert_allclose(first, wanted, rtol=0, atol=1e-6 * max(size, 1) * 4)


@given(shapes, st.sampled_from(FORMATS), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_wide_inputs_agree_with_the_twin_on_every_isa(shape, fmt, bias, seed):
    tokens, n, k = shape
    rng = np.random.default_rng(seed)
    weight, x = replace(random_linear(rng, n, k, fmt, bias), wide_inputs=True), random_inputs(rng, tokens, k)
    wanted = PackedMatrix(weight.packed, fmt, n, k).wide_product(x)
    wanted = wanted if weight.bias is None else wanted + weight.bias
    exact = x.astype(np.float64) @ pack.unpack(weight.packed, fmt, n, k).T.astype(np.float64)
    exact = exact if weight.bias is None else exact + weight.bias
    for ops in OPS.values():
        got = run(ops, lambda a, ops=ops: ops.linear(a, weight), x)
        if fmt.is_integer:
            np.testing.assert_array_equal(got, wanted)
        np.testing.assert_allclose(got, exact, rtol=0, atol=2e-4 * np.abs(x).max() * np.sqrt(k))
        alone = run(ops, lambda a, ops=ops: ops.linear(a, weight), x[-1:])
        np.testing.assert_array_equal(got[-1], alone[0])


@given(shapes, st.sampled_from(FORMATS), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_a_token_does_not_see_its_batch(shape, fmt, seed):
    tokens, n, k = shape
    rng = np.random.default_rng(seed)
    weight, x = random_linear(rng, n, k, fmt), random_inputs(rng, tokens, k)
    for isa in ISAS:
        ops = OPS[isa, 1]
        together = run(ops, lambda a, ops=ops: ops.linear(a, weight), x)
        t = int(rng.integers(tokens))
        alone = run(ops, lambda a, ops=ops: ops.linear(a, weight), x[t : t + 1])
        np.testing.assert_array_equal(together[t], alone[0])


@pytest.mark.parametrize("fmt", INTEGER + TWO_LEVEL, ids=str)
def test_extreme_codes_and_inputs(fmt):
    """The largest integer sums there can be, and inputs of zero, tiny and huge size."""
    n, k = 16, 2 * fmt.group
    codes = np.zeros((n, k), np.uint8)
    codes[::2] = 255 if fmt.kind == "int8" else 15
    ones = np.ones((n, 2), np.float16)
    scales = np.full((n, 2), -127, np.int8) if fmt.two_level else ones
    more = np.ones((n, 1), np.float32) if fmt.two_level else ones if fmt.has_min else None
    packed = pack.pack_codes(codes, scales, more, fmt)
    weight = Linear("w", packed, fmt, n, k)
    x = np.ones((6, k), np.float32)
    x[1] = -1
    x[2] = 0
    x[3, ::2] = 1e-42
    x[4] *= 1e30
    x[5, fmt.group :] = 0
    wanted = PackedMatrix(packed, fmt, n, k).product(x[[0, 1, 2, 4, 5]])
    for isa in ISAS:
        ops = OPS[isa, 1]
        got = run(ops, lambda a, ops=ops: ops.linear(a, weight), x)
        np.testing.assert_array_equal(got[[0, 1, 2, 4, 5]], wanted)
        np.testing.assert_array_equal(got, run(OPS["portable", 1], lambda a: OPS["portable", 1].linear(a, weight), x))


@given(shapes, st.sampled_from(FORMATS), st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_packing_makes_the_twins_bytes(shape, fmt, seed):
    threads, n, k = 1 + shape[0] % 3, shape[1], shape[2]
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((n, k), np.float32) * np.exp2(rng.integers(-30, 14, (n, 1))).astype(np.float32)
    w[rng.random((n, k)) < 0.2] = 0
    wanted = pack.pack(w, fmt)
    packed = native.pack(w, fmt, threads)
    np.testing.assert_array_equal(packed, wanted)
    np.testing.assert_array_equal(native.unpack(packed, fmt, n, k, threads), pack.unpack(wanted, fmt, n, k))
    if fmt.is_integer and not fmt.two_level:
        np.testing.assert_array_equal(native.pack_codes(*pack.quantize(w, fmt), fmt, threads), wanted)


def test_packing_checks_sizes():
    w = np.zeros((4, 8), np.float32)
    with pytest.raises(ValueError, match="exactly the packed size"):
        native.pack(w, Format("f32"), out=np.empty(3, np.uint8))
    with pytest.raises(ValueError, match="fewer than the format needs"):
        native.unpack(np.empty(3, np.uint8), Format("f32"), 4, 8)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_embedding_rows(fmt):
    rng = np.random.default_rng(1)
    table = random_linear(rng, 37, 50, fmt)
    ids = np.array([36, 0, 17, 17], np.int32)
    wanted = pack.unpack(table.packed, fmt, 37, 50)[ids] * np.float32(1.5)
    for ops in OPS.values():
        out = ops.compute.numpy(_core.embed(ops.compute, ops.packed(table), ids, 1.5))
        np.testing.assert_array_equal(out, wanted)
    with pytest.raises(IndexError, match="token id 37 is not below 37"):
        _core.embed(ops.compute, ops.packed(table), np.array([37], np.int32), 1.0)


@pytest.mark.parametrize(
    "activation", [SILU, ("gelu", 0.0, 0.0), ("gelu_tanh", 0.0, 0.0), ("clamped_swiglu", 1.702, 7.0)]
)
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_gated_mlp(activation, tokens):
    rng = np.random.default_rng(2)
    gate_up, down = random_linear(rng, 70, 24, Format("f32"), True), random_linear(rng, 24, 35, Format("f32"), True)
    x = rng.standard_normal((tokens, 24), np.float32) * 2
    gate, up = np.split(x @ pack.unpack(gate_up.packed, gate_up.fmt, 70, 24).T + gate_up.bias, 2, axis=1)
    hidden = gated_activation(gate, up, activation)
    wanted = hidden @ pack.unpack(down.packed, down.fmt, 24, 35).T + down.bias
    outs = [run(ops, lambda a, o=ops: o.gated_mlp(a, gate_up, down, activation), x) for ops in OPS.values()]
    for out in outs:
        np.testing.assert_array_equal(out, outs[0])
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=2e-4)


def test_activation_far_from_zero():
    """silu saturates cleanly: 0 far below, x far above, no infinities or NaN between."""
    values = np.array([-1e30, -1e4, -100, -88, -20, -1e-20, 0, 1e-20, 20, 88, 100, 1e4, 1e30], np.float32)
    size = len(values)
    gate = np.diag(values).astype(np.float32)
    f32, one = Format("f32"), np.eye(size, dtype=np.float32)
    gate_up = Linear("g", pack.pack(np.vstack([gate, one]), f32), f32, 2 * size, size)
    down = Linear("d", pack.pack(one, f32), f32, size, size)
    wanted = gated_activation(values[None], np.ones((1, size), np.float32), SILU)[0]
    for ops in OPS.values():
        got = run(ops, lambda a, ops=ops: ops.gated_mlp(a, gate_up, down, SILU), np.ones((1, size), np.float32))[0]
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("tokens", [1, 7])
def test_element_wise(tokens):
    rng = np.random.default_rng(3)
    x, y, gates = (rng.standard_normal((tokens, n), np.float32) for n in (33, 33, 1))
    one = Linear("g", pack.pack(np.ones((1, 1), np.float32), Format("f32")), Format("f32"), 1, 1)
    for ops in OPS.values():
        compute = ops.compute
        np.testing.assert_array_equal(run(ops, ops.add, x, y), x + y)
        np.testing.assert_array_equal(run(ops, lambda a, b, ops=ops: ops.add(a, b, 0.3), x, y), x + np.float32(0.3) * y)
        gated = run(ops, lambda a, b, c, ops=ops: ops.add_gated(a, b, c, one), x, y, gates)
        np.testing.assert_allclose(gated, x + y / (1 + np.exp(-gates)), rtol=1e-5, atol=1e-6)
        a = compute.from_numpy(x)
        _core.divide(compute, a, 3.0)
        np.testing.assert_array_equal(compute.numpy(a), x / np.float32(3))
        rows = np.array([tokens - 1, 0], np.int32)
        np.testing.assert_array_equal(compute.numpy(_core.gather_rows(compute, a, rows)), (x / np.float32(3))[rows])


def test_a_full_workspace_is_an_over_budget():
    ops = make_ops(ISAS[0], nbytes=4096)
    rng = np.random.default_rng(4)
    x = ops.compute.from_numpy(rng.standard_normal((2, 16), np.float32))
    before = ops.compute.mark()
    with pytest.raises(OverBudget, match="workspace"):
        ops.linear(x, random_linear(rng, 1000, 16, Format("f32")))
    assert ops.compute.mark() == before
    assert ops.compute.peak_bytes <= 4096


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("fmt", [Format("int4", 32), Format("int8", 32), Format("mxfp4", 32), Format("bf16")], ids=str)
def test_speed_is_printed(isa, tokens, fmt):
    n, k = 512, 1024
    rng = np.random.default_rng(5)
    weight, ops = random_linear(rng, n, k, fmt), make_ops(isa, 2)
    x = random_inputs(rng, tokens, k)
    xs = ops.compute.from_numpy(x)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        out = ops.linear(xs, weight)
        seconds.append(time.perf_counter() - start)
    best = min(seconds)
    np.testing.assert_allclose(
        ops.compute.numpy(out), PackedMatrix(weight.packed, fmt, n, k).product(x), rtol=0, atol=1e-3 * np.abs(x).max()
    )
    rate = f"{weight.packed.size / best / 1e9:.1f} GB/s, {2 * tokens * n * k / best / 1e9:.0f} GFLOP/s"
    print(f"{isa} {fmt} M={tokens}: {rate}")

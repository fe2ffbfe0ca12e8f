"""The numpy twins define the packed formats: round trips, exact layout, error bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import UsageError
from tidegate.quant import pack as tw
from tidegate.quant.formats import GROUPS, MXFP4_VALUES, Format

INTEGER_FORMATS = [
    *(Format(kind, group, has_min) for kind in ("int4", "int8") for group in GROUPS for has_min in (False, True)),
    Format("mxfp4", 32),
    *(Format("int4", group, two_level=True) for group in GROUPS if group > 16),
]
ALL_FORMATS = [Format("f32"), Format("bf16"), *INTEGER_FORMATS]
shapes = st.tuples(st.integers(1, 40), st.integers(1, 200))


def random_matrix(n, k, seed, scale=0.05):
    return (np.random.default_rng(seed).standard_normal((n, k)) * scale).astype(np.float32)


@given(fmt=st.sampled_from(INTEGER_FORMATS), shape=shapes, seed=st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_codes_survive_packing(fmt, shape, seed):
    rng = np.random.default_rng(seed)
    n, k = shape
    groups = -(-k // fmt.group)
    codes = rng.integers(0, 256 if fmt.kind == "int8" else 16, (n, k), np.uint8)
    scales = rng.standard_normal((n, groups)).astype(np.float16)
    mins = rng.standard_normal((n, groups)).astype(np.float16) if fmt.has_min else None
    if fmt.two_level:
        scales, mins = rng.integers(-127, 128, (n, groups), np.int8), rng.standard_normal((n, 1)).astype(np.float32)
    packed = tw.pack_codes(codes, scales, mins, fmt)
    assert packed.dtype == np.uint8 and packed.size == fmt.packed_bytes(n, k)
    codes2, scales2, mins2 = tw.unpack_codes(packed, fmt, n, k)
    np.testing.assert_array_equal(codes, codes2)
    np.testing.assert_array_equal(scales, scales2)
    assert (mins is None and mins2 is None) or np.array_equal(mins, mins2)


@given(fmt=st.sampled_from(ALL_FORMATS), shape=shapes, seed=st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_unpack_is_what_quantize_says_and_within_half_a_step(fmt, shape, seed):
    w = random_matrix(*shape, seed)
    back = tw.unpack(tw.pack(w, fmt), fmt, *shape)
    assert back.shape == shape
    if fmt.kind == "f32":
        np.testing.assert_array_equal(back, w)
        return
    if fmt.kind == "bf16":
        np.testing.assert_allclose(back, w, rtol=2**-8)
        return
    codes, scales, mins = tw.quantize(w, fmt)
    np.testing.assert_array_equal(back, tw.dequantize(codes, scales, mins, fmt))
    step = np.repeat(np.abs(scales.astype(np.float32)), fmt.group, axis=1)[:, : shape[1]]
    # half a step; a whole one at the clipped end (int4: +8 does not exist); mxfp4's widest gap is 4 steps
    allowed = {"int8": 0.51, "int4": 0.51 if fmt.has_min else 1.01, "mxfp4": 4.01}[fmt.kind]
    if fmt.has_min:
        allowed += 0.1  # the minimum's own rounding
    if fmt.two_level:
        step = (step + 0.5) * mins  # multipliers are whole
    assert (np.abs(back - w) <= allowed * step + 2e-3 * np.abs(w).max()).all()


@pytest.mark.parametrize("fmt", INTEGER_FORMATS, ids=str)
def test_requantizing_is_stable(fmt):
    w = random_matrix(33, 130, 7)
    once = tw.unpack(tw.pack(w, fmt), fmt, 33, 130)
    twice = tw.unpack(tw.pack(once, fmt), fmt, 33, 130)
    # Where a row's largest weight was clipped, its scale, and with it all steps, become others.
    tolerance = 1e-2 if fmt.two_level else 2e-3 if fmt.has_min else 0
    np.testing.assert_allclose(twice, once, atol=tolerance * np.abs(w).max())


def test_documented_positions_of_int4():
    """Byte b of row r in step j holds input 8j+b low and 8j+4+b high; scales lead the group."""
    fmt = Format("int4", 32)
    codes = np.random.default_rng(0).integers(0, 16, (16, 64), np.uint8)
    scales = np.arange(32, dtype=np.float16).reshape(16, 2)
    packed = tw.pack_codes(codes, scales, None, fmt)
    group_bytes = 32 + 16 * 16
    for g in range(2):
        block = packed[g * group_bytes : (g + 1) * group_bytes]
        np.testing.assert_array_equal(block[:32].view(np.float16), scales[:, g])
        for j, r, b in [(0, 0, 0), (1, 3, 2), (3, 15, 3), (2, 7, 1)]:
            byte = block[32 + (j * 16 + r) * 4 + b]
            assert byte & 15 == codes[r, 32 * g + 8 * j + b]
            assert byte >> 4 == codes[r, 32 * g + 8 * j + 4 + b]


def test_documented_positions_of_two_level_scales():
    """Four groups' multipliers, their codes, the next four groups; row scales last."""
    fmt = Format("int4", 64, two_level=True)
    rng = np.random.default_rng(0)
    codes, multipliers = rng.integers(0, 16, (32, 384), np.uint8), rng.integers(-127, 128, (32, 6), np.int8)
    row_scales = rng.standard_normal((32, 1)).astype(np.float32)
    packed = tw.pack_codes(codes, multipliers, row_scales, fmt).reshape(2, -1)
    code_bytes = 16 * 32
    assert packed.shape[1] == 2 * 64 + 6 * code_bytes + 64
    for p in range(2):
        rows = slice(16 * p, 16 * p + 16)
        np.testing.assert_array_equal(packed[p, :64].view(np.int8).reshape(4, 16), multipliers[rows, :4].T)
        second = packed[p, 64 + 4 * code_bytes :]
        np.testing.assert_array_equal(second[:64].view(np.int8).reshape(4, 16)[:2], multipliers[rows, 4:].T)
        assert not second[32:64].any()
        np.testing.assert_array_equal(packed[p, -64:].view(np.float32), row_scales[rows, 0])
        for g, j, r, b in [(0, 0, 0, 0), (3, 7, 15, 3), (4, 2, 5, 1), (5, 6, 9, 2)]:
            byte = packed[p, 64 * (1 + g // 4) + g * code_bytes + (j * 16 + r) * 4 + b]
            assert byte & 15 == codes[16 * p + r, 64 * g + 8 * j + b]
            assert byte >> 4 == codes[16 * p + r, 64 * g + 8 * j + 4 + b]


@pytest.mark.parametrize("group", [32, 64, 128])
def test_two_level_scales_lose_no_more_than_float16_scales(group):
    w = random_matrix(64, 1024, 11)

    def loss(fmt):
        return np.linalg.norm(tw.unpack(tw.pack(w, fmt), fmt, *w.shape) - w) / np.linalg.norm(w)

    assert loss(Format("int4", group, two_level=True)) < 1.001 * loss(Format("int4", group))


@pytest.mark.parametrize("low", [-8, -7])
def test_two_level_scales_keep_what_is_on_a_grid_of_four_bits(low):
    """Q4_0's, whose largest weight is -8 steps, and those from -7 to 7."""
    rng = np.random.default_rng(5)
    codes = rng.integers(low, 8, (16, 40, 32))
    codes[:, :, 3] = low
    scales = rng.choice([-1, 1], (16, 40, 1)) * rng.uniform(0.5, 1.5, (16, 40, 1))
    w = (codes * scales).reshape(16, -1).astype(np.float32)
    back = tw.unpack(tw.pack(w, Format.parse("int4-g32-m8")), Format.parse("int4-g32-m8"), *w.shape)
    assert np.linalg.norm(back - w) < 0.007 * np.linalg.norm(w)


@pytest.mark.parametrize(
    "name", ["int4-g16-m8", "int4-g32-min-m8", "int8-g32-m8", "mxfp4-g32-m8", "bf16-m8", "int4-m8"]
)
def test_there_are_no_other_two_level_formats(name):
    with pytest.raises(UsageError, match="no such weight format"):
        Format.parse(name)
    assert Format.parse("int4-g128-m8") == Format("int4", 128, two_level=True)


def test_documented_positions_of_int8_with_minima_bf16_f32():
    fmt = Format("int8", 16, True)
    codes = np.random.default_rng(0).integers(0, 256, (32, 32), np.uint8)
    scales = np.random.default_rng(1).standard_normal((32, 2)).astype(np.float16)
    packed = tw.pack_codes(codes, scales, -scales, fmt).reshape(2, 2, -1)
    for p, g, j, r, b in [(0, 0, 0, 0, 0), (1, 1, 3, 15, 3), (1, 0, 2, 5, 1)]:
        block = packed[p, g]
        assert block[:32].view(np.float16)[r] == scales[16 * p + r, g]
        assert block[32:64].view(np.float16)[r] == -scales[16 * p + r, g]
        assert block[64 + (j * 16 + r) * 4 + b] == codes[16 * p + r, 16 * g + 4 * j + b]
    w = random_matrix(32, 6, 3)
    f32 = tw.pack(w, Format("f32")).view(np.float32).reshape(2, 6, 16)
    assert f32[1, 4, 3] == w[19, 4]
    bf16 = tw.pack(w, Format("bf16")).view(np.uint16).reshape(2, 3, 16, 2)
    assert bf16[1, 2, 3, 1] == tw.to_bf16(w)[19, 5]


def test_panels_are_independent_so_rows_can_be_streamed():
    w = random_matrix(50, 96, 5)
    for fmt in ALL_FORMATS:
        parts = [tw.pack(w[r : r + 16], fmt) for r in range(0, 50, 16)]
        np.testing.assert_array_equal(np.concatenate(parts), tw.pack(w, fmt))


def test_degenerate_groups():
    zero, huge = np.zeros((3, 40), np.float32), np.full((3, 40), 1e9, np.float32)
    tiny = np.full((3, 40), 1e-30, np.float32)
    for fmt in INTEGER_FORMATS:
        np.testing.assert_array_equal(tw.unpack(tw.pack(zero, fmt), fmt, 3, 40), zero)
        assert np.isfinite(tw.unpack(tw.pack(huge, fmt), fmt, 3, 40)).all()
        assert np.abs(tw.unpack(tw.pack(tiny, fmt), fmt, 3, 40)).max() < 1e-6


def test_padding_is_the_offset_and_scale_zero():
    for fmt in INTEGER_FORMATS:
        codes, scales, mins = tw.unpack_codes(tw.pack(random_matrix(5, 20, 1), fmt), fmt, *fmt.padded(5, 20))
        assert (codes[5:] == fmt.code_offset).all() and (codes[:, 20:] == fmt.code_offset).all()
        assert not scales[5:].any() and (mins is None or not mins[5:].any())


def test_mxfp4_ties_go_to_the_even_nibble():
    values = np.array([0.5, 1.5, 2.5, 3.5, 5, 7, 10, 12] * 4, np.float32)[None]
    codes, scales, _ = tw.quantize(values, Format("mxfp4", 32))
    assert scales[0, 0] == 1  # floor(log2 12) - 3
    assert [MXFP4_VALUES[c] for c in codes[0, :8]] == [0, 2, 2, 4, 4, 8, 8, 12]


def test_bf16_rounds_to_nearest_even_and_keeps_nan():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800001, 0xFF800000, 0x7F7FFFFF], np.uint32)
    assert [hex(v) for v in tw.to_bf16(bits.view(np.float32))] == [
        "0x3f80", "0x3f82", "0x3f81", "0x7fc0", "0xff80", "0x7f80",
    ]  # fmt: skip

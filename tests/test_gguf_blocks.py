"""Dequantization against the ``gguf`` package, and exact or bounded repacking into our formats."""

import gguf
import numpy as np
import pytest

from tidegate.checkpoint import gguf_blocks
from tidegate.errors import BadTensor
from tidegate.quant import pack

ROWS, K = 24, 512
QUANTIZED = [name for name in gguf_blocks.READABLE if gguf_blocks.native_format(name)]
EXACT = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"]
K_QUANTS = [name for name in QUANTIZED if name not in EXACT]
F16_FIELDS = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
              "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "MXFP4": []}  # fmt: skip


def random_blocks(dtype, seed, rows=ROWS, k=K):
    """Random bytes with sane float16 fields: every code and every packed scale occurs."""
    kind = gguf_blocks.BLOCK_TYPES[dtype]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows * k // kind.weights, kind.nbytes), np.uint8)
    for field in F16_FIELDS[dtype]:
        values = (rng.standard_normal(len(raw)) * 1e-3).astype(np.float16)
        raw[:, field : field + 2] = values.view(np.uint8).reshape(-1, 2)
    if dtype == "MXFP4":
        raw[:, 0] = rng.integers(104, 144, len(raw))
    return raw.reshape(-1)


def oracle(dtype, raw, rows=ROWS, k=K):
    return gguf.quants.dequantize(raw.reshape(rows, -1), gguf.GGMLQuantizationType[dtype]).reshape(rows, k)


def test_sizes_are_those_of_the_gguf_package():
    for kind, (weights, nbytes) in gguf.GGML_QUANT_SIZES.items():
        ours = gguf_blocks.BLOCK_TYPES[kind.name]
        assert (ours.weights, ours.nbytes) == (weights, nbytes), kind.name


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_dequantize_is_bit_exact(dtype):
    raw = random_blocks(dtype, 1)
    got, want = gguf_blocks.dequantize(dtype, raw, ROWS, K), oracle(dtype, raw)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_plain_floats(dtype):
    values = np.random.default_rng(0).standard_normal((ROWS, K)).astype(np.float32)
    stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType[dtype])
    raw = np.ascontiguousarray(stored).view(np.uint8).reshape(-1)
    want = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[dtype])
    np.testing.assert_array_equal(gguf_blocks.dequantize(dtype, raw, ROWS, K), want)


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_integers_and_floats_have_no_codes(dtype):
    assert gguf_blocks.native_format(dtype) is None
    with pytest.raises(BadTensor, match=dtype):
        gguf_blocks.codes(dtype, np.zeros(64, np.uint8), 1, 16)


@pytest.mark.parametrize("dtype", EXACT)
def test_repacking_is_exact(dtype):
    raw = random_blocks(dtype, 2)
    codes, scales, mins, fmt = gguf_blocks.codes(dtype, raw, ROWS, K)
    assert fmt == gguf_blocks.native_format(dtype)
    assert codes.shape == (ROWS, K) and scales.shape == (ROWS, K // fmt.group) and (mins is not None) == fmt.has_min
    np.testing.assert_array_equal(pack.dequantize(codes, scales, mins, fmt), oracle(dtype, raw))
    packed = pack.pack_codes(codes, scales, mins, fmt)
    np.testing.assert_array_equal(pack.unpack(packed, fmt, ROWS, K), oracle(dtype, raw))


@pytest.mark.parametrize("dtype", K_QUANTS)
def test_repacking_k_quants_loses_less_than_a_thousandth(dtype):
    raw = random_blocks(dtype, 3, 256, 1024)
    codes, scales, mins, fmt = gguf_blocks.codes(dtype, raw, 256, 1024)
    got, want = pack.dequantize(codes, scales, mins, fmt), oracle(dtype, raw, 256, 1024)
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 1e-3


@pytest.mark.parametrize(("dtype", "middle"), [("Q2_K", 1.5), ("Q4_K", 7.5), ("Q5_K", 15.5)])
def test_repacking_loses_as_little_when_scale_and_minimum_cancel(dtype, middle):
    """Real weights have mean zero, so that minimum = -middle code * scale and their rounding errors weigh double."""
    raw = random_blocks(dtype, 5, 256, 1024).reshape(-1, gguf_blocks.BLOCK_TYPES[dtype].nbytes)
    d, dmin = F16_FIELDS[dtype]
    step = np.abs(raw[:, d : d + 2].copy().view(np.float16).astype(np.float32))
    raw[:, d : d + 2] = step.astype(np.float16).view(np.uint8)
    raw[:, dmin : dmin + 2] = (step * middle).astype(np.float16).view(np.uint8)
    if dtype == "Q2_K":
        raw[:, :16] = (raw[:, :16] & 15) * 17
    else:
        raw[:, 8:12], raw[:, 12:16] = raw[:, 4:8], (raw[:, 12:16] & 15) * 17
    codes, scales, mins, fmt = gguf_blocks.codes(dtype, raw.reshape(-1), 256, 1024)
    got, want = pack.dequantize(codes, scales, mins, fmt), oracle(dtype, raw.reshape(-1), 256, 1024)
    assert abs(want.mean()) < 0.1 * want.std()
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 1e-3


def mxfp4(exponent, nibble_byte):
    return np.array([exponent] + [nibble_byte] * 16, np.uint8)


def test_mxfp4_tiny_scales_are_rounded_within_2_to_the_minus_24():
    raw = np.concatenate([np.concatenate([[e], np.random.default_rng(e).integers(0, 256, 16)]) for e in range(90, 110)])
    raw = raw.astype(np.uint8)
    codes, scales, _, fmt = gguf_blocks.codes("MXFP4", raw, 20, 32)
    error = np.abs(pack.dequantize(codes, scales, None, fmt) - oracle("MXFP4", raw, 20, 32))
    assert error.max() <= 2.0**-24 and (error[14:] == 0).all()


def test_mxfp4_huge_scales_are_refused_unless_the_block_is_zero():
    codes, scales, _, _ = gguf_blocks.codes("MXFP4", mxfp4(200, 0x80), 1, 32)
    assert scales[0, 0] == 0 and ((codes & 7) == 0).all()
    with pytest.raises(BadTensor, match="MXFP4"):
        gguf_blocks.codes("MXFP4", mxfp4(144, 0x11), 1, 32)


def test_a_scale_beyond_float16_is_refused():
    raw = random_blocks("Q6_K", 4, 1, 256)
    raw[192:208], raw[208:210] = 127, np.array([60000], np.float16).view(np.uint8)
    with pytest.raises(BadTensor, match="float16"):
        gguf_blocks.codes("Q6_K", raw, 1, 256)


@pytest.mark.parametrize("dtype", ["IQ4_XS", "TQ1_0", "NOPE"])
def test_unreadable_types_say_so(dtype):
    with pytest.raises(BadTensor, match=f"{dtype} cannot be read"):
        gguf_blocks.dequantize(dtype, np.zeros(256, np.uint8), 1, 256)

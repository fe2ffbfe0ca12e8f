"""Sources: rectangles of tensors stacked into matrices, read by rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.checkpoint.base import Checkpoint, TensorInfo
from tidegate.checkpoint.sources import Part, Source
from tidegate.errors import BadTensor
from tidegate.quant import pack as tw
from tidegate.quant.formats import Format


class MemoryCheckpoint(Checkpoint):
    """Arrays by name, read by rows as Checkpoint says; 'q.*' tensors have int8-g16 codes."""

    kind, path, config = "hf", "memory", {}

    def __init__(self, **arrays):
        self.arrays = arrays
        self.tensors = {n: TensorInfo(n, a.shape, "F32", self.path, 0, a.nbytes) for n, a in arrays.items()}

    def _rows(self, name):
        array = self.arrays[name]
        return array.reshape(-1, 1) if array.ndim == 1 else array.reshape(-1, array.shape[-1])

    def read_raw(self, name, start=0, stop=None):
        return self._rows(name)[start:stop].reshape(-1).view(np.uint8)

    def read_f32(self, name, start=0, stop=None):
        return self._rows(name)[start:stop].copy()

    def native_format(self, name):
        return Format("int8", 16) if name.startswith("q") else None

    def read_codes(self, name, start=0, stop=None):
        return tw.quantize(self._rows(name)[start:stop], Format("int8", 16))

    def tokenizer_json(self): ...
    def chat_template(self): ...
    def special_tokens(self): ...


RNG = np.random.default_rng(0)
FUSED = RNG.standard_normal((3, 8, 4)).astype(np.float32)  # [E, 2F, D]
TURNED = RNG.standard_normal((3, 4, 8)).astype(np.float32)  # [E, D, 2F]
BIAS = RNG.standard_normal((3, 8)).astype(np.float32)  # [E, 2F]
KV_B = RNG.standard_normal((10, 6)).astype(np.float32)  # 2 heads of (nope 3 + v 2), kv_lora 6
NORM = RNG.standard_normal(5).astype(np.float32)
QA = RNG.standard_normal((6, 32)).astype(np.float32)
QB = RNG.standard_normal((3, 32)).astype(np.float32)
CK = MemoryCheckpoint(fused=FUSED, turned=TURNED, bias=BIAS, kv_b=KV_B, norm=NORM, qa=QA, qb=QB)

CASES = {
    "whole": (Source.of("kv_b"), KV_B),
    "flattened": (Source.of("fused"), FUSED.reshape(24, 4)),
    "vector": (Source.of("norm"), NORM[:, None]),
    "up of fused": (Source.of(Part("fused", index=1, rows=(4, None, 1))), FUSED[1, 4:]),
    "interleaved and turned": (
        Source.of(Part("turned", index=2, cols=(1, None, 2), transpose=True)),
        TURNED[2].T[1::2],
    ),
    "interleaved bias": (Source.of(Part("bias", index=1, rows=(0, None, 2))), BIAS[1, ::2, None]),
    "k_up": (
        Source.of(*(Part("kv_b", rows=(h * 5, h * 5 + 3, 1), transpose=True) for h in range(2))),
        np.concatenate([KV_B[0:3].T, KV_B[5:8].T]),
    ),
    "v_up": (Source.of(*(Part("kv_b", rows=(h * 5 + 3, h * 5 + 5, 1)) for h in range(2))), KV_B[[3, 4, 8, 9]]),
    "stacked": (Source.of("qa", Part("qb", rows=(0, None, 2))), np.concatenate([QA, QB[::2]])),
}


@pytest.mark.parametrize("name", CASES)
def test_every_row_range_reads_what_numpy_says(name):
    source, wanted = CASES[name]
    assert source.shape(CK) == wanted.shape
    for start in range(len(wanted)):
        for stop in range(start + 1, len(wanted) + 1):
            got = source.read_f32(CK, start, stop)
            np.testing.assert_array_equal(got, wanted[start:stop])
            assert got.flags.c_contiguous


def test_codes_follow_rows_and_steps():
    source, wanted = CASES["stacked"]
    assert source.native_format(CK) == Format("int8", 16)
    for got, want in zip(source.read_codes(CK, 2, 8)[:2], tw.quantize(wanted[2:8], Format("int8", 16)), strict=False):
        np.testing.assert_array_equal(got, want)
    assert Source.of("qa", "kv_b").native_format(CK) is None
    assert Source.of(Part("qa", transpose=True)).native_format(CK) is None
    assert Source.of(Part("qa", cols=(0, 16, 1))).native_format(CK) is None


@given(rows=st.tuples(st.integers(0, 9), st.integers(0, 10), st.integers(1, 4)), transpose=st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_span(rows, transpose):
    part = Part("kv_b", rows=rows, cols=(1, 6, 2), transpose=transpose)
    wanted = KV_B[slice(*rows), 1:6:2]
    wanted = wanted.T if transpose else wanted
    assert part.shape(CK) == wanted.shape
    if wanted.size:
        np.testing.assert_array_equal(Source.of(part).read_f32(CK), wanted)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Source.of("nothing"), "nothing is missing"),
        (Source.of(Part("fused", index=3)), "entry 3 is needed"),
        (Source.of(Part("kv_b", rows=(0, 11, 1))), "10 rows, 0:11"),
        (Source.of("kv_b", "qa"), r"disagree.*kv_b \[10, 6\], qa \[6, 32\]"),
    ],
)
def test_what_does_not_fit_is_named(source, message):
    with pytest.raises(BadTensor, match=message):
        source.shape(CK)

"""What the tests of conversion share."""

import numpy as np
import pytest

from tidegate.checkpoint.convert import ConvertOptions
from tidegate.checkpoint.convert import pack as pack_module
from tidegate.checkpoint.convert import partial as partial_module
from tidegate.checkpoint.inventory import dense_tensors
from tidegate.checkpoint.open import open_checkpoint
from tidegate.checkpoint.store import ExpertStore
from tidegate.experts.base import ExpertKey
from tidegate.models.families import model_config, weight_map
from tidegate.quant import pack as tw

EXACT = ConvertOptions(experts="f32", dense="f32")
DEFAULT = ConvertOptions()


@pytest.fixture
def small_blocks(monkeypatch):
    """Many blocks and many syncs even for tiny checkpoints."""
    monkeypatch.setattr(pack_module, "BLOCK_WEIGHTS", 1500)
    monkeypatch.setattr(partial_module, "_SYNC_BYTES", 20_000)


def check_store(src, dst):
    """Every byte of the store, recomputed from whole matrices with the numpy twins."""
    store, checkpoint = ExpertStore.open(dst), open_checkpoint(src)
    weights = weight_map(checkpoint, model_config(checkpoint.config))

    def wanted(source, fmt):
        if fmt is None:
            return source.read_f32(checkpoint).reshape(-1).view(np.uint8)
        if fmt == source.native_format(checkpoint):
            return tw.pack_codes(*source.read_codes(checkpoint), fmt)
        return tw.pack(source.read_f32(checkpoint), fmt)

    for tensor in dense_tensors(store.config):
        packed = wanted(weights.dense(tensor.name), store.dense[tensor.name].fmt)
        np.testing.assert_array_equal(store.read_dense(tensor.name), packed, tensor.name)
        assert packed.size == store.dense[tensor.name].nbytes
    for layer, layout in enumerate(store.layouts):
        for expert in range(store.config.moe.num_experts):
            blob, sources = store.read_blob(ExpertKey(layer, expert)), weights.expert(layer, expert)
            parts = [(0, sources.gate, layout.fmt), (layout.up_offset, sources.up, layout.fmt)]
            parts.append((layout.down_offset, sources.down, layout.down_fmt))
            at = layout.bias_offset
            for bias in (sources.gate_bias, sources.up_bias, sources.down_bias) if layout.has_bias else ():
                parts.append((at, bias, None))
                at += -(-4 * bias.shape(checkpoint)[0] // 64) * 64
            expected = np.zeros(layout.blob_bytes, np.uint8)
            for offset, source, fmt in parts:
                packed = wanted(source, fmt)
                expected[offset : offset + packed.size] = packed
            np.testing.assert_array_equal(blob, expected)
    store.verify()
    return store


def tree(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

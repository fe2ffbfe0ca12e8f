"""The reference backend's rules against torch and transformers, on inputs that the tiny models do not reach."""

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.phimoe.modeling_phimoe import sparsemixer

import checkpoints
from tidegate.backends.operands import KvLayout
from tidegate.backends.reference import ReferenceBackend
from tidegate.backends.reference_math import choose, gated_activation, quantize_activations
from tidegate.model_config import MoeConfig

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_activations_are_torchs(name):
    gate = np.concatenate([np.linspace(-30, 30, 4001), [0.0, -0.0, 1e-30, 88.0, -88.0]]).astype(np.float32)
    up = RNG.standard_normal(gate.shape).astype(np.float32)
    act = torch.nn.SiLU() if name == "silu" else torch.nn.GELU("tanh" if name == "gelu_tanh" else "none")
    wanted = (act(torch.tensor(gate).double()) * torch.tensor(up)).float().numpy()
    np.testing.assert_allclose(gated_activation(gate, up, (name, 0.0, 0.0)), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("shift", [-3.0, 0.0, 3.0])
def test_sparsemixer_is_transformers(jitter, shift):
    logits = (RNG.standard_normal((500, 16)) + shift).astype(np.float32)
    logits[::7, 3] = 0
    moe = MoeConfig(16, 2, 8, scoring="sparsemixer", router_jitter=jitter)
    ids, weights = choose(logits, None, moe)
    want_weights, want_ids = sparsemixer(torch.tensor(logits), jitter, training=False)
    assert np.array_equal(ids, want_ids.numpy())
    np.testing.assert_allclose(weights, want_weights.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_group_limited_sigmoid_routing_is_transformers(spread):
    config = checkpoints.build("deepseek_v3").config
    router = DeepseekV3TopkRouter(config)
    router.weight.data = torch.eye(config.n_routed_experts, config.hidden_size)
    router.e_score_correction_bias.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    x = torch.tensor(RNG.standard_normal((300, config.hidden_size)) * spread).float()
    logits, want_weights, want_ids = router(x)
    moe = MoeConfig(
        config.n_routed_experts, 4, 8, scoring="sigmoid", normalize_topk=True, routed_scaling=config.routed_scaling_factor,
        num_groups=4, topk_groups=2, group_score="top2_sum", has_correction_bias=True,
    )  # fmt: skip
    ids, weights = choose(logits.detach().numpy(), router.e_score_correction_bias.numpy(), moe)
    order = np.argsort(ids, axis=1)
    want_order = np.argsort(want_ids.numpy(), axis=1)
    assert np.array_equal(np.take_along_axis(ids, order, 1), np.take_along_axis(want_ids.numpy(), want_order, 1))
    got, want = (
        np.take_along_axis(w, o, 1) for w, o in ((weights, order), (want_weights.detach().numpy(), want_order))
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_ties_go_to_the_lower_expert():
    for scoring in ("softmax", "topk_softmax", "sigmoid", "sparsemixer"):
        ids, _ = choose(np.zeros((1, 8), np.float32), None, MoeConfig(8, 2, 8, scoring=scoring))
        assert ids.tolist() == [[0, 1]]


def test_activations_are_quantized_to_the_last_code():
    x = np.array([[127.0, -127.0, 0.5, 1.5, -2.5, 0, 0, 0, *[0.0] * 8, *[0.0] * 8]], np.float32)
    codes, scales = quantize_activations(x, 16)
    assert scales.tolist() == [[1.0, 0.0]] and codes[0, 1].tolist() == [0] * 16
    assert codes[0, 0, :5].tolist() == [127, -127, 0, 2, -2]  # half to even


def test_kv_pages_may_have_room_to_spare():
    """The arena rounds areas up; bytes behind the last whole page are nobody's."""
    layout = KvLayout(num_layers=3, kv_heads=1, k_dim=20, v_dim=0)
    backend = ReferenceBackend()
    backend.bind_kv(layout, np.zeros(2 * layout.page_bytes + 64, np.uint8))
    assert len(backend._keys.read(0, slice(None))) == 2

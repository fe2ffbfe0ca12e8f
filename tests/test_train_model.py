"""The training forward pass against transformers, its hand-written gradients against autograd, int4 and the routers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tidegate.train.model import Model, moe_entry, rms_norm  # noqa: E402
from tidegate.train.moe import Router, assign_with_capacity  # noqa: E402
from tidegate.train.optimizer import orthogonalise  # noqa: E402
from tidegate.train.options import Architecture, RouterOptions  # noqa: E402
from tidegate.train.quantization import fake_int4  # noqa: E402
from tidegate.train.weights import Buffers, initialise, parameters_of  # noqa: E402

MICRO = Architecture(
    vocab_size=96, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    num_experts=6, num_experts_per_tok=2, expert_size=32, max_positions=64,
)  # fmt: skip


def build(options: RouterOptions, seed: int = 0) -> tuple[Model, dict[str, torch.Tensor]]:
    parameters = parameters_of(MICRO)
    masters = Buffers(parameters, "master")
    initialise(masters.views(), parameters, options, seed)
    weights, gradients = Buffers(parameters, "weight"), Buffers(parameters, "gradient")
    for name, view in weights.views().items():
        view.copy_(masters.views()[name])
    routers = [Router(MICRO, options) for _ in range(MICRO.num_layers)]
    return Model(MICRO, routers, parameters, weights, gradients, 16), masters.views()


def test_logits_and_gradients_agree_with_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from tidegate.train.export import hub_config, hub_tensors  # noqa: PLC0415

    options = RouterOptions(balance_alpha=0.0, z_loss=0.0)
    model, masters = build(options)
    for view in masters.values():
        view.copy_(view.bfloat16())
    config = transformers.Qwen3MoeConfig(**hub_config(MICRO))
    oracle = transformers.Qwen3MoeForCausalLM(config).float()
    tensors = hub_tensors(masters, MICRO, quantized=False)
    merged = fuse_experts({name: tensor.float() for name, tensor in tensors.items()})
    missing, unexpected = oracle.load_state_dict(merged, strict=False)
    assert not unexpected
    assert missing in ([], ["lm_head.weight"])
    ids = torch.randint(0, 96, (3, 17), generator=torch.Generator().manual_seed(1))
    result = model.loss(ids[:, :-1], ids[:, 1:])
    result.loss.backward()
    logits = oracle(input_ids=ids[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, 96), ids[:, 1:].reshape(-1))
    expected.backward()
    assert abs(result.nll.item() - expected.item()) < 0.01
    theirs = dict(oracle.named_parameters())
    pairs = {
        "layers.1.gate_up": "model.layers.1.mlp.experts.gate_up_proj",
        "layers.0.down": "model.layers.0.mlp.experts.down_proj",
        "layers.0.router": "model.layers.0.mlp.gate.weight",
        "layers.0.output": "model.layers.0.self_attn.o_proj.weight",
        "embedding": "model.embed_tokens.weight",
        "layers.1.query_norm": "model.layers.1.self_attn.q_norm.weight",
    }
    for ours, their in pairs.items():
        gradient, wanted = model.gradients[ours].float(), theirs[their].grad
        # bfloat16 products send a few tokens of a near tie to another expert
        assert torch.nn.functional.cosine_similarity(gradient.flatten(), wanted.flatten(), 0) > 0.95, ours
        assert abs(gradient.norm() / wanted.norm() - 1) < 0.1, ours


def fuse_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The fused names that transformers keeps in memory."""
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(MICRO.num_layers):
        at = f"model.layers.{layer}.mlp.experts."
        parts = {
            kind: [tensors[f"{at}{e}.{kind}_proj.weight"] for e in range(MICRO.num_experts)]
            for kind in ("gate", "up", "down")
        }
        both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        result[at + "gate_up_proj"], result[at + "down_proj"] = torch.stack(both), torch.stack(parts["down"])
    return result


def test_what_a_router_reads() -> None:
    x_TD = 3 * torch.randn(5, 32, generator=torch.Generator().manual_seed(0)) + 1
    norm, router_ED = torch.linspace(0.5, 2, 32), torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    inputs = ("plain", "centered", "standard")
    plain, centered, standard = (moe_entry(x_TD, norm, router_ED, 1e-6, name)[1] for name in inputs)
    hidden_TD = rms_norm(x_TD, norm, 1e-6)
    middle_TD = hidden_TD - hidden_TD.mean(-1, keepdim=True)
    assert torch.allclose(plain, hidden_TD @ router_ED.T, atol=1e-5)
    assert torch.allclose(centered, middle_TD @ router_ED.T, atol=1e-5)
    assert torch.allclose(standard, middle_TD / middle_TD.std(-1, keepdim=True, correction=0) @ router_ED.T, atol=1e-4)
    # a scale a token changes weights, never the order of experts
    assert torch.equal(centered.argsort(-1), standard.argsort(-1))


def test_evaluate_equals_the_training_loss() -> None:
    model, _ = build(RouterOptions())
    ids = torch.randint(0, 96, (2, 17), generator=torch.Generator().manual_seed(2))
    nll_T, load_LE = model.evaluate(ids[:, :-1], ids[:, 1:])
    assert abs(nll_T.mean().item() - model.loss(ids[:, :-1], ids[:, 1:]).nll.item()) < 1e-3
    assert torch.allclose(load_LE.sum(-1), torch.ones(MICRO.num_layers))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.floats(1.0, 3.0))
def test_capacity_is_kept_and_experts_of_a_token_differ(seed: int, tokens: int, factor: float) -> None:
    options = RouterOptions(capacity_factor=factor)
    scores = torch.softmax(3 * torch.randn(tokens, 6, generator=torch.Generator().manual_seed(seed)), -1)
    capacity = options.capacity(tokens, MICRO)
    chosen = assign_with_capacity(scores, 2, capacity)
    assert all(len(set(row)) == 2 for row in chosen.tolist())
    over = torch.bincount(chosen.flatten(), minlength=6) - capacity
    assert over.clamp_min(0).sum() <= 6  # only a tight factor's last tokens may exceed it
    if factor >= 2:
        assert over.max() <= 0


def test_plenty_of_capacity_is_plain_top_k() -> None:
    scores = torch.softmax(torch.randn(30, 6, generator=torch.Generator().manual_seed(0)), -1)
    assert torch.equal(assign_with_capacity(scores, 2, 30), scores.topk(2).indices)


def test_bias_moves_towards_idle_experts() -> None:
    router = Router(MICRO, RouterOptions(bias_rate=0.1))
    load = torch.tensor([1.0, 0, 0, 0, 0, 0])
    router.update_bias(load)
    assert router.bias_E.tolist() == pytest.approx([-0.1, 0.1, 0.1, 0.1, 0.1, 0.1])


def test_window_load_forgets_by_token() -> None:
    options = RouterOptions(balance_scope="window", window_tokens=4, window_decay=0.5)
    router = Router(MICRO, options)
    load = router._window_load(torch.tensor([[0, 1], [2, 3]]))
    assert load.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 3, 1 / 3, 0, 0])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(1e-3, 1e3))
def test_int4_values_survive_bfloat16_and_a_second_quantization(seed: int, scale: float) -> None:
    master = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(seed)) * scale
    once = fake_int4(master)
    groups = (master - once).view(-1, 32).abs().amax(-1)
    steps = master.view(-1, 32).abs().amax(-1) / 8
    assert bool((groups <= steps * 1.05).all())
    stored = once.bfloat16().float()
    again = fake_int4(stored)
    assert torch.allclose(again, once, rtol=1e-6, atol=0)
    assert torch.equal(fake_int4(torch.zeros(1, 32)), torch.zeros(1, 32))


def test_orthogonalise_pushes_singular_values_to_one() -> None:
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(x).float())
    assert values.min() > 0.5
    assert values.max() < 1.4


def test_tokenizer_round_trips(tmp_path: Path) -> None:
    from tidegate.train.tokenizer import train_tokenizer, write_tokens  # noqa: PLC0415

    texts = ["def f(x):\n    return x + 1\n" * 20, "The quick brown fox. " * 30, "床前明月光，疑是地上霜。" * 20]
    tokenizer = train_tokenizer(iter(texts), 400)
    for text in [*texts, "😀🏳️‍🌈 \x00\x07\t\r\n", "שלום עולם", "a" * 4096, " \u00a0 \n\n  x", "e\u0301"]:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    (tmp_path / "c.jsonl").write_text('{"text": "one<|im_end|>"}\n{"text": "two"}\n')
    count = write_tokens(tokenizer, tmp_path / "c.jsonl", tmp_path / "c.u16")
    ids = np.fromfile(tmp_path / "c.u16", dtype="<u2")
    assert len(ids) == count
    assert list(ids).count(0) == 2
    assert list(ids).count(tokenizer.token_to_id("<|im_end|>")) == 1

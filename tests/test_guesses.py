"""Gates that guess at routers: their biases follow what the routers say beyond them, in every backend."""

import numpy as np
import pytest

from attention_cases import cpu_backend
from tidegate.backends.base import Backend, Norm, Router
from tidegate.backends.reference import ReferenceBackend
from tidegate.experts.gates_file import own_gates_bytes, pack_gates
from tidegate.experts.lookahead import AHEAD, AT_START
from tidegate.model_config import MoeConfig
from tidegate.models import guesses
from tidegate.models.guesses import Gates, own_gates
from tidegate.models.weights import MoeWeights

HIDDEN, EXPERTS, TOP_K, TOKENS = 64, 32, 4, 40
PLAIN = MoeConfig(EXPERTS, TOP_K, 8, "softmax")
GROUPS = MoeConfig(EXPERTS, TOP_K, 8, "sigmoid", num_groups=4, topk_groups=2, has_correction_bias=True)


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _layers(moe: MoeConfig) -> list[MoeWeights]:
    def router(layer: int) -> Router:
        correction_E = 0.1 * _normal(20 + layer, EXPERTS) if moe.has_correction_bias else None
        return Router(_normal(10 + layer, EXPERTS, HIDDEN), None, correction_E, moe)

    norm = Norm(np.ones(HIDDEN, np.float32), None, 1e-6)
    return [MoeWeights(layer, norm, router(layer), None, None, None) for layer in range(2)]


def _found(backend: Backend, moe: MoeConfig, rows: int) -> np.ndarray:
    """By distance the share of the second layer's experts that the gates named in the later tokens. What lies between the states
    that they see and the one that the router sees is the same for every token."""
    layers = _layers(moe)
    memory = np.zeros(own_gates_bytes(2, EXPERTS, HIDDEN), np.uint8)
    guesser = Gates(backend, layers, pack_gates(own_gates(layers), memory, 1), moe)
    from_numpy = backend.compute.from_numpy if hasattr(backend, "compute") else np.asarray
    attention_D, shares = 1.5 * _normal(1, HIDDEN), {AT_START: [], AHEAD: []}
    for token in range(TOKENS):
        x_TD = _normal(100 + token, rows, HIDDEN)
        assert guesser.at_start(0, from_numpy(x_TD)) is None, "nothing is known of the first layer"
        seen, _ = backend.norm_route(from_numpy(x_TD), layers[0].norm, layers[0].router)
        guesses = [guesser.after_route(0, seen), guesser.at_start(1, from_numpy(x_TD))]
        seen, routing = backend.norm_route(from_numpy(x_TD + attention_D), layers[1].norm, layers[1].router)
        assert guesser.after_route(1, seen) is None, "there is no third layer"
        for guess in guesses:
            assert guess is not None and guess.layer == 1
            named = [set(one[:TOP_K]) for one in guess.experts_TG]
            right = [len(one & set(ids)) for one, ids in zip(named, routing.topk_expert_ids_TK.tolist(), strict=True)]
            shares[guess.distance].append(sum(right) / (TOP_K * rows))
    return np.array([np.mean(shares[distance][TOKENS // 2 :]) for distance in (AT_START, AHEAD)])


@pytest.mark.parametrize("moe", [PLAIN, GROUPS], ids=["plain", "groups"])
@pytest.mark.parametrize("rows", [1, 3])
def test_biases_follow_what_the_routers_say_beyond_the_gates(
    moe: MoeConfig, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, cpu = _found(ReferenceBackend(), moe, rows), _found(cpu_backend(), moe, rows)
    np.testing.assert_allclose(reference, cpu, atol=0.03)
    monkeypatch.setattr(guesses._Gate, "follow", lambda self, said_E, rows: None)
    fixed = _found(cpu_backend(), moe, rows)
    print(f"named by gates with biases that follow {cpu.round(2)}, with fixed ones {fixed.round(2)}")
    assert (cpu > fixed + 0.2).all() and (cpu > 0.75).all()

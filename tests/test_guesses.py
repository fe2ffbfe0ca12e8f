"""Gates that guess at routers: their biases follow what the routers say beyond them, in every backend."""

import numpy as np
import pytest

from attention_cases import cpu_backend
from tidegate.backends.base import Backend
from tidegate.backends.cpu_attention import _NativeGate
from tidegate.backends.operands import Norm, Router
from tidegate.backends.reference import ReferenceBackend
from tidegate.checkpoint.store import Blob
from tidegate.experts.base import CacheCounters
from tidegate.experts.cache import ExpertCache
from tidegate.experts.gates_file import own_gates_bytes, pack_gates
from tidegate.experts.loader import LoaderOptions, NativeLoader
from tidegate.experts.lookahead import AHEAD, AT_START, Lookahead
from tidegate.experts.policy import POLICIES
from tidegate.model_config import MoeConfig
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
        seen, routing = backend.norm_route(from_numpy(x_TD), layers[0].norm, layers[0].router)
        guesses = [guesser.after_route(0, seen, routing.said_E), guesser.at_start(1, from_numpy(x_TD))]
        seen, routing = backend.norm_route(from_numpy(x_TD + attention_D), layers[1].norm, layers[1].router)
        assert guesser.after_route(1, seen, routing.said_E) is None, "there is no third layer"
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
    monkeypatch.setattr(_NativeGate, "follow", lambda self, heard_E: None)
    fixed = _found(cpu_backend(), moe, rows)
    print(f"named by gates with biases that follow {cpu.round(2)}, with fixed ones {fixed.round(2)}")
    assert (cpu > fixed + 0.2).all() and (cpu > 0.75).all()


class _Disk:
    """A loader of experts of one page each. Loads are waited for when they are asked for."""

    def __init__(self, path) -> None:
        (path / "experts").write_bytes(bytes(4096 * 2 * EXPERTS))
        self.paths = [path / "experts"]
        memory = np.zeros(4096 * (2 * EXPERTS + 1), np.uint8)
        skip = -memory.ctypes.data % 4096
        slots = [memory[skip + 4096 * slot : skip + 4096 * (slot + 1)] for slot in range(2 * EXPERTS)]
        self.loader = NativeLoader(self, slots, LoaderOptions(chunk_bytes=4096))

    def blob(self, key) -> Blob:
        return Blob(0, 4096 * (EXPERTS * key.layer + key.expert), 4096, 0)

    def settle(self, cache) -> None:
        for layer in range(2):
            for expert in cache.residents(layer):
                self.loader.wait(cache.book(layer).slot_of(expert))


def _prefetched(path, policy: str, slots: int, *, natively: bool) -> tuple[list[list[int]], list[bytes], CacheCounters]:
    """What one token after the other needs and has in memory; the gates' biases; and the counters."""
    backend, layers, disk = cpu_backend(), _layers(PLAIN), _Disk(path)
    memory = np.zeros(own_gates_bytes(2, EXPERTS, HIDDEN), np.uint8)
    linears = pack_gates(own_gates(layers), memory, 1)
    guesser = Gates(backend, layers, linears, PLAIN)
    cache = ExpertCache([slots] * 2, EXPERTS, POLICIES[policy], disk.loader, share=True)
    lookahead = Lookahead(cache, TOP_K, lambda: 0.1)
    sights = guesser.sights(lookahead.odds, lookahead.natives()) if natively else None
    from_numpy, seen = backend.compute.from_numpy, []
    attention_D = 0.5 * _normal(1, HIDDEN)

    def told(guess) -> None:
        for ranked, margins in zip(guess.experts_TG, guess.margins_TG, strict=True) if guess else ():
            lookahead.foresee(guess.layer, guess.distance, ranked, margins)

    for token in range(3 * TOKENS):
        backend.compute.release(0)
        lookahead.begin_step(1)
        for layer in range(2):
            x = _normal(100 + token, 1, HIDDEN) + layer * attention_D
            if sights is None:
                told(guesser.at_start(layer, from_numpy(x)))
            else:
                sights[layer].at_start(from_numpy(x))
            disk.settle(cache)
            x = from_numpy(x + attention_D)
            normed, routing = backend.norm_route(x, layers[layer].norm, layers[layer].router)
            needed = sorted(routing.topk_expert_ids_TK[0].tolist())
            if sights is None:
                visit = cache.visit(layer, needed, [needed])
                next(visit)
                lookahead.after_route(layer, needed)
                told(guesser.after_route(layer, normed, routing.said_E))
                disk.settle(cache)
                visit.close()
            else:
                if layer == 0:
                    cache.deal()
                native = cache.native(layer)
                assert native.serves(needed, 1) and native.serves(needed, 17) == (slots == EXPERTS)
                native.visit(needed)
                native.cancel_refuted()
                sights[layer].after_route(normed, needed, routing.said_E)
                disk.settle(cache)
                native.leave(needed)
            seen.append([*needed, *sorted(cache.resident(layer)), *sorted(cache.resident(1)), cache.capacity(0)])
    cache.check_integrity()
    disk.loader.close()
    return seen, [linear.bias.tobytes() for linear in linears.values()], cache.counters


@pytest.mark.parametrize("policy", ["decayed-lfu", "lru", "lfu", "lfru"])
def test_one_token_natively_is_the_same(tmp_path, policy: str) -> None:
    plain, native = (_prefetched(tmp_path, policy, EXPERTS // 2, natively=natively) for natively in (False, True))
    assert plain == native
    assert native[2].prefetch_hits > 20 and native[2].prefetch_dropped > 20 and native[2].misses > 20


@pytest.mark.parametrize("policy", ["decayed-lfu", "resident-set"])
def test_one_token_natively_is_the_same_where_nothing_is_evicted(tmp_path, policy: str) -> None:
    plain, native = (_prefetched(tmp_path, policy, EXPERTS, natively=natively) for natively in (False, True))
    assert plain == native and native[2].prefetch_hits > 0 and native[2].evictions == 0


def test_a_gate_refuses_what_does_not_fit(tmp_path) -> None:
    layers, disk = _layers(PLAIN), _Disk(tmp_path)
    memory = np.zeros(own_gates_bytes(2, EXPERTS, HIDDEN), np.uint8)
    linear, backend = pack_gates(own_gates(layers), memory, 1)["start.1"], cpu_backend()
    for top_k, most in ((0, 4), (5, 4), (4, EXPERTS + 1)):
        with pytest.raises(ValueError, match="top_k"):
            backend.make_gate(linear, None, top_k, most)
    gate = backend.make_gate(linear, None, TOP_K, 2 * TOP_K)
    lookahead = Lookahead(ExpertCache([4] * 2, EXPERTS, POLICIES["decayed-lfu"], disk.loader), TOP_K, lambda: 0.0)
    here = lookahead.natives()[0]
    with pytest.raises(ValueError, match="cache"):
        backend.make_sight(lookahead.odds, 0, (None, None, gate), (here, None))
    sight = backend.make_sight(lookahead.odds, 1, (gate, None, None), (here, None))
    with pytest.raises(ValueError, match="one row"):
        sight.at_start(backend.compute.from_numpy(_normal(0, 2, HIDDEN)))
    others = ExpertCache([4] * 2, EXPERTS, POLICIES["resident-set"], disk.loader)
    assert Lookahead(others, TOP_K, lambda: 0.0).natives() is None
    disk.loader.close()

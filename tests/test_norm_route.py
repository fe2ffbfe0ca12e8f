"""Norm and routing of the cpu backend against the reference, in every batch, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import cpu_backend
from tidegate import _core
from tidegate.backends.operands import Norm, Router
from tidegate.backends.reference import ReferenceBackend
from tidegate.model_config import MoeConfig

ISAS = _core.available_isas()
REFERENCE = ReferenceBackend()


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def cpu_norm(backend, x, norm):
    return backend.compute.numpy(backend.norm(backend.compute.from_numpy(x), norm)).copy()


@given(st.integers(1, 400), st.integers(1, 40), st.sampled_from(["rms", "layer"]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_norm(width, tokens, kind, has_bias):
    x = normal(width, tokens, width) * 3 + np.float32(0.5)
    norm = Norm(normal(1, width), normal(2, width) if has_bias and kind == "layer" else None, 1e-5, kind)
    want = REFERENCE.norm(x, norm)
    results = [cpu_norm(cpu_backend(isa=isa), x, norm) for isa in ISAS]
    np.testing.assert_allclose(results[0], want, rtol=2e-5, atol=1e-5)
    single = cpu_backend(threads=1)
    by_token = np.concatenate([cpu_norm(single, x[t : t + 1], norm) for t in range(tokens)])
    for result in [*results[1:], by_token]:
        assert result.tobytes() == results[0].tobytes()


def test_norm_of_another_width_is_refused():
    with pytest.raises(ValueError, match="another width"):
        cpu_norm(cpu_backend(), normal(0, 2, 8), Norm(normal(1, 9), None, 1e-5))


@st.composite
def routers(draw):
    scoring = draw(st.sampled_from(["softmax", "topk_softmax", "sigmoid", "sparsemixer"]))
    groups = draw(st.sampled_from([1, 1, 2, 4])) if scoring in ("softmax", "sigmoid") else 1
    experts = groups * draw(st.integers(3, 33))
    topk_groups = draw(st.integers(1, groups))
    top_k = 2 if scoring == "sparsemixer" else draw(st.integers(1, min(8, experts // groups * topk_groups)))
    seed = draw(st.integers(0, 10_000))
    has_bias = draw(st.booleans())
    has_correction = scoring == "sigmoid" and draw(st.booleans())
    config = MoeConfig(
        num_experts=experts,
        num_experts_per_tok=top_k,
        expert_dim=8,
        scoring=scoring,
        normalize_topk=scoring != "sparsemixer" and draw(st.booleans()),
        routed_scaling=1.0 if scoring == "sparsemixer" else draw(st.sampled_from([1.0, 2.5])),
        num_groups=groups,
        topk_groups=topk_groups,
        group_score=draw(st.sampled_from(["max", "top2_sum"])),
        has_router_bias=has_bias,
        has_correction_bias=has_correction,
        router_jitter=0.01 if draw(st.booleans()) else 0.3,
    )
    hidden = draw(st.integers(1, 150))
    weight = normal(seed, experts, hidden) / np.float32(hidden**0.5)
    if draw(st.booleans()):
        weight[experts // 2 :] = weight[: experts - experts // 2]  # ties
    bias = normal(seed + 1, experts) if has_bias else None
    correction = normal(seed + 2, experts) if has_correction else None
    return Router(weight, bias, correction, config)


def exact_input(seed, tokens, hidden):
    """Few bits, so that equal weights give equal logits in every order of sums."""
    return np.random.default_rng(seed).integers(-3, 4, (tokens, hidden)).astype(np.float32)


@given(routers(), st.integers(1, 70), st.sampled_from(ISAS))
@settings(max_examples=150, deadline=None)
def test_route(router, tokens, isa):
    x = exact_input(tokens, tokens, router.weight_ED.shape[1])
    want = REFERENCE.route(x, router)
    backend = cpu_backend(isa=isa)
    got = backend.route(backend.compute.from_numpy(x), router)
    np.testing.assert_allclose(got.said_E, want.said_E, rtol=1e-4, atol=1e-4)
    assert got.topk_expert_ids_TK.dtype == np.int32 and got.topk_weights_TK.dtype == np.float32
    assert got.topk_expert_ids_TK.shape == got.topk_weights_TK.shape == want.topk_expert_ids_TK.shape
    same = (got.topk_expert_ids_TK == want.topk_expert_ids_TK).all(axis=1)
    # Rounding of a logit may swap two experts that are nearly equal, hardly ever: never more than a token of this few.
    assert (~same).sum() <= 1
    np.testing.assert_allclose(got.topk_weights_TK[same], want.topk_weights_TK[same], rtol=1e-4, atol=1e-6)


@given(routers(), st.integers(2, 100))
@settings(max_examples=40, deadline=None)
def test_routing_does_not_depend_on_the_batch_threads_or_isa(router, tokens):
    x = normal(3, tokens, router.weight_ED.shape[1])
    whole = cpu_backend(isa=ISAS[0])
    want = whole.route(whole.compute.from_numpy(x), router)
    for backend in [cpu_backend(threads=1, isa=isa) for isa in ISAS]:
        for rows in (slice(0, 1), slice(tokens // 2, tokens)):
            got = backend.route(backend.compute.from_numpy(x[rows]), router)
            assert got.topk_expert_ids_TK.tobytes() == want.topk_expert_ids_TK[rows].tobytes()
            assert got.topk_weights_TK.tobytes() == want.topk_weights_TK[rows].tobytes()


def test_ties_go_to_the_lower_expert():
    router = Router(np.zeros((6, 4), np.float32), None, None, MoeConfig(6, 3, 8, "topk_softmax"))
    backend = cpu_backend()
    routing = backend.route(backend.compute.from_numpy(normal(0, 2, 4)), router)
    assert routing.topk_expert_ids_TK.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(routing.topk_weights_TK, 1 / 3)


def test_more_experts_than_the_groups_hold_are_refused():
    config = MoeConfig(8, 3, 8, "sigmoid", num_groups=4, topk_groups=1)
    backend = cpu_backend()
    with pytest.raises(ValueError, match="cannot choose 3 of 2 experts"):
        backend.route(backend.compute.from_numpy(normal(0, 1, 4)), Router(normal(0, 8, 4), None, None, config))


@given(st.integers(1, 5), st.integers(1, 70), st.integers(0, 1000), st.booleans(), st.data())
@settings(max_examples=80, deadline=None)
def test_ranks_and_margins(tokens, experts, seed, has_ties, data):
    top_k = data.draw(st.integers(1, experts))
    most = data.draw(st.integers(top_k, experts))
    scores = normal(seed, tokens, experts) * 20
    if has_ties:
        scores = np.rint(scores / 20)
    backend = cpu_backend()
    ids, margins = backend.rank(backend.compute.from_numpy(scores), top_k, most)
    want_ids, want_margins = REFERENCE.rank(scores, top_k, most)
    assert ids == want_ids
    np.testing.assert_allclose(margins, want_margins, atol=1 / 256)
    assert (np.float16(margins) == np.array(margins)).all() and np.abs(margins).max() <= 8
    sorted_rows = -np.sort(-scores, axis=1)
    if most > top_k and (sorted_rows[:, top_k - 1] > sorted_rows[:, top_k] + 1).all():
        assert (np.array(margins)[:, :top_k] > 0).all() and (np.array(margins)[:, top_k:] < 0).all()


def test_an_impossible_ranking_is_refused():
    backend = cpu_backend()
    scores = backend.compute.from_numpy(normal(0, 1, 4))
    for top_k, most in ((0, 2), (3, 2), (1, 5)):
        with pytest.raises(ValueError, match="top_k <= most"):
            backend.rank(scores, top_k, most)

"""The sampler against the definitions: distributions, ties, penalties, determinism."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.config import SamplingOptions
from tidegate.engine.sampler import choose, penalized, sample, uniform
from tidegate.engine.sequence import Sampled, Sequence


def _sequence(prompt: list[int], answer: list[int] = [], **options: object) -> Sequence:  # noqa: B006
    sequence = Sequence(0, prompt, 1000, SamplingOptions(**options))  # type: ignore[arg-type]
    for token in answer:
        sequence.append(Sampled(token))
    return sequence


def _probabilities(x: np.ndarray, options: SamplingOptions) -> np.ndarray:
    """Softmax with temperature, then every filter by its definition, in plain loops."""
    p = np.exp((x - x.max()) / options.temperature)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    kept = order[: options.top_k or None]
    total, reached, nucleus = sum(p[i] for i in kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        reached += p[i]
        if reached >= options.top_p * total:
            break
    final = [i for i in nucleus if p[i] >= options.min_p * p[order[0]]]
    out = np.zeros(len(x))
    out[final] = p[final] / p[final].sum()
    return out


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_draws_follow_the_distribution(options: dict[str, float]) -> None:
    wanted = SamplingOptions(**options)  # type: ignore[arg-type]
    x = np.random.default_rng(1).normal(0, 2, 20)
    x[3] = x[7]  # a tie
    draws = 20_000
    counts = np.bincount([choose(x, wanted, position) for position in range(draws)], minlength=20)
    p = _probabilities(x, wanted)
    assert not counts[p == 0].any()
    sigma = np.sqrt(draws * p * (1 - p)) + 1
    assert (np.abs(counts - draws * p) < 5 * sigma).all()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=50),
    st.floats(0.05, 5), st.integers(0, 10), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**63 - 1), st.integers(0, 10**6),
)  # fmt: skip
def test_only_allowed_tokens_are_drawn(values, temperature, top_k, top_p, min_p, seed, position) -> None:
    options = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    x = np.array(values)
    token = choose(x, options, position)
    assert token == choose(x.copy(), options, position)
    rank = sorted(range(len(x)), key=lambda i: (-x[i], i)).index(token)
    assert top_k == 0 or rank < top_k
    assert np.exp((x[token] - x.max()) / temperature) >= min_p * (1 - 1e-9)


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    x = np.array([0.0, 5.0, 5.0, 1.0])
    assert choose(x, SamplingOptions(), 0) == 1
    assert choose(x, SamplingOptions(temperature=1.0, top_k=1), 0) == 1


def test_penalties() -> None:
    logits = np.array([2.0, -2.0, 1.0, 3.0], np.float32)
    got = penalized(
        logits, _sequence([0, 1], [3, 3], repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    )
    assert got.tolist() == [1.0, -4.0, 1.0, 1.5 - 0.5 - 2 * 0.25]
    assert logits.tolist() == [2.0, -2.0, 1.0, 3.0], "the model's logits stay as they are"


def test_logprobs_are_the_models_own() -> None:
    logits = np.random.default_rng(2).normal(0, 3, 40).astype(np.float32)
    got = sample(logits, _sequence([1], temperature=1.0, logprobs=4, repetition_penalty=1.7))
    p = np.log(np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum())
    assert got.logprob == pytest.approx(p[got.token_id], abs=1e-9)
    assert [i for i, _ in got.top] == np.argsort(-p)[:4].tolist()
    assert [v for _, v in got.top] == pytest.approx(sorted(p, reverse=True)[:4], abs=1e-9)


def test_uniform_is_uniform_and_depends_on_seed_and_position() -> None:
    drawn = np.array([uniform(seed, position) for seed in range(50) for position in range(200)])
    assert len(set(drawn)) == len(drawn)
    counts = np.bincount((drawn * 10).astype(int), minlength=10)
    assert abs(counts - 1000).max() < 150

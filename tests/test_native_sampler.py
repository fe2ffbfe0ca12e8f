"""The native sampler chooses what the plain one chooses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate import _core
from tidegate.config import SamplingOptions
from tidegate.engine import native_sampler, sampler
from tidegate.engine.sequence import Sampled, Sequence


@st.composite
def cases(draw):
    vocabulary = draw(st.sampled_from([1, 2, 30, 500, 5000]))
    options = SamplingOptions(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5, 50.0])),
        top_k=draw(st.sampled_from([0, 1, 2, 40, 600])),
        top_p=draw(st.sampled_from([0.0, 0.1, 0.7, 0.95, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.2, -0.1])),
        seed=draw(st.integers(0, 2**63)),
        logprobs=draw(st.sampled_from([None, 0, 1, 7])),
    )
    generator = np.random.default_rng(draw(st.integers(0, 10_000)))
    logits = generator.normal(0, draw(st.sampled_from([0.1, 3.0, 30.0])), vocabulary).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits)  # many ties
    sequence = Sequence(0, generator.integers(0, vocabulary, 5).tolist(), 1000, options)
    for token in generator.integers(0, vocabulary, draw(st.integers(0, 30))).tolist():
        sequence.append(Sampled(token))
    return logits, sequence


@given(cases())
@settings(max_examples=500, deadline=None)
def test_same_choice_as_the_plain_sampler(case):
    logits, sequence = case
    want, got = sampler.sample(logits, sequence), native_sampler.sample(logits, sequence)
    assert got.token_id == want.token_id
    assert [token for token, _ in got.top] == [token for token, _ in want.top]
    if want.logprob is not None:
        assert got.logprob == pytest.approx(want.logprob, rel=1e-12, abs=1e-12)
        np.testing.assert_allclose([p for _, p in got.top], [p for _, p in want.top], rtol=1e-12, atol=1e-12)


def test_tokens_beyond_the_vocabulary_are_refused():
    logits = np.zeros(4, np.float32)
    with pytest.raises(IndexError, match="token 4"):
        _core.choose_token(logits, 0.0, 0, 1.0, 0.0, 0.0, repetition=2.0, seen=np.array([4], np.int32))
    with pytest.raises(IndexError, match="token -1"):
        _core.choose_token(
            logits,
            0.0,
            0,
            1.0,
            0.0,
            0.0,
            presence=1.0,
            counted=np.array([-1], np.int32),
            counts=np.array([1], np.int32),
        )
    with pytest.raises(IndexError, match="token 9"):
        _core.log_probs(logits, 9, 1)

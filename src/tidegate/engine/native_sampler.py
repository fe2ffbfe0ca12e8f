"""The sampler of sampler.py in the native core: the same choices, without sorting or copying the vocabulary in Python."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate import _core
from tidegate.engine.sampler import F32Array, uniform
from tidegate.engine.sequence import Sampled, Sequence

I32Array = NDArray[np.int32]


def sample(logits_V: F32Array, sequence: Sequence) -> Sampled:
    """The next token of ``sequence``; see sampler.sample."""
    options = sequence.sampling
    counted, counts = _counts(sequence)
    token = _core.choose_token(
        logits_V,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        uniform=0.0 if options.temperature == 0.0 else uniform(options.seed, len(sequence.tokens)),
        repetition=options.repetition_penalty,
        presence=options.presence_penalty,
        frequency=options.frequency_penalty,
        seen=None if options.repetition_penalty == 1.0 else np.array(sequence.tokens, np.int32),
        counted=counted,
        counts=counts,
    )
    if options.logprobs is None:
        return Sampled(token)
    (_, logprob), *top = _core.log_probs(logits_V, token, options.logprobs)
    return Sampled(token, logprob, tuple(top))


def _counts(sequence: Sequence) -> tuple[I32Array | None, I32Array | None]:
    """Tokens of the answer and how often each was chosen, if a penalty asks for them."""
    options, counts = sequence.sampling, sequence.output_counts
    if not (options.presence_penalty or options.frequency_penalty):
        return None, None
    return np.fromiter(counts.keys(), np.int32, len(counts)), np.fromiter(counts.values(), np.int32, len(counts))

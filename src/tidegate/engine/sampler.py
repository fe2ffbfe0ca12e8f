"""How the next token is chosen: the plain numpy version, which defines correct.

Order: repetition, presence and frequency penalties; temperature; top-k; top-p; min-p; draw. Every draw depends only on
the sequence's own logits, its seed and the token's position: never on the batch, the budget or the clock.
Ties go to the lower token id. Arithmetic is float64 in one fixed order. V vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate.config import SamplingOptions
from tidegate.engine.sequence import Sampled, Sequence

F32Array = NDArray[np.float32]
F64Array = NDArray[np.float64]
_MASK = (1 << 64) - 1
# Behind a first weight of 1, a weight below 2**-54 changes no running sum in float64, so it can never be drawn.
_NEGLIGIBLE = -54 * float(np.log(2.0))


def sample(logits_V: F32Array, sequence: Sequence) -> Sampled:
    """The next token of ``sequence``, given the logits behind its last token. Log probabilities, when asked for, are
    the model's own: before penalties and temperature."""
    options = sequence.sampling
    if options.is_plain_greedy:
        token = int(np.argmax(logits_V))
    else:
        token = choose(penalized(logits_V, sequence), options, len(sequence.tokens))
    if options.logprobs is None:
        return Sampled(token)
    return _with_logprobs(logits_V, token, options.logprobs)


def penalized(logits_V: F32Array, sequence: Sequence) -> F64Array:
    """A float64 copy. ``repetition_penalty`` divides positive and multiplies negative logits of every token of prompt
    and answer; presence and frequency penalties count the answer only."""
    x_V, options = logits_V.astype(np.float64), sequence.sampling
    if options.repetition_penalty != 1.0:
        seen = np.unique(np.array(sequence.tokens, np.int64))
        values = x_V[seen]
        x_V[seen] = np.where(values > 0, values / options.repetition_penalty, values * options.repetition_penalty)
    if (options.presence_penalty or options.frequency_penalty) and sequence.output_counts:
        ids = np.fromiter(sequence.output_counts.keys(), np.int64)
        counts = np.fromiter(sequence.output_counts.values(), np.float64)
        x_V[ids] -= options.presence_penalty + options.frequency_penalty * counts
    return x_V


def choose(x_V: F64Array, options: SamplingOptions, position: int) -> int:
    """Draw from penalized logits."""
    if options.temperature == 0.0 or options.top_k == 1:
        return int(np.argmax(x_V))
    scaled_V = (x_V - x_V.max()) / options.temperature
    ids = np.flatnonzero(scaled_V >= _NEGLIGIBLE)
    ids = ids[np.argsort(-scaled_V[ids], kind="stable")]
    if options.top_k:
        ids = ids[: options.top_k]
    weights = np.exp(scaled_V[ids])
    sums = np.cumsum(weights)
    if options.top_p < 1.0:
        keep = int(np.searchsorted(sums, options.top_p * sums[-1])) + 1
        ids, weights, sums = ids[:keep], weights[:keep], sums[:keep]
    if options.min_p > 0.0:
        keep = max(1, int(np.count_nonzero(weights >= options.min_p)))
        ids, sums = ids[:keep], sums[:keep]
    drawn = uniform(options.seed, position) * sums[-1]
    return int(ids[min(int(np.searchsorted(sums, drawn, side="right")), len(ids) - 1)])


def _with_logprobs(logits_V: F32Array, token: int, num_top: int) -> Sampled:
    x_V = logits_V.astype(np.float64)
    x_V -= x_V.max()
    x_V -= np.log(np.exp(x_V).sum())
    best = np.argsort(-x_V, kind="stable")[:num_top]
    return Sampled(token, float(x_V[token]), tuple((int(i), float(x_V[i])) for i in best))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from seed and position alone (splitmix64)."""
    return (_splitmix64(_splitmix64(seed) ^ position) >> 11) * 2.0**-53


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)

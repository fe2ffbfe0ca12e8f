"""The attention half of a layer. T tokens of the step, D hidden."""

from __future__ import annotations

from typing import Generic

from tidegate.backends.base import A, Backend
from tidegate.backends.operands import AttentionHalf
from tidegate.models.weights import LatentAttentionWeights


class GroupedAttention(Generic[A]):
    """Grouped-query attention: norm, one projection to q, k and v, attention over the cached pages, output projection."""

    def __init__(self, weights: AttentionHalf, backend: Backend[A]) -> None:
        self._weights, self._backend = weights, backend

    def __call__(self, x: A) -> A:
        """[T, D] -> [T, D], to be added to x. Writes the step's keys and values."""
        return self._backend.attention(x, self._weights)


class LatentAttention(Generic[A]):
    """Multi-head latent attention (DeepSeek-V2): the cache holds one compressed row a token, shared by all heads."""

    def __init__(self, weights: LatentAttentionWeights, backend: Backend[A]) -> None:
        self._weights, self._backend = weights, backend

    def __call__(self, x: A) -> A:
        """[T, D] -> [T, D], to be added to x. Writes the step's latents."""
        backend, weights = self._backend, self._weights
        x = backend.norm(x, weights.norm)
        q = backend.linear(x, weights.q)
        if weights.q_norm is not None and weights.q_b is not None:
            q = backend.linear(backend.norm(q, weights.q_norm), weights.q_b)
        kv = backend.linear(x, weights.kv)
        return backend.linear(backend.attend_latent(q, kv, weights.attention), weights.out)

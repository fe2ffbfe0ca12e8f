"""Which experts of a layer work together, and groups of them.

Legend: T rows, L MoE layers, E experts of a layer.
"""

from __future__ import annotations

import numpy as np

from tidegate.sim.rows import Array, Rows


def co_activation(rows: Rows) -> Array:
    """float64 [L, E, E]: how often two experts of a layer served the same token; the diagonal is each one's uses."""
    out = np.zeros((rows.num_layers, rows.num_experts, rows.num_experts))
    for layer in range(rows.num_layers):
        hot_TE = rows.hot(slice(layer, layer + 1))[:, 0].astype(np.float32)
        out[layer] = hot_TE.T @ hot_TE
    return out


def lift(pairs_LEE: Array, num_tokens: int) -> Array:
    """Co-activation over what independent experts with the same loads would show; 1 where nothing is known."""
    uses_LE = np.diagonal(pairs_LEE, axis1=1, axis2=2)
    expected = uses_LE[:, :, None] * uses_LE[:, None, :] / max(1, num_tokens)
    out: Array = np.divide(pairs_LEE, expected, out=np.ones_like(pairs_LEE), where=expected > 0)
    return out


def grouped(pairs_LEE: Array, num_groups: int) -> Array:
    """int64 [L, E]: the group of every expert. Average-link clustering on lift, groups of at most twice the mean size."""
    num_layers, num_experts, _ = pairs_LEE.shape
    num_tokens = int(np.diagonal(pairs_LEE, axis1=1, axis2=2).sum(axis=1).max())
    lift_LEE = lift(pairs_LEE, num_tokens)
    largest = 2 * -(-num_experts // num_groups)
    return np.stack([_cluster(lift_LEE[layer], num_groups, largest) for layer in range(num_layers)])


def _cluster(lift_EE: Array, num_groups: int, largest: int) -> Array:
    """Merge the two groups with the highest mean lift until ``num_groups`` are left or no merge is small enough."""
    num_experts = len(lift_EE)
    group_E, size_E = np.arange(num_experts), np.ones(num_experts, np.int64)
    link = lift_EE.copy()
    np.fill_diagonal(link, -np.inf)
    for _ in range(num_experts - num_groups):
        allowed = np.where(size_E[:, None] + size_E[None] <= largest, link, -np.inf)
        a, b = divmod(int(allowed.argmax()), num_experts)
        if allowed[a, b] == -np.inf:
            break
        merged = (size_E[a] * link[a] + size_E[b] * link[b]) / (size_E[a] + size_E[b])
        link[a] = link[:, a] = merged
        link[b] = link[:, b] = link[a, a] = -np.inf
        size_E[a] += size_E[b]
        group_E[group_E == b] = a
    out: Array = np.unique(group_E, return_inverse=True)[1]
    return out

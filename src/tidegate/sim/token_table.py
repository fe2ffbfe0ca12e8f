"""Counts of expert use by input token.

Legend: T rows, L MoE layers, E experts of a layer, N tokens of the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tidegate.sim.rows import Array, Rows

MOST_TOKENS, LEAST_USES, _PRIOR_USES = 2048, 4, 8.0


@dataclass(frozen=True)
class TokenCounts:
    """``uses_NLE[n]``: how often token ``tokens[n]``, seen ``seen_N[n]`` times, used each expert."""

    tokens: Array
    seen_N: Array
    uses_NLE: Array
    prior_LE: Array

    def table(self) -> Array:
        """float16: frequencies shrunk to the prior, as if every token had been seen a few times more with it."""
        total_N11 = (self.seen_N + _PRIOR_USES)[:, None, None]
        table: Array = ((self.uses_NLE + _PRIOR_USES * self.prior_LE) / total_N11).astype(np.float16)
        return table

    def without_itself(self, token_T: Array, hot_TLE: Array) -> Array:
        """float32 [T, L, E]: each row's table entry as it would be had that very row not been counted."""
        row_of = {int(token): row for row, token in enumerate(self.tokens)}
        index_T = np.array([row_of.get(int(token), -1) for token in token_T])
        known_T = index_T >= 0
        uses_TLE = self.uses_NLE[index_T].astype(np.float32) - hot_TLE
        total_T = self.seen_N[index_T] - 1 + _PRIOR_USES
        mixed = (uses_TLE + np.float32(_PRIOR_USES) * self.prior_LE) / total_T[:, None, None].astype(np.float32)
        out: Array = np.where(known_T[:, None, None], mixed, self.prior_LE)
        return out.astype(np.float32)


def count_tokens(rows: Rows) -> TokenCounts:
    """The most frequent tokens that were seen at least a few times; the prior is over all rows."""
    values, inverse, seen = np.unique(rows.token_T, return_inverse=True, return_counts=True)
    chosen = np.argsort(-seen, kind="stable")[:MOST_TOKENS]
    chosen = np.sort(chosen[seen[chosen] >= LEAST_USES])
    row_of_value = np.full(len(values), len(chosen))
    row_of_value[chosen] = np.arange(len(chosen))
    row_T = row_of_value[inverse]
    uses = np.zeros((len(chosen) + 1, rows.num_layers, rows.num_experts), np.int32)
    for layer in range(rows.num_layers):
        for column in range(rows.num_experts_per_tok):
            np.add.at(uses[:, layer], (row_T, rows.experts_TLK[:, layer, column]), 1)
    prior_LE = (uses.sum(axis=0) / len(rows.token_T)).astype(np.float32)
    return TokenCounts(values[chosen], seen[chosen], uses[:-1], prior_LE)

"""A trace's rows as whole arrays, for analysis and fitting; the start of a long trace is enough for both.

Legend: T rows, L MoE layers, E experts of a layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.errors import UsageError
from tidegate.experts.trace import TraceChunk
from tidegate.sim.batching import sequences

Array = NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """Sequence after sequence: ``offsets[i]:offsets[i+1]`` are the rows of sequence ``ids[i]`` in order of position."""

    ids: list[int]
    offsets: Array
    token_T: Array
    experts_TLK: Array
    sketch_TLS: Array
    num_experts: int

    @property
    def num_layers(self) -> int:
        return int(self.experts_TLK.shape[1])

    @property
    def num_experts_per_tok(self) -> int:
        return int(self.experts_TLK.shape[2])

    @property
    def is_first(self) -> Array:
        """True where a sequence begins."""
        first = np.zeros(len(self.token_T), bool)
        first[self.offsets[:-1][np.diff(self.offsets) > 0]] = True
        return first

    def hot(self, layers: slice = slice(None)) -> Array:
        """uint8 [T, L, E]: 1 where the token used the expert."""
        experts_TLK = self.experts_TLK[:, layers]
        out = np.zeros((*experts_TLK.shape[:2], self.num_experts), np.uint8)
        np.put_along_axis(out, experts_TLK.astype(np.int64), 1, axis=2)
        return out

    def part(self, start: int, stop: int) -> Rows:
        """Sequences start..stop."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return replace(
            self, ids=self.ids[start:stop], offsets=self.offsets[start : stop + 1] - first,
            token_T=self.token_T[first:last], experts_TLK=self.experts_TLK[first:last],
            sketch_TLS=self.sketch_TLS[first:last],
        )  # fmt: skip

    def split(self, held_out_ratio: float) -> tuple[Rows, Rows]:
        """(fit, held out): the last sequences, at least one, with about this share of the tokens. Raises UsageError with a
        single sequence."""
        count = len(self.ids)
        if count < 2:
            raise UsageError("the trace has a single sequence; holding some out needs two at least")
        cut = int(np.searchsorted(self.offsets, (1 - held_out_ratio) * len(self.token_T), side="right")) - 1
        cut = min(max(cut, 1), count - 1)
        return self.part(0, cut), self.part(cut, count)


def read_rows(chunks: Iterable[TraceChunk], num_experts: int, most_tokens: int | None = None) -> Rows:
    """Whole sequences from the start until there are ``most_tokens``; the last one is cut. Raises UsageError if empty."""
    taken, total = [], 0
    for one in sequences(chunks):
        left = len(one.token_T) if most_tokens is None else most_tokens - total
        if left <= 0:
            break
        taken.append((one.sequence, one.token_T[:left], one.experts_TLK[:left], one.sketch_TLS[:left]))
        total += len(taken[-1][1])
    if not total:
        raise UsageError("the trace has no tokens")
    ids, *columns = zip(*taken, strict=True)
    offsets = np.cumsum([0, *map(len, columns[0])])
    token_T, experts_TLK, sketch_TLS = map(np.concatenate, columns)
    return Rows(list(ids), offsets, token_T, experts_TLK, sketch_TLS, num_experts)


def decayed_before(hot_TLE: Array, is_first_T: Array, fade: float) -> Array:
    """float16 [T, L, E]: decayed counts as they were before each token, from 0 at a sequence's start; as ``History`` keeps
    them."""
    out = np.zeros(hot_TLE.shape, np.float16)
    heat = np.zeros(hot_TLE.shape[1:], np.float32)
    for t, hot in enumerate(hot_TLE):
        if is_first_T[t]:
            heat[:] = 0
        out[t] = heat
        heat *= fade
        heat += hot * np.float32(1 - fade)
    return out


def last_before(hot_TLE: Array, is_first_T: Array) -> Array:
    """The token before's experts, zeros where a sequence begins."""
    out = np.zeros_like(hot_TLE)
    out[1:] = hot_TLE[:-1]
    out[is_first_T] = 0
    return out


def window_before(hot_TLE: Array, is_first_T: Array, window: int) -> Array:
    """float16 [T, L, E]: share of the up to ``window`` tokens before, same sequence, that used the expert."""
    totals = np.concatenate([np.zeros((1, *hot_TLE.shape[1:]), np.int32), np.cumsum(hot_TLE, axis=0, dtype=np.int32)])
    index = np.arange(len(hot_TLE))
    begin = np.maximum.accumulate(np.where(is_first_T, index, 0))
    low = np.maximum(begin, index - window)
    seen = np.maximum(index - low, 1)
    share: Array = (totals[index] - totals[low]) / seen[:, None, None]
    return share.astype(np.float16)

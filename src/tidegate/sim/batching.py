"""Other batch sizes than the recorded one: the sequences of a trace, decoded side by side.

First come, first served, as the engine's scheduler does with decoding sequences: up to B run, everybody gets one token a
step, and who ends makes room for the next. Legend: T tokens (rows), L MoE layers, K experts per token, R layers ahead, G guesses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tidegate.experts.trace import TraceChunk
from tidegate.sim.replay import Array, Step, needed


@dataclass(frozen=True)
class Recorded:
    """One sequence of a trace: token int32 [T], experts [T, L, K], sketch [T, L, S], guesses and margins [T, L, R, G]."""

    sequence: int
    token_T: Array
    experts_TLK: Array
    sketch_TLS: Array
    guesses_TLRG: Array
    margins_TLRG: Array


def sequences(chunks: Iterable[TraceChunk]) -> Iterator[Recorded]:
    """Every sequence, in order. One that runs beside others is gathered whole, so memory holds as many as ran at a time."""
    open_parts: dict[int, list[tuple[Array, ...]]] = {}
    for chunk in chunks:
        order = np.argsort(chunk.sequence, kind="stable")
        ids, first = np.unique(chunk.sequence[order], return_index=True)
        rows_of = dict(zip(ids.tolist(), np.split(order, first[1:]), strict=True))
        for sequence in [one for one in open_parts if one not in rows_of]:
            yield _joined(sequence, open_parts.pop(sequence))
        for sequence in dict.fromkeys(chunk.sequence.tolist()):
            rows = rows_of[sequence]
            columns = (chunk.token, chunk.experts, chunk.sketch, chunk.guesses, chunk.margins)
            open_parts.setdefault(sequence, []).append(tuple(column[rows] for column in columns))
    for sequence, parts in open_parts.items():
        yield _joined(sequence, parts)


def _joined(sequence: int, parts: Sequence[tuple[Array, ...]]) -> Recorded:
    return Recorded(sequence, *(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def batched(chunks: Iterable[TraceChunk], batch: int) -> Iterator[Step]:
    """Steps of up to ``batch`` rows, each of another sequence."""
    source = sequences(chunks)
    running: list[tuple[Recorded, int]] = []
    while True:
        while len(running) < batch and (one := next(source, None)) is not None:
            running.append((one, 0))
        if not running:
            return
        experts_TLK = np.stack([one.experts_TLK[at] for one, at in running])
        sketch_TLS, guesses_TLRG, margins_TLRG = (
            np.stack([getattr(one, name)[at] for one, at in running])
            for name in ("sketch_TLS", "guesses_TLRG", "margins_TLRG")
        )
        ids, tokens = [one.sequence for one, _ in running], [int(one.token_T[at]) for one, at in running]
        yield Step(ids, tokens, experts_TLK, sketch_TLS, guesses_TLRG, margins_TLRG, needed(experts_TLK))
        running = [(one, at + 1) for one, at in running if at + 1 < len(one.token_T)]

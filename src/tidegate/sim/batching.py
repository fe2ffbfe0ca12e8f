"""Other batch sizes than the recorded one: the sequences of a trace, decoded side by side.

First come, first served, as the engine's scheduler does with decoding sequences: up to B run, everybody gets one token a
step, and who ends makes room for the next. Legend: T tokens (rows), L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tidegate.experts.trace import TraceChunk
from tidegate.sim.replay import Step, needed


def sequences(chunks: Iterable[TraceChunk]) -> Iterator[tuple[int, list[int], np.ndarray]]:
    """(sequence id, tokens, experts [T, L, K]) of every sequence whose rows lie together, in order. A sequence that runs
    beside others is gathered whole, so memory holds as many as ran at a time."""
    open_parts: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for chunk in chunks:
        order = np.argsort(chunk.sequence, kind="stable")
        ids, first = np.unique(chunk.sequence[order], return_index=True)
        rows_of = dict(zip(ids.tolist(), np.split(order, first[1:]), strict=True))
        for sequence in [one for one in open_parts if one not in rows_of]:
            yield _joined(sequence, open_parts.pop(sequence))
        for sequence in dict.fromkeys(chunk.sequence.tolist()):
            rows = rows_of[sequence]
            open_parts.setdefault(sequence, []).append((chunk.token[rows], chunk.experts[rows]))
    for sequence, parts in open_parts.items():
        yield _joined(sequence, parts)


def _joined(sequence: int, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[int, list[int], np.ndarray]:
    return sequence, np.concatenate([t for t, _ in parts]).tolist(), np.concatenate([e for _, e in parts])


def batched(chunks: Iterable[TraceChunk], batch: int) -> Iterator[Step]:
    """Steps of up to ``batch`` rows, each of another sequence."""
    source = sequences(chunks)
    running: list[tuple[int, list[int], np.ndarray]] = []
    at: list[int] = []
    while True:
        while len(running) < batch and (one := next(source, None)) is not None:
            running.append(one)
            at.append(0)
        if not running:
            return
        experts_TLK = np.stack([experts[i] for (_, _, experts), i in zip(running, at, strict=True)])
        tokens = [tokens[i] for (_, tokens, _), i in zip(running, at, strict=True)]
        yield Step([sequence for sequence, _, _ in running], tokens, experts_TLK, needed(experts_TLK))
        at = [i + 1 for i in at]
        left = [row for row, (_, tokens, _) in enumerate(running) if at[row] < len(tokens)]
        running, at = [running[row] for row in left], [at[row] for row in left]

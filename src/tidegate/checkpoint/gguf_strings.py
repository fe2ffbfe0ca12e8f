"""Finds the strings of a GGUF array without making Python objects of them."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

ByteArray = NDArray[np.uint8]
IntArray = NDArray[np.int64]

_WALK_BYTES = 1 << 17
_SLOW_RUN = 1024  # strings walked one by one where the vectorised walk cannot go on


def string_spans(data: ByteArray, count: int) -> tuple[IntArray, IntArray]:
    """Begin and end of each of up to ``count`` strings (u64 length, then bytes) laid end to end from ``data[0]``.

    Stops early where ``data`` ends inside a string. A length below 65536 has six zero bytes on top, text hardly ever
    has six; so every run of zeros proposes a string that starts where the run ends, and the proposals are right as
    long as each length leads exactly to the next one. Where it does not (two empty strings in a row, a text with
    zeros, a longer one), a stretch is walked one by one.
    """
    begins: list[IntArray] = []
    ends: list[IntArray] = []
    at, left = 0, count
    while left > 0 and at + 8 <= len(data):
        for walk in (_walk_by_zero_runs, _walk_one_by_one):
            first, last = walk(data[at:], left)
            if len(first):
                break
        else:
            break
        begins.append(first + at)
        ends.append(last + at)
        at += int(last[-1])
        left -= len(first)
    nothing = np.empty(0, np.int64)
    return np.concatenate([nothing, *begins]), np.concatenate([nothing, *ends])


def _walk_by_zero_runs(data: ByteArray, count: int) -> tuple[IntArray, IntArray]:
    data = data[:_WALK_BYTES]
    zero = data == 0
    two = zero[:-1] & zero[1:]
    four = two[:-2] & two[2:]
    six = four[:-2] & two[4:]
    begins = np.flatnonzero(six[:-1] & ~zero[6:])[:count] + 6
    if len(begins) == 0 or begins[0] != 8:
        return begins[:0], begins[:0]
    ends = begins + data[begins - 8] + 256 * data[begins - 7].astype(np.int64)
    chained = begins[1:] == ends[:-1] + 8
    good = 1 + (len(chained) if chained.all() else int(np.argmin(chained)))
    good = int(np.searchsorted(ends[:good], len(data), side="right"))
    return begins[:good], ends[:good]


def _walk_one_by_one(data: ByteArray, count: int) -> tuple[IntArray, IntArray]:
    view, at, spans = data.data, 0, []
    for _ in range(min(count, _SLOW_RUN)):
        if at + 8 > len(data):
            break
        end = at + 8 + int(struct.unpack_from("<Q", view, at)[0])
        if end > len(data):
            break
        spans.append((at + 8, end))
        at = end
    both = np.array(spans, np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]

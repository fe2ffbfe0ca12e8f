"""The dense weights of a store, in memory."""

from __future__ import annotations

from math import prod

import numpy as np

from tidegate import _core
from tidegate.backends.operands import ByteArray, F32Array
from tidegate.checkpoint.reading import read_into
from tidegate.checkpoint.store import ExpertStore
from tidegate.errors import CorruptFile
from tidegate.quant.formats import Format


def read_dense(store: ExpertStore, section: ByteArray, *, page_cache: bool, verify: bool) -> None:
    """Fill ``section``, which has ``store.dense_bytes``. Raises ReadFailed, and with ``verify`` CorruptFile naming the tensor."""
    read_into(store.dense_path, 0, section, page_cache=page_cache)
    for entry in store.dense.values() if verify else ():
        got = _core.crc32(section[entry.offset : entry.offset + entry.nbytes])
        if got != entry.crc32:
            what = f"checksum of {entry.name}"
            raise CorruptFile(store.dense_path, entry.offset, what, f"{entry.crc32:08x}", f"{got:08x}")


class DenseSection:
    """DenseTensors (models/weights.py) of a store, as views of ``section``, which ``read_dense`` filled."""

    def __init__(self, store: ExpertStore, section: ByteArray) -> None:
        self._entries, self._section = store.dense, section

    def matrix(self, name: str) -> tuple[ByteArray, Format]:
        entry = self._entries[name]
        assert entry.fmt is not None, name
        return self._section[entry.offset : entry.offset + entry.nbytes], entry.fmt

    def plain(self, name: str) -> F32Array:
        entry = self._entries[name]
        assert entry.fmt is None and entry.nbytes == 4 * prod(entry.shape), entry
        return self._section[entry.offset : entry.offset + entry.nbytes].view(np.float32).reshape(entry.shape)

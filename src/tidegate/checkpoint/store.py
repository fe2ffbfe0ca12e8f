"""The expert store: packed weights on disk, one aligned blob per expert. The format is specified in docs/format.md."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tidegate.checkpoint.base import ByteArray, kind_of_tokenizer
from tidegate.checkpoint.files import InputFile
from tidegate.checkpoint.manifest import DENSE_FILE, EXPERTS_FILE, DenseEntry, Manifest, read_manifest
from tidegate.errors import BadTensor, CorruptFile
from tidegate.model_config import ModelConfig
from tidegate.quant.layout import ExpertLayout

_VERIFY_CHUNK_BYTES = 4 << 20
Progress = Callable[[int, int], None]


class Key(Protocol):
    """An ExpertKey: ``layer`` counts MoE layers from 0, ``expert`` within it."""

    @property
    def layer(self) -> int: ...
    @property
    def expert(self) -> int: ...


class Blob(NamedTuple):
    """Where one expert's bytes are: ``file`` indexes ``ExpertStore.paths``; ``offset`` is a multiple of 4096."""

    file: int
    offset: int
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class _Region:
    """A checksummed range of a file."""

    path: Path
    offset: int
    nbytes: int
    crc32: int
    what: str


class ExpertStore:
    """A converted model, read-only. Opening reads the manifest and file sizes, no weights."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Use ``open``."""
        self.path = path
        self.manifest = manifest
        self.config: ModelConfig = manifest.config
        self.paths: tuple[Path, ...] = (path / EXPERTS_FILE,)
        self.dense_path: Path = path / DENSE_FILE
        self.layouts: tuple[ExpertLayout, ...] = tuple(layer.layout for layer in manifest.layers)

    @staticmethod
    def open(path: Path | str) -> ExpertStore:
        """Raises CheckpointError (not a store, another version), BadTensor (a tensor missing or of the wrong shape) or
        CorruptFile (a checksum of the manifest, an offset, a file longer or shorter than the manifest says)."""
        path = Path(path)
        store = ExpertStore(path, read_manifest(path))
        for file_path, wanted in store._file_sizes().items():
            got = InputFile(file_path).size_bytes
            if got != wanted:
                raise CorruptFile(file_path, min(got, wanted), "size of the file", f"{wanted:,} bytes", f"{got:,}")
        return store

    @cached_property
    def dense(self) -> dict[str, DenseEntry]:
        """Entries of dense.bin by name, in file order. Offsets are multiples of 64 from the start of the file."""
        return {entry.name: entry for entry in self.manifest.dense}

    @property
    def dense_bytes(self) -> int:
        """Size of dense.bin, a multiple of 4096."""
        return self.manifest.dense_bytes

    @property
    def expert_bytes(self) -> int:
        """Size of experts.bin, a multiple of 4096."""
        return self.manifest.expert_bytes

    def blob(self, key: Key) -> Blob:
        """Where an expert is. ``key`` must exist."""
        layer = self.manifest.layers[key.layer]
        nbytes = layer.layout.blob_bytes
        return Blob(0, layer.offset + key.expert * nbytes, nbytes, layer.crc32s[key.expert])

    def read_blob(self, key: Key) -> ByteArray:
        """The bytes of one expert, checked. Raises ReadFailed or CorruptFile."""
        blob = self.blob(key)
        what = f"expert {key.expert} of MoE layer {key.layer}"
        return _read(_Region(self.paths[blob.file], blob.offset, blob.nbytes, blob.crc32, what))

    def read_dense(self, name: str) -> ByteArray:
        """The bytes of one dense tensor, checked. Raises BadTensor, ReadFailed or CorruptFile."""
        entry = self.dense.get(name)
        if entry is None:
            raise BadTensor(f"{self.path}: there is no tensor {name}")
        return _read(_Region(self.dense_path, entry.offset, entry.nbytes, entry.crc32, name))

    def tokenizer_json(self) -> str | None:
        """As in Checkpoint."""
        return self._text("tokenizer.json")

    def tokenizer_kind(self) -> str | None:
        """As in Checkpoint."""
        return kind_of_tokenizer(self.tokenizer_json(), self.path)

    def chat_template(self) -> str | None:
        """As in Checkpoint."""
        return self._text("chat_template.jinja")

    def special_tokens(self) -> dict[str, Any]:
        """As in Checkpoint."""
        return dict(self.manifest.special_tokens)

    def verify(self, progress: Progress | None = None) -> None:
        """Recompute every checksum. ``progress(done_bytes, total_bytes)`` is called after each piece. Raises ReadFailed,
        or CorruptFile naming the file, the offset and the thing that starts there."""
        regions = list(self._regions())
        total_bytes, done_bytes = sum(region.nbytes for region in regions), 0
        files: dict[Path, InputFile] = {}
        for region in regions:
            file = files.setdefault(region.path, InputFile(region.path))
            crc = 0
            for start in range(0, region.nbytes, _VERIFY_CHUNK_BYTES):
                nbytes = min(_VERIFY_CHUNK_BYTES, region.nbytes - start)
                crc = zlib.crc32(file.read(region.offset + start, nbytes).data, crc)
                done_bytes += nbytes
                if progress is not None:
                    progress(done_bytes, total_bytes)
            _check(region, crc)

    def _file_sizes(self) -> dict[Path, int]:
        sizes = {self.path / name: file.nbytes for name, file in self.manifest.files.items()}
        return {**sizes, self.dense_path: self.dense_bytes, self.paths[0]: self.expert_bytes}

    def _regions(self) -> Iterator[_Region]:
        for name, file in self.manifest.files.items():
            yield _Region(self.path / name, 0, file.nbytes, file.crc32, name)
        for e in self.manifest.dense:
            yield _Region(self.dense_path, e.offset, e.nbytes, e.crc32, e.name)
        for index, layer in enumerate(self.manifest.layers):
            nbytes = layer.layout.blob_bytes
            for expert, crc in enumerate(layer.crc32s):
                what = f"expert {expert} of MoE layer {index}"
                yield _Region(self.paths[0], layer.offset + expert * nbytes, nbytes, crc, what)

    def _text(self, name: str) -> str | None:
        if name not in self.manifest.files:
            return None
        file = self.manifest.files[name]
        return _read(_Region(self.path / name, 0, file.nbytes, file.crc32, name)).tobytes().decode()


def _read(region: _Region) -> ByteArray:
    data = InputFile(region.path).read(region.offset, region.nbytes)
    _check(region, zlib.crc32(data.data))
    return data


def _check(region: _Region, crc: int) -> None:
    if crc != region.crc32:
        what = f"checksum of {region.what} ({region.nbytes:,} bytes)"
        raise CorruptFile(region.path, region.offset, what, f"{region.crc32:08x}", f"{crc:08x}")

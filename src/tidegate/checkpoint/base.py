"""What a source checkpoint offers: a config in Hugging Face terms and named tensors that can be read in slices."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidegate.errors import CheckpointError
from tidegate.quant.formats import Format

F32Array = NDArray[np.float32]
F16Array = NDArray[np.float16]
ByteArray = NDArray[np.uint8]
Codes = tuple[ByteArray, F16Array, F16Array | None]  # codes [N, K], scales [N, K/G], minima [N, K/G]: quant/pack.py


def kind_of_tokenizer(tokenizer_json: str | None, where: Path) -> str | None:
    """The model type that a `tokenizers` document names; None without a document. Raises CheckpointError for one of ``where``
    that is none."""
    if tokenizer_json is None:
        return None
    named = re.search(r'"model"\s*:\s*\{\s*"type"\s*:\s*"(\w+)"', tokenizer_json)
    try:
        return named[1] if named else str(json.loads(tokenizer_json).get("model", {}).get("type"))
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where}: its tokenizer.json is no tokenizer: {error}") from None


class TensorInfo(NamedTuple):
    """Where one tensor lives. ``shape`` is row-major, outermost axis first (GGUF's order is reversed on reading).

    ``dtype``: safetensors names (F32, F16, BF16, F8_E4M3, U8, I32, ...) or GGUF names (Q4_0, Q6_K, MXFP4, ...).
    ``offset`` is absolute in ``path``; ``nbytes`` is the exact size on disk.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path
    offset: int
    nbytes: int


class Checkpoint(ABC):
    """A source of weights: a Hugging Face folder or a GGUF file (with its split parts).

    ``kind`` is "hf" or "gguf". ``config`` has the keys of Hugging Face's config.json (GGUF metadata is translated),
    plus for GGUF ``"tidegate_gguf_architecture"``. Tensors keep their own names; models/families.py maps them.

    Rows: a tensor [..., K] is read as the matrix [product of the leading axes, K], so that expert e of a stacked
    [E, N, K] is rows e*N : (e+1)*N; a vector [n] is n rows of one.
    """

    kind: str
    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]

    @abstractmethod
    def read_raw(self, name: str, start: int = 0, stop: int | None = None) -> ByteArray:
        """Bytes of rows ``start:stop`` (a copy, flat uint8). Raises BadTensor for an unknown name or rows out of range,
        and ReadFailed (path, offset, wanted, got) for a short read or an I/O error."""

    @abstractmethod
    def read_f32(self, name: str, start: int = 0, stop: int | None = None) -> F32Array:
        """Rows ``start:stop`` dequantized to float32, shape [stop - start, K]. Errors as in read_raw."""

    def native_format(self, name: str) -> Format | None:
        """The packed format that holds the tensor's own quantization exactly (Q4_0, Q8_0, MXFP4, ...) or within
        float16 rounding of its scales (K-quants); None for plain and FP8 tensors."""
        return None

    def read_codes(self, name: str, start: int = 0, stop: int | None = None) -> Codes:
        """Rows ``start:stop`` as codes, scales and minima of ``native_format(name)``. Errors as in read_raw."""
        raise NotImplementedError(f"{name} has no native format")

    def stored_bytes(self, name: str) -> int:
        """Size on disk of a tensor and of what belongs to it alone (FP8's block scales); over all tensors they add up to
        the sizes in the headers."""
        return self.tensors[name].nbytes

    @property
    def total_bytes(self) -> int:
        """Of all tensors, on disk."""
        return sum(map(self.stored_bytes, self.tensors))

    @abstractmethod
    def tokenizer_json(self) -> str | None:
        """A `tokenizers` JSON document, taken from the folder or built from GGUF metadata; None if there is none."""

    def tokenizer_kind(self) -> str | None:
        """``BPE``, ``Unigram`` and the like, without taking a vocabulary of megabytes apart; None without a tokenizer."""
        return kind_of_tokenizer(self.tokenizer_json(), self.path)

    @abstractmethod
    def chat_template(self) -> str | None:
        """The jinja2 chat template, or None."""

    @abstractmethod
    def special_tokens(self) -> dict[str, Any]:
        """``bos_token``, ``eos_token`` (strings or None), ``eos_token_ids`` (list of int), ``add_bos`` (bool)."""

"""Headers of a repository on the Hugging Face hub, by range requests: no weight is downloaded."""

from __future__ import annotations

import logging
import socket
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from tidegate.checkpoint.base import ByteArray, TensorInfo
from tidegate.checkpoint.files import read_json
from tidegate.checkpoint.hf import HfCheckpoint
from tidegate.checkpoint.safetensors import DTYPE_BYTES
from tidegate.errors import BadTensor, CheckpointError, UsageError

_CONNECT_S = 5.0


class HubCheckpoint(HfCheckpoint):
    """A Hugging Face folder of which only config.json and the tensor headers are here."""

    kind = "hub"

    def __init__(self, repository: str) -> None:
        """``repository``: OWNER/NAME. Raises UsageError if it cannot be reached, CheckpointError for what it holds."""
        config, shards = _fetch(repository)
        self._describe(Path(repository), config)
        for shard, header in shards.items():
            for name, (dtype, shape) in header.items():
                if dtype not in DTYPE_BYTES:
                    raise BadTensor(f"{repository}/{shard}: {name} has dtype {dtype}")
                nbytes = prod(shape) * DTYPE_BYTES[dtype]
                self._on_disk[name] = TensorInfo(name, shape, dtype, self.path / shard, 0, nbytes)
        self.tensors = self._logical_tensors()

    def read_raw(self, name: str, start: int = 0, stop: int | None = None) -> ByteArray:
        raise CheckpointError(f"{self.path}: its weights are on the hub; download them first (`hf download`)")


_Header = dict[str, tuple[str, tuple[int, ...]]]


def _fetch(repository: str) -> tuple[dict[str, Any], dict[str, _Header]]:
    from huggingface_hub import HfApi, constants, hf_hub_download  # noqa: PLC0415

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        _reach(constants.ENDPOINT)
        config = read_json(Path(hf_hub_download(repository, "config.json")))
        found = HfApi().get_safetensors_metadata(repository)
    except CheckpointError:
        raise
    except Exception as error:  # the client's errors have no common root: its own, the HTTP library's, the system's
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"{repository}: neither a file or folder here nor a repository that can be reached ({reason[0][:200]}); "
            "give a local folder, a GGUF file, or the model's config.json"
        ) from None
    return config, {
        shard: {name: (str(info.dtype), tuple(info.shape)) for name, info in file.tensors.items()}
        for shard, file in found.files_metadata.items()
    }


def _reach(endpoint: str) -> None:
    """Fail at once without a network, where the client would retry for half a minute. Raises OSError."""
    url = urlsplit(endpoint)
    if url.hostname and url.scheme not in getproxies():
        port = url.port or {"http": 80}.get(url.scheme, 443)
        socket.create_connection((url.hostname, port), _CONNECT_S).close()

"""Stores made on the way: ``run`` takes a source checkpoint and converts it once into a cache folder."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

from tidegate.checkpoint.convert.options import ConvertOptions, fingerprint
from tidegate.checkpoint.convert.write import Progress, convert
from tidegate.checkpoint.files import cache_folder
from tidegate.checkpoint.open import detect
from tidegate.errors import CheckpointError


def cached_store(
    source: Path | str,
    options: ConvertOptions | None = None,
    *,
    say: Callable[[str], None] = lambda message: None,
    progress: Progress | None = None,
) -> Path:
    """The store for ``source``: itself if it is one, else a cached conversion, made now if there is none.

    The cache is keyed by the source's files (path, sizes, times) and the options. ``say`` gets one line when it converts
    and one when it waits for another process that does. Raises as ``convert`` does.
    """
    kind, path = detect(source)
    if kind == "store":
        return path
    options = options or ConvertOptions()
    path, folder = path.resolve(), cache_folder()
    store = folder / f"{path.stem or 'model'}-{fingerprint(path, options, str(path))[:16]}"
    if store.exists():
        return store
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f"{store.name}.lock").open("w")
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror}; set TIDEGATE_CACHE") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that converts {path}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not store.exists():
            say(f"converting {path} once into {store} (TIDEGATE_CACHE chooses the folder)")
            convert(path, store, options, progress=progress)
    return store

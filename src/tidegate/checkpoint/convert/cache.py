"""Stores made on the way: ``run`` takes a source checkpoint and converts it once into a cache folder."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from tidegate.checkpoint.convert.options import ConvertOptions, fingerprint
from tidegate.checkpoint.convert.write import Progress, convert
from tidegate.checkpoint.files import cache_folder
from tidegate.checkpoint.manifest import PREDICTOR_FILE
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

    The cache is keyed by the source's files (path, sizes, times), the options and the program's version. What it has of the same
    source and options under another key, nobody would find again: it is removed before the new store is made. ``say`` gets a
    line for that, one when it converts and one when it waits for another process that does. Raises as ``convert`` does.
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
        lock = (folder / f"{store.name}.lock").open("a+")
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror}; set TIDEGATE_CACHE") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that converts {path}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not store.exists():
            origin = json.dumps({"source": str(path), "options": asdict(options)})
            _remove_earlier(store, origin, say)
            lock.truncate(0)
            lock.write(origin)
            lock.flush()
            say(f"converting {path} once into {store} (TIDEGATE_CACHE chooses the folder)")
            convert(path, store, options, progress=progress)
    return store


def _remove_earlier(store: Path, origin: str, say: Callable[[str], None]) -> None:
    """What was made, or begun, of the same ``origin``, which the lock files name; not what another process is making, what holds
    a predictor that somebody has fitted, or what this user may not remove."""
    for file in store.parent.glob("*.lock"):
        old = file.with_suffix("")
        if old == store or (old / PREDICTOR_FILE).exists():
            continue
        with suppress(OSError, UnicodeDecodeError), file.open(encoding="utf-8") as lock:
            if lock.read() != origin:
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if old.exists():
                say(f"removing {old}: its source has changed since, or Tidegate has")
            for folder in (old, old.with_name(f"{old.name}.partial")):
                if folder.exists():
                    shutil.rmtree(folder)
            file.unlink()

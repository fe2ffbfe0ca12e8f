"""The conversion itself: plan, check the disk, pack blocks of rows in a few threads, write them in file order."""

from __future__ import annotations

import json
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tidegate.checkpoint.base import ByteArray, Checkpoint
from tidegate.checkpoint.convert.options import ConvertOptions, fingerprint
from tidegate.checkpoint.convert.pack import pack_rows, row_blocks
from tidegate.checkpoint.convert.partial import Partial
from tidegate.checkpoint.convert.plan import ConvertPlan, Unit, make_plan
from tidegate.checkpoint.manifest import MANIFEST, SideFile, to_json
from tidegate.checkpoint.open import open_checkpoint
from tidegate.errors import CheckpointError, TidegateError, UsageError

Progress = Callable[[int, int, str], None]
_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class _Block:
    """Bytes of a unit, at ``offset`` from its start."""

    unit: Unit
    offset: int
    data: Future[ByteArray]
    is_last: bool


def convert(
    src: Path | str,
    dst: Path | str,
    options: ConvertOptions | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Convert ``src`` into a store at ``dst`` and return ``dst``. ``progress(done_bytes, total_bytes, what)`` is called after
    every block; a resumed conversion starts above 0.

    Killed or interrupted (KeyboardInterrupt passes through), it leaves DST.partial, and the same call goes on from there;
    the result is the same to the byte. Any error removes DST.partial. Raises UsageError (DST exists, bad options),
    CheckpointError and its kinds for the source, DiskFull before writing or in the middle.
    """
    dst, options = Path(dst).expanduser().absolute(), options or ConvertOptions()
    _check_destination(dst, overwrite)
    checkpoint = open_checkpoint(src)
    plan = make_plan(checkpoint, options)
    file_bytes = plan.file_bytes()
    digest = fingerprint(checkpoint.path, options, plan.config.to_json(), file_bytes)
    partial = Partial(dst, digest, file_bytes)
    try:
        _write_units(plan, partial, progress)
        if digest != fingerprint(checkpoint.path, options, plan.config.to_json(), file_bytes):
            raise CheckpointError(f"{checkpoint.path}: was changed while it was converted; convert it again")
        _publish(plan, partial, overwrite)
    except (TidegateError, OSError):
        partial.discard()
        raise
    except BaseException:
        partial.sync()
        partial.close()
        raise
    return dst


def _check_destination(dst: Path, overwrite: bool) -> None:
    if not dst.exists():
        return
    if dst.is_dir() and not any(dst.iterdir()):
        dst.rmdir()
    elif not (dst / MANIFEST).exists():
        raise UsageError(f"{dst}: exists and is not a store; choose another DST")
    elif not overwrite:
        raise UsageError(f"{dst}: exists; add --overwrite to replace it")


def _write_units(plan: ConvertPlan, partial: Partial, progress: Progress | None) -> None:
    total_bytes = partial.total_bytes
    crc, position, first = 0, 0, len(partial.crc32s)
    done_bytes = sum(unit.nbytes for unit, _ in zip(plan.units(), range(first), strict=False))
    for block in _blocks(plan, first):
        data, unit = block.data.result(), block.unit
        gap = np.zeros(block.offset - position, np.uint8)
        partial.write(unit.file, unit.offset + block.offset, data)
        crc = zlib.crc32(data.data, zlib.crc32(gap.data, crc))
        position = block.offset + data.size
        done_bytes += gap.size + data.size
        if block.is_last:
            tail = np.zeros(unit.nbytes - position, np.uint8)
            partial.finish_unit(zlib.crc32(tail.data, crc))
            done_bytes += tail.size
            crc = position = 0
        if progress is not None:
            progress(min(done_bytes, total_bytes), total_bytes, unit.what)
    if progress is not None:
        progress(total_bytes, total_bytes, "")


def _blocks(plan: ConvertPlan, first: int) -> Iterator[_Block]:
    """Blocks of the units from ``first`` on, in file order, packed ahead by at most two blocks a thread."""
    window: deque[_Block] = deque()
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="convert")
    try:
        for unit in plan.units(first):
            for block in _unit_blocks(unit, plan.checkpoint, pool):
                window.append(block)
                if len(window) > _THREADS + 1:
                    yield window.popleft()
        yield from window
    finally:
        pool.shutdown(cancel_futures=True)


def _unit_blocks(unit: Unit, checkpoint: Checkpoint, pool: ThreadPoolExecutor) -> Iterator[_Block]:
    blocks = [(piece, *rows) for piece in unit.pieces for rows in row_blocks(piece, checkpoint)]
    for number, (piece, start, stop, offset) in enumerate(blocks, 1):
        data = pool.submit(pack_rows, piece, checkpoint, start, stop)
        yield _Block(unit, piece.offset + offset, data, number == len(blocks))


def _publish(plan: ConvertPlan, partial: Partial, overwrite: bool) -> None:
    partial.sync()
    checkpoint = plan.checkpoint
    texts = {
        "config.json": json.dumps(checkpoint.config, indent=1),
        "tokenizer.json": checkpoint.tokenizer_json(),
        "chat_template.jinja": checkpoint.chat_template(),
    }
    data = {name: text.encode() for name, text in texts.items() if text is not None}
    files = {name: SideFile(len(text), zlib.crc32(text)) for name, text in data.items()}
    manifest = plan.manifest(partial.crc32s, files, checkpoint.special_tokens())
    partial.publish({**data, MANIFEST: to_json(manifest).encode()}, overwrite)

"""The folder of an unfinished conversion, DST.partial: data files written in order, and a journal of what is on disk.

Journal: one JSON object a line; first the fingerprint of the conversion, then ``{"crc32s": [...]}`` with the checksums of
units whose bytes had been synced before the line was written. A torn last line is ignored, so a kill at any moment loses at
most the units since the last sync.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

from tidegate.checkpoint.base import ByteArray
from tidegate.errors import CheckpointError, DiskFull, UsageError

JOURNAL = "journal"
_SYNC_BYTES = 128 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Partial:
    """Locked while open: a second process converting to the same DST is refused."""

    def __init__(self, dst: Path, fingerprint: str, file_bytes: dict[str, int]) -> None:
        """Open DST.partial, or make it (``dst`` is absolute). ``crc32s`` holds the units found finished; with another
        fingerprint it starts anew.

        Raises DiskFull before anything is written if the rest does not fit, UsageError if another process is at it.
        """
        self.dst, self.folder = dst, dst.with_name(dst.name + ".partial")
        self.total_bytes = sum(file_bytes.values())
        self.resumed = False
        self.crc32s: list[int] = []
        self._new_crc32s: list[int] = []
        self._unsynced_bytes = 0
        self._files: dict[str, int] = {}
        self._check_room(file_bytes)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()) and not (self.folder / JOURNAL).exists():
                raise UsageError(
                    f"{self.folder}: exists and is not an unfinished conversion; remove it or choose another DST"
                )
            self._journal = self._lock()
        except OSError as error:
            self._raise(self.folder, error)
        try:
            self._open_files(fingerprint, file_bytes)
        except OSError as error:
            self.discard()
            self._raise(self.folder, error)

    def write(self, file: str, offset: int, data: ByteArray) -> None:
        """Put bytes at an offset. Raises DiskFull or CheckpointError."""
        view, done = memoryview(data.data), 0
        try:
            while done < len(view):
                done += os.pwrite(self._files[file], view[done:], offset + done)
        except OSError as error:
            self._raise(self.folder / file, error)
        self._unsynced_bytes += len(view)

    def finish_unit(self, crc32: int) -> None:
        """All bytes of the next unit have been written; now and then everything so far is made durable."""
        self._new_crc32s.append(crc32)
        if self._unsynced_bytes >= _SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        """Make finished units durable and journal them."""
        try:
            for fd in self._files.values():
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # keep the page cache for others
            if self._new_crc32s:
                self._append({"crc32s": self._new_crc32s})
        except OSError as error:
            self._raise(self.folder, error)
        self.crc32s += self._new_crc32s
        self._new_crc32s, self._unsynced_bytes = [], 0

    def publish(self, texts: dict[str, bytes], overwrite: bool) -> None:
        """Add small files and make the folder DST, atomically; with ``overwrite`` a DST that is there is replaced."""
        self.sync()
        try:
            for name, text in texts.items():
                with (self.folder / name).open("wb") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
            _sync_folder(self.folder)
            old = self.dst.with_name(f".{self.dst.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            if overwrite and self.dst.exists():
                self.dst.rename(old)
            self.folder.rename(self.dst)
            (self.dst / JOURNAL).unlink()
            _sync_folder(self.dst.parent)
        except OSError as error:
            self._raise(self.folder, error)
        self.close()
        shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Release files and lock; the folder stays."""
        for fd in (*self._files.values(), self._journal):
            os.close(fd)
        self._files, self._journal = {}, -1

    def _check_room(self, file_bytes: dict[str, int]) -> None:
        have_bytes = sum(
            min(512 * (self.folder / name).stat().st_blocks, nbytes)
            for name, nbytes in file_bytes.items()
            if (self.folder / name).exists()
        )
        free_bytes, slack_bytes = self._free_bytes(), 1 << 20  # slack: small files, the file system's own
        if self.total_bytes - have_bytes + slack_bytes > free_bytes:
            raise DiskFull(self.dst, self.total_bytes - have_bytes + slack_bytes, free_bytes)

    def _free_bytes(self) -> int:
        disk = os.statvfs(next(parent for parent in self.dst.parents if parent.exists()))
        return disk.f_bavail * disk.f_frsize

    def _lock(self) -> int:
        path = self.folder / JOURNAL
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == path.stat().st_ino:
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(fd)
        raise UsageError(
            f"{self.dst}: another process is converting into this folder; wait for it or choose another DST"
        )

    def _open_files(self, fingerprint: str, file_bytes: dict[str, int]) -> None:
        lines, length = self._read_journal()
        self.resumed = len(lines) > 1 and lines[0] == {"fingerprint": fingerprint}
        if self.resumed:
            os.ftruncate(self._journal, length)
            self.crc32s = [int(crc) for line in lines[1:] for crc in line["crc32s"]]
        else:
            for path in self.folder.iterdir():
                if path.name != JOURNAL:
                    path.unlink()
            os.ftruncate(self._journal, 0)
            self._append({"fingerprint": fingerprint})
        for name, nbytes in file_bytes.items():
            self._files[name] = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._files[name], nbytes)
        _sync_folder(self.folder)

    def _read_journal(self) -> tuple[list[dict[str, Any]], int]:
        """The whole lines, and the length in bytes of that good part."""
        lines, length = [], 0
        for line in (self.folder / JOURNAL).read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
            length += len(line)
        return lines, length

    def _append(self, line: dict[str, object]) -> None:
        data = json.dumps(line).encode() + b"\n"
        if os.write(self._journal, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(self._journal)

    def _raise(self, path: Path, error: OSError) -> NoReturn:
        if error.errno in _NO_ROOM:
            raise DiskFull(path, self.total_bytes, self._free_bytes()) from None
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from None


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""What the kernel says about this process: its pages, its limits and its control groups (v1 and v2).

Paths of ``/proc`` and of the root are arguments so that tests can put fake trees in their place.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a huge number


@dataclass(frozen=True)
class ProcessMemory:
    """Of /proc/self/status, in bytes. ``rss`` = anonymous + file (mapped libraries) + shared; ``peak`` is its high-water
    mark (VmHWM). ``page_table_bytes`` and 16 KiB of kernel stack a thread are not in it but count against a cgroup's limit."""

    rss_bytes: int
    peak_rss_bytes: int
    anon_bytes: int
    file_bytes: int
    shared_bytes: int
    page_table_bytes: int
    virtual_bytes: int
    threads: int


def process_memory(proc: Path = Path("/proc/self")) -> ProcessMemory:
    """A snapshot; takes about 0.1 ms."""
    fields = _fields(proc / "status")
    kib = {key: int(value.split()[0]) << 10 for key, value in fields.items() if value.endswith("kB")}
    return ProcessMemory(
        rss_bytes=kib["VmRSS"],
        peak_rss_bytes=kib.get("VmHWM", kib["VmRSS"]),
        anon_bytes=kib.get("RssAnon", 0),
        file_bytes=kib.get("RssFile", 0),
        shared_bytes=kib.get("RssShmem", 0),
        page_table_bytes=kib.get("VmPTE", 0),
        virtual_bytes=kib["VmSize"],
        threads=int(fields["Threads"]),
    )


def reset_peak(proc: Path = Path("/proc/self")) -> bool:
    """Set the high-water mark to the present RSS, so that it speaks of what comes now; False where that is forbidden."""
    try:
        (proc / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class ShareOfMemory:
    """Of /proc/self/smaps_rollup, in bytes. ``pss``: pages that other processes map too count in proportion;
    ``private`` would be freed if this process ended; ``huge`` lies in transparent huge pages."""

    pss_bytes: int
    private_bytes: int
    huge_bytes: int


def share_of_memory(proc: Path = Path("/proc/self")) -> ShareOfMemory:
    """Walks every page: milliseconds for gigabytes without huge pages."""
    kib = {key: int(value.split()[0]) << 10 for key, value in _fields(proc / "smaps_rollup").items() if "kB" in value}
    return ShareOfMemory(kib["Pss"], kib["Private_Clean"] + kib["Private_Dirty"], kib["AnonHugePages"])


@dataclass(frozen=True)
class MachineMemory:
    """Of /proc/meminfo: ``available`` is the kernel's own estimate of what can be had without swapping."""

    total_bytes: int
    available_bytes: int


def machine_memory(proc: Path = Path("/proc")) -> MachineMemory:
    kib = {key: int(value.split()[0]) << 10 for key, value in _fields(proc / "meminfo").items()}
    return MachineMemory(kib["MemTotal"], kib.get("MemAvailable", kib["MemFree"]))


@dataclass(frozen=True)
class Cgroup:
    """One memory control group that this process is in, the own one or an ancestor. ``limit_bytes`` None: unlimited;
    ``reclaimable_bytes`` is page cache in ``usage_bytes`` that the kernel drops first; ``peak_bytes`` None: not offered."""

    path: Path
    version: int
    limit_bytes: int | None
    usage_bytes: int
    reclaimable_bytes: int
    peak_bytes: int | None


def memory_cgroups(proc: Path = Path("/proc/self"), root: Path = Path("/")) -> list[Cgroup]:
    """The memory control groups of this process, own first, then the ancestors that can be seen. Empty without any."""
    try:
        mounts = (proc / "mountinfo").read_text().splitlines()
        groups = (proc / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Cgroup] = []
    for line in groups:
        hierarchy, controllers, path = line.split(":", 2)
        version = 2 if hierarchy == "0" and not controllers else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        for mount_root, mount_point in _cgroup_mounts(mounts, version):
            top = root / mount_point.lstrip("/")
            folder = top / _below(path, mount_root)
            while not folder.is_dir() and folder != top:
                folder = folder.parent
            for one in [folder, *folder.parents]:
                group = _read_v1(one) if version == 1 else _read_v2(one)
                if group is not None:
                    found.append(group)
                if one == top:
                    break
    return found


def address_space_limit() -> int | None:
    """RLIMIT_AS of this process; None if unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _fields(path: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return {key: value.strip() for key, colon, value in lines if colon}


def _cgroup_mounts(mountinfo: list[str], version: int) -> list[tuple[str, str]]:
    """(root inside the hierarchy, mount point) of every mount of the memory controller; proc(5) has the format."""
    out = []
    for line in mountinfo:
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        wanted = kind == "cgroup2" if version == 2 else kind == "cgroup" and "memory" in options.split(",")
        if wanted:
            fields = left.split(" ")
            out.append((_unescape(fields[3]), _unescape(fields[4])))
    return out


def _unescape(text: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text


def _below(path: str, mount_root: str) -> str:
    """A group's path relative to what is mounted; inside a container the mount shows only the container's own part."""
    if mount_root != "/" and (path == mount_root or path.startswith(mount_root + "/")):
        path = path[len(mount_root) :]
    return "" if "/.." in path else path.strip("/")


def _read_v1(folder: Path) -> Cgroup | None:
    usage = _number(folder / "memory.usage_in_bytes")
    if usage is None:
        return None
    limit = _number(folder / "memory.limit_in_bytes")
    return Cgroup(
        path=folder,
        version=1,
        limit_bytes=None if limit is None or limit >= _UNLIMITED_BYTES else limit,
        usage_bytes=usage,
        reclaimable_bytes=_stat(folder, "total_inactive_file"),
        peak_bytes=_number(folder / "memory.max_usage_in_bytes"),
    )


def _read_v2(folder: Path) -> Cgroup | None:
    usage = _number(folder / "memory.current")
    if usage is None:  # the root group, or a hierarchy without the memory controller
        return None
    limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
    return Cgroup(
        path=folder,
        version=2,
        limit_bytes=min((limit for limit in limits if limit is not None), default=None),
        usage_bytes=usage,
        reclaimable_bytes=_stat(folder, "inactive_file"),
        peak_bytes=_number(folder / "memory.peak"),
    )


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no file or it says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(folder: Path, key: str) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for name, _, value in (line.partition(" ") for line in lines) if name == key), 0)

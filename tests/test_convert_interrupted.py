"""Conversions that are interrupted go on exactly: full disks, kill -9, Ctrl-C, two at once, the cache."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import checkpoints
from conversions import DEFAULT, check_store, small_blocks, tree
from tidegate.checkpoint.convert import ConvertOptions, cached_store, convert
from tidegate.checkpoint.convert import pack as pack_module
from tidegate.checkpoint.convert import partial as partial_module
from tidegate.checkpoint.manifest import PREDICTOR_FILE
from tidegate.errors import CheckpointError, DiskFull, UsageError

__all__ = ["small_blocks"]


# ---- the disk


def test_a_disk_too_small_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 50, 50, 50, 0, 0, 0, 0, 255)))
    with pytest.raises(DiskFull, match=r"needs 1,\d+,\d+ B of disk, 204,800 B are free"):
        convert(checkpoints.checkpoint("mixtral"), tmp_path / "dst")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MB; skips where the user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tidegate-test", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs privileges")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_in_the_middle(small_disk, small_blocks):
    def fill(done, total, what):
        if not (small_disk / "other").exists() and done > total // 2:
            with (small_disk / "other").open("wb") as file, pytest.raises(OSError, match="No space"):
                while True:
                    file.write(bytes(100_000))
                    file.flush()

    with pytest.raises(DiskFull, match=r"experts.bin: needs [\d,]+ B of disk, 0 B are free"):
        convert(checkpoints.checkpoint("mixtral"), small_disk / "dst", progress=fill)
    assert [path.name for path in small_disk.iterdir()] == ["other"]


def test_a_file_size_limit(tmp_path):
    code = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        from tidegate.checkpoint.convert import convert
        convert(SRC, DST)
    """
    done = run_child(code, checkpoints.checkpoint("mixtral"), tmp_path / "dst")
    assert done.returncode == 1 and re.search(r"CheckpointError: .*: cannot be written: File too large", done.stderr)
    assert not list(tmp_path.iterdir())


# ---- kill -9, Ctrl-C, resume


def run_child(code, src, dst, **popen):
    code = f"SRC, DST = {str(src)!r}, {str(dst)!r}\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **popen)


STOP_AT = """
    import os, signal
    from tidegate.checkpoint.convert import convert, pack, partial
    pack.BLOCK_WEIGHTS, partial._SYNC_BYTES = 1500, 20_000
    blocks = 0
    def progress(done, total, what):
        global blocks
        blocks += 1
        if blocks == AT:
            os.kill(os.getpid(), SIGNAL)
    convert(SRC, DST, progress=progress)
"""


@pytest.mark.parametrize("at", [1, 2, 40, 100, 250])
def test_killed_and_resumed_is_the_same_to_the_byte(tmp_path, small_blocks, at):
    src, dst = checkpoints.checkpoint("mixtral"), tmp_path / "dst"
    done = run_child(f"AT, SIGNAL = {at}, 9\n" + textwrap.dedent(STOP_AT), src, dst)
    assert done.returncode == -9, done.stderr
    assert not dst.exists() and (tmp_path / "dst.partial").exists()
    starts = []
    convert(src, dst, progress=lambda done, total, what: starts.append(done))
    if at >= 100:
        assert starts[0] > 50_000
    whole = convert(src, tmp_path / "whole")
    assert tree(dst) == tree(whole) and not (tmp_path / "dst.partial").exists()


def interrupted(tmp_path, src, at=150):
    """A partial conversion of ``src`` in this process, stopped by Ctrl-C after some blocks."""
    seen = []

    def progress(done, total, what):
        seen.append(done)
        if len(seen) == at:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        convert(src, tmp_path / "dst", progress=progress)
    assert not (tmp_path / "dst").exists()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("convert")]
    return tmp_path / "dst.partial", seen[-1]


def test_ctrl_c_keeps_what_is_done(tmp_path, small_blocks):
    src = checkpoints.checkpoint("mixtral")
    _, reached = interrupted(tmp_path, src)
    starts = []
    convert(src, tmp_path / "dst", progress=lambda done, total, what: starts.append(done))
    assert starts[0] > reached - 30_000  # all but the unfinished unit
    check_store(src, tmp_path / "dst")


@given(keep=st.floats(0, 1))
@settings(max_examples=8, deadline=None)
def test_a_torn_journal_costs_time_only(tmp_path_factory, keep):
    folder = tmp_path_factory.mktemp("torn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_module, "BLOCK_WEIGHTS", 1500)
        patch.setattr(partial_module, "_SYNC_BYTES", 20_000)
        src = checkpoints.checkpoint("mixtral")
        partial, _ = interrupted(folder, src)
        os.truncate(partial / "journal", int(keep * (partial / "journal").stat().st_size))
        interrupted(folder, src, at=20)  # appends to what was left
        assert tree(convert(src, folder / "dst")) == tree(convert(src, folder / "whole"))
    shutil.rmtree(folder)


@pytest.mark.parametrize("what", ["options", "source"])
def test_another_conversion_starts_anew(tmp_path, small_blocks, what):
    src = shutil.copytree(checkpoints.checkpoint("mixtral"), tmp_path / "src")
    interrupted(tmp_path, src)
    options = DEFAULT
    if what == "options":
        options = ConvertOptions(experts="int8")
    else:
        tensors = load_file(src / "model.safetensors")
        tensors["model.embed_tokens.weight"] *= 2
        save_file(tensors, src / "model.safetensors")
    starts = []
    convert(src, tmp_path / "dst", options, progress=lambda done, total, what: starts.append(done))
    assert starts[0] < 10_000
    check_store(src, tmp_path / "dst")


def test_what_appears_at_dst_meanwhile_is_not_replaced(tmp_path):
    def appear(done, total, what):
        (tmp_path / "dst").mkdir(exist_ok=True)
        (tmp_path / "dst" / "thesis.txt").write_text("precious")

    with pytest.raises(CheckpointError, match="cannot be written: Directory not empty"):
        convert(checkpoints.checkpoint("mixtral"), tmp_path / "dst", progress=appear)
    assert list(tree(tmp_path / "dst")) == ["thesis.txt"] and not (tmp_path / "dst.partial").exists()


def test_killed_just_before_the_end(tmp_path, small_blocks):
    code = """
        import os
        from pathlib import Path
        from tidegate.checkpoint.convert import convert, pack
        pack.BLOCK_WEIGHTS = 1500
        Path.rename = lambda *_: os.kill(os.getpid(), 9)
        convert(SRC, DST)
    """
    src, dst = checkpoints.checkpoint("mixtral"), tmp_path / "dst"
    assert run_child(code, src, dst).returncode == -9 and (tmp_path / "dst.partial" / "manifest.json").exists()
    starts = []
    convert(src, dst, progress=lambda done, total, what: starts.append(done / total))
    assert starts == [1] and tree(dst) == tree(convert(src, tmp_path / "whole"))


def test_two_conversions_into_one_folder(tmp_path, small_blocks):
    src, errors = checkpoints.checkpoint("mixtral"), []

    def second(done, total, what):
        if not errors:
            with pytest.raises(UsageError, match="another process is converting") as error:
                convert(src, tmp_path / "dst")
            errors.append(error.value)

    check_store(src, convert(src, tmp_path / "dst", progress=second))
    assert errors


# ---- memory


def test_peak_memory_is_bounded_and_does_not_grow_with_the_model(tmp_path):
    """docs/format.md: at most 160 MiB, whatever the model."""
    rng = np.random.default_rng(0)
    tensors = load_file(checkpoints.checkpoint("llama") / "model.safetensors")
    big = torch.from_numpy(rng.standard_normal((400_000, 64), dtype=np.float32))  # 102 MB
    tensors |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), big)
    src = shutil.copytree(checkpoints.checkpoint("llama"), tmp_path / "src")
    save_file({name: w.clone() for name, w in tensors.items()}, src / "model.safetensors")
    config = json.loads((src / "config.json").read_text()) | {"vocab_size": 400_000, "tie_word_embeddings": False}
    (src / "config.json").write_text(json.dumps(config))
    code = """
        import re
        from pathlib import Path
        from tidegate.checkpoint.convert import ConvertOptions, convert
        convert(SRC, DST, ConvertOptions(dense="int4"))
        print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
    """
    done = run_child(code, src, tmp_path / "dst")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 160 << 10, f"{int(done.stdout):,} KiB"


# ---- the cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cached_store_converts_once_and_says_so(tmp_path, cache):
    src, said = shutil.copytree(checkpoints.checkpoint("olmoe"), tmp_path / "src"), []
    store = cached_store(src, say=said.append)
    assert store.parent == cache and len(said) == 1 and "converting" in said[0] and str(store) in said[0]
    assert cached_store(src, say=said.append) == store and len(said) == 1
    assert cached_store(store) == store
    assert cached_store(src, ConvertOptions(experts="int8"), say=said.append) != store and len(said) == 2


def test_a_changed_source_replaces_its_own_store_and_no_other(tmp_path, cache, monkeypatch):
    src, said = shutil.copytree(checkpoints.checkpoint("olmoe"), tmp_path / "src"), []
    twin = cached_store(shutil.copytree(src, tmp_path / "twin"))
    old, wide = cached_store(src), cached_store(src, ConvertOptions(experts="int8"))
    shutil.copytree(old, (begun := old.with_name(f"{old.name}.partial")))
    os.utime(src / "model.safetensors", (1, 1))
    new = cached_store(src, say=said.append)
    assert [line.split()[0] for line in said] == ["removing", "converting"] and str(old) in said[0]
    assert {path for path in cache.iterdir() if path.is_dir()} == {twin, wide, new}, (old, begun)
    os.utime(src / "model.safetensors", (2, 2))
    with (cache / f"{new.name}.lock").open() as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        cached_store(src)
    assert new.exists(), "another process was making it"


def test_what_somebody_else_left_in_the_cache_stays(tmp_path, cache):
    src = shutil.copytree(checkpoints.checkpoint("olmoe"), tmp_path / "src")
    fitted = cached_store(src)
    (fitted / PREDICTOR_FILE).write_bytes(b"fitted")
    (cache / "folder.lock").mkdir()
    (cache / "odd.lock").write_bytes(b"\xff\xfe")
    os.utime(src / "model.safetensors", (1, 1))
    assert cached_store(src) != fitted and (fitted / PREDICTOR_FILE).read_bytes() == b"fitted"
    assert (cache / "odd.lock").exists()


def test_two_processes_share_one_conversion(tmp_path, cache):
    code = """
        import sys
        from tidegate.checkpoint.convert import cached_store
        print(cached_store(SRC, say=lambda message: print(message, file=sys.stderr)))
    """
    src, results = checkpoints.checkpoint("olmoe"), []
    threads = [threading.Thread(target=lambda: results.append(run_child(code, src, ""))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result.returncode == 0 for result in results), results
    assert len({result.stdout for result in results}) == 1
    assert sum(result.stderr.count("converting") for result in results) == 1
    check_store(src, Path(results[0].stdout.strip()))


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match="set TIDEGATE_CACHE"):
        cached_store(checkpoints.checkpoint("olmoe"))

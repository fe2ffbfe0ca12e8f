"""``tidegate convert`` and ``tidegate info`` as a user meets them."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time

import pytest

import checkpoints
from tidegate.checkpoint.convert import convert
from tidegate.cli import main
from tidegate.cli.info import count_parameters
from tidegate.cli.progress import Progress
from tidegate.models.families import model_config


def tidegate(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "tidegate", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        **options,
    )


def test_convert_says_what_it_wrote_and_refuses_to_do_it_twice(tmp_path):
    src, dst = checkpoints.checkpoint("olmoe"), tmp_path / "store"
    done = tidegate("convert", src, dst, "--experts", "int8", "--dense", "int4", "--group", "64")
    assert done.returncode == 0, done.stderr
    assert f"{dst}: " in done.stdout and "(int4-g64-m8)" in done.stdout and "(int8-g64)" in done.stdout
    done = tidegate("convert", src, dst)
    assert done.returncode == 2 and done.stdout == "" and "--overwrite" in done.stderr and done.stderr.count("\n") == 1
    assert tidegate("convert", src, dst, "--overwrite").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["/no/such", "dst"], 1, "/no/such: no such file or folder"),
        (["builtin", "dst"], 1, "is an expert store already, which runs as it is"),
        (["org/model", "dst"], 1, "download it first"),
        ([".", "dst"], 1, "nothing to run here"),
        (["--experts", "int5", ".", "dst"], 2, "--experts int5"),
        (["--group", "7", ".", "dst"], 2, "--group 7"),
        (["onlysrc"], 2, "DST"),
    ],
)
def test_mistakes_are_one_line(tmp_path, arguments, code, said):
    done = tidegate("convert", *arguments, cwd=tmp_path)
    assert done.returncode == code and done.stdout == ""
    assert done.stderr.startswith("tidegate: error: ") and said.lower() in done.stderr.lower(), done.stderr
    assert not list(tmp_path.iterdir())


def test_ctrl_c_says_that_the_same_command_goes_on(tmp_path, monkeypatch, capsys):
    tell = Progress.__call__

    def interrupted(self, done, total, what=""):
        tell(self, done, total, what)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Progress, "__call__", interrupted)
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path / "cache"))
    assert main(["run", str(checkpoints.checkpoint("olmoe")), "hello"]) == 130
    assert "the cache keeps what is done, the same command goes on" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "cache")
    assert main(["convert", str(checkpoints.checkpoint("olmoe")), str(tmp_path / "dst")]) == 130
    assert "dst.partial keeps what is done, the same command goes on" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["convert", str(checkpoints.checkpoint("olmoe")), str(tmp_path / "dst")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]


def test_torch_is_not_needed(tmp_path):
    code = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = sys.modules["safetensors"] = None
from tidegate.cli import main
src, dst = sys.argv[1:]
assert main(["convert", src, dst]) == 0
assert main(["info", src]) == 0
assert main(["info", dst, "--verify"]) == 0
"""
    arguments = [sys.executable, "-c", code, checkpoints.checkpoint("deepseek_v2"), tmp_path / "dst"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "checksums  all good" in done.stdout


def test_info_counts_weights_as_torch_does():
    for name in checkpoints.VARIANTS:
        model = checkpoints.load(name)
        config = model_config(json.loads((checkpoints.checkpoint(name) / "config.json").read_text()))
        total, active = count_parameters(config)
        wanted = sum(weights.numel() for weights in model.parameters())
        buffers = sum(b.numel() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
        assert total == wanted + buffers, name
        assert active == total if config.moe is None else active < total


def test_info_of_a_source_and_of_its_store(tmp_path):
    src = checkpoints.checkpoint("qwen2_moe")
    source = json.loads(tidegate("info", src, "--json").stdout)
    store = json.loads(tidegate("info", convert(src, tmp_path / "dst"), "--json").stdout)
    same = (
        "family",
        "parameters",
        "active_parameters",
        "layers",
        "moe_layers",
        "experts",
        "experts_per_token",
        "context",
    )
    assert {key: source[key] for key in same} == {key: store[key] for key in same}
    assert source["kind"] == "hf" and store["kind"] == "store"
    assert source["bytes"] == sum(source["parts_bytes"].values()) == sum(source["formats_bytes"].values())
    assert source["parts_bytes"]["unused"] == 0
    assert store["bytes"] == sum(store["parts_bytes"].values())
    assert store["bytes"] == sum((tmp_path / "dst" / name).stat().st_size for name in ("dense.bin", "experts.bin"))
    text = tidegate("info", src).stdout
    assert "qwen2_moe" in text and "2 with 12 experts of width 40, 4 per token" in text and "no chat template" in text


def test_info_verify(tmp_path):
    src = checkpoints.checkpoint("olmoe")
    dst = convert(src, tmp_path / "dst")
    assert "all good" in tidegate("info", dst, "--verify").stdout
    done = tidegate("info", src, "--verify")
    assert done.returncode == 2 and "--verify has no effect" in done.stderr
    data = bytearray((dst / "experts.bin").read_bytes())
    data[5000] ^= 4
    (dst / "experts.bin").write_bytes(data)
    done = tidegate("info", dst, "--verify")
    assert done.returncode == 1 and done.stdout == "" and "experts.bin: checksum of expert" in done.stderr
    assert "all good" not in tidegate("info", dst).stdout


def test_info_needs_neither_core_nor_tokenizers():
    code = (
        "import sys; from tidegate.cli import main; main(['info', sys.argv[1]]); print(*sys.modules, file=sys.stderr)"
    )
    arguments = [sys.executable, "-c", code, checkpoints.checkpoint("olmoe")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert not loaded & {"torch", "tokenizers", "jinja2", "huggingface_hub", "tidegate._core"}


def test_info_of_a_broken_store(tmp_path):
    dst = convert(checkpoints.checkpoint("olmoe"), tmp_path / "dst")
    os.truncate(dst / "experts.bin", 4096)
    done = tidegate("info", dst)
    assert done.returncode == 1 and "experts.bin: size of the file" in done.stderr and done.stderr.count("\n") == 1


def test_progress_is_lines_in_a_log(monkeypatch, capsys):
    clock = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    with Progress("converting") as progress:
        for done in range(0, 1001, 10):
            progress(done, 1000, "x")
    lines = capsys.readouterr().err.splitlines()
    assert 10 <= len(lines) <= 21 and all("of 0.98 KiB" in line and "/s" in line for line in lines), lines


@pytest.mark.skipif(not shutil.which("stty"), reason="needs a terminal")
def test_progress_is_a_bar_on_a_terminal(tmp_path):
    main_end, child_end = pty.openpty()
    arguments = [sys.executable, "-m", "tidegate", "convert", checkpoints.checkpoint("olmoe"), tmp_path / "dst"]
    with subprocess.Popen(
        arguments, stderr=child_end, stdout=subprocess.DEVNULL, env={**os.environ, "TERM": "xterm"}
    ) as child:
        os.close(child_end)
        seen = b""
        try:
            while chunk := os.read(main_end, 4096):
                seen += chunk
        except OSError:  # Linux: EIO when the child has closed its end
            pass
    os.close(main_end)
    assert child.returncode == 0 and b"converting" in seen and "█".encode() in seen

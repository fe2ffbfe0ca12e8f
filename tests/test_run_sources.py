"""``tidegate run`` on source checkpoints, sound and broken: converted once, torch never imported, errors that name the
place, nothing left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKED = (
    "import sys\nfor name in ('torch', 'transformers', 'safetensors', 'gguf'): sys.modules[name] = None\n"
    "from tidegate.cli import main\nsys.exit(main(sys.argv[1:]))"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder in two shards, made without torch."""
    folder = tmp_path_factory.mktemp("source") / "model"
    sizes = ["--layers", "2", "--experts", "8", "--hidden", "64", "--expert-width", "32"]
    subprocess.run(
        [sys.executable, ROOT / "examples" / "random_moe.py", folder, *sizes], check=True, capture_output=True
    )
    _shard(folder)
    return folder


def _shard(folder: Path) -> None:
    whole = folder / "model.safetensors"
    data = whole.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:start]), data[start:]
    names, where = sorted(header), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file, out, end = f"model-{number:05d}-of-00002.safetensors", {}, 0
        blob = b""
        for name in part:
            first, last = header[name]["data_offsets"]
            out[name] = {**header[name], "data_offsets": [end, end + last - first]}
            blob, end, where[name] = blob + body[first:last], end + last - first, file
        text = json.dumps(out).encode()
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + blob)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    whole.unlink()


def _tidegate(cache: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TIDEGATE_CACHE": str(cache)}
    command = [sys.executable, "-c", BLOCKED, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)


def test_run_convert_and_info_work_with_torch_blocked(source: Path, tmp_path: Path) -> None:
    cache, arguments = tmp_path / "cache", [source, "hello", "--max-tokens", "4", "--context", "64", "--ignore-eos"]
    first, second = (_tidegate(cache, "run", *arguments) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout == second.stdout
    assert "converting" in first.stderr and "converting" not in second.stderr
    assert len([entry for entry in cache.iterdir() if entry.is_dir()]) == 1
    assert _tidegate(cache, "info", source).returncode == 0
    assert _tidegate(cache, "convert", source, tmp_path / "store").returncode == 0
    by_store = _tidegate(cache, "run", tmp_path / "store", *arguments[1:])
    assert by_store.stdout == first.stdout
    refused = _tidegate(cache, "run", tmp_path / "store", "hello", "--experts", "int8")
    assert refused.returncode == 2 and "--experts has no effect" in refused.stderr


def _truncate(folder: Path, keep: int | None) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2 if keep is None else keep])


def _edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: _truncate(f, -1), "model-00002-of-00002.safetensors"),
        (lambda f: _truncate(f, None), "model-00002-of-00002.safetensors"),
        (lambda f: (f / "model-00001-of-00002.safetensors").unlink(), "model-00001-of-00002.safetensors"),
        (lambda f: _edit_config(f, moe_intermediate_size=48), "shape"),
        (lambda f: _edit_config(f, num_experts=9), "wanted shape [9, 64], got [8, 64]"),
        (lambda f: _edit_config(f, model_type="mamba"), "mamba"),
        (lambda f: (f / "config.json").write_text("{"), "config.json"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer"),
    ],
)
def test_a_broken_source_is_one_line_and_leaves_nothing(
    source: Path, tmp_path: Path, damage: object, said: str
) -> None:
    broken, cache = tmp_path / "model", tmp_path / "cache"
    broken.mkdir()
    for file in source.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    damage(broken)  # type: ignore[operator]
    done = _tidegate(cache, "run", broken, "hello", "--max-tokens", "2", "--context", "64")
    lines = [line for line in done.stderr.splitlines() if not line.startswith("converting ")]
    assert done.returncode == 1 and done.stdout == ""
    assert len(lines) == 1 and lines[0].startswith("tidegate: error: ") and said in lines[0], done.stderr
    if said != "tokenizer":
        assert not [entry for entry in cache.glob("*") if entry.is_dir()], "no partial store"

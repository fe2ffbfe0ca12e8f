"""``tidegate plan`` as a user meets it: real child processes, and a hub that is a server of this test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import checkpoints
from published import MODELS
from tidegate.checkpoint.convert import convert


def plan(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidegate", "plan", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "TIDEGATE_CACHE": "/no/such/cache", **environment},  # nothing measured there
    )  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "config.json"
    path.write_text(json.dumps(MODELS["OLMoE-1B-7B"].config))
    return path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--memory", "-8GiB"], "--memory '-8GiB': must be more than zero"),
        (["--memory", "0GiB"], "more than zero"),
        (["--memory", "10PiB"], "more than 1 PiB"),
        (["--memory", "9999TiB"], "more than 1 PiB"),
        (["--memory", "8"], "number with a unit"),
        (["--memory", "8 gigs"], "number with a unit"),
        (["--memory", "100MiB"], "the smallest budget that works is"),
        (["--ram", "64"], "--ram '64'"),
        (["--ram", "8GiB", "--memory", "9GiB"], "--ram"),
        (["--disk-bandwidth", "fast"], "--disk-bandwidth 'fast': write a number with a unit, like 3GB/s"),
        (["--ram", "64MiB"], "use more --ram or use fewer bits"),
        (["--context", "0"], "--context 0"),
        (["--context", "1000000"], "made for 4096 positions"),
        (["--batch", "0"], "--sequences 0"),
        (["--experts", "int5"], "--experts 'int5'"),
        (["--experts", "int4,int5"], "--experts 'int5'"),
        (["--experts", "int4,"], "--experts ''"),
        (["--kv", "f8"], "--kv 'f8'"),
        (["--prompt", "5000"], "--prompt 5000"),
        (["--vram", "24"], "--vram '24'"),
        (["--vram", "600MiB", "--ram", "64GiB"], "--vram: "),
        (["--link-bandwidth", "25GB/s"], "only with --vram"),
        (["--vram", "24GiB", "--vram-bandwidth", "fast"], "--vram-bandwidth 'fast'"),
        (["--json", "--markdown"], "not both"),
        (["--trace", "/no/such.trace"], "no such trace"),
    ],
)
def test_absurd_flags_are_refused_in_one_line(config: Path, arguments: list[str], said: str) -> None:
    if said == "no such trace":
        arguments = [*arguments, "--ram", "64GiB"]
    done = plan(config, *arguments)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert lines[0].startswith("tidegate: error: ") and said in lines[0], lines


@pytest.mark.parametrize("path", ["/no/such/model", "nobody/nothing", "."])
def test_what_is_no_model_is_refused_in_one_line(path: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tidegate", "plan", path], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf")},
    )  # fmt: skip
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and path in done.stderr, done.stderr


def test_the_card_in_three_forms(config: Path) -> None:
    asked = (config, "--ram", "64GiB", "--memory", "4GiB", "--context", "2048", "--batch", "2", "--threads", "2")
    card = json.loads(plan(*asked, "--json").stdout)
    assert card["budget_bytes"] == sum(card["plan"]["accounts_bytes"].values()) == 4 << 30
    assert card["verdict"] == "streams" and card["sequences"] == 2 and len(card["plan"]["slots_per_layer"]) == 16
    assert card["options"]["context"] == 2048 and card["options"]["threads"] == 2
    assert card["forecast"]["low_tokens_per_s"] < card["forecast"]["decode_tokens_per_s"]
    text = plan(*asked).stdout
    for owner, size in card["packed_bytes"].items():
        assert size == 0 or f"{size:,} B" in text, owner
    assert "a token" in text and "runs: " in text and "ASSUMED" in text
    marked = plan(*asked, "--markdown").stdout
    assert "| budget | bytes | | |" in marked and "**runs: " in marked


def test_a_budget_beyond_this_machine_is_one_for_another(config: Path) -> None:
    done = plan(config, "--memory", "900TiB", "--json")
    card = json.loads(done.stdout)
    assert done.returncode == 0 and card["budget_bytes"] == 900 << 40 and card["verdict"] == "fits"
    assert "for another machine, this one can never have more than" in card["budget"]


def test_bandwidths_change_the_forecast_and_nothing_else(config: Path) -> None:
    asked = (config, "--ram", "64GiB", "--memory", "2GiB", "--json")
    cards = [json.loads(plan(*asked, *more).stdout) for more in ((), ("--disk-bandwidth", "100GB/s"))]
    assert cards[1]["forecast"]["decode_tokens_per_s"] > cards[0]["forecast"]["decode_tokens_per_s"]
    assert cards[0]["plan"] == cards[1]["plan"]


def test_a_store_cannot_be_planned_in_another_format(tmp_path: Path) -> None:
    store = convert(checkpoints.checkpoint("qwen3_moe"), tmp_path / "store")
    assert plan(store, "--context", "64").returncode == 0
    done = plan(store, "--experts", "int8")
    assert done.returncode == 2 and "converted already" in done.stderr


class _Hub(BaseHTTPRequestHandler):
    """Serves one folder as repository org/model, with ranges, as the hub does."""

    folder: Path

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _answer(self, has_body: bool) -> None:
        file = self.folder / self.path.rpartition("/resolve/main/")[2]
        if "/resolve/main/" not in self.path or not file.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = file.read_bytes()
        first, last = 0, len(data) - 1
        ranged = self.headers.get("Range", "").removeprefix("bytes=")
        if ranged:
            start, _, stop = ranged.partition("-")
            first, last = int(start), min(int(stop or last), last)
        self.send_response(206 if ranged else 200)
        self.send_header("ETag", '"0123456789"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(last + 1 - first))
        if ranged:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.end_headers()
        if has_body:
            self.wfile.write(data[first : last + 1])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    folder = checkpoints.checkpoint("qwen3_moe", "bfloat16")
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"folder": folder}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_repository_on_the_hub_is_planned_like_the_folder(hub: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = hub
    asked = ("--ram", "8GiB", "--context", "64", "--json")
    far = plan("org/model", *asked, HF_ENDPOINT=address, HF_HOME=str(tmp_path / "hf"), HF_HUB_DISABLE_PROGRESS_BARS="1")
    assert far.returncode == 0, far.stderr
    near, far_card = json.loads(plan(folder, *asked).stdout), json.loads(far.stdout)
    assert far_card.pop("kind") == "hub" and near.pop("kind") == "hf"
    assert far_card.pop("model") == "org/model" and near.pop("model") == str(folder)
    assert far_card == near


def test_advice_says_so_when_nothing_fits(config: Path) -> None:
    done = plan(config, "--ram", "64GiB", "--memory", "200MiB", "--advise")
    assert done.returncode == 2 and "nothing fits this budget" in done.stdout and "rule of thumb" in done.stdout
    assert "ways out:" in done.stdout and "--kv int8: " in done.stdout


def test_formats_side_by_side(config: Path) -> None:
    asked = (config, "--ram", "64GiB", "--memory", "4500MiB", "--context", "512", "--experts", "bf16,int8,int4")
    found = json.loads(plan(*asked, "--json").stdout)
    rows = found["formats"]
    assert [row["experts"] for row in rows] == ["bf16", "int8-g32", "int4-g32-m8"]
    assert found["expert_formats"][0]["format"] == "bf16", "the card is of the first"
    for name in ("store_bytes", "smallest_bytes"):
        assert [row[name] for row in rows] == sorted((row[name] for row in rows), reverse=True)
    speeds = [row["decode_tokens_per_s"] for row in rows]
    assert speeds == sorted(speeds)
    text = plan(*asked).stdout
    assert "formats:" in text and all(row["experts"] in text.partition("formats:")[2] for row in rows)
    smallest = f"{rows[1]['smallest_bytes']}B"  # of int8
    small = (config, "--ram", "64GiB", "--memory", smallest, "--context", "512", "--experts", "f32,int4")
    done = plan(*small, "--markdown")
    assert done.returncode == 0 and "| too small |" in done.stdout, "one of them fits"

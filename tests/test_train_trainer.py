"""The trainer on a micro model: same seed same losses, kill and resume, gradients, export."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tidegate.train import checkpoint  # noqa: E402
from tidegate.train.options import Architecture, RouterOptions, TrainOptions  # noqa: E402
from tidegate.train.trainer import Trainer  # noqa: E402

MICRO = Architecture(
    vocab_size=128, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    num_experts=4, num_experts_per_tok=2, expert_size=32, max_positions=64,
)  # fmt: skip
OPTIONS = TrainOptions(
    architecture=MICRO, steps=50, batch_sequences=4, sequence_length=16, warmup_steps=5, decay_steps=10,
    world_size=1, compile=False, seed=3,
)  # fmt: skip
SHARES = {"even": 0.5, "odd": 0.5}


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro models are slower on several threads than on one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Two domains of tokens that a model can learn: counting up by two, from an even or an odd number."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    for at, domain in enumerate(SHARES):
        ids = ((np.arange(5000) * 2 + at) % 128).astype("<u2")
        for split in ("train", "heldout"):
            (folder / f"{domain}.{split}.u16").write_bytes(ids.tobytes())
    return folder


def losses(directory: Path) -> list[float]:
    return [record["nll"] for record in checkpoint.read_curve(directory / "curve.jsonl")]


def test_same_seed_gives_the_same_first_fifty_losses_and_they_fall(tmp_path: Path, tokens: Path) -> None:
    for name in ("first", "second"):
        Trainer(tmp_path / name, tokens, OPTIONS, SHARES).run()
    first = losses(tmp_path / "first")
    assert len(first) == 50
    assert first == losses(tmp_path / "second")
    assert first[-1] < first[0] - 1.0


def test_two_workers_are_reproducible_whenever_they_save(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(OPTIONS, world_size=2, steps=12)
    for name, save_every_s in (("first", 1e9), ("second", 1e9), ("saving", -1.0)):
        monkeypatch.setattr("tidegate.train.trainer.SAVE_EVERY_S", save_every_s)
        Trainer(tmp_path / name, tokens, options, SHARES).run()
    assert losses(tmp_path / "first") == losses(tmp_path / "second") == losses(tmp_path / "saving")


@pytest.mark.parametrize(
    "router",
    [
        RouterOptions(balance_scope="window", temperature_end=0.5, init="orthogonal"),
        RouterOptions(balance_alpha=0.0, z_loss=0.0, bias_rate=0.01),
        RouterOptions(capacity_factor=1.0),
    ],
)
def test_a_stopped_run_resumes_on_the_same_curve(tmp_path: Path, tokens: Path, router: RouterOptions) -> None:
    options = replace(OPTIONS, router=router, steps=12, qat_from_step=8)
    Trainer(tmp_path / "whole", tokens, options, SHARES).run()
    stopped = Trainer(tmp_path / "parts", tokens, options, SHARES)
    stopped.run(lambda record: stop_after(stopped, record, 5))
    resumed = Trainer.resume(tmp_path / "parts", tokens, {})
    assert resumed.step == 6
    resumed.run()
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")


def stop_after(trainer: Trainer, record: dict[str, float], step: int) -> None:
    if record["step"] == step:
        checkpoint.save(trainer.directory, trainer.step, trainer._state())
        trainer.step = trainer.options.steps


def test_kill_nine_leaves_a_run_that_resumes_on_the_same_curve(tmp_path: Path, tokens: Path) -> None:
    script = f"""
import json, os, sys, tidegate.train.trainer as t
os.sched_getaffinity = lambda _: {{0}}
from pathlib import Path
from tidegate.train.options import TrainOptions
t.SAVE_EVERY_S = 0.2
options = TrainOptions.from_json(json.loads({json.dumps(json.dumps(replace(OPTIONS, steps=100_000).to_json()))}))
t.Trainer(Path({str(tmp_path / "killed")!r}), Path({str(tokens)!r}), options, {SHARES!r}).run()
"""
    child = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list((tmp_path / "killed").glob("checkpoint-*.pt"))) < 2:
        time.sleep(0.02)
        assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait()
    saved = Trainer.resume(tmp_path / "killed", tokens, {}).step
    steps = saved + 20 + OPTIONS.decay_steps
    assert saved > 0
    Trainer.resume(tmp_path / "killed", tokens, {"steps": steps}).run()
    Trainer(tmp_path / "whole", tokens, replace(OPTIONS, steps=steps), SHARES).run()
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_a_cut_checkpoint_is_named(tmp_path: Path, tokens: Path) -> None:
    trainer = Trainer(tmp_path / "run", tokens, replace(OPTIONS, steps=1), SHARES)
    trainer.run()
    path = checkpoint.latest(tmp_path / "run")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(checkpoint.CorruptFile, match=path.name):
        Trainer.resume(tmp_path / "run", tokens, {})

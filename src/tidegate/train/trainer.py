"""A training run: a folder with options, checkpoints, the curve; started, stopped, killed and resumed at will."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import multiprocessing

from tidegate.errors import UsageError
from tidegate.train import checkpoint
from tidegate.train.data import heldout_windows
from tidegate.train.options import TrainOptions
from tidegate.train.worker import RUN, SAVE, STOP, Shared, Worker, expert_entropy, follow, settle_process

DEFAULT_SHARES = {
    "prose": 0.20, "manuals": 0.18, "code": 0.20, "chinese": 0.14, "classical": 0.12, "instructions": 0.16,
}  # fmt: skip
HELDOUT_SEQUENCES = 8
SAVE_EVERY_S = 240.0

Report = Callable[[dict[str, Any]], None]


class Trainer:
    """Owns the run's folder and worker 0, which lives in this process; the other workers are child processes."""

    def __init__(
        self, directory: Path, tokens: Path, options: TrainOptions, shares: dict[str, float] | None = None
    ) -> None:
        """``tokens`` holds ``<domain>.train.u16`` and ``<domain>.heldout.u16``; raises UsageError where one is missing. Nothing
        is started yet."""
        self.directory, self.options = directory, options
        self.tokens, self.shares = tokens, shares or DEFAULT_SHARES
        for domain in self.shares:
            for split in ("train", "heldout"):
                if not (path := tokens / f"{domain}.{split}.u16").is_file():
                    raise UsageError(f"{path}: no such token file; python -m tidegate.train.tokenizer makes them")
        directory.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        self._spawn = context.Process
        paths = {domain: tokens / f"{domain}.train.u16" for domain in self.shares}
        self.shared = Shared.create(options, paths, self.shares, context.Barrier(options.world_size))
        self.step, self.sequence = 0, 0

    @staticmethod
    def resume(
        directory: Path, tokens: Path, changes: dict[str, Any], router_changes: dict[str, Any] | None = None
    ) -> Trainer:
        """The run as its newest checkpoint left it, with some options changed (a longer or shorter end, say)."""
        state = checkpoint.load(checkpoint.latest(directory))
        options = TrainOptions.from_json(json.loads(state["options"]))
        options = replace(options, router=replace(options.router, **(router_changes or {})), **changes)
        trainer = Trainer(directory, tokens, options, json.loads(state["shares"]))
        trainer._restore(state)
        return trainer

    def run(self, report: Report | None = None, *, time_limit_s: float = float("inf")) -> None:
        """Train to ``options.steps`` or the time limit, then save. ``report`` gets every step's record."""
        options, shared = self.options, self.shared
        shared.first_step, shared.first_sequence = self.step, self.sequence
        cores = len(os.sched_getaffinity(0))
        num_threads = max(1, cores // options.world_size)
        children = [
            self._spawn(target=follow, args=(shared, rank, num_threads), daemon=True)
            for rank in range(1, options.world_size)
        ]
        for child in children:
            child.start()
        settle_process(num_threads)
        worker = Worker(shared, 0)
        curve = checkpoint.Curve(self.directory / "curve.jsonl", self.step)
        started = saved = time.monotonic()
        try:
            while self.step < options.steps:
                begun = time.monotonic()
                updated = worker.step(self.step, self.sequence)
                record = self._record(time.monotonic() - begun, updated)
                self.step, self.sequence = self.step + 1, self.sequence + options.batch_sequences
                last = self.step == options.steps or time.monotonic() - started > time_limit_s
                due = last or time.monotonic() - saved > SAVE_EVERY_S
                shared.control[0] = STOP if last else SAVE if due else RUN
                worker.meet()
                if due:
                    record["heldout"] = self.heldout_nll(worker)
                curve.write(record)
                if due:
                    checkpoint.save(self.directory, self.step, self._state())
                    saved = time.monotonic()
                if report:
                    report(record)
                if last:
                    break
                if due:
                    worker.meet()
        finally:
            curve.close()
            shared.barrier.abort()
            for child in children:
                child.join(timeout=30)

    def heldout_nll(self, worker: Worker) -> dict[str, float]:
        """Nats per token of a few held-out windows of each domain."""
        result = {}
        for domain in sorted(self.shares):
            path = self.tokens / f"{domain}.heldout.u16"
            windows = heldout_windows(path, self.options.sequence_length, HELDOUT_SEQUENCES)
            batch = torch.from_numpy(windows).to(self.options.device)
            temperature = self.options.router_temperature(self.step)
            nll_T, _ = worker.model.evaluate(batch[:, :-1], batch[:, 1:], temperature)
            result[domain] = round(float(nll_T.mean()), 4)
        return result

    def _record(self, duration_s: float, updated: bool) -> dict[str, Any]:
        load_LE = self.shared.load_WLE.mean(0).numpy()
        return {
            "step": self.step,
            "nll": float(self.shared.nll_W.mean()),
            "tokens_per_s": round(self.options.tokens_per_step / duration_s, 1),
            "rate": self.options.rate_factor(self.step),
            "expert_entropy_ratio": round(expert_entropy(load_LE), 4),
            "smallest_share_ratio": round(float(np.min(load_LE) * load_LE.shape[-1]), 3),
            "updated": updated,
        }

    def _state(self) -> dict[str, Any]:
        shared = self.shared
        return {
            "options": json.dumps(self.options.to_json()),
            "shares": json.dumps(self.shares),
            "step": self.step,
            "sequence": self.sequence,
            "masters": shared.masters.full,
            "moments": shared.moments.full,
            "squares": shared.squares.full,
            "routers": [[router.state() for router in routers] for routers in shared.routers],
        }

    def _restore(self, state: dict[str, Any]) -> None:
        shared = self.shared
        self.step, self.sequence = state["step"], state["sequence"]
        for name, target in (("masters", shared.masters), ("moments", shared.moments), ("squares", shared.squares)):
            target.full.copy_(state[name])
        for routers, saved in zip(shared.routers, state["routers"], strict=False):
            for router, tensors in zip(routers, saved, strict=True):
                for tensor, value in zip(router.state(), tensors, strict=True):
                    tensor.copy_(value)

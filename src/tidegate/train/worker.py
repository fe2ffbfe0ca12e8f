"""One training process. Workers share every tensor; each computes its part of a batch, then updates its parameters.

A step has two meetings: after all gradients are written, and after all weights are updated. Workers are processes of
one thread each: with few cores that is faster than threads inside every operation, and a busy neighbour delays a step
once and not at every operation.
"""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import torch

from tidegate.train.data import Sampler
from tidegate.train.model import Model
from tidegate.train.moe import Router
from tidegate.train.optimizer import Optimizer, share_out
from tidegate.train.options import TrainOptions
from tidegate.train.weights import Buffers, Parameter, initialise, parameters_of

RUN, SAVE, STOP = 0, 1, 2
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_PR_SET_PDEATHSIG = 1


@dataclass
class Shared:
    """Everything the workers of a run have in common. ``control`` is RUN, SAVE or STOP, set by worker 0."""

    options: TrainOptions
    token_paths: dict[str, Path]
    shares: dict[str, float]
    barrier: Barrier
    parameters: list[Parameter]
    masters: Buffers
    moments: Buffers
    squares: Buffers
    weights: Buffers
    gradients: list[Buffers]
    routers: list[list[Router]]
    nll_W: torch.Tensor
    load_WLE: torch.Tensor
    control: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64).share_memory_())
    first_step: int = 0
    first_sequence: int = 0

    @staticmethod
    def create(
        options: TrainOptions, token_paths: dict[str, Path], shares: dict[str, float], barrier: Barrier
    ) -> Shared:
        """Allocate (in memory shared by the workers, on the CPU) and initialise from the seed."""
        parameters, shape = parameters_of(options.architecture), options.architecture
        allocate = partial(Buffers, device=options.device, shared=options.device == "cpu")
        adam = [item for item in parameters if item.kind not in ("matrix", "expert")]
        shared = Shared(
            options, token_paths, shares, barrier, parameters,
            masters=allocate(parameters, "master"),
            moments=allocate(parameters, "master"),
            squares=allocate(adam, "master"),
            weights=allocate(parameters, "weight"),
            gradients=[allocate(parameters, "gradient") for _ in range(options.world_size)],
            routers=[[Router(shape, options.router) for _ in range(shape.num_layers)] for _ in range(options.world_size)],
            nll_W=torch.zeros(options.world_size).share_memory_(),
            load_WLE=torch.zeros(options.world_size, shape.num_layers, shape.num_experts).share_memory_(),
        )  # fmt: skip
        for routers in shared.routers:
            for router in routers:
                for tensor in router.state():
                    tensor.share_memory_()
        initialise(shared.masters.views(), parameters, options.router, options.seed)
        return shared


def settle_process(num_threads: int) -> None:
    """Keep glibc from giving memory back after every step (page faults cost 10 % otherwise); die with the parent."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_MMAP_MAX, 0)
    torch.set_num_threads(num_threads)


class Worker:
    """Worker ``rank`` of a run."""

    def __init__(self, shared: Shared, rank: int) -> None:
        options = shared.options
        self.shared, self.rank, self.options = shared, rank, options
        self.sampler = Sampler(shared.token_paths, shared.shares, options.sequence_length, options.seed)
        self.model = Model(
            options.architecture, shared.routers[rank], shared.parameters, shared.weights, shared.gradients[rank],
            options.sequence_length, options.compile,
        )  # fmt: skip
        self.optimizer = Optimizer(
            options, share_out(shared.parameters, options.world_size)[rank], shared.masters.views(),
            shared.moments.views(), shared.squares.views(), shared.weights.views(),
            [buffers.views() for buffers in shared.gradients],
        )  # fmt: skip
        self.optimizer.publish_all(shared.first_step)
        self.meet()

    def meet(self) -> None:
        """Wait for all workers. Raises BrokenBarrierError when one of them has died."""
        self.shared.barrier.wait()

    def step(self, step: int, first_sequence: int) -> bool:
        """One step. Returns whether the update was made: not where any worker's loss is not finite."""
        shared, options = self.shared, self.options
        count = options.batch_sequences // options.world_size
        batch = torch.from_numpy(self.sampler.batch(first_sequence + self.rank * count, count)).to(options.device)
        self.model.clear_gradients()
        result = self.model.loss(batch[:, :-1], batch[:, 1:], options.router_temperature(step))
        result.loss.backward()
        shared.nll_W[self.rank] = result.nll
        shared.load_WLE[self.rank] = result.load_LE
        self.meet()
        finite = bool(torch.isfinite(shared.nll_W).all())
        if finite:
            self.optimizer.step(step)
            for router, load_E in zip(self.model.routers, shared.load_WLE.mean(0), strict=True):
                router.update_bias(load_E.to(options.device))
        self.meet()
        return finite


def follow(shared: Shared, rank: int, num_threads: int) -> None:
    """Body of the workers other than 0: step until told to stop."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settle_process(num_threads)
    worker = Worker(shared, rank)
    step, sequence = shared.first_step, shared.first_sequence
    while step < shared.options.steps:
        worker.step(step, sequence)
        step, sequence = step + 1, sequence + shared.options.batch_sequences
        worker.meet()
        told = int(shared.control)  # worker 0 sets it before it comes and leaves it until all met again
        if told == SAVE:
            worker.meet()
        if told == STOP:
            return


def expert_entropy(load_LE: np.ndarray) -> float:
    """Entropy of the experts' load over that of an even load, mean over layers: 1.0 is perfect balance."""
    load = np.maximum(load_LE, 1e-12)
    return float((-(load * np.log(load)).sum(-1) / np.log(load.shape[-1])).mean())

"""Compute objects for the tests of native kernels: every instruction set, one thread and three."""

import numpy as np

from tidegate import _core
from tidegate.backends.cpu_linear import LinearOps

ISAS = _core.available_isas()


class Ops(LinearOps):
    """The products of the CPU backend without its attention."""


Ops.__abstractmethods__ = frozenset()


def aligned(nbytes):
    block = np.empty(nbytes + 64, np.uint8)
    start = -block.ctypes.data % 64
    return block[start : start + nbytes]


def make_ops(isa, threads=1, nbytes=64 << 20):
    return Ops(_core.Compute(threads, aligned(nbytes), isa))


OPS = {(isa, threads): make_ops(isa, threads) for isa in ISAS for threads in (1, 3)}


def run(ops, op, *arrays):
    """op on matrices made of arrays; the result as an array of its own."""
    ops.compute.release(0)
    return ops.compute.numpy(op(*[ops.compute.from_numpy(a) for a in arrays])).copy()

"""Native core (csrc/). One section a header, in the order of bindings.cc."""

from tidegate.backends.base import ByteArray, F32Array

version: str

# ---- compute.h, workspace.h, tensor.h

class Matrix:
    rows: int
    cols: int

class Compute:
    def __init__(self, threads: int, memory: ByteArray, isa: str) -> None: ...
    threads: int
    isa: str
    peak_bytes: int
    def mark(self) -> int: ...
    def release(self, mark: int) -> None: ...
    def matrix(self, rows: int, cols: int) -> Matrix: ...
    def from_numpy(self, array: F32Array) -> Matrix: ...
    def numpy(self, x: Matrix) -> F32Array: ...

def available_isas() -> list[str]: ...

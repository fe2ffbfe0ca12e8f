"""The threaded parts of the core under ThreadSanitizer and AddressSanitizer; by hand: ``tests/native/run.sh``."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {
    "loader_test": ["loader", "file_set", "block_reader", "faulty_reader", "crc32"],
    "pool_test": ["pool"],
}


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
@pytest.mark.parametrize("name", SOURCES)
def test_under_a_sanitizer(name: str, sanitizer: str, tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    flags = ["-std=c++20", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    empty = tmp_path / "empty.cc"
    empty.write_text("int main() {}\n")
    probe = [str(compiler), *flags, str(empty), "-o", str(tmp_path / "empty")]
    if compiler is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("no C++ compiler with this sanitizer")
    program = tmp_path / name
    files = [ROOT / "tests/native" / f"{name}.cc", *(ROOT / "csrc" / f"{source}.cc" for source in SOURCES[name])]
    subprocess.run([compiler, *flags, f"-I{ROOT / 'csrc'}", *map(str, files), "-o", str(program)], check=True)
    # Older ThreadSanitizers cannot place their shadow memory on kernels that randomise many address bits.
    fixed_addresses = [setarch, "-R"] if (setarch := shutil.which("setarch")) else []
    done = subprocess.run([*fixed_addresses, str(program)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(": ok\n")

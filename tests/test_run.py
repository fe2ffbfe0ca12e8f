"""``tidegate run`` as a person meets it: child processes, pipes, signals and a pseudo-terminal."""

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stores import qwen_config, write_store

COMMAND = [sys.executable, "-m", "tidegate", "run"]
CLOSING = re.compile(
    r"^([\d.,]+ tokens/s, )?first token .+, [\d,]+ hits / [\d,]+ misses \([\d.]+% of [\d,]+ expert visits hit\), "
    r"[\d.]+ \w+ read, peak [\d.]+ MiB of 120 MiB$"
)
FLAGS = ["--memory", "120MiB", "--context", "512"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("run") / "store", qwen_config())


@pytest.fixture(scope="module")
def slow_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough work that 4,000 tokens take a while."""
    config = qwen_config(hidden_size=256, num_hidden_layers=10, moe_intermediate_size=128, max_position_embeddings=8192)
    return write_store(tmp_path_factory.mktemp("slow") / "store", config)


def _run(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *map(str, arguments), *FLAGS], capture_output=True, text=True, check=False, timeout=120, **options
    )  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return done


def test_without_memory_the_budget_is_what_is_available_and_says_so(store: Path) -> None:
    done = subprocess.run(
        [*COMMAND, store, "x", "--max-tokens", "2", "--context", "64"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "by default" in done.stderr.splitlines()[0] and "reserve" in done.stderr


def test_a_flipped_byte_is_found_by_verify(store: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(store, damaged)
    with (damaged / "experts.bin").open("r+b") as file:
        for expert in range(48):  # one byte of every blob
            file.seek(4096 * expert + 50)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
    command = [*COMMAND, damaged, "x", *FLAGS, "--max-tokens", "2", "--verify"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "experts.bin: crc32 of expert" in done.stderr.splitlines()[-1]
    assert not done.stdout or done.stdout.endswith("\n"), "the error has a line of its own"


def test_a_prompt_is_answered_and_the_run_ends_with_one_line(store: Path) -> None:
    done = _run(store, "hello", "--max-tokens", "12", "--ignore-eos")
    assert done.stdout.endswith("\n") and len(done.stdout) > 1
    lines = done.stderr.splitlines()
    assert lines[0].startswith("memory: 120 MiB by --memory")
    assert any("expert slots" in line and "16 of 16 experts a layer (100%)" in line for line in lines)
    assert CLOSING.match(lines[-1]), lines[-1]


def test_prompt_file_and_standard_input_are_the_same(store: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("hello there")
    by_argument = _run(store, "hello there", "--max-tokens", "8")
    by_file = _run(store, "--file", tmp_path / "prompt.txt", "--max-tokens", "8")
    by_pipe = _run(store, "--max-tokens", "8", input="hello there")
    assert by_argument.stdout == by_file.stdout == by_pipe.stdout
    assert _run(store, "hello there", "--max-tokens", "8", "--raw").stdout != by_argument.stdout, "no template"


def test_an_empty_prompt_is_refused_before_anything_is_loaded(store: Path) -> None:
    done = subprocess.run([*COMMAND, "/no/such"], capture_output=True, text=True, check=False, input=" \n")
    assert (done.returncode, done.stderr) == (2, "tidegate: error: the prompt is empty\n")


def test_json_is_one_object_with_units_in_its_keys(store: Path) -> None:
    done = _run(store, "hello", "--max-tokens", "8", "--json", "--ignore-eos")
    result = json.loads(done.stdout)
    assert done.stderr == ""
    assert result["decode_tokens"] == 7 and result["prefill_tokens"] == len("u:hello") + 1 + len("a:")
    assert result["budget_bytes"] == 120 << 20 and result["peak_bytes"] <= 120 << 20
    assert sum(result["plan"]["accounts_bytes"].values()) == 120 << 20
    assert result["misses"] > 0 and result["read_bytes"] > 0


def test_sampling_flags_reach_the_sampler(store: Path) -> None:
    arguments = [store, "hello", "--max-tokens", "20", "--ignore-eos"]
    greedy = _run(*arguments)
    drawn = [_run(*arguments, "--temperature", "1.5", "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0] != greedy.stdout
    cut = _run(*arguments, "--stop", greedy.stdout[3:5]).stdout.rstrip("\n")
    assert greedy.stdout.startswith(cut) and len(cut) <= 3


def test_before_the_arena_the_process_stays_under_100_mb(store: Path) -> None:
    code = (
        "import tidegate, tidegate.cli.run, tidegate.backends.cpu\nfrom tidegate.errors import BudgetTooSmall\n"
        "from tidegate.memory.probe import process_memory\n"
        f"try: tidegate.load({str(store)!r}, memory=1)\n"
        "except BudgetTooSmall: print(process_memory().peak_rss_bytes)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100_000_000


def test_a_budget_too_small_is_one_line_that_names_the_smallest(store: Path) -> None:
    done = subprocess.run([*COMMAND, store, "x", "--memory", "10MiB"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(
        r"tidegate: error: --memory 10,485,760 B is too small by [\d,]+ B; the smallest budget that works is [\d,]+ B, "
        r"--memory \d+MiB \(needs less: .*--context 256.*\)\n",
        done.stderr,
    )


def test_ctrl_c_ends_a_run_with_its_closing_line_and_130(slow_store: Path) -> None:
    child = subprocess.Popen(
        [
            *COMMAND,
            slow_store,
            "hello",
            "--memory",
            "120MiB",
            "--max-tokens",
            "4000",
            "--context",
            "4096",
            "--ignore-eos",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    first = child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130 and first
    assert b"Traceback" not in err and CLOSING.match(err.decode().splitlines()[-1])
    assert len(out) < 4000


class Terminal:
    """A child whose standard input, output and error are a terminal of its own."""

    def __init__(self, *arguments: str | Path) -> None:
        self._master, slave = pty.openpty()
        attributes = termios.tcgetattr(slave)
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        self.child = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,  # noqa: PLW1509 (before exec, on purpose)
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)
        self.seen = ""

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def _read(self) -> bool:
        """Take what is there, waiting a moment; False once the child has closed its side."""
        if select.select([self._master], [], [], 0.2)[0]:
            try:
                self.seen += os.read(self._master, 65536).decode(errors="replace")
            except OSError:
                return False
        return True

    def wait_for(self, pattern: str, timeout_s: float = 60) -> str:
        """Everything up to the end of the first match, which is taken off ``seen``."""
        end = time.monotonic() + timeout_s
        while (match := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < end, f"no {pattern!r} in {self.seen!r}"
            assert self._read() or re.search(pattern, self.seen), f"no {pattern!r} in {self.seen!r}"
        text, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return text

    def interrupt_until(self, pattern: str) -> None:
        """Ctrl-C, again if need be: one that comes between readline's prompt and its first wait is only noticed later."""
        for _ in range(20):
            self.send("\x03")
            end = time.monotonic() + 3
            while time.monotonic() < end:
                self._read()
                if re.search(pattern, self.seen):
                    self.seen = self.seen[re.search(pattern, self.seen).end() :]
                    return
        raise AssertionError(f"no {pattern!r} in {self.seen!r}")

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self._master)


@pytest.fixture
def terminal(slow_store: Path) -> Iterator[Terminal]:
    flags = ["--memory", "120MiB", "--max-tokens", "4000", "--context", "8192", "--ignore-eos", "--prefill-chunk", "64"]
    chat = Terminal(slow_store, *flags)
    yield chat
    chat.close()


def test_ctrl_c_in_a_chat_stops_the_answer_and_not_the_program(terminal: Terminal) -> None:
    terminal.wait_for(r"/reset starts anew")
    terminal.wait_for(r"> $")
    terminal.send("hello\n")
    terminal.wait_for(r"\S")
    terminal.send("\x03")
    answer = terminal.wait_for(r"\n> $")
    assert len(answer) < 4000
    terminal.interrupt_until(r"Ctrl-C stops an answer")  # at the prompt: nothing to stop
    terminal.wait_for(r"> $")
    terminal.send("/reset\n")
    terminal.wait_for(r"> $")
    terminal.send("more\n")
    terminal.wait_for(r"\S")
    terminal.send("\x03")
    terminal.wait_for(r"\n> $")
    terminal.send("/quit\n")
    terminal.wait_for(r"first token .* of 120 MiB")
    assert terminal.child.wait(timeout=30) == 0
    assert "Traceback" not in terminal.seen


def test_a_long_prompt_says_how_far_it_has_been_read(terminal: Terminal) -> None:
    terminal.wait_for(r"> $")
    terminal.send("hello " * 100 + "\n")
    terminal.wait_for(r"reading the prompt: 64 tokens")
    terminal.wait_for(r"reading the prompt: 128 tokens")
    terminal.wait_for(r"\r\x1b\[K[^\r]*\S")  # the line is gone, the answer begins
    terminal.send("\x03")
    terminal.wait_for(r"\n> $")


def test_ctrl_d_leaves_a_chat(terminal: Terminal) -> None:
    terminal.wait_for(r"> $")
    terminal.send("\x04")
    terminal.wait_for(r"0 hits / 0 misses, .* of 120 MiB")
    assert terminal.child.wait(timeout=30) == 0


def test_a_chat_through_a_pipe(store: Path) -> None:
    done = _run(store, "--chat", "--max-tokens", "6", input="hello\n\nagain\n/quit\nnever\n")
    assert done.stdout.count("\n") >= 2
    assert CLOSING.match(done.stderr.splitlines()[-1])
    too_long = _run(store, "--chat", "--max-tokens", "6", input="x" * 600 + "\nhello\n")
    assert "raise --context" in too_long.stderr and too_long.stdout.strip()

"""Starting child processes that write a log, and ending them.

Owns the fork server's life and a kill at a random moment: a wait for the child's end with a random
deadline, then SIGKILL.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from tests.durability.child import Order

ANSWER_S: Final = 30.0
ROOT: Final = Path(__file__).parents[2]


@dataclass(slots=True)
class ForkServer:
    """Forks writers, one at a time."""

    process: subprocess.Popen[bytes]

    def run(self, order: Order, meanwhile: Callable[[int], None]) -> int:
        """Runs one child; `meanwhile(pid)` may end it. Returns its exit code, -9 when killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(order.line())
        self.process.stdin.flush()
        pid = _number(self.process.stdout)
        meanwhile(pid)
        return _number(self.process.stdout)


def _number(source: IO[bytes]) -> int:
    ready, _, _ = select.select([source], [], [], ANSWER_S)
    line = source.readline() if ready else b""
    assert line, "the fork server does not answer"
    return int(line)


@contextmanager
def fork_server() -> Iterator[ForkServer]:
    """A server until the block ends."""
    argv = [sys.executable, "-m", "tests.durability.child"]
    process = subprocess.Popen(
        argv, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert _number(process.stdout) == process.pid
        yield ForkServer(process)
    finally:
        process.stdin.close()
        _end(process)
        process.stdout.close()


@contextmanager
def traced(pid: int, injection: str) -> Iterator[None]:
    """strace changes a call of what the process forks while the block runs: "call:what:when=n".

    Not with --seccomp-bpf, under which strace 6.1 counts wrongly.
    """
    call = injection.partition(":")[0]
    argv = ["strace", "-f", "-o", "/dev/null", "-e", f"trace={call}"]
    argv += ["-e", f"inject={injection}", "-p", str(pid)]
    strace = subprocess.Popen(argv, stderr=subprocess.PIPE, bufsize=0)
    assert strace.stderr is not None
    try:
        ready, _, _ = select.select([strace.stderr], [], [], ANSWER_S)
        line = strace.stderr.readline() if ready else b""
        assert b"attached" in line, f"strace: {line!r}"
        yield
    finally:
        strace.terminate()
        _end(strace)
        strace.stderr.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10.0)


def kill_after(delay_s: float) -> Callable[[int], None]:
    """Waits for the child's end, at most so long, then kills it."""

    def meanwhile(pid: int) -> None:
        if not _has_ended(pid, delay_s):
            os.kill(pid, signal.SIGKILL)

    return meanwhile


def await_end(pid: int) -> None:
    """Waits for the child's end; one that hangs is killed, which its exit code says."""
    if not _has_ended(pid, ANSWER_S):
        os.kill(pid, signal.SIGKILL)


def _has_ended(pid: int, timeout_s: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ready, _, _ = select.select([descriptor], [], [], timeout_s)
        return bool(ready)
    finally:
        os.close(descriptor)

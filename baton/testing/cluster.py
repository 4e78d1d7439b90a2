"""A real cluster for end-to-end tests: `baton up` as its users start it.

Owns the child process of the command and its end. Never reaches into the services; tests talk to
them over their own doors.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from baton.launcher.cluster import arena_dir, remove_arena_dir, remove_nvme_dir
from baton.launcher.ports import PortReservation

READY_TIMEOUT_S: Final = 180.0
STOP_TIMEOUT_S: Final = 60.0
_READY: Final = "ready in "


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCluster:
    """Where the cluster is."""

    url: str
    grpc_address: str
    run_dir: Path
    ready_after_s: float
    process: subprocess.Popen[str]

    def pid(self, name: str) -> int:
        """Process id of the child `name`, such as `decode-0`."""
        return int((self.run_dir / f"{name}.pid").read_text(encoding="ascii"))

    def log(self, name: str) -> str:
        """What the child has logged so far."""
        return (self.run_dir / f"{name}.log").read_text(encoding="utf-8", errors="replace")


def free_port() -> int:
    """A port that nobody has right now."""
    ports = PortReservation("127.0.0.1")
    port = ports.next_port()
    ports.release()
    return port


@contextlib.contextmanager
def running_cluster(run_dir: Path, *flags: str) -> Iterator[RunningCluster]:
    """Run `baton up` with a free port and `flags` until the block ends.

    Raises AssertionError with the command's output when it does not become ready.
    """
    port, grpc_port = free_port(), free_port()
    argv = (sys.executable, "-m", "baton.cli.main", "up", "--run-dir", str(run_dir))
    process = subprocess.Popen(
        [*argv, "--http-port", str(port), "--grpc-port", str(grpc_port), *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        ready_after_s = _wait_until_ready(lines)
        yield RunningCluster(
            url=f"http://127.0.0.1:{port}",
            grpc_address=f"127.0.0.1:{grpc_port}",
            run_dir=run_dir,
            ready_after_s=ready_after_s,
            process=process,
        )
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT_S)
            raise
        finally:
            reader.join(STOP_TIMEOUT_S)
            process.stdout.close()
            # One that had to be killed removed nothing.
            remove_arena_dir(arena_dir(run_dir))
            remove_nvme_dir(run_dir / "nvme")


def _read_lines(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _wait_until_ready(lines: queue.Queue[str | None]) -> float:
    seen: list[str] = []
    while True:
        line = lines.get(timeout=READY_TIMEOUT_S)
        assert line is not None, "baton up ended before it was ready:\n" + "".join(seen)
        seen.append(line)
        if line.startswith(_READY):
            return float(line.removeprefix(_READY).partition(" s")[0])

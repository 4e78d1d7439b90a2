"""The host arena: one tmpfs file of equal page slots, allocated and touched whole at start.

Owns the file, its header, its mapping and the bytes of pages (zeroing, copying, checking). Never
decides which page is whose. A file belongs to one kvstore process, which holds a flock on it; a
file whose kvstore is dead is made anew.

Header, 4096 bytes, little-endian: magic `BKA1`, version u16, reserved u16, arena id 16 B,
slot_bytes u64, page_bytes u64, page_count u32, layers u16, kv_heads u16, head_dim u16,
head_dim_v u16, block_tokens u16, dtype u16, kv digest 16 B, masked CRC-32C u32 of all before it;
zeros follow.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from baton.errors import StartupError
from baton.kv.crc import ByteArray, crc32c, mask_crc
from baton.kv.layout import KvGeometry

MAGIC: Final = b"BKA1"
VERSION: Final = 1
DATA_OFFSET: Final = 4096
LOCK_BASE: Final = 2**40
PAGES_MIN: Final = 2

_HEADER: Final = struct.Struct("<4sHH16sQQIHHHHHH16s")
# struct flock: l_type, l_whence, l_start, l_len, l_pid (padded as the kernel's on 64 bits).
_FLOCK: Final = struct.Struct("hhqqi4x")
_F_OFD_GETLK: Final = 36
_F_OFD_SETLK: Final = 37


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaSpec:
    """What an arena is to be. `arena_bytes` is what its page slots may take."""

    directory: Path
    node_id: str
    arena_bytes: int
    geometry: KvGeometry
    kv_digest: bytes
    arena_id: bytes

    @property
    def path(self) -> Path:
        """The file's place."""
        return self.directory / f"arena-{self.node_id}.kv"

    @property
    def page_count(self) -> int:
        """Page slots that fit."""
        return self.arena_bytes // self.geometry.slot_bytes


class Arena:
    """A created, touched and mapped arena. Close it in the end; the file is removed."""

    def __init__(self, spec: ArenaSpec, descriptor: int, mapping: mmap.mmap) -> None:
        self.spec = spec
        self.geometry = spec.geometry
        self.page_count = spec.page_count
        self.slot_bytes = spec.geometry.slot_bytes
        self.page_bytes = spec.geometry.page_bytes
        self._descriptor = descriptor
        self._mapping = mapping
        self._bytes: ByteArray = np.frombuffer(mapping, dtype=np.uint8)

    @classmethod
    def create(cls, spec: ArenaSpec) -> Arena:
        """Makes the file; StartupError with a hint where it does not fit or is in use."""
        if spec.page_count < PAGES_MIN:
            raise StartupError(
                f"--arena-bytes {spec.arena_bytes} holds {spec.page_count} pages of "
                f"{spec.geometry.slot_bytes} bytes",
                hint=f"give at least {PAGES_MIN * spec.geometry.slot_bytes}",
            )
        spec.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_stale(spec.path)
        total = DATA_OFFSET + spec.page_count * spec.geometry.slot_bytes
        _check_space(spec.directory, total)
        descriptor = os.open(spec.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            return cls(spec, descriptor, _fill(descriptor, spec, total))
        except OSError as error:
            os.close(descriptor)
            spec.path.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise _does_not_fit(spec.directory, total, None) from error
            raise

    def page(self, page: int) -> ByteArray:
        """The content of one page, writable, without the slot's padding."""
        start = DATA_OFFSET + page * self.slot_bytes
        return self._bytes[start : start + self.page_bytes]

    def zero(self, page: int) -> None:
        """Clears a page slot, padding included."""
        start = DATA_OFFSET + page * self.slot_bytes
        self._bytes[start : start + self.slot_bytes] = 0

    def open_for_worker(self, worker_slot: int) -> int | None:
        """A fresh description of the file that holds the slot's lock; None if it is still held.

        Pass it on and close it at once: the kernel drops the lock when the worker's last mapping
        and descriptor are gone.
        """
        descriptor = os.open(self.spec.path, os.O_RDWR | os.O_CLOEXEC)
        lock = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, LOCK_BASE + worker_slot, 1, 0)
        try:
            fcntl.fcntl(descriptor, _F_OFD_SETLK, lock)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise
        return descriptor

    def is_slot_locked(self, worker_slot: int) -> bool:
        """Whether some process still has the slot's descriptor or its mapping."""
        ask = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, LOCK_BASE + worker_slot, 1, 0)
        answer = fcntl.fcntl(self._descriptor, _F_OFD_GETLK, ask)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Unmaps and removes the file; workers that have it mapped keep their mapping."""
        self.spec.path.unlink(missing_ok=True)
        self._bytes = np.empty(0, dtype=np.uint8)
        # A page view may still be held somewhere; then the mapping goes with the process.
        with contextlib.suppress(BufferError):
            self._mapping.close()
        os.close(self._descriptor)


def _remove_stale(path: Path) -> None:
    """Removes a dead kvstore's file; StartupError while its flock is held."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StartupError(
            f"a running kvstore has the arena {path}",
            hint="stop it, or give this one another --node-id or --arena-dir",
        ) from error
    else:
        path.unlink()
    finally:
        os.close(descriptor)


def _check_space(directory: Path, total: int) -> None:
    stats = os.statvfs(directory)
    free = stats.f_bavail * stats.f_frsize
    if total > free:
        raise _does_not_fit(directory, total, free)


def _does_not_fit(directory: Path, total: int, free: int | None) -> StartupError:
    room = "there is less" if free is None else f"{free} are free"
    return StartupError(
        f"the arena needs {total} bytes in {directory}, {room}",
        hint="give a smaller --arena-bytes, or a larger /dev/shm (docker: --shm-size; "
        "`mount -o remount,size=8G /dev/shm`)",
    )


def _fill(descriptor: int, spec: ArenaSpec, total: int) -> mmap.mmap:
    """Allocates, maps and touches the whole file, then writes its header."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # Allocated, not sparse: a full tmpfs must fail here and not as SIGBUS in a worker.
    os.posix_fallocate(descriptor, 0, total)
    mapping = mmap.mmap(
        descriptor, total, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE
    )
    mapping[:DATA_OFFSET] = encode_header(spec).ljust(DATA_OFFSET, b"\0")
    return mapping


def encode_header(spec: ArenaSpec) -> bytes:
    """The header's fields and CRC, without the zeros behind them."""
    geometry = spec.geometry
    body = _HEADER.pack(
        MAGIC,
        VERSION,
        0,
        spec.arena_id,
        geometry.slot_bytes,
        geometry.page_bytes,
        spec.page_count,
        geometry.layers,
        geometry.kv_heads,
        geometry.head_dim,
        geometry.head_dim_v,
        geometry.block_tokens,
        geometry.dtype.wire_code,
        spec.kv_digest,
    )
    return body + struct.pack("<I", mask_crc(crc32c(body)))

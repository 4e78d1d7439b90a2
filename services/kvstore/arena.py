"""The host arena: one tmpfs file of equal page slots, allocated and touched whole at start.

Owns the file, its header, its mapping and the bytes of pages (zeroing, copying, checking). Never
decides which page is whose. A file belongs to one kvstore process, which holds a flock on it. It
outlives that process: the next one that wants exactly this arena reattaches it, with all its bytes;
a file that is anything else is made anew under another id.

Its header is that of `slot_files`, with magic `BKA1`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from baton.arena.copying import checksums_at
from baton.errors import StartupError
from baton.kv.crc import ByteArray
from baton.kv.layout import KvGeometry
from services.kvstore.slot_files import DATA_OFFSET as DATA_OFFSET
from services.kvstore.slot_files import (
    GENERATION_BITS,
    HEADER_BYTES,
    FileNames,
    SlotHeader,
    free_bytes,
    lock_existing,
    make_unnamed,
)

MAGIC: Final = b"BKA1"
VERSION: Final = 2
LOCK_BASE: Final = 2**40
PAGES_MIN: Final = 2
SLOTS_MAX: Final = 4096
"""Worker slots: lock bytes from `LOCK_BASE` on."""

_NAMES: Final = FileNames(kind="arena", directory_flag="--arena-dir")
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

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return self.header.file_bytes

    @property
    def header(self) -> SlotHeader:
        """What the file's header says."""
        return SlotHeader(
            magic=MAGIC,
            version=VERSION,
            file_id=self.arena_id,
            slot_count=self.page_count,
            geometry=self.geometry,
            kv_digest=self.kv_digest,
        )


class Arena:
    """A mapped arena. `is_reattached`: its bytes are those of the kvstore before."""

    def __init__(
        self, spec: ArenaSpec, descriptor: int, mapping: mmap.mmap, *, starts: int = 0
    ) -> None:
        self.spec = spec
        self.geometry = spec.geometry
        self.page_count = spec.page_count
        self.slot_bytes = spec.geometry.slot_bytes
        self.page_bytes = spec.geometry.page_bytes
        self.is_reattached = starts > 0
        self.generation_floor = starts << GENERATION_BITS
        self._descriptor = descriptor
        self._mapping = mapping
        self._bytes: ByteArray = np.frombuffer(mapping, dtype=np.uint8)

    @classmethod
    def open(cls, spec: ArenaSpec) -> Arena:
        """The file that is there, if it is what `spec` wants (but for its id), else a new one.

        StartupError with a hint where it does not fit, or while another kvstore has it.
        """
        _require_pages(spec)
        spec.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = lock_existing(spec.path, _NAMES)
        if descriptor is None:
            return cls._made(spec)
        header = os.pread(descriptor, HEADER_BYTES, 0)
        found = spec.header.found_in(header)
        if found is None or os.fstat(descriptor).st_size != spec.file_bytes:
            # While its flock is ours: nobody else can have opened it in between.
            spec.path.unlink()
            os.close(descriptor)
            return cls._made(spec)
        arena_id, starts = found
        spec = replace(spec, arena_id=arena_id)
        # Before anything is granted: page generations of this life are those of no other.
        os.pwrite(descriptor, spec.header.encode(starts + 1), 0)
        try:
            mapping = _mapped(descriptor, spec.file_bytes)
        except OSError as error:
            os.close(descriptor)
            raise _cannot_have(spec, error) from error
        return cls(spec, descriptor, mapping, starts=starts + 1)

    @classmethod
    def _made(cls, spec: ArenaSpec) -> Arena:
        total = spec.file_bytes
        _check_space(spec.directory, total)
        # Headed and locked before it has its name: who opens it by name finds it whole.
        unnamed, descriptor = make_unnamed(spec.path)
        try:
            mapping = _mapped(descriptor, total)
            mapping[:DATA_OFFSET] = spec.header.encode(0).ljust(DATA_OFFSET, b"\0")
            unnamed.rename(spec.path)
        except OSError as error:
            os.close(descriptor)
            unnamed.unlink(missing_ok=True)
            raise _cannot_have(spec, error) from error
        return cls(spec, descriptor, mapping)

    def page(self, page: int) -> ByteArray:
        """The content of one page, writable, without the slot's padding."""
        start = DATA_OFFSET + page * self.slot_bytes
        return self._bytes[start : start + self.page_bytes]

    def checksums(self, pages: Sequence[int]) -> list[int]:
        """The CRC-32C of each page's content, in one call that lets other threads run."""
        offsets = [DATA_OFFSET + page * self.slot_bytes for page in pages]
        return checksums_at(self._bytes, offsets, self.page_bytes)

    def slot(self, page: int) -> ByteArray:
        """All bytes of one page slot, writable, padding included; page-aligned."""
        start = DATA_OFFSET + page * self.slot_bytes
        return self._bytes[start : start + self.slot_bytes]

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

    def locked_slots(self) -> list[int]:
        """The worker slots whose lock some process has, in order."""
        any_slot = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, LOCK_BASE, SLOTS_MAX, 0)
        answer = fcntl.fcntl(self._descriptor, _F_OFD_GETLK, any_slot)
        if _FLOCK.unpack(answer)[0] == fcntl.F_UNLCK:
            return []
        return [slot for slot in range(SLOTS_MAX) if self.is_slot_locked(slot)]

    def close(self) -> None:
        """Unmaps; the file stays, and the next kvstore of this node finds it."""
        self._bytes = np.empty(0, dtype=np.uint8)
        # A page view may still be held somewhere; then the mapping goes with the process.
        with contextlib.suppress(BufferError):
            self._mapping.close()
        os.close(self._descriptor)

    def remove(self) -> None:
        """Closes and removes the file; workers that have it mapped keep their mapping."""
        self.spec.path.unlink(missing_ok=True)
        self.close()


def _require_pages(spec: ArenaSpec) -> None:
    if spec.page_count < PAGES_MIN:
        raise StartupError(
            f"--arena-bytes {spec.arena_bytes} holds {spec.page_count} pages of "
            f"{spec.geometry.slot_bytes} bytes",
            hint=f"give at least {PAGES_MIN * spec.geometry.slot_bytes}",
        )


def _check_space(directory: Path, total: int) -> None:
    free = free_bytes(directory)
    if total > free:
        raise _does_not_fit(directory, total, free)


def _does_not_fit(directory: Path, total: int, free: int | None) -> StartupError:
    room = "there is less" if free is None else f"{free} are free"
    return StartupError(
        f"the arena needs {total} bytes in {directory}, {room}",
        hint="give a smaller --arena-bytes, or a larger /dev/shm (docker: --shm-size; "
        "`mount -o remount,size=8G /dev/shm`)",
    )


def _cannot_have(spec: ArenaSpec, error: OSError) -> Exception:
    """What to say of an arena that could not be allocated or mapped."""
    if error.errno in (errno.ENOSPC, errno.ENOMEM):
        return _does_not_fit(spec.directory, spec.file_bytes, None)
    return error


def _mapped(descriptor: int, total: int) -> mmap.mmap:
    """Allocates, maps and touches the whole file; what stands in it stays."""
    # Allocated, not sparse: a full tmpfs must fail here and not as SIGBUS in a worker.
    os.posix_fallocate(descriptor, 0, total)
    return mmap.mmap(
        descriptor, total, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE
    )

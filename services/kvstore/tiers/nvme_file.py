"""The NVMe file: equal slots on a local disk, each with the content of one arena page.

Owns the file, its header and its descriptors, and reads and writes of runs of slots. Blocking;
called by the threads of `disk_queue`. Never decides which slot is whose, never checks a content. A
file belongs to one kvstore process, which holds a flock on it. It outlives that process and the
host's power: the next kvstore that wants exactly this file reattaches it; a file that is anything
else is made anew under another id, so that references to the old one are misses.

Direct I/O where the file system takes it: what is read here is not read again soon, and must not
push other things out of the page cache. Elsewhere (tmpfs, some network and stacked file systems)
buffered, and what was read or written is dropped from the cache.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import structlog

from baton.errors import StartupError
from baton.kv.crc import ByteArray
from baton.kv.layout import KvGeometry
from services.kvstore.slot_files import (
    DATA_OFFSET,
    GENERATION_BITS,
    HEADER_BYTES,
    FileNames,
    SlotHeader,
    free_bytes,
    lock_existing,
    make_unnamed,
)

MAGIC: Final = b"BKN1"
VERSION: Final = 1
SLOTS_MIN: Final = 2
MEASURED_BYTES: Final = 16 << 20
"""At the file's end, written when it is made: extents that never were are read without the disk."""

BUFFERS_MAX: Final = 1024
"""Buffers of one read or write: the kernel's IOV_MAX."""

_NAMES: Final = FileNames(kind="NVMe", directory_flag="--nvme-dir")

_log = structlog.stdlib.get_logger("services.kvstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeSpec:
    """What a file is to be. `nvme_bytes`: what its slots may take; `file_id`: that of a new one."""

    directory: Path
    node_id: str
    nvme_bytes: int
    geometry: KvGeometry
    kv_digest: bytes
    file_id: bytes

    @property
    def path(self) -> Path:
        """The file's place."""
        return self.directory / f"nvme-{self.node_id}.kv"

    @property
    def header(self) -> SlotHeader:
        """What the file's header says."""
        return SlotHeader(
            magic=MAGIC,
            version=VERSION,
            file_id=self.file_id,
            slot_count=self.nvme_bytes // self.geometry.slot_bytes,
            geometry=self.geometry,
            kv_digest=self.kv_digest,
        )


class NvmeFile:
    """An opened file. `is_reattached`: its slots are those of the kvstore before. `is_direct`:
    reads and writes go past the page cache, and want page-aligned buffers.
    """

    def __init__(self, spec: NvmeSpec, descriptor: int, *, starts: int = 0) -> None:
        header = spec.header
        self.spec = spec
        self.file_id = spec.file_id
        self.slot_count = header.slot_count
        self.slot_bytes = spec.geometry.slot_bytes
        self.is_reattached = starts > 0
        self.generation_floor = starts << GENERATION_BITS
        self._descriptor = descriptor
        direct = _open_direct(spec.path, descriptor)
        self.is_direct = direct is not None
        self._data = descriptor if direct is None else direct
        if direct is None:
            _log.warning("nvme_not_direct", path=str(spec.path), hint=_NOT_DIRECT_HINT)

    @classmethod
    def open(cls, spec: NvmeSpec) -> NvmeFile:
        """The file that is there, if it is what `spec` wants (but for its id), else a new one.

        StartupError with a hint where it does not fit, or while another kvstore has it.
        """
        _require_slots(spec)
        try:
            spec.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = lock_existing(spec.path, _NAMES)
            if descriptor is None:
                return cls._made(spec)
            try:
                return cls._reattached(spec, descriptor)
            except OSError:
                os.close(descriptor)
                raise
        except OSError as error:
            raise _cannot_have(spec, error) from error

    @classmethod
    def _reattached(cls, spec: NvmeSpec, descriptor: int) -> NvmeFile:
        found = spec.header.found_in(os.pread(descriptor, HEADER_BYTES, 0))
        if found is None or os.fstat(descriptor).st_size != spec.header.file_bytes:
            # While its flock is ours: nobody else can have opened it in between. Its room is free
            # once the descriptor is closed.
            spec.path.unlink()
            os.close(descriptor)
            return cls._made(spec)
        file_id, starts = found
        spec = replace(spec, file_id=file_id)
        os.pwrite(descriptor, spec.header.encode(starts + 1), 0)
        # Before any slot is written: after a power cut, too, no slot generation is used twice.
        os.fdatasync(descriptor)
        return cls(spec, descriptor, starts=starts + 1)

    @classmethod
    def _made(cls, spec: NvmeSpec) -> NvmeFile:
        total = spec.header.file_bytes
        free = free_bytes(spec.directory)
        if total > free:
            raise _does_not_fit(spec, free)
        # Headed and locked before it has its name: who opens it by name finds it whole.
        unnamed, descriptor = make_unnamed(spec.path)
        try:
            # Allocated, not sparse: a full disk must be found now and not when a slot is written.
            os.posix_fallocate(descriptor, 0, total)
            _write_end(descriptor, total)
            os.pwrite(descriptor, spec.header.encode(0).ljust(DATA_OFFSET, b"\0"), 0)
            os.fsync(descriptor)
            unnamed.rename(spec.path)
            _sync_directory(spec.directory)
        except OSError:
            os.close(descriptor)
            unnamed.unlink(missing_ok=True)
            raise
        return cls(spec, descriptor)

    def read_run(self, first_slot: int, buffers: Sequence[ByteArray]) -> None:
        """Fills buffers of `slot_bytes` with the slots from `first_slot` on; OSError, also when
        fewer bytes are there.
        """
        offset, left = self._start(first_slot, buffers), [item.data for item in buffers]
        begin = offset
        while left:
            count = os.preadv(self._data, left, offset)
            if count == 0:
                raise OSError(errno.EIO, f"the file ends at {offset}, inside slot {first_slot} on")
            offset, left = offset + count, _rest(left, count)
        self._drop_cached(begin, offset)

    def write_run(self, first_slot: int, buffers: Sequence[ByteArray]) -> None:
        """Writes the slots from `first_slot` on from buffers of `slot_bytes`; OSError. On disk
        only after `flush`.
        """
        offset, left = self._start(first_slot, buffers), [item.data for item in buffers]
        while left:
            count = os.pwritev(self._data, left, offset)
            if count == 0:
                raise OSError(errno.EIO, f"nothing was written at {offset}")
            offset, left = offset + count, _rest(left, count)

    def flush(self) -> None:
        """What was written before is on disk; OSError."""
        os.fdatasync(self._data)
        self._drop_cached(DATA_OFFSET, self.spec.header.file_bytes)

    def close(self) -> None:
        """Lets the file go; it stays, and the next kvstore of this node finds it."""
        if self._data != self._descriptor:
            os.close(self._data)
        os.close(self._descriptor)

    def remove(self) -> None:
        """Closes and removes the file."""
        self.spec.path.unlink(missing_ok=True)
        self.close()

    def _start(self, first_slot: int, buffers: Sequence[ByteArray]) -> int:
        assert 0 <= first_slot <= self.slot_count - len(buffers), (first_slot, len(buffers))
        assert 1 <= len(buffers) <= BUFFERS_MAX, len(buffers)
        assert all(buffer.nbytes == self.slot_bytes for buffer in buffers)
        return DATA_OFFSET + first_slot * self.slot_bytes

    def _drop_cached(self, begin: int, end: int) -> None:
        if not self.is_direct:
            os.posix_fadvise(self._data, begin, end - begin, os.POSIX_FADV_DONTNEED)


_NOT_DIRECT_HINT: Final = (
    "the file system does not take direct I/O; give --nvme-dir on a local disk for full speed"
)


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    """The buffers behind the first `done` bytes of them."""
    for index, buffer in enumerate(buffers):
        if done < buffer.nbytes:
            return [buffer[done:], *buffers[index + 1 :]]
        done -= buffer.nbytes
    return []


def _open_direct(path: Path, descriptor: int) -> int | None:
    """A second descriptor of the opened file, past the page cache; None where there is no such."""
    try:
        direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
    except OSError:
        return None
    # Some file systems let it be opened and refuse to read.
    with mmap.mmap(-1, DATA_OFFSET) as probe:
        try:
            is_read = os.preadv(direct, [probe], DATA_OFFSET) == DATA_OFFSET
        except OSError:
            is_read = False
    if is_read and os.path.samestat(os.fstat(direct), os.fstat(descriptor)):
        return direct
    os.close(direct)
    return None


def _write_end(descriptor: int, total: int) -> None:
    """Bytes that neither a disk nor a file system makes smaller, in what is read to measure it."""
    piece = os.urandom(1 << 20)
    offset = max(DATA_OFFSET, total - MEASURED_BYTES)
    while offset < total:
        offset += os.pwrite(descriptor, piece[: total - offset], offset)
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, total, os.POSIX_FADV_DONTNEED)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_slots(spec: NvmeSpec) -> None:
    count = spec.header.slot_count
    if count < SLOTS_MIN:
        raise StartupError(
            f"--nvme-bytes {spec.nvme_bytes} holds {count} slots of "
            f"{spec.geometry.slot_bytes} bytes",
            hint=f"give at least {SLOTS_MIN * spec.geometry.slot_bytes}, or 0 for no NVMe tier",
        )


def _does_not_fit(spec: NvmeSpec, free: int | None) -> StartupError:
    room = "there is less" if free is None else f"{free} are free"
    return StartupError(
        f"the NVMe tier needs {spec.header.file_bytes} bytes in {spec.directory}, {room}",
        hint="give a smaller --nvme-bytes (0: no NVMe tier), or --nvme-dir on another disk",
    )


def _cannot_have(spec: NvmeSpec, error: OSError) -> Exception:
    """What to say of a file that could not be made or opened."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return _does_not_fit(spec, None)
    return StartupError(
        f"the NVMe tier cannot use {spec.path}: {error.strerror or error}",
        hint="give --nvme-dir a directory of a local disk that this user may write, or "
        "--nvme-bytes 0 for no NVMe tier",
    )

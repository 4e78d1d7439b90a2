"""What files of equal slots (the host arena, the NVMe file) have in common: header, owner, room.

Owns the header's bytes, the flock that says which kvstore has a file, and what is said where a file
does not fit. Never touches a slot.

Header, 4096 bytes, little-endian: magic 4 B, version u16, reserved u16, file id 16 B, slot_bytes
u64, page_bytes u64, slot count u32, layers u16, kv_heads u16, head_dim u16, head_dim_v u16,
block_tokens u16, dtype u16, kv digest 16 B, starts u32, masked CRC-32C u32 of all before it; zeros
follow. `starts` counts the kvstores that have had the file before this one.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from baton.errors import StartupError
from baton.kv.crc import crc32c, mask_crc
from baton.kv.layout import KvGeometry

DATA_OFFSET: Final = 4096
STARTS_MAX: Final = (1 << 31) - 1
GENERATION_BITS: Final = 32
"""Generations of one life of a file begin at `starts << GENERATION_BITS`: none repeats."""

_HEADER: Final = struct.Struct("<4sHH16sQQIHHHHHH16sI")
HEADER_BYTES: Final = _HEADER.size + 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """What a file says it is, but for how often it was started on."""

    magic: bytes
    version: int
    file_id: bytes
    slot_count: int
    geometry: KvGeometry
    kv_digest: bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return DATA_OFFSET + self.slot_count * self.geometry.slot_bytes

    def encode(self, starts: int) -> bytes:
        """The header's fields and CRC, without the zeros behind them."""
        geometry = self.geometry
        body = _HEADER.pack(
            self.magic,
            self.version,
            0,
            self.file_id,
            geometry.slot_bytes,
            geometry.page_bytes,
            self.slot_count,
            geometry.layers,
            geometry.kv_heads,
            geometry.head_dim,
            geometry.head_dim_v,
            geometry.block_tokens,
            geometry.dtype.wire_code,
            self.kv_digest,
            starts,
        )
        return body + struct.pack("<I", mask_crc(crc32c(body)))

    def found_in(self, data: bytes) -> tuple[bytes, int] | None:
        """(File id, starts) of a header that is this one in every other field; None of any
        other.
        """
        if len(data) < HEADER_BYTES:
            return None
        values = _HEADER.unpack_from(data)
        file_id, starts = values[3], values[-1]
        if starts >= STARTS_MAX:
            return None
        # Field by field and bit by bit: what we would have written, or not ours.
        wanted = replace(self, file_id=file_id).encode(starts)
        return (file_id, starts) if data[:HEADER_BYTES] == wanted else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileNames:
    """How messages call a kind of file and the setting of its directory."""

    kind: str
    directory_flag: str


def lock_existing(path: Path, names: FileNames) -> int | None:
    """The file with our flock on it; None where there is none. StartupError while another kvstore
    has it, or when it is not a file of ours.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _not_ours(path, names) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise StartupError(
                f"a running kvstore has the {names.kind} {path}",
                hint=f"stop it, or give this one another --node-id or {names.directory_flag}",
            ) from error
        if _is_still(path, descriptor, names):
            return descriptor
        # Replaced between opening and locking: look again.
        os.close(descriptor)


def make_unnamed(path: Path) -> tuple[Path, int]:
    """A new file beside `path`, locked, and its descriptor: it gets its name once it is whole."""
    unnamed = path.with_suffix(".new")
    unnamed.unlink(missing_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(unnamed, flags, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return unnamed, descriptor


def free_bytes(directory: Path) -> int:
    """What a file in the directory may still take."""
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize


def _is_still(path: Path, descriptor: int, names: FileNames) -> bool:
    """Whether `path` names the opened file. StartupError when that is no file of this user's."""
    opened = os.fstat(descriptor)
    if not stat.S_ISREG(opened.st_mode) or opened.st_uid != os.geteuid():
        os.close(descriptor)
        raise _not_ours(path, names)
    try:
        return os.path.samestat(opened, path.lstat())
    except FileNotFoundError:
        return False


def _not_ours(path: Path, names: FileNames) -> StartupError:
    return StartupError(
        f"{path} is not an {names.kind} file of this user",
        hint=f"remove it, or give another {names.directory_flag}",
    )

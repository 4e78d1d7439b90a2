"""Segment files: their names, how one comes to be, how bytes reach it.

Owns the calls to the operating system for one file. Blocking. Never knows what records mean, and
never tries again what failed.

A segment begins as a *spare*: a file under another name, preallocated with zeros, so that a full
disk is met before anything is written. Written with its header it is renamed to its own name, which
is durable when the directory was flushed.
"""

from __future__ import annotations

import errno
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.kvstore.log.format import (
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    encode_segment_header,
    first_chain,
)

SUFFIX: Final = ".blog"
SPARE_SUFFIX: Final = ".spare"


def segment_path(directory: Path, sequence: int) -> Path:
    """The file of a segment."""
    return directory / f"{sequence:016x}{SUFFIX}"


def sequence_of(path: Path) -> int:
    """The sequence in a segment's file name."""
    return int(path.stem, 16)


def segment_paths(directory: Path) -> list[Path]:
    """The segment files of a directory, oldest first."""
    return sorted(directory.glob(f"*{SUFFIX}"))


def sync_directory(directory: Path) -> None:
    """Makes created and removed names durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_spares(directory: Path) -> None:
    """At start: what an earlier run prepared and never used."""
    for path in directory.glob(f"*{SPARE_SUFFIX}"):
        path.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spare:
    """A preallocated file that is no segment yet."""

    path: Path
    descriptor: int


def create_spare(directory: Path, segment_bytes: int) -> Spare:
    """Preallocates a file of zeros; on failure nothing is left of it."""
    # No two share a name: one may just be becoming a segment.
    path = directory / f"{secrets.token_hex(8)}{SPARE_SUFFIX}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, segment_bytes)
    except OSError:
        discard_spare(Spare(path=path, descriptor=descriptor))
        raise
    return Spare(path=path, descriptor=descriptor)


def discard_spare(spare: Spare) -> None:
    """Closes and removes a spare."""
    os.close(spare.descriptor)
    spare.path.unlink(missing_ok=True)


@dataclass(slots=True, kw_only=True)
class SegmentFile:
    """One open segment. `offset`: where the next record begins; `chain_crc`: what it continues.

    `is_named`: its name and its header are durable.
    """

    path: Path
    descriptor: int
    sequence: int
    first_lsn: int
    offset: int
    chain_crc: int
    is_named: bool = False

    def put(self, data: bytes | bytearray) -> None:
        """Writes at `offset`, all of it or OSError; then the file is not to be written again."""
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self.descriptor, rest, self.offset)
            if written <= 0:
                raise OSError(errno.EIO, "nothing was written", str(self.path))
            self.offset += written
            rest = rest[written:]

    def sync(self) -> None:
        """What was written is on disk."""
        os.fdatasync(self.descriptor)

    def end(self) -> None:
        """Cuts the file to its size and closes it."""
        try:
            os.ftruncate(self.descriptor, self.offset)
        finally:
            os.close(self.descriptor)


def begin_segment(spare: Spare, directory: Path, header: SegmentHeader) -> SegmentFile:
    """Writes the header and gives the spare its name; neither is durable yet."""
    path = segment_path(directory, header.sequence)
    try:
        encoded = encode_segment_header(header)
        if os.pwrite(spare.descriptor, encoded, 0) != len(encoded):
            raise OSError(errno.EIO, "a short write of the segment header", str(spare.path))
        if path.exists():
            raise OSError(errno.EEXIST, "the segment exists", str(path))
        spare.path.rename(path)
    except OSError:
        discard_spare(spare)
        raise
    return SegmentFile(
        path=path,
        descriptor=spare.descriptor,
        sequence=header.sequence,
        first_lsn=header.first_lsn,
        offset=SEGMENT_HEADER_BYTES,
        chain_crc=first_chain(header.segment_id),
    )

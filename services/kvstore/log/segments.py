"""Segment files: creating, writing, flushing, rolling, freeing. Blocking; runs in one thread.

Owns the files of one log directory, W3 (a failed write or flush poisons the segment: what was
written since the last good flush goes, with the same LSNs, to a new one) and the order of freeing
(oldest first, so that the end of a log never goes before its beginning). Never knows what records
mean.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from services.kvstore.log.format import (
    ALIGNMENT_BYTES,
    SEGMENT_BYTES,
    SEGMENT_HEADER_BYTES,
    STORE_ADDRESS,
    EncodedRecord,
    RecordAddress,
    RecordType,
    SegmentHeader,
    encode_record,
    encode_segment_header,
    first_chain,
    frame_payload,
)
from services.kvstore.log.store_records import Flush

SUFFIX: Final = ".blog"
UNFLUSHED_BYTES_MAX: Final = 16 << 20
UNFLUSHED_S_MAX: Final = 1.0

_log = structlog.stdlib.get_logger("services.kvstore.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """An encoded body with its place in the store's order."""

    lsn: int
    kind: RecordType
    payload: bytes
    address: RecordAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """What a group commit did. `segments` has, per record, the sequence of its segment."""

    segments: tuple[int, ...]
    durable_lsn: int
    flush_s: float | None


class SegmentWriter:
    """Appends groups of records to the newest segment of a directory."""

    def __init__(
        self,
        directory: Path,
        *,
        store_id: bytes,
        first_sequence: int,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._directory = directory
        self._store_id = store_id
        self._segment_bytes = segment_bytes
        self._sequence = first_sequence - 1
        self._descriptor: int | None = None
        self._offset = 0
        self._chain = 0
        self.durable_lsn = 0
        self._written_lsn = 0
        self._unflushed: list[Numbered] = []
        self._unflushed_bytes = 0
        self._flushed_s = time.monotonic()
        self.poisoned_segments = 0

    @property
    def sequence(self) -> int:
        """The segment that is written now."""
        return self._sequence

    def write_group(self, group: Sequence[Numbered], *, is_flushed: bool) -> GroupResult:
        """Writes records in order; with `is_flushed` they are on disk when this returns.

        The group's first LSN minus one belongs to the FLUSH record that begins it. A failure is
        tried once more on a new segment; the second one raises OSError.
        """
        try:
            return self._write_group(group, is_flushed=is_flushed)
        except OSError as error:
            self.poisoned_segments += 1
            _log.error("segment_poisoned", sequence=self._sequence, error=str(error))
            retained = [item for item in self._unflushed if item.lsn < group[0].lsn]
            self._abandon()
            if retained:
                self._write_group(retained, is_flushed=False)
            return self._write_group(group, is_flushed=True)

    def _write_group(self, group: Sequence[Numbered], *, is_flushed: bool) -> GroupResult:
        assert group, "an empty group is not written"
        flush = Numbered(
            lsn=group[0].lsn - 1,
            kind=RecordType.FLUSH,
            payload=Flush(durable_lsn=self.durable_lsn).encode(),
            address=STORE_ADDRESS,
        )
        segments: list[int] = []
        pieces: list[bytes] = []
        pending = 0
        for item in (flush, *group):
            encoded = self._framed(item)
            size = pending + len(encoded.data)
            if self._descriptor is None or not self._fits(size):
                self._put(pieces)
                pieces, pending = [], 0
                self._roll(item.lsn)
                encoded = self._framed(item)
            self._chain = encoded.chain
            pieces.append(encoded.data)
            pending += len(encoded.data)
            segments.append(self._sequence)
        self._put(pieces)
        self._written_lsn = group[-1].lsn
        self._unflushed += group
        flush_s = self._flush() if is_flushed or self._is_flush_due() else None
        return GroupResult(
            segments=tuple(segments[1:]), durable_lsn=self.durable_lsn, flush_s=flush_s
        )

    def _framed(self, item: Numbered) -> EncodedRecord:
        return frame_payload(
            item.kind, item.payload, item.address, lsn=item.lsn, previous_chain=self._chain
        )

    def _fits(self, size: int) -> bool:
        return self._offset + size <= self._segment_bytes

    def _put(self, pieces: list[bytes]) -> None:
        if not pieces:
            return
        assert self._descriptor is not None
        data = memoryview(b"".join(pieces))
        while data:
            written = os.pwrite(self._descriptor, data, self._offset)
            self._offset += written
            self._unflushed_bytes += written
            data = data[written:]

    def _is_flush_due(self) -> bool:
        return (
            self._unflushed_bytes >= UNFLUSHED_BYTES_MAX
            or time.monotonic() - self._flushed_s >= UNFLUSHED_S_MAX
        )

    def flush_idle(self) -> GroupResult | None:
        """Flushes what an earlier group left unflushed; None when nothing is."""
        if not self._unflushed:
            return None
        group = self._unflushed
        try:
            flush_s = self._flush()
        except OSError as error:
            self.poisoned_segments += 1
            _log.error("segment_poisoned", sequence=self._sequence, error=str(error))
            self._abandon()
            self._unflushed = []
            return self._write_group(group, is_flushed=True)
        return GroupResult(segments=(), durable_lsn=self.durable_lsn, flush_s=flush_s)

    def _flush(self) -> float:
        assert self._descriptor is not None
        started_s = time.monotonic()
        os.fdatasync(self._descriptor)
        self._flushed_s = time.monotonic()
        self.durable_lsn = max(self.durable_lsn, self._written_lsn)
        self._unflushed = []
        self._unflushed_bytes = 0
        return self._flushed_s - started_s

    def _roll(self, first_lsn: int) -> None:
        """Ends the segment, flushed and cut to its size, and begins the next."""
        if self._descriptor is not None:
            self._flush()
            os.ftruncate(self._descriptor, self._offset)
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
        self._sequence += 1
        segment_id = secrets.token_bytes(16)
        header = SegmentHeader(
            segment_id=segment_id,
            store_id=self._store_id,
            sequence=self._sequence,
            first_lsn=first_lsn,
            segment_bytes=self._segment_bytes,
        )
        path = segment_path(self._directory, self._sequence)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self._segment_bytes)
            os.pwrite(descriptor, encode_segment_header(header), 0)
            os.fsync(descriptor)
            sync_directory(self._directory)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self._offset = SEGMENT_HEADER_BYTES
        self._chain = first_chain(segment_id)
        self._unflushed_bytes = 0

    def _abandon(self) -> None:
        """Never touches the poisoned segment again; the next group begins a new one."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._unflushed = []

    def free_before(self, sequence: int) -> int:
        """Removes the segments older than `sequence`; returns how many."""
        freed = 0
        for path in segment_paths(self._directory):
            if sequence_of(path) < min(sequence, self._sequence):
                path.unlink()
                freed += 1
        if freed:
            sync_directory(self._directory)
        return freed

    def close(self, final_lsn: int | None = None) -> None:
        """Flushes and cuts the last segment to its size: a clean stop leaves no torn tail.

        With `final_lsn` a last FLUSH states that everything is on disk, so that whatever is missing
        at the next start is damage.
        """
        if self._descriptor is None:
            return
        self._flush()
        if final_lsn is not None and self._fits(2 * ALIGNMENT_BYTES):
            last = encode_record(
                Flush(durable_lsn=self.durable_lsn),
                STORE_ADDRESS,
                lsn=final_lsn,
                previous_chain=self._chain,
            )
            self._put([last.data])
        os.ftruncate(self._descriptor, self._offset)
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = None


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

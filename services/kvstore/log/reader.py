"""Reading segments back: every valid record in order, torn tails cut, damage told apart.

Owns the scan of one log directory at start. Blocking. A bad record above the highest durable LSN
that any valid record states is a torn tail, whatever lies behind it, and is cut off the file; at or
below it is damage, which is reported and never served (W2). Never applies a record.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import structlog

from baton.errors import ServiceError
from baton.kv.crc import ByteArray, crc32c
from services.kvstore.log.format import (
    ALIGNMENT_BYTES,
    HEADER_BYTES,
    RECORD_MAGIC,
    SEGMENT_HEADER_BYTES,
    ReadRecord,
    SegmentHeader,
    decode_body,
    decode_header,
    decode_segment_header,
    first_chain,
    read_record,
)
from services.kvstore.log.segments import segment_paths, sequence_of, sync_directory
from services.kvstore.log.store_records import Flush

_log = structlog.stdlib.get_logger("services.kvstore.log")


@dataclass(slots=True, kw_only=True)
class SegmentScan:
    """What one segment holds. `bad_offset` is where reading had to stop before the data's end."""

    path: Path
    sequence: int
    header: SegmentHeader | None
    records: list[ReadRecord] = field(default_factory=list)
    end_offset: int = 0
    bad_offset: int | None = None
    bad_field: str | None = None
    behind: list[ReadRecord] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class LogScan:
    """All segments of a directory. `damaged_from` is the LSN from which records are missing."""

    segments: list[SegmentScan] = field(default_factory=list)
    newest_lsn: int = 0
    durable_lsn: int = 0
    damaged_from: int | None = None
    torn_bytes: int = 0

    @property
    def store_id(self) -> bytes | None:
        """The id in the newest readable segment."""
        headers = [scan.header for scan in self.segments if scan.header is not None]
        return headers[-1].store_id if headers else None

    @property
    def next_sequence(self) -> int:
        """The number of the segment that writing goes on in."""
        return max((scan.sequence for scan in self.segments), default=0) + 1


def scan_directory(directory: Path) -> LogScan:
    """Reads every segment, oldest first, and cuts torn tails off (durably)."""
    scan = LogScan(segments=[scan_segment(path) for path in segment_paths(directory)])
    for segment in scan.segments:
        for item in (*segment.records, *segment.behind):
            if isinstance(item.record, Flush):
                scan.durable_lsn = max(scan.durable_lsn, item.record.durable_lsn)
    for index, segment in enumerate(scan.segments):
        following = scan.segments[index + 1] if index + 1 < len(scan.segments) else None
        _judge(scan, segment, following)
    if scan.damaged_from is None and scan.newest_lsn < scan.durable_lsn:
        scan.damaged_from = scan.newest_lsn + 1
    return scan


def _judge(scan: LogScan, segment: SegmentScan, following: SegmentScan | None) -> None:
    """Torn tail or damage, and the order of LSNs across segments.

    A segment that was given up after a failed write is not damaged by what it lacks: the next one
    begins again at the first LSN that was not on disk.
    """
    first = segment.records[0].header.lsn if segment.records else None
    if first is not None and scan.newest_lsn and first > scan.newest_lsn + 1:
        _damage(scan, segment, scan.newest_lsn + 1)
    if segment.records:
        scan.newest_lsn = max(scan.newest_lsn, segment.records[-1].header.lsn)
    if segment.bad_offset is None:
        return
    bad_lsn = scan.newest_lsn + 1
    is_written_again = (
        following is not None
        and following.header is not None
        and following.header.first_lsn <= bad_lsn
    )
    if bad_lsn <= scan.durable_lsn and not is_written_again:
        _damage(scan, segment, bad_lsn)
        # What can still be read behind it is used for logs that begin there only.
        segment.records += segment.behind
        if segment.behind:
            scan.newest_lsn = max(scan.newest_lsn, segment.behind[-1].header.lsn)
        return
    scan.torn_bytes += _cut(segment)


def _damage(scan: LogScan, segment: SegmentScan, lsn: int) -> None:
    if scan.damaged_from is None:
        scan.damaged_from = lsn
    _log.error(
        "log_damaged",
        segment=segment.path.name,
        offset=segment.bad_offset,
        field=segment.bad_field,
        from_lsn=lsn,
        durable_lsn=scan.durable_lsn,
    )


def _cut(segment: SegmentScan) -> int:
    """Truncates a torn tail, durably; the bytes cut. A segment without a header goes whole."""
    if segment.header is None:
        size = segment.path.stat().st_size
        segment.path.unlink()
        sync_directory(segment.path.parent)
        _log.warning("torn_segment_removed", segment=segment.path.name)
        return size
    descriptor = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        os.ftruncate(descriptor, segment.end_offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    _log.warning(
        "torn_tail_cut",
        segment=segment.path.name,
        offset=segment.end_offset,
        field=segment.bad_field,
    )
    return size - segment.end_offset


def scan_segment(path: Path) -> SegmentScan:
    """Reads one segment up to its end or its first bad record."""
    sequence = sequence_of(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < SEGMENT_HEADER_BYTES:
            return SegmentScan(
                path=path, sequence=sequence, header=None, bad_offset=0, bad_field="segment_header"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            return _scan(path, sequence, mapping)


def _scan(path: Path, sequence: int, mapping: mmap.mmap) -> SegmentScan:
    content: ByteArray = np.frombuffer(mapping, dtype=np.uint8)
    try:
        try:
            header = decode_segment_header(content)
        except ServiceError as error:
            return SegmentScan(
                path=path, sequence=sequence, header=None, bad_offset=0, bad_field=error.field
            )
        scan = SegmentScan(
            path=path, sequence=sequence, header=header, end_offset=SEGMENT_HEADER_BYTES
        )
        _read_records(scan, content, first_chain(header.segment_id))
        return scan
    finally:
        # The mapping cannot close while an array looks into it.
        del content


def _read_records(scan: SegmentScan, content: ByteArray, chain: int) -> None:
    offset = scan.end_offset
    while offset < content.size:
        try:
            item = read_record(content, offset, previous_chain=chain)
        except ServiceError as error:
            if content[offset:].any():
                scan.bad_offset, scan.bad_field = offset, error.field
                scan.behind = _resync(content, offset + ALIGNMENT_BYTES)
            break
        scan.records.append(item)
        chain, offset = item.chain, item.end_offset
        scan.end_offset = offset


def _resync(content: ByteArray, offset: int) -> list[ReadRecord]:
    """Valid records behind a bad one, found by their magic; their chain starts at the first."""
    found: list[ReadRecord] = []
    magic = np.frombuffer(RECORD_MAGIC, dtype=np.uint8)
    rows = content[: content.size // ALIGNMENT_BYTES * ALIGNMENT_BYTES].reshape(-1, ALIGNMENT_BYTES)
    starts = np.flatnonzero((rows[:, : magic.size] == magic).all(axis=1)) * ALIGNMENT_BYTES
    for start in (int(value) for value in starts):
        if start < offset:
            continue
        item = _read_alone(content, start)
        if item is not None:
            found.append(item)
            offset = item.end_offset
    return found


def _read_alone(content: ByteArray, offset: int) -> ReadRecord | None:
    """A record whose own CRCs hold, whatever stood before it."""
    try:
        header = decode_header(content, offset)
        start, end_offset = offset + HEADER_BYTES, offset + header.record_bytes
        payload = content[start : start + header.payload_bytes]
        if end_offset > content.size or crc32c(payload) != header.payload_crc:
            return None
        record = decode_body(header, payload.data)
    except ServiceError:
        return None
    return ReadRecord(
        header=header,
        record=record,
        offset=offset,
        end_offset=end_offset,
        chain=header.chain_crc,
    )

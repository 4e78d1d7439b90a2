"""One segment file, read: its bytes, its header, and the runs of valid records in it.

Owns reading a file that may be anything (missing, a directory, unreadable in part, foreign) without
raising, and finding valid records behind bad ones. Never decides what a bad place means, and never
writes.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from baton.errors import ServiceError
from baton.kv.crc import ByteArray
from services.kvstore.log import native
from services.kvstore.log.format import (
    ALIGNMENT_BYTES,
    HEADER_BYTES,
    SEGMENT_BYTES,
    SEGMENT_HEADER_BYTES,
    ReadRecord,
    RecordType,
    SegmentHeader,
    decode_body,
    decode_header,
    decode_segment_header,
    first_chain,
)
from services.kvstore.log.segments import SUFFIX

SEGMENT_FILE_BYTES_MAX: Final = 256 << 20
"""A larger file is no segment; nothing is allocated for it."""
READ_BYTES: Final = 8 << 20
SECTOR_BYTES: Final = 4096
UNREADABLE_BYTE: Final = 0xFF
BROKEN_SUFFIX: Final = ".broken"
UNKNOWN_LSNS: Final = SEGMENT_BYTES // ALIGNMENT_BYTES
"""More records than a segment can hold: so many LSNs are left free for one that is unreadable."""

_NAME: Final = re.compile(rf"[0-9a-f]{{16}}{re.escape(SUFFIX)}")
_KNOWN_STOPS: Final = frozenset({"payload", "payload_crc", "padding"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRecord:
    """A place where a record should begin and none is valid.

    `log_id`, `type_code` and `lsn` are known when its header is whole and follows in the chain.
    """

    offset: int
    field: str
    lsn: int | None = None
    log_id: bytes | None = None
    type_code: int | None = None


@dataclass(slots=True, kw_only=True)
class Piece:
    """Valid records that follow each other: bytes [start, end) of the file.

    `chain_crc`: the chain before the first; None where it cannot be known. `bads`: the bad places
    between it and the piece before.
    """

    start: int
    end: int
    chain_crc: int | None
    records: int
    first_lsn: int
    last_lsn: int
    bads: tuple[BadRecord, ...] = ()


@dataclass(slots=True, kw_only=True)
class SegmentScan:
    """What one segment file holds.

    `header` None: it is bad or not there. `problem`: why nothing was read, in words. `bads`: the
    bad places behind the last piece. `durable_lsn`: the highest that a FLUSH in it states. `types`:
    records by type code. `kept`: the pieces that count, once that is decided.
    """

    path: Path
    sequence: int
    header: SegmentHeader | None = None
    size: int = 0
    pieces: list[Piece] = field(default_factory=list)
    bads: list[BadRecord] = field(default_factory=list)
    durable_lsn: int = 0
    problem: str | None = None
    header_problem: str | None = None
    is_header_zero: bool = False
    unreadable: list[tuple[int, int]] = field(default_factory=list)
    types: dict[int, int] = field(default_factory=dict)
    kept: list[Piece] = field(default_factory=list)

    @property
    def records(self) -> list[ReadRecord]:
        """The records that count, decoded, read again from the file: for tools, not for speed."""
        if not self.kept:
            return []
        content = read_content(self.path).data
        return [
            _read_row(content, int(row["offset"]))
            for piece in self.kept
            for row in rescan(content, piece).rows
        ]

    @property
    def is_unreadable(self) -> bool:
        """Whether the system refused the file, or parts of it."""
        return self.problem is not None or bool(self.unreadable)

    @property
    def end_offset(self) -> int:
        """Where the last valid record ends."""
        return self.pieces[-1].end if self.pieces else SEGMENT_HEADER_BYTES


def list_segments(directory: Path) -> list[Path]:
    """The segment files of a directory by their names, oldest first."""
    return sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name))


def list_others(directory: Path) -> list[Path]:
    """What else is there."""
    return sorted(path for path in directory.iterdir() if not _NAME.fullmatch(path.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The bytes of a file. `unreadable`: ranges the system refused, filled with 0xFF."""

    data: ByteArray
    unreadable: list[tuple[int, int]]


def read_content(path: Path) -> Content:
    """A whole file; OSError when it is no readable file of a segment's size."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        if status.st_size > SEGMENT_FILE_BYTES_MAX:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes are no segment", str(path))
        data = np.empty(status.st_size, dtype=np.uint8)
        unreadable: list[tuple[int, int]] = []
        for start in range(0, data.size, READ_BYTES):
            _read_into(descriptor, data, start, min(start + READ_BYTES, data.size), unreadable)
        return Content(data=data, unreadable=unreadable)
    finally:
        os.close(descriptor)


def _read_into(
    descriptor: int, data: ByteArray, start: int, end: int, unreadable: list[tuple[int, int]]
) -> None:
    """Reads [start, end); what cannot be read is found sector by sector."""
    try:
        _read_exactly(descriptor, data, start, end)
    except OSError:
        if end - start > SECTOR_BYTES:
            for sector in range(start, end, SECTOR_BYTES):
                stop = min(sector + SECTOR_BYTES, end)
                _read_into(descriptor, data, sector, stop, unreadable)
            return
        data[start:end] = UNREADABLE_BYTE
        if unreadable and unreadable[-1][1] == start:
            unreadable[-1] = (unreadable[-1][0], end)
        else:
            unreadable.append((start, end))


def _read_exactly(descriptor: int, data: ByteArray, start: int, end: int) -> None:
    view = data.data
    while start < end:
        read = os.preadv(descriptor, [view[start:end]], start)
        if read <= 0:
            raise OSError(errno.EIO, "the file became shorter while it was read")
        start += read


def scan_segment(path: Path) -> SegmentScan:
    """Reads one segment file; never raises for what is in it."""
    scan = SegmentScan(path=path, sequence=int(path.name[:16], 16))
    try:
        content = read_content(path)
    except OSError as error:
        scan.problem = error.strerror or str(error)
        return scan
    scan.size, scan.unreadable = content.data.size, content.unreadable
    _scan_content(scan, content.data)
    return scan


def _scan_content(scan: SegmentScan, content: ByteArray) -> None:
    chain: int | None = None
    try:
        scan.header = decode_segment_header(content)
        chain = first_chain(scan.header.segment_id)
    except ServiceError as error:
        scan.header_problem = error.field
        scan.is_header_zero = not content[:SEGMENT_HEADER_BYTES].any()
    offset: int | None = SEGMENT_HEADER_BYTES
    if scan.header is None:
        offset = _next_record(content, SEGMENT_HEADER_BYTES)
        if offset not in (None, SEGMENT_HEADER_BYTES):
            scan.bads.append(BadRecord(offset=SEGMENT_HEADER_BYTES, field="magic"))
    while offset is not None and offset < content.size:
        offset, chain = _scan_from(scan, content, offset, chain)


def _next_record(content: ByteArray, offset: int) -> int | None:
    return native.find_record(content, offset) if offset < content.size else None


def _scan_from(
    scan: SegmentScan, content: ByteArray, offset: int, chain: int | None
) -> tuple[int | None, int | None]:
    """One run of valid records; where to go on behind it, and with which chain."""
    whole = content[: content.size // ALIGNMENT_BYTES * ALIGNMENT_BYTES]
    if offset >= whole.size:
        if content[offset:].any():
            scan.bads.append(BadRecord(offset=offset, field="header"))
        return None, None
    scanned = native.scan(whole, chain_crc=chain, offset=offset)
    end, stop, count = scanned.end_offset, scanned.stop, len(scanned.rows)
    if stop is None and content[whole.size :].any():
        stop = "header"
    if stop is None and end < content.size and _was_cut(scan):
        # It had been cut to its records: what reads as zeros behind them was one.
        stop = "magic"
    if chain is None and count == 1 and stop is not None:
        # Nothing confirms the place of a single record between bad ones.
        _believe_flush(scan, content, scanned.rows)
        scan.bads.append(BadRecord(offset=offset, field="chain_crc"))
        return _next_record(content, end), None
    if count:
        _add_piece(scan, content, scanned, offset, chain)
    if stop is None:
        return None, None
    if stop == "chain_crc":
        scan.bads.append(BadRecord(offset=end, field=stop))
        return end, None
    if stop not in _KNOWN_STOPS:
        scan.bads.append(BadRecord(offset=end, field=stop))
        return _next_record(content, end + ALIGNMENT_BYTES), None
    header = decode_header(content, end)
    scan.bads.append(
        BadRecord(
            offset=end,
            field=stop,
            lsn=header.lsn,
            log_id=header.log_id,
            type_code=header.type_code,
        )
    )
    if stop == "payload":
        return _next_record(content, end + ALIGNMENT_BYTES), None
    behind = end + header.record_bytes
    if behind < whole.size:
        following = native.scan(whole, chain_crc=header.chain_crc, offset=behind)
        if len(following.rows):
            return behind, header.chain_crc
    # Nothing follows it: the header may be misplaced, and what it spans another's.
    return _next_record(content, end + ALIGNMENT_BYTES), None


def _was_cut(scan: SegmentScan) -> bool:
    """Whether the file has no unused rest any more: its writer, or a repair, cut it off."""
    return scan.header is not None and scan.size < scan.header.segment_bytes


def _add_piece(
    scan: SegmentScan,
    content: ByteArray,
    scanned: native.Scanned,
    start: int,
    chain: int | None,
) -> None:
    rows = scanned.rows
    scan.pieces.append(
        Piece(
            start=start,
            end=scanned.end_offset,
            chain_crc=chain,
            records=len(rows),
            first_lsn=int(rows["lsn"][0]),
            last_lsn=int(rows["lsn"].max()),
            bads=tuple(scan.bads),
        )
    )
    scan.bads = []
    codes, counts = np.unique(rows["type_code"], return_counts=True)
    for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
        scan.types[code] = scan.types.get(code, 0) + count
    is_flush = _are_flushes(rows)
    if is_flush.any():
        stated = _u64_at(content, rows["offset"][is_flush] + HEADER_BYTES)
        scan.durable_lsn = max(scan.durable_lsn, int(stated.max()))


def _are_flushes(rows: native.Rows) -> npt.NDArray[np.bool_]:
    are: npt.NDArray[np.bool_] = (rows["type_code"] == RecordType.FLUSH) & (
        rows["payload_bytes"] == 8
    )
    return are


def _believe_flush(scan: SegmentScan, content: ByteArray, rows: native.Rows) -> None:
    """What a lone FLUSH states is true wherever it stands, if it can have been written here."""
    if not _are_flushes(rows).all():
        return
    lsn = int(rows["lsn"][0])
    stated = int(_u64_at(content, rows["offset"] + HEADER_BYTES)[0])
    if scan.header is None or scan.header.sequence != scan.sequence:
        is_plausible = True
    else:
        first = scan.header.first_lsn
        is_plausible = first <= lsn <= first + UNKNOWN_LSNS
    if is_plausible and stated < lsn:
        scan.durable_lsn = max(scan.durable_lsn, stated)


def _u64_at(content: ByteArray, offsets: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    places = offsets[:, None] + np.arange(8, dtype=np.uint64)
    values: npt.NDArray[np.uint64] = content[places].view("<u8")[:, 0]
    return values


def rescan(content: ByteArray, piece: Piece) -> native.Scanned:
    """The records of a piece."""
    return native.scan(content[: piece.end], chain_crc=piece.chain_crc, offset=piece.start)


def _read_row(content: ByteArray, offset: int) -> ReadRecord:
    """A record whose frame was checked."""
    header = decode_header(content, offset)
    start = offset + HEADER_BYTES
    payload = content[start : start + header.payload_bytes].tobytes()
    return ReadRecord(
        header=header,
        record=decode_body(header, payload),
        offset=offset,
        end_offset=offset + header.record_bytes,
        chain=header.chain_crc,
    )

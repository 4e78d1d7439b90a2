"""The framing of the log: segment header, record header, chain, payload padding.

Owns the bytes of docs/formats.md, "Log". Pure: it neither opens files nor decides what a bad record
means (torn tail or damage); it raises LOG_CORRUPT with metadata field and offset, and the reader
decides. Bodies stand in `records`, `store_records` and `state`, shared parts in `fields`.

Invariants: the header CRC is checked before the length is believed; the length is capped and
compared with the bytes present before anything is read for it; a record starts and ends at a
multiple of 64 bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Final, Protocol, TypeAlias

from baton.errors import ServiceError
from baton.kv.crc import Buffer, as_bytes, crc32c, mask_crc
from baton.kv.manifest import LOG_ID_BYTES
from services.kvstore.log.fields import BodyReader, corrupt
from services.kvstore.log.records import (
    Append,
    Checkpoint,
    Grant,
    Moved,
    Release,
    Seal,
    Take,
    Truncate,
)
from services.kvstore.log.session_records import Session
from services.kvstore.log.state import Open, Snapshot
from services.kvstore.log.store_records import Close, Flush, Place, Publish, Revoke

RECORD_MAGIC: Final = b"BLR1"
SEGMENT_MAGIC: Final = b"BLS1"
VERSION: Final = 1
HEADER_BYTES: Final = 64
ALIGNMENT_BYTES: Final = 64
SEGMENT_HEADER_BYTES: Final = 64
SEGMENT_BYTES: Final = 64 << 20
PAYLOAD_BYTES_MAX: Final = 32 << 20
SEGMENT_ID_BYTES: Final = 16
STORE_LOG_ID: Final = bytes(LOG_ID_BYTES)
"""The log id of records that belong to no log (FLUSH)."""

RECORD_HEADER: Final = struct.Struct("<4sBBH16sQQIIIIII")
_CHAINED_BYTES: Final = 56
_CRC_OFFSET: Final = 60
_SEGMENT: Final = struct.Struct("<4sHH16s16sQQII")
_SKIPPABLE: Final = 0x80
assert RECORD_HEADER.size == HEADER_BYTES
assert _SEGMENT.size == SEGMENT_HEADER_BYTES


@unique
class RecordType(IntEnum):
    """The type byte of a record header."""

    OPEN = 1
    GRANT = 2
    RELEASE = 3
    CHECKPOINT = 4
    SEAL = 5
    TAKE = 6
    APPEND = 7
    TRUNCATE = 8
    MOVED = 9
    PLACE = 10
    PUBLISH = 11
    REVOKE = 12
    SNAPSHOT = 13
    FLUSH = 14
    CLOSE = 15
    SESSION = 0x90


Record: TypeAlias = (
    Open
    | Grant
    | Release
    | Checkpoint
    | Seal
    | Take
    | Append
    | Truncate
    | Moved
    | Place
    | Publish
    | Revoke
    | Snapshot
    | Flush
    | Close
    | Session
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRecord:
    """A record of a later version that a reader may pass over: its type has the high bit set."""

    type_code: int
    payload: bytes


class _Body(Protocol):
    @classmethod
    def decode(cls, reader: BodyReader) -> Record: ...


_BODIES: Final[dict[RecordType, type[_Body]]] = {
    RecordType.OPEN: Open,
    RecordType.GRANT: Grant,
    RecordType.RELEASE: Release,
    RecordType.CHECKPOINT: Checkpoint,
    RecordType.SEAL: Seal,
    RecordType.TAKE: Take,
    RecordType.APPEND: Append,
    RecordType.TRUNCATE: Truncate,
    RecordType.MOVED: Moved,
    RecordType.PLACE: Place,
    RecordType.PUBLISH: Publish,
    RecordType.REVOKE: Revoke,
    RecordType.SNAPSHOT: Snapshot,
    RecordType.FLUSH: Flush,
    RecordType.CLOSE: Close,
    RecordType.SESSION: Session,
}
KNOWN_TYPES: Final = frozenset(int(kind) for kind in RecordType)
_TYPES: Final[dict[type, RecordType]] = {body: kind for kind, body in _BODIES.items()}


def type_of(record: Record) -> RecordType:
    """Return the type byte of a record."""
    return _TYPES[type(record)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordAddress:
    """Which log a record is of, under which generation, and at which position."""

    log_id: bytes
    generation: int
    position: int


STORE_ADDRESS: Final = RecordAddress(log_id=STORE_LOG_ID, generation=0, position=0)
"""The address of records that belong to no log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHeader:
    """A verified record header; CRC and chain of the payload are still to be compared."""

    type_code: int
    flags: int
    log_id: bytes
    lsn: int
    generation: int
    position: int
    payload_bytes: int
    payload_crc: int
    chain_crc: int

    @property
    def record_bytes(self) -> int:
        """Bytes of the whole record, padding included."""
        return record_bytes(self.payload_bytes)

    @property
    def address(self) -> RecordAddress:
        """Log id, generation and position."""
        return RecordAddress(log_id=self.log_id, generation=self.generation, position=self.position)


def record_bytes(payload_bytes: int) -> int:
    """Return the bytes of a record with this payload: header, payload, padding to 64."""
    return HEADER_BYTES + -(-payload_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def first_chain(segment_id: bytes) -> int:
    """Return the chain value before a segment's first record: CRC-32C of the segment's id."""
    assert len(segment_id) == SEGMENT_ID_BYTES
    return crc32c(segment_id)


def next_chain(previous: int, header: bytes) -> int:
    """Return a record's chain value: CRC-32C of the previous value (u32 LE) and bytes 0..55."""
    return crc32c(struct.pack("<I", previous) + header[:_CHAINED_BYTES])


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRecord:
    """A record as written, and the chain value that the next one continues."""

    data: bytes
    chain: int


def encode_record(
    record: Record, address: RecordAddress, *, lsn: int, previous_chain: int
) -> EncodedRecord:
    """Return the bytes of a record: header, body, zero padding to 64 bytes.

    A body over `PAYLOAD_BYTES_MAX` or a field out of its range is our bug and asserts.
    """
    payload = record.encode()
    return frame_payload(type_of(record), payload, address, lsn=lsn, previous_chain=previous_chain)


def frame_payload(
    kind: RecordType, payload: bytes, address: RecordAddress, *, lsn: int, previous_chain: int
) -> EncodedRecord:
    """As `encode_record`, for a body that is encoded already."""
    type_code = int(kind)
    assert len(payload) <= PAYLOAD_BYTES_MAX, f"payload of {len(payload)} bytes"
    assert len(address.log_id) == LOG_ID_BYTES
    head = RECORD_HEADER.pack(
        RECORD_MAGIC,
        VERSION,
        type_code,
        0,
        address.log_id,
        lsn,
        address.generation,
        address.position,
        0,
        len(payload),
        crc32c(payload),
        0,
        0,
    )
    chain = next_chain(previous_chain, head)
    chained = head[:_CHAINED_BYTES] + struct.pack("<I", chain)
    header = chained + struct.pack("<I", mask_crc(crc32c(chained)))
    padding = bytes(record_bytes(len(payload)) - HEADER_BYTES - len(payload))
    return EncodedRecord(data=header + payload + padding, chain=chain)


def unsealed_record(kind: RecordType, payload: bytes, address: RecordAddress) -> bytes:
    """Return a whole record without its LSN, CRCs and chain, which `native.seal` fills in."""
    size = len(payload)
    assert size <= PAYLOAD_BYTES_MAX, f"payload of {size} bytes"
    log_id = address.log_id
    assert len(log_id) == LOG_ID_BYTES
    head = RECORD_HEADER.pack(
        RECORD_MAGIC,
        VERSION,
        kind,
        0,
        log_id,
        0,
        address.generation,
        address.position,
        0,
        size,
        0,
        0,
        0,
    )
    return head + payload + bytes(-size % ALIGNMENT_BYTES)


def _corrupt_at(name: str, why: str, offset: int) -> ServiceError:
    error = corrupt(name, f"{why} (record at byte {offset})")
    return ServiceError(
        error.reason,
        error.message,
        field=name,
        metadata={"field": name, "offset": str(offset)},
    )


def decode_header(data: Buffer, offset: int = 0) -> RecordHeader:
    """Decode the record header at `offset`; raises LOG_CORRUPT with metadata field and offset.

    Magic, header CRC, version, type, flags and length are checked, in this order; the length
    against its cap only.
    """
    window = as_bytes(data)[offset : offset + HEADER_BYTES]
    if window.size < HEADER_BYTES:
        raise _corrupt_at("header", f"{window.size} of {HEADER_BYTES} bytes present", offset)
    raw = window.tobytes()
    if raw[:4] != RECORD_MAGIC:
        raise _corrupt_at("magic", "no record starts here", offset)
    if mask_crc(crc32c(raw[:_CRC_OFFSET])) != int.from_bytes(raw[_CRC_OFFSET:], "little"):
        raise _corrupt_at("header_crc", "does not match the header", offset)
    _, version, type_code, flags, log_id, lsn, generation, position, reserved, *sizes, _ = (
        RECORD_HEADER.unpack(raw)
    )
    payload_bytes, payload_crc, chain_crc = sizes
    if version != VERSION:
        raise _corrupt_at("version", f"{version} is unknown", offset)
    is_known = type_code in KNOWN_TYPES
    if not is_known and not type_code & _SKIPPABLE:
        raise _corrupt_at("type", f"{type_code} is unknown and may not be skipped", offset)
    if is_known and (flags or reserved):
        raise _corrupt_at("flags", "unknown flags or reserved bits", offset)
    if payload_bytes > PAYLOAD_BYTES_MAX:
        raise _corrupt_at("payload_bytes", f"{payload_bytes} exceeds {PAYLOAD_BYTES_MAX}", offset)
    return RecordHeader(
        type_code=type_code,
        flags=flags,
        log_id=log_id,
        lsn=lsn,
        generation=generation,
        position=position,
        payload_bytes=payload_bytes,
        payload_crc=payload_crc,
        chain_crc=chain_crc,
    )


def decode_body(header: RecordHeader, payload: bytes | memoryview) -> Record | SkippedRecord:
    """Decode the body whose CRC was compared; raises LOG_CORRUPT naming the field."""
    if header.type_code not in KNOWN_TYPES:
        return SkippedRecord(type_code=header.type_code, payload=bytes(payload))
    reader = BodyReader(payload)
    record = _BODIES[RecordType(header.type_code)].decode(reader)
    reader.finish()
    return record


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRecord:
    """One record read from a segment. `end_offset` is where the next one starts."""

    header: RecordHeader
    record: Record | SkippedRecord
    offset: int
    end_offset: int
    chain: int


def read_record(data: Buffer, offset: int, *, previous_chain: int) -> ReadRecord:
    """Read and verify the record at `offset` of a segment's bytes.

    Raises LOG_CORRUPT with metadata field and offset: header, magic, header_crc, version, type,
    flags, payload_bytes, chain_crc, payload (bytes missing), payload_crc, padding, or a field of
    the body.
    """
    content = as_bytes(data)
    header = decode_header(content, offset)
    raw_header = content[offset : offset + HEADER_BYTES].tobytes()
    if next_chain(previous_chain, raw_header) != header.chain_crc:
        raise _corrupt_at("chain_crc", "the record does not follow the one before it", offset)
    end_offset = offset + header.record_bytes
    if end_offset > content.size:
        raise _corrupt_at("payload", "ends behind the bytes present", offset)
    start = offset + HEADER_BYTES
    payload = content[start : start + header.payload_bytes]
    if crc32c(payload) != header.payload_crc:
        raise _corrupt_at("payload_crc", "does not match the payload", offset)
    if content[start + header.payload_bytes : end_offset].any():
        raise _corrupt_at("padding", "is not zero", offset)
    try:
        record = decode_body(header, payload.data)
    except ServiceError as error:
        raise _corrupt_at(error.field or "payload", error.message, offset) from error
    return ReadRecord(
        header=header,
        record=record,
        offset=offset,
        end_offset=end_offset,
        chain=header.chain_crc,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """The first 64 bytes of a segment file.

    `segment_id` (16 random bytes) starts the chain; `store_id` (16 bytes) names the kvstore;
    `sequence` orders its segments; `first_lsn` is the LSN of the first record.
    """

    segment_id: bytes
    store_id: bytes
    sequence: int
    first_lsn: int
    segment_bytes: int = SEGMENT_BYTES


def encode_segment_header(header: SegmentHeader) -> bytes:
    """Return the 64 header bytes of a segment."""
    assert len(header.segment_id) == len(header.store_id) == SEGMENT_ID_BYTES
    body = _SEGMENT.pack(
        SEGMENT_MAGIC,
        VERSION,
        0,
        header.segment_id,
        header.store_id,
        header.sequence,
        header.first_lsn,
        header.segment_bytes,
        0,
    )[:_CRC_OFFSET]
    return body + struct.pack("<I", mask_crc(crc32c(body)))


def decode_segment_header(data: Buffer) -> SegmentHeader:
    """Decode a segment's header; raises LOG_CORRUPT naming the field."""
    raw = as_bytes(data)[:SEGMENT_HEADER_BYTES].tobytes()
    if len(raw) < SEGMENT_HEADER_BYTES:
        raise _corrupt_at("segment_header", f"{len(raw)} bytes present", 0)
    if raw[:4] != SEGMENT_MAGIC:
        raise _corrupt_at("segment_magic", "this is no log segment", 0)
    if mask_crc(crc32c(raw[:_CRC_OFFSET])) != int.from_bytes(raw[_CRC_OFFSET:], "little"):
        raise _corrupt_at("segment_crc", "does not match the header", 0)
    _, version, flags, segment_id, store_id, sequence, first_lsn, size, _ = _SEGMENT.unpack(raw)
    if version != VERSION or flags != 0:
        raise _corrupt_at("segment_version", f"version {version}, flags {flags:#x} unknown", 0)
    return SegmentHeader(
        segment_id=segment_id,
        store_id=store_id,
        sequence=sequence,
        first_lsn=first_lsn,
        segment_bytes=size,
    )

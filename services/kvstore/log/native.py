"""The framing of the log in bulk: scanning a segment's bytes, completing a group of records.

Owns the choice between the native library (`native/log/`) and Python, which give the same results:
without a compiler, or without cffi, Python serves. Pure: opens no segment, and decides nothing
about what a bad record means. Bodies are not looked into.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from baton.engine.native_library import open_library
from baton.engine.step_kernel_build import LOG
from baton.errors import ServiceError
from baton.kv.crc import Buffer, as_bytes, crc32c, mask_crc
from services.kvstore.log.format import (
    ALIGNMENT_BYTES,
    HEADER_BYTES,
    KNOWN_TYPES,
    PAYLOAD_BYTES_MAX,
    RECORD_HEADER,
    RECORD_MAGIC,
    SEGMENT_HEADER_BYTES,
    VERSION,
    RecordHeader,
    decode_header,
    next_chain,
    record_bytes,
)

ABI_VERSION: Final = 1
DECLARATIONS: Final = """
struct bl_row {
    uint64_t offset;
    uint64_t lsn;
    uint64_t generation;
    uint8_t log_id[16];
    uint32_t position;
    uint32_t payload_bytes;
    uint32_t log;
    uint32_t chain_crc;
    uint16_t flags;
    uint8_t type_code;
    uint8_t zero[5];
};
struct bl_scan {
    uint64_t end_offset;
    uint64_t row_count;
    uint32_t log_count;
    uint32_t chain_crc;
    uint32_t stop;
    uint32_t zero;
};
uint32_t bl_abi_version(void);
uint32_t bl_crc32c(uint32_t crc, const uint8_t* data, uint64_t size);
int32_t bl_scan_records(const uint8_t* data, uint64_t size, uint64_t offset,
                        uint32_t chain_crc, uint32_t is_chain_known, struct bl_row* rows,
                        uint64_t row_capacity, uint32_t* slots, uint64_t slot_count,
                        struct bl_scan* out);
int64_t bl_find_record(const uint8_t* data, uint64_t size, uint64_t offset);
int64_t bl_seal_records(uint8_t* data, uint64_t size, uint64_t first_lsn,
                        uint32_t* chain_crc);
"""

STOPS: Final[tuple[str | None, ...]] = (
    None,
    "full",
    "header",
    "magic",
    "header_crc",
    "version",
    "type",
    "flags",
    "payload_bytes",
    "chain_crc",
    "payload",
    "payload_crc",
    "padding",
)
"""The fields of LOG_CORRUPT that `format.read_record` names, by the number of enum bl_stop."""

ROW: Final = np.dtype(
    [
        ("offset", "<u8"),
        ("lsn", "<u8"),
        ("generation", "<u8"),
        ("log_id", "u1", (16,)),
        ("position", "<u4"),
        ("payload_bytes", "<u4"),
        ("log", "<u4"),
        ("chain_crc", "<u4"),
        ("flags", "<u2"),
        ("type_code", "u1"),
        ("zero", "u1", (5,)),
    ]
)
"""One valid record. `offset` is its header's in the buffer: its payload begins 64 bytes later.
`log` is the row of its log id in `Scanned.log_ids`."""

Rows = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """What a buffer holds from an offset on.

    `rows`: an array of `ROW`, a valid record each, in order. `log_ids`: the distinct ones,
    (count, 16) bytes, in the order of first appearance. `end_offset`: where the last valid record
    ends. `chain_crc`: the chain after it. `stop`: None at the end of the bytes or where only zeros
    follow; else the field in which the record at `end_offset` is bad, as `read_record` names it.
    """

    rows: Rows
    log_ids: npt.NDArray[np.uint8]
    end_offset: int
    chain_crc: int
    stop: str | None


@cache
def opened_library() -> tuple[Any, Any] | None:
    """(ffi, library); None where it was not built, is another version's, or cffi is missing."""
    return open_library(LOG.file, DECLARATIONS, "bl_abi_version", ABI_VERSION)


def is_native() -> bool:
    """Whether the native library serves."""
    return opened_library() is not None


# --- scanning -----------------------------------------------------------------------------------


def scan(buffer: Buffer, *, chain_crc: int | None, offset: int = SEGMENT_HEADER_BYTES) -> Scanned:
    """Every valid record from `offset` on, up to the first bad one.

    `chain_crc` is the chain before the first record (`format.first_chain` of the segment's id);
    None takes the first record's own, for what stands behind a bad one. The rows are copies: the
    buffer may go.
    """
    loaded = opened_library()
    if loaded is None:
        return scan_in_python(buffer, chain_crc=chain_crc, offset=offset)
    ffi, native = loaded
    content = as_bytes(buffer)
    assert offset in range(0, content.size + 1, ALIGNMENT_BYTES), offset
    # Records have 64 bytes or more. Memory that no row reaches is never touched.
    capacity = (content.size - offset) // ALIGNMENT_BYTES + 1
    slot_count = 1 << (2 * capacity - 1).bit_length()
    rows = np.empty(capacity, dtype=ROW)
    slots = np.zeros(slot_count, dtype=np.uint32)
    out = ffi.new("struct bl_scan *")
    status = native.bl_scan_records(
        ffi.from_buffer("uint8_t[]", content),
        content.size,
        offset,
        0 if chain_crc is None else chain_crc,
        0 if chain_crc is None else 1,
        ffi.cast("struct bl_row *", ffi.from_buffer(rows)),
        capacity,
        ffi.from_buffer("uint32_t[]", slots),
        slot_count,
        out,
    )
    assert status == 0, status
    return _scanned(
        rows[: out.row_count].copy(),
        int(out.log_count),
        end_offset=int(out.end_offset),
        chain_crc=int(out.chain_crc),
        stop=STOPS[out.stop],
    )


def scan_in_python(
    buffer: Buffer, *, chain_crc: int | None, offset: int = SEGMENT_HEADER_BYTES
) -> Scanned:
    """As `scan`, record by record."""
    content = as_bytes(buffer)
    assert offset in range(0, content.size + 1, ALIGNMENT_BYTES), offset
    data = content.tobytes()
    found: list[tuple[Any, ...]] = []
    chain, stop = chain_crc, None
    while offset < len(data):
        values = _valid(data, offset, chain)
        if values is None:
            header, stop = _checked(content, offset, chain)
            if header is None:
                break
            values = _values_of(header, offset)
        found.append(values)
        chain, offset = values[_CHAIN], values[_END]
    if stop is not None and not content[offset:].any():
        stop = None
    numbers: dict[bytes, int] = {}
    rows = _rows_of(found, numbers)
    return _scanned(rows, len(numbers), end_offset=offset, chain_crc=chain or 0, stop=stop)


_NAMES: Final = ("offset", "lsn", "generation", "position", "payload_bytes", "chain_crc")
_CHAIN: Final = 5
_END: Final = 6


def _values_of(header: RecordHeader, offset: int) -> tuple[Any, ...]:
    return (
        offset,
        header.lsn,
        header.generation,
        header.position,
        header.payload_bytes,
        header.chain_crc,
        offset + header.record_bytes,
        header.flags,
        header.type_code,
        header.log_id,
    )


def _valid(data: bytes, offset: int, chain: int | None) -> tuple[Any, ...] | None:
    """The values of an ordinary valid record; None for anything else, which `_checked` names."""
    raw = data[offset : offset + HEADER_BYTES]
    if len(raw) < HEADER_BYTES:
        return None
    magic, version, code, flags, log_id, lsn, generation, position, zero, size, *crcs = (
        RECORD_HEADER.unpack(raw)
    )
    payload_crc, chain_crc, header_crc = crcs
    start = offset + HEADER_BYTES
    end = start - (-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if (
        magic != RECORD_MAGIC
        or mask_crc(crc32c(raw[:60])) != header_crc
        or version != VERSION
        or code not in KNOWN_TYPES
        or flags
        or zero
        or size > PAYLOAD_BYTES_MAX
        or end > len(data)
        or (chain is not None and next_chain(chain, raw) != chain_crc)
        or crc32c(data[start : start + size]) != payload_crc
        or (start + size < end and any(data[start + size : end]))
    ):
        return None
    return offset, lsn, generation, position, size, chain_crc, end, flags, code, log_id


def _rows_of(found: list[tuple[Any, ...]], numbers: dict[bytes, int]) -> Rows:
    """As an array; fills in which number each log id has."""
    rows: Rows = np.zeros(len(found), dtype=ROW)
    if not found:
        return rows
    *columns, _, flags, codes, log_ids = zip(*found, strict=True)
    for name, column in zip(_NAMES, columns, strict=True):
        rows[name] = column
    rows["flags"], rows["type_code"] = flags, codes
    rows["log"] = [numbers.setdefault(log_id, len(numbers)) for log_id in log_ids]
    rows["log_id"] = np.frombuffer(b"".join(log_ids), dtype=np.uint8).reshape(-1, 16)
    return rows


def _scanned(
    rows: Rows, log_count: int, *, end_offset: int, chain_crc: int, stop: str | None
) -> Scanned:
    first = np.zeros(log_count, dtype=np.intp)
    # Backwards: what is written last stays, the first row of each log.
    first[rows["log"][::-1]] = np.arange(len(rows))[::-1]
    return Scanned(
        rows=rows,
        log_ids=rows["log_id"][first],
        end_offset=end_offset,
        chain_crc=chain_crc,
        stop=stop,
    )


def _checked(
    content: npt.NDArray[np.uint8], offset: int, chain: int | None
) -> tuple[RecordHeader | None, str | None]:
    """The header of a valid record, or the field in which it is bad."""
    try:
        header = decode_header(content, offset)
    except ServiceError as error:
        return None, error.field
    start, end = offset + HEADER_BYTES, offset + header.record_bytes
    if chain is not None:
        raw = content[offset:start].tobytes()
        if next_chain(chain, raw) != header.chain_crc:
            return None, "chain_crc"
    if end > content.size:
        return None, "payload"
    if crc32c(content[start : start + header.payload_bytes]) != header.payload_crc:
        return None, "payload_crc"
    if content[start + header.payload_bytes : end].any():
        return None, "padding"
    return header, None


def find_record(buffer: Buffer, offset: int) -> int | None:
    """Where, from `offset` on, a record stands whose own CRCs hold, whatever stands before it."""
    loaded = opened_library()
    if loaded is None:
        return find_record_in_python(buffer, offset)
    ffi, native = loaded
    content = as_bytes(buffer)
    found = native.bl_find_record(ffi.from_buffer("uint8_t[]", content), content.size, offset)
    assert found >= 0, found
    return None if found == content.size else int(found)


def find_record_in_python(buffer: Buffer, offset: int) -> int | None:
    """As `find_record`: candidates by their magic."""
    content = as_bytes(buffer)
    assert offset % ALIGNMENT_BYTES == 0, offset
    whole = content.size // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    lines = content[min(offset, whole) : whole].reshape(-1, ALIGNMENT_BYTES)
    magic = np.frombuffer(RECORD_MAGIC, dtype=np.uint8)
    for line in np.flatnonzero((lines[:, : magic.size] == magic).all(axis=1)):
        start = offset + int(line) * ALIGNMENT_BYTES
        if _checked(content, start, None)[0] is not None:
            return start
    return None


# --- sealing ------------------------------------------------------------------------------------


def seal(group: bytearray, *, first_lsn: int, chain_crc: int) -> int:
    """Completes the records of a group in place; returns the chain after the last.

    `group` holds whole records one after the other (`format.unsealed_record`), whose LSN, CRCs
    and chain are filled in: LSNs count from `first_lsn`.
    """
    loaded = opened_library()
    if loaded is None:
        return seal_in_python(group, first_lsn=first_lsn, chain_crc=chain_crc)
    ffi, native = loaded
    chain = ffi.new("uint32_t *", chain_crc)
    count = native.bl_seal_records(
        ffi.from_buffer("uint8_t[]", group, require_writable=True), len(group), first_lsn, chain
    )
    assert count >= 0, f"no whole records: {count}"
    return int(chain[0])


def seal_in_python(group: bytearray, *, first_lsn: int, chain_crc: int) -> int:
    """As `seal`, record by record."""
    offset, lsn = 0, first_lsn
    while offset < len(group):
        start = offset + HEADER_BYTES
        payload_bytes = int.from_bytes(group[offset + 48 : offset + 52], "little")
        end = offset + record_bytes(payload_bytes)
        assert group[offset : offset + 4] == RECORD_MAGIC, offset
        assert payload_bytes <= PAYLOAD_BYTES_MAX, payload_bytes
        assert end <= len(group), payload_bytes
        payload_crc = crc32c(bytes(group[start : start + payload_bytes]))
        group[offset + 24 : offset + 32] = lsn.to_bytes(8, "little")
        group[offset + 52 : offset + 56] = payload_crc.to_bytes(4, "little")
        chain_crc = next_chain(chain_crc, bytes(group[offset : offset + 56]))
        group[offset + 56 : offset + 60] = chain_crc.to_bytes(4, "little")
        header_crc = mask_crc(crc32c(bytes(group[offset : offset + 60])))
        group[offset + 60 : offset + 64] = header_crc.to_bytes(4, "little")
        offset, lsn = end, lsn + 1
    return chain_crc

"""Log segments as a killed kvstore leaves them, made in bulk: many logs that decode side by side.

Owns the bytes of the records. They follow docs/formats.md and stand in the order of a busy store:
each log is opened, granted pages, committed, sealed and taken; then, round by round, every log gets
one token, in groups of 32 records behind a FLUSH.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from baton.kv.blocks import Scope
from baton.sampling_parameters import SamplingParameters
from services.kvstore.log import native
from services.kvstore.log.fields import Extent, LogIdentity, PageEntry, PageRef
from services.kvstore.log.fold_appends import APPEND
from services.kvstore.log.format import (
    RECORD_MAGIC,
    SEGMENT_BYTES,
    SEGMENT_HEADER_BYTES,
    STORE_ADDRESS,
    VERSION,
    Record,
    RecordAddress,
    RecordType,
    SegmentHeader,
    encode_segment_header,
    first_chain,
    type_of,
    unsealed_record,
)
from services.kvstore.log.records import Checkpoint, Grant, Seal, Take
from services.kvstore.log.segments import segment_path
from services.kvstore.log.state import Open
from services.kvstore.log.store_records import Flush

TENANT = "bench"
GROUP_RECORDS = 32
GRANT_PAGES = 8

_HEAD = np.dtype(
    [
        ("magic", "S4"),
        ("version", "u1"),
        ("type_code", "u1"),
        ("flags", "<u2"),
        ("log_id", "V16"),
        ("lsn", "<u8"),
        ("generation", "<u8"),
        ("position", "<u4"),
        ("zero", "<u4"),
        ("payload_bytes", "<u4"),
        ("crcs", "<u4", (3,)),
    ]
)
_LINE = np.dtype([("head", _HEAD), ("body", APPEND)])
assert _LINE.itemsize == 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many logs, how many tokens each, of which `prompt_tokens` were prefilled."""

    logs: int
    tokens: int
    prompt_tokens: int = 16
    block_tokens: int = 16

    @property
    def appends(self) -> int:
        """APPEND records: every token but the prompt and the first sampled one."""
        return self.logs * (self.tokens - self.prompt_tokens - 1)

    @property
    def pages_of_log(self) -> int:
        """Pages of one log, in whole grants."""
        return -(-self.tokens // (self.block_tokens * GRANT_PAGES)) * GRANT_PAGES


@dataclass(slots=True, kw_only=True)
class LogFiles:
    """Writes sealed records into segments of a directory."""

    directory: Path
    store_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    sequence: int = 0
    lsn: int = 0
    total_bytes: int = 0
    _parts: list[bytes] = field(default_factory=list)
    _size: int = SEGMENT_BYTES
    _chain: int = 0

    def group(self, data: bytes | bytearray, records: int) -> None:
        """One group commit: a FLUSH and `records` unsealed records."""
        flush = unsealed_record(
            RecordType.FLUSH, Flush(durable_lsn=self.lsn).encode(), STORE_ADDRESS
        )
        group = bytearray(flush + data)
        if self._size + len(group) > SEGMENT_BYTES:
            self._roll()
        self._chain = native.seal(group, first_lsn=self.lsn + 1, chain_crc=self._chain)
        self.lsn += records + 1
        self._parts.append(bytes(group))
        self._size += len(group)

    def records(self, items: list[tuple[Record, RecordAddress]]) -> None:
        """One group of ordinary records."""
        data = [unsealed_record(type_of(record), record.encode(), at) for record, at in items]
        self.group(b"".join(data), len(items))

    def end(self) -> None:
        """The newest segment keeps its preallocated zeros, as after kill -9."""
        self._write(SEGMENT_BYTES)

    def _roll(self) -> None:
        self._write(None)
        self.sequence += 1
        segment_id = secrets.token_bytes(16)
        header = SegmentHeader(
            segment_id=segment_id,
            store_id=self.store_id,
            sequence=self.sequence,
            first_lsn=self.lsn + 1,
        )
        self._parts = [encode_segment_header(header)]
        self._size, self._chain = SEGMENT_HEADER_BYTES, first_chain(segment_id)

    def _write(self, size: int | None) -> None:
        if not self._parts:
            return
        data = b"".join(self._parts)
        self.total_bytes += len(data)
        with segment_path(self.directory, self.sequence).open("wb") as file:
            file.write(data)
            if size is not None:
                file.truncate(size)


def log_ids(shape: Shape) -> list[bytes]:
    """The ids of the logs; the same each time."""
    return [blake3(f"bench {index}".encode()).digest(16) for index in range(shape.logs)]


def identity(kv_digest: bytes, tokenizer_hash: bytes, request_id: str) -> LogIdentity:
    """Of a log of tenant `bench`."""
    return LogIdentity(
        scope=Scope(tenant=TENANT),
        request_id=request_id,
        body_hash=bytes(32),
        sampling=SamplingParameters().to_canonical_bytes(),
        label_digest=bytes(16),
        kv_digest=kv_digest,
        tokenizer_hash=tokenizer_hash,
        numeric_class_id=7,
        block_tokens=16,
        ttl_s=3600,
        opened_wall_ms=1_700_000_000_000,
    )


def generate(
    directory: Path,
    shape: Shape,
    *,
    arena_id: bytes,
    kv_digest: bytes = bytes(16),
    tokenizer_hash: bytes = bytes(8),
) -> LogFiles:
    """Writes the segments of `shape`; every page of the logs is in the arena `arena_id`."""
    assert shape.prompt_tokens == shape.block_tokens
    files = LogFiles(directory=directory)
    ids = log_ids(shape)
    for index, log_id in enumerate(ids):
        one = identity(kv_digest, tokenizer_hash, f"request-{index}")
        files.records(_beginning(shape, index, log_id, one, arena_id))
    lines = _lines(shape, ids, arena_id)
    rounds = range(shape.prompt_tokens + 1, shape.tokens)
    for position in rounds:
        if (position - 1) % (shape.block_tokens * GRANT_PAGES) == 0:
            for index, log_id in enumerate(ids):
                block = (position - 1) // shape.block_tokens
                grant = _grant(shape, index, block, arena_id)
                at = RecordAddress(log_id=log_id, generation=2, position=position)
                files.records([(grant, at)])
        _set_round(lines, shape, position)
        for first in range(0, shape.logs, GROUP_RECORDS):
            part = lines[first : first + GROUP_RECORDS]
            files.group(part.tobytes(), len(part))
    files.end()
    return files


def _beginning(
    shape: Shape, index: int, log_id: bytes, one: LogIdentity, arena_id: bytes
) -> list[tuple[Record, RecordAddress]]:
    size = shape.prompt_tokens
    ref = PageRef(arena_id=arena_id, page=index * shape.pages_of_log, page_generation=1, crc=index)
    entry = PageEntry(ref=ref, tokens=size)
    first = RecordAddress(log_id=log_id, generation=1, position=size)
    taken = RecordAddress(log_id=log_id, generation=2, position=size + 1)
    take = Take(
        previous_generation=1,
        worker_id="decode",
        worker_slot=1,
        worker_incarnation=1,
        lease_ms=10_000,
    )
    return [
        (Open(identity=one, token_ids=tuple(range(size))), first),
        (_grant(shape, index, 0, arena_id), first),
        (Checkpoint(from_position=0, to_position=size, entries=(entry,)), first),
        (Seal(chunk_list_digest=bytes(32), chunk_count=1, token_id=5), first),
        (take, taken),
    ]


def _grant(shape: Shape, index: int, block: int, arena_id: bytes) -> Grant:
    extent = Extent(
        arena_id=arena_id,
        first_page=index * shape.pages_of_log + block,
        page_count=GRANT_PAGES,
        page_generation=1,
    )
    return Grant(worker_id="decode", worker_slot=1, worker_incarnation=1, extents=(extent,))


def _lines(shape: Shape, ids: list[bytes], arena_id: bytes) -> npt.NDArray[np.void]:
    """One APPEND of each log; what changes with the position is set by `_set_round`."""
    lines: npt.NDArray[Any] = np.zeros(shape.logs, dtype=_LINE)
    head, body = lines["head"], lines["body"]
    head["magic"], head["version"], head["type_code"] = RECORD_MAGIC, VERSION, RecordType.APPEND
    head["log_id"] = np.frombuffer(b"".join(ids), dtype="V16")
    head["generation"] = 2
    head["payload_bytes"] = APPEND.itemsize
    body["arena_id"] = np.frombuffer(arena_id, dtype="<u8")
    body["page_generation"] = 1
    return lines


def _set_round(lines: npt.NDArray[np.void], shape: Shape, position: int) -> None:
    head, body = lines["head"], lines["body"]
    block, slot = divmod(position - 1, shape.block_tokens)
    first = np.arange(shape.logs, dtype=np.uint32)
    head["position"] = position
    body["token_id"] = (first * 31 + position) % 200
    body["page"] = first * shape.pages_of_log + block
    body["slot"] = slot
    body["slot_crc"] = first + position
    fills = slot == shape.block_tokens - 1
    body["flags"] = 2 if fills else 0
    body["page_crc"] = first + 1 if fills else 0

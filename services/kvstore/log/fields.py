"""What record bodies are made of: a bounded reader, page references, identities, log probabilities.

Owns the encoding of these parts, which several records share. Never does I/O. Every count is
compared with the bytes present before anything is read for it; a fault is LOG_CORRUPT naming the
field.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, unique
from typing import Any, Final, overload

from baton.errors import Reason, ServiceError
from baton.kv.blocks import Scope
from baton.kv.crc import slot_list_crc
from baton.kv.digests import DIGEST_BYTES, HASH_BYTES, TOKENIZER_HASH_BYTES
from baton.kv.layout import BLOCK_TOKENS_MAX, BLOCK_TOKENS_MIN

ARENA_ID_BYTES: Final = 16
TEXT_BYTES_MAX: Final = 1024
SAMPLING_BYTES_MAX: Final = 1 << 18

U16: Final = struct.Struct("<H")
U32: Final = struct.Struct("<I")
PAGE_REF: Final = struct.Struct("<16sQII")
_ENTRY_TAIL: Final = struct.Struct("<HHI")
ENTRY_BYTES: Final = PAGE_REF.size + _ENTRY_TAIL.size
_TOP: Final = struct.Struct("<If")
_IDENTITY: Final = struct.Struct("<HBBIQIHHHHHHI32s16s16s8sI")

_STORED: Final = 1
_CACHEABLE: Final = 2


def corrupt(name: str, why: str) -> ServiceError:
    """Return LOG_CORRUPT naming a field."""
    return ServiceError(
        Reason.LOG_CORRUPT, f"record {name}: {why}", field=name, metadata={"field": name}
    )


class BodyReader:
    """Reads a record's payload front to back and never past its end."""

    __slots__ = ("_data", "_offset")

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._offset = 0

    @property
    def remaining(self) -> int:
        """Bytes not yet read."""
        return len(self._data) - self._offset

    def take(self, layout: struct.Struct, name: str) -> tuple[Any, ...]:
        """Read one fixed struct."""
        return layout.unpack(self.take_bytes(layout.size, name))

    def take_bytes(self, size: int, name: str) -> bytes:
        """Read `size` bytes."""
        if size > self.remaining:
            raise corrupt(name, f"needs {size} bytes, {self.remaining} are left")
        start = self._offset
        self._offset += size
        return bytes(self._data[start : self._offset])

    def take_u32s(self, count: int, name: str) -> tuple[int, ...]:
        """Read `count` u32 values."""
        return struct.unpack(f"<{count}I", self.take_bytes(4 * count, name))

    def take_text(self, size: int, name: str) -> str:
        """Read `size` bytes of UTF-8, at least one."""
        if size == 0:
            raise corrupt(name, "is empty")
        if size > TEXT_BYTES_MAX:
            raise corrupt(name, f"{size} bytes of text, at most {TEXT_BYTES_MAX}")
        try:
            return self.take_bytes(size, name).decode()
        except UnicodeDecodeError as error:
            raise corrupt(name, "is not UTF-8") from error

    def take_optional_text(self, size: int, name: str) -> str | None:
        """Read a text that is absent when it has no bytes."""
        return None if size == 0 else self.take_text(size, name)

    def finish(self) -> None:
        """Refuse bytes that nothing has read."""
        if self.remaining:
            raise corrupt("payload", f"{self.remaining} bytes follow the body")


def pack_u32s(values: Sequence[int]) -> bytes:
    """Return values as u32 little-endian; an array of them as it stands in memory."""
    if isinstance(values, array) and values.itemsize == U32.size and sys.byteorder == "little":
        return values.tobytes()
    return struct.pack(f"<{len(values)}I", *values)


def text_bytes(text: str | None) -> bytes:
    """Return UTF-8 bytes; None is an empty field, and an empty text is never stored."""
    assert text != "", "an absent text is None"
    data = b"" if text is None else text.encode()
    assert len(data) <= TEXT_BYTES_MAX, f"{len(data)} bytes of text"
    return data


def require_size(value: bytes, size: int, name: str) -> bytes:
    """Assert the size of a digest or id that this process made itself."""
    assert len(value) == size, f"{name} must be {size} bytes, is {len(value)}"
    return value


@unique
class EndReason(IntEnum):
    """Why a sequence ended; the numbers are those of common.v1.FinishReason."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR = 4


def end_reason_code(reason: EndReason | None) -> int:
    """Return the stored byte; 0 means that the sequence has not ended."""
    return 0 if reason is None else int(reason)


def end_reason_of(code: int) -> EndReason | None:
    """Return the reason of a stored byte."""
    if code == 0:
        return None
    try:
        return EndReason(code)
    except ValueError as error:
        raise corrupt("end_reason", f"code {code} is unknown") from error


@unique
class AckLevel(IntEnum):
    """How far an acknowledged record has travelled."""

    OS = 1
    DISK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRef:
    """Where content stands and how to check it; never the content.

    `arena_id` is the random id in the arena's header (16 bytes); `page_generation` tells one use of
    the page from the next. `crc` covers what the record says: a page, a slot, or the list of slot
    CRCs of a partial page.
    """

    arena_id: bytes
    page: int
    page_generation: int
    crc: int

    def encode(self) -> bytes:
        """Return the 32 bytes: arena id, page generation u64, page u32, CRC u32."""
        arena_id = require_size(self.arena_id, ARENA_ID_BYTES, "arena_id")
        return PAGE_REF.pack(arena_id, self.page_generation, self.page, self.crc)

    @classmethod
    def decode(cls, data: bytes) -> PageRef:
        """Decode 32 bytes."""
        arena_id, page_generation, page, crc = PAGE_REF.unpack(data)
        return cls(arena_id=arena_id, page=page, page_generation=page_generation, crc=crc)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageEntry:
    """One row of a page table: the committed slots [0, tokens) of a page.

    A full page has no `slot_crcs` and `ref.crc` is its page CRC. A partial one has one CRC per slot
    and `ref.crc` is `slot_list_crc` of them.
    """

    ref: PageRef
    tokens: int
    slot_crcs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= BLOCK_TOKENS_MAX:
            raise corrupt("tokens", f"{self.tokens} slots in a page entry")
        if not self.slot_crcs:
            return
        if len(self.slot_crcs) != self.tokens:
            raise corrupt("slot_crcs", f"{len(self.slot_crcs)} CRCs for {self.tokens} slots")
        if slot_list_crc(self.slot_crcs) != self.ref.crc:
            raise corrupt("slot_crcs", "the entry's CRC is not that of its slot CRCs")

    @property
    def is_full(self) -> bool:
        """Whether the entry is checked by its page CRC."""
        return not self.slot_crcs


class PackedEntries(Sequence[PageEntry]):
    """Entries in their encoded form already, of a page table of any length; read they are decoded.

    `data` is what `encode_entries` returns for them.
    """

    __slots__ = ("_count", "data")
    # Compared by content, which changes: not hashable.
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, count: int, data: bytes) -> None:
        self._count = count
        self.data = data

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> PageEntry: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[PageEntry, ...]: ...

    def __getitem__(self, index: int | slice) -> PageEntry | tuple[PageEntry, ...]:
        return self._decoded()[index]

    def __iter__(self) -> Iterator[PageEntry]:
        return iter(self._decoded())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._decoded() == tuple(other)

    def _decoded(self) -> tuple[PageEntry, ...]:
        return decode_entries(BodyReader(self.data), self._count)


def encode_entries(entries: Sequence[PageEntry]) -> bytes:
    """Return the entries (40 bytes each), then all their slot CRCs in order."""
    if isinstance(entries, PackedEntries):
        return entries.data
    heads = [
        entry.ref.encode() + _ENTRY_TAIL.pack(entry.tokens, len(entry.slot_crcs), 0)
        for entry in entries
    ]
    return b"".join(heads) + b"".join(pack_u32s(entry.slot_crcs) for entry in entries)


def decode_entries(reader: BodyReader, count: int) -> tuple[PageEntry, ...]:
    """Read `count` entries and their slot CRCs."""
    heads = reader.take_bytes(count * ENTRY_BYTES, "entries")
    entries = []
    for offset in range(0, len(heads), ENTRY_BYTES):
        split = offset + PAGE_REF.size
        tokens, crc_count, reserved = _ENTRY_TAIL.unpack_from(heads, split)
        require_zero(reserved, "entries.reserved")
        entries.append((PageRef.decode(heads[offset:split]), tokens, crc_count))
    return tuple(
        PageEntry(ref=ref, tokens=tokens, slot_crcs=reader.take_u32s(crc_count, "slot_crcs"))
        for ref, tokens, crc_count in entries
    )


def require_zero(value: int, name: str) -> None:
    """Refuse reserved bits that are set."""
    if value != 0:
        raise corrupt(name, "reserved bits are set")


def require_flags(value: int, known: int, name: str) -> None:
    """Refuse flag bits this version does not know."""
    if value & ~known:
        raise corrupt(name, f"unknown flags {value & ~known:#x}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A run of pages granted to one writer, all in their use number `page_generation`."""

    arena_id: bytes
    first_page: int
    page_count: int
    page_generation: int

    def encode(self) -> bytes:
        """Return the 32 bytes: arena id, page generation u64, first page u32, page count u32."""
        arena_id = require_size(self.arena_id, ARENA_ID_BYTES, "arena_id")
        return PAGE_REF.pack(arena_id, self.page_generation, self.first_page, self.page_count)

    @classmethod
    def decode(cls, data: bytes) -> Extent:
        """Decode 32 bytes."""
        arena_id, page_generation, first_page, page_count = PAGE_REF.unpack(data)
        if page_count == 0:
            raise corrupt("extents", "an extent of no pages")
        return cls(
            arena_id=arena_id,
            first_page=first_page,
            page_count=page_count,
            page_generation=page_generation,
        )


def decode_extents(reader: BodyReader, count: int) -> tuple[Extent, ...]:
    """Read `count` extents."""
    data = reader.take_bytes(count * PAGE_REF.size, "extents")
    return tuple(
        Extent.decode(data[offset : offset + PAGE_REF.size])
        for offset in range(0, len(data), PAGE_REF.size)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Log probabilities (float32) of one sampled token and of the likeliest ones (id, value)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def encode_top(self) -> bytes:
        """Return the `top` list, 8 bytes each."""
        return b"".join(_TOP.pack(token_id, value) for token_id, value in self.top)


def decode_logprobs(reader: BodyReader, logprob: float, count: int) -> Logprobs:
    """Read the `top` list of a log probability whose own value stood in a fixed part."""
    data = reader.take_bytes(count * _TOP.size, "logprobs")
    return Logprobs(logprob=logprob, top=tuple(_TOP.iter_unpack(data)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogIdentity:
    """What a log is and for whom; fixed by its OPEN and repeated in its SNAPSHOT.

    `sampling` is `SamplingParameters.to_canonical_bytes()`. `body_hash` (32 bytes) is the request
    body's, for idempotency. `opened_wall_ms` and `ttl_s` only end the log's keeping, never give
    ownership. `is_stored`: kept after its end. `is_cacheable`: its blocks may be shared in `scope`.
    `base_class_id` is the numeric class of the KV it began with; None: as `numeric_class_id`.
    """

    scope: Scope
    request_id: str
    body_hash: bytes
    sampling: bytes
    label_digest: bytes
    kv_digest: bytes
    tokenizer_hash: bytes
    numeric_class_id: int
    block_tokens: int
    ttl_s: int
    opened_wall_ms: int
    is_stored: bool = True
    is_cacheable: bool = True
    ack_level: AckLevel = field(default=AckLevel.OS)
    base_class_id: int | None = None

    def encode(self) -> bytes:
        """Return the fixed part (112 bytes), then texts and sampling parameters."""
        scope = self.scope
        texts = [
            text_bytes(text)
            for text in (scope.tenant, scope.team, scope.role, scope.cache_salt, self.request_id)
        ]
        assert len(self.sampling) <= SAMPLING_BYTES_MAX, len(self.sampling)
        head = _IDENTITY.pack(
            (_STORED if self.is_stored else 0) | (_CACHEABLE if self.is_cacheable else 0),
            int(self.ack_level),
            0,
            self.ttl_s,
            self.opened_wall_ms,
            self.numeric_class_id,
            self.block_tokens,
            *(len(data) for data in texts),
            len(self.sampling),
            require_size(self.body_hash, HASH_BYTES, "body_hash"),
            require_size(self.label_digest, DIGEST_BYTES, "label_digest"),
            require_size(self.kv_digest, DIGEST_BYTES, "kv_digest"),
            require_size(self.tokenizer_hash, TOKENIZER_HASH_BYTES, "tokenizer_hash"),
            self.base_class_id or 0,
        )
        return head + b"".join(texts) + self.sampling

    @classmethod
    def decode(cls, reader: BodyReader) -> LogIdentity:
        """Read an identity."""
        values = reader.take(_IDENTITY, "identity")
        flags, ack_level, reserved, ttl_s, opened_wall_ms, numeric_class_id, block_tokens = values[
            :7
        ]
        sizes, sampling_bytes = values[7:12], values[12]
        require_flags(flags, _STORED | _CACHEABLE, "identity.flags")
        require_zero(reserved, "identity.reserved")
        if not BLOCK_TOKENS_MIN <= block_tokens <= BLOCK_TOKENS_MAX:
            raise corrupt("block_tokens", f"is {block_tokens}")
        if ack_level not in (1, 2):
            raise corrupt("ack_level", f"code {ack_level} is unknown")
        if sampling_bytes > SAMPLING_BYTES_MAX:
            raise corrupt("sampling", f"{sampling_bytes} bytes, at most {SAMPLING_BYTES_MAX}")
        scope = _take_scope(reader, sizes[:4])
        return cls(
            scope=scope,
            request_id=reader.take_text(sizes[4], "request_id"),
            body_hash=values[13],
            sampling=reader.take_bytes(sampling_bytes, "sampling"),
            label_digest=values[14],
            kv_digest=values[15],
            tokenizer_hash=values[16],
            numeric_class_id=numeric_class_id,
            block_tokens=block_tokens,
            ttl_s=ttl_s,
            opened_wall_ms=opened_wall_ms,
            is_stored=bool(flags & _STORED),
            is_cacheable=bool(flags & _CACHEABLE),
            ack_level=AckLevel(ack_level),
            base_class_id=values[17] or None,
        )


def _take_scope(reader: BodyReader, sizes: Sequence[int]) -> Scope:
    tenant = reader.take_text(sizes[0], "tenant")
    team, role, salt = (
        reader.take_optional_text(size, name)
        for size, name in zip(sizes[1:], ("team", "role", "cache_salt"), strict=True)
    )
    try:
        return Scope(tenant=tenant, team=team, role=role, cache_salt=salt)
    except ServiceError as error:
        raise corrupt(error.field or "scope", error.message) from error

"""The bodies of the records about one log's KV and tokens, to bytes and back.

Owns GRANT, RELEASE, CHECKPOINT, SEAL, TAKE, APPEND, TRUNCATE and MOVED. Never frames them
(format.py) and never applies them. Log id, generation and position stand in the record's header and
are not repeated here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.kv.digests import HASH_BYTES
from services.kvstore.log.fields import (
    BodyReader,
    EndReason,
    Extent,
    Logprobs,
    PageEntry,
    PageRef,
    corrupt,
    decode_entries,
    decode_extents,
    decode_logprobs,
    encode_entries,
    end_reason_code,
    end_reason_of,
    require_flags,
    require_size,
    require_zero,
    text_bytes,
)

_GRANT: Final = struct.Struct("<IHHQ")
_RELEASE: Final = struct.Struct("<II")
_CHECKPOINT: Final = struct.Struct("<IIII")
_SEAL: Final = struct.Struct("<32sIBBHfI16x")
_TAKE: Final = struct.Struct("<QQIHHII")
_APPEND: Final = struct.Struct("<IBBH32sfIH14x")
# APPEND with its page reference in place.
_PLAIN_APPEND: Final = struct.Struct("<IBBH16sQIIfIH14x")
_TRUNCATE: Final = struct.Struct("<QII")
_MOVED: Final = struct.Struct("<Q32sHHI")

_HAS_LOGPROBS: Final = 1
_HAS_TOKEN: Final = 2
_HAS_PAGE_CRC: Final = 2
_ADOPTED: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """GRANT: pages given to one writer. `worker_slot` is the worker's lock byte in the arena."""

    worker_id: str
    worker_slot: int
    worker_incarnation: int
    extents: tuple[Extent, ...]

    def encode(self) -> bytes:
        """Return the body."""
        worker = text_bytes(self.worker_id)
        head = _GRANT.pack(
            len(self.extents), self.worker_slot, len(worker), self.worker_incarnation
        )
        return head + b"".join(extent.encode() for extent in self.extents) + worker

    @classmethod
    def decode(cls, reader: BodyReader) -> Grant:
        """Read the body."""
        count, worker_slot, worker_bytes, incarnation = reader.take(_GRANT, "grant")
        extents = decode_extents(reader, count)
        return cls(
            worker_id=reader.take_text(worker_bytes, "worker_id"),
            worker_slot=worker_slot,
            worker_incarnation=incarnation,
            extents=extents,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """RELEASE: granted pages that nobody writes any more and no record refers to."""

    extents: tuple[Extent, ...]

    def encode(self) -> bytes:
        """Return the body."""
        head = _RELEASE.pack(len(self.extents), 0)
        return head + b"".join(extent.encode() for extent in self.extents)

    @classmethod
    def decode(cls, reader: BodyReader) -> Release:
        """Read the body."""
        count, reserved = reader.take(_RELEASE, "release")
        require_zero(reserved, "release.reserved")
        return cls(extents=decode_extents(reader, count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """CHECKPOINT: prefill committed the KV of [from_position, to_position).

    `entries` are the rows of every page the range touches, in order; a row states all committed
    slots of its page, also those before `from_position`. Header position: `to_position`.

    `is_adopted`: the KV was not computed for this log, or was and is only stated again (a copied
    page whose CRCs became known later); it is no chunk of the list that SEAL's digest covers.
    """

    from_position: int
    to_position: int
    entries: Sequence[PageEntry]
    is_adopted: bool = False

    def encode(self) -> bytes:
        """Return the body."""
        head = _CHECKPOINT.pack(
            self.from_position,
            self.to_position,
            len(self.entries),
            _ADOPTED if self.is_adopted else 0,
        )
        return head + encode_entries(self.entries)

    @classmethod
    def decode(cls, reader: BodyReader) -> Checkpoint:
        """Read the body."""
        first, end, count, flags = reader.take(_CHECKPOINT, "checkpoint")
        require_flags(flags, _ADOPTED, "checkpoint.flags")
        if first >= end:
            raise corrupt("to_position", f"range {first} to {end} is empty")
        return cls(
            from_position=first,
            to_position=end,
            entries=decode_entries(reader, count),
            is_adopted=bool(flags & _ADOPTED),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """SEAL: the prompt's KV is complete; `token_id` is the first sampled token, at the header's
    position, or None for a log that is only a prefix.
    """

    chunk_list_digest: bytes
    chunk_count: int
    token_id: int | None
    logprobs: Logprobs | None = None
    end_reason: EndReason | None = None

    def encode(self) -> bytes:
        """Return the body."""
        flags = 0 if self.logprobs is None else _HAS_LOGPROBS
        flags |= 0 if self.token_id is None else _HAS_TOKEN
        head = _SEAL.pack(
            require_size(self.chunk_list_digest, HASH_BYTES, "chunk_list_digest"),
            self.token_id or 0,
            end_reason_code(self.end_reason),
            flags,
            0 if self.logprobs is None else len(self.logprobs.top),
            0.0 if self.logprobs is None else self.logprobs.logprob,
            self.chunk_count,
        )
        return head + (b"" if self.logprobs is None else self.logprobs.encode_top())

    @classmethod
    def decode(cls, reader: BodyReader) -> Seal:
        """Read the body."""
        digest, token_id, end_code, flags, top_count, logprob, chunk_count = reader.take(
            _SEAL, "seal"
        )
        require_flags(flags, _HAS_LOGPROBS | _HAS_TOKEN, "seal.flags")
        has_logprobs = bool(flags & _HAS_LOGPROBS)
        return cls(
            chunk_list_digest=digest,
            chunk_count=chunk_count,
            token_id=token_id if flags & _HAS_TOKEN else None,
            logprobs=decode_logprobs(reader, logprob, top_count) if has_logprobs else None,
            end_reason=end_reason_of(end_code),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """TAKE: a worker takes the log over; the header's generation is the new one.

    `worker_id` None: the log was only fenced, nobody writes it. `tail` is the fresh page into which
    the committed slots of a partial last page were copied. `numeric_class_id` is the new writer's;
    None: as before.
    """

    previous_generation: int
    worker_id: str | None
    worker_slot: int
    worker_incarnation: int
    lease_ms: int
    tail: PageEntry | None = None
    numeric_class_id: int | None = None

    def encode(self) -> bytes:
        """Return the body."""
        worker = text_bytes(self.worker_id)
        tails = _as_list(self.tail)
        head = _TAKE.pack(
            self.previous_generation,
            self.worker_incarnation,
            self.lease_ms,
            self.worker_slot,
            len(worker),
            len(tails),
            self.numeric_class_id or 0,
        )
        return head + encode_entries(tails) + worker

    @classmethod
    def decode(cls, reader: BodyReader) -> Take:
        """Read the body."""
        previous, incarnation, lease_ms, slot, worker_bytes, tail_count, class_id = reader.take(
            _TAKE, "take"
        )
        tail = _decode_tail(reader, tail_count)
        return cls(
            previous_generation=previous,
            worker_id=reader.take_optional_text(worker_bytes, "worker_id"),
            worker_slot=slot,
            worker_incarnation=incarnation,
            lease_ms=lease_ms,
            tail=tail,
            numeric_class_id=class_id or None,
        )


def _as_list(entry: PageEntry | None) -> list[PageEntry]:
    return [] if entry is None else [entry]


def _decode_tail(reader: BodyReader, count: int) -> PageEntry | None:
    if count > 1:
        raise corrupt("tail", f"{count} tail pages, at most one")
    return next(iter(decode_entries(reader, count)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """APPEND: one decoded token at the header's position p, and the KV slot of position p - 1.

    `slot_ref.crc` is the CRC of slot `slot`; `page_crc` is set when that slot filled its page.
    """

    token_id: int
    slot_ref: PageRef
    slot: int
    page_crc: int | None = None
    logprobs: Logprobs | None = None
    end_reason: EndReason | None = None

    def encode(self) -> bytes:
        """Return the body."""
        flags = 0 if self.logprobs is None else _HAS_LOGPROBS
        flags |= 0 if self.page_crc is None else _HAS_PAGE_CRC
        head = _APPEND.pack(
            self.token_id,
            end_reason_code(self.end_reason),
            flags,
            0 if self.logprobs is None else len(self.logprobs.top),
            self.slot_ref.encode(),
            0.0 if self.logprobs is None else self.logprobs.logprob,
            self.page_crc or 0,
            self.slot,
        )
        return head + (b"" if self.logprobs is None else self.logprobs.encode_top())

    @classmethod
    def decode(cls, reader: BodyReader) -> Append:
        """Read the body."""
        token_id, end_code, flags, top_count, ref, logprob, page_crc, slot = reader.take(
            _APPEND, "append"
        )
        require_flags(flags, _HAS_LOGPROBS | _HAS_PAGE_CRC, "append.flags")
        has_logprobs = bool(flags & _HAS_LOGPROBS)
        return cls(
            token_id=token_id,
            slot_ref=PageRef.decode(ref),
            slot=slot,
            page_crc=page_crc if flags & _HAS_PAGE_CRC else None,
            logprobs=decode_logprobs(reader, logprob, top_count) if has_logprobs else None,
            end_reason=end_reason_of(end_code),
        )


def plain_append(
    token_id: int,
    reason: EndReason | None,
    place: tuple[bytes, int, int, int, int],
    page_crc: int | None,
) -> bytes:
    """The body of an APPEND without log probabilities, as `Append.encode` makes it: the many.

    `place`: arena id, page generation, page, slot CRC, slot.
    """
    arena_id, page_generation, page, slot_crc, slot = place
    return _PLAIN_APPEND.pack(
        token_id,
        0 if reason is None else end_reason_code(reason),
        0 if page_crc is None else _HAS_PAGE_CRC,
        0,
        arena_id,
        page_generation,
        page,
        slot_crc,
        0.0,
        page_crc or 0,
        slot,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate:
    """TRUNCATE: tokens from the header's position on are gone; its generation is the new one."""

    previous_generation: int
    tail: PageEntry | None = None

    def encode(self) -> bytes:
        """Return the body."""
        tails = _as_list(self.tail)
        return _TRUNCATE.pack(self.previous_generation, len(tails), 0) + encode_entries(tails)

    @classmethod
    def decode(cls, reader: BodyReader) -> Truncate:
        """Read the body."""
        previous, tail_count, reserved = reader.take(_TRUNCATE, "truncate")
        require_zero(reserved, "truncate.reserved")
        return cls(previous_generation=previous, tail=_decode_tail(reader, tail_count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """MOVED: the log's home is now `to_home`, under the header's generation."""

    previous_generation: int
    to_home: str
    chunk_list_digest: bytes

    def encode(self) -> bytes:
        """Return the body."""
        home = text_bytes(self.to_home)
        digest = require_size(self.chunk_list_digest, HASH_BYTES, "chunk_list_digest")
        return _MOVED.pack(self.previous_generation, digest, len(home), 0, 0) + home

    @classmethod
    def decode(cls, reader: BodyReader) -> Moved:
        """Read the body."""
        previous, digest, home_bytes, reserved, more = reader.take(_MOVED, "moved")
        require_zero(reserved | more, "moved.reserved")
        home = reader.take_text(home_bytes, "to_home")
        return cls(previous_generation=previous, to_home=home, chunk_list_digest=digest)


assert _SEAL.size == _APPEND.size == _PLAIN_APPEND.size == 64

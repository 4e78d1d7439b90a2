"""The bodies of the records about the store: places of pages, published prefixes, flushes, closing.

Owns PLACE, PUBLISH, REVOKE, FLUSH and CLOSE. Never frames them (format.py), never applies them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Final

from baton.kv.digests import DIGEST_BYTES, HASH_BYTES, TOKENIZER_HASH_BYTES
from services.kvstore.log.fields import (
    U16,
    BodyReader,
    PageEntry,
    corrupt,
    decode_entries,
    encode_entries,
    require_size,
    require_zero,
    text_bytes,
)

_PLACE: Final = struct.Struct("<IIIBBH")
_PUBLISH: Final = struct.Struct("<32s32s32s16s16s8sIIQQHHHH")
_PUBLISH_MORE: Final = struct.Struct("<IHH")
_IS_PINNED: Final = 1
_REVOKE: Final = struct.Struct("<QHHI")
_FLUSH: Final = struct.Struct("<Q")
_CLOSE: Final = struct.Struct("<BBHI")


@unique
class Tier(IntEnum):
    """Kind of arena. Places on devices are not recorded: they end with their worker."""

    HOST = 1
    NVME = 2
    DEVICE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """PLACE: positions [from_position, to_position) of the header's log stand in these slots of a
    tier, and its table there ends at `to_position`; from = to cuts it.

    `entries` are as CHECKPOINT's, but refer to slots of the tier's file. `prefix_id`: the table is
    that of a prefix published from the log, not the log's own. Header position: `to_position`.
    """

    tier: Tier
    from_position: int
    to_position: int
    entries: Sequence[PageEntry]
    prefix_id: str | None = None

    def encode(self) -> bytes:
        """Return the body."""
        prefix = text_bytes(self.prefix_id)
        head = _PLACE.pack(
            self.from_position,
            self.to_position,
            len(self.entries),
            int(self.tier),
            0,
            len(prefix),
        )
        return head + prefix + encode_entries(self.entries)

    @classmethod
    def decode(cls, reader: BodyReader) -> Place:
        """Read the body."""
        first, end, count, tier, reserved, prefix_bytes = reader.take(_PLACE, "place")
        require_zero(reserved, "place.reserved")
        if first > end:
            raise corrupt("to_position", f"range {first} to {end} ends before it begins")
        return cls(
            tier=_tier_of(tier),
            from_position=first,
            to_position=end,
            prefix_id=reader.take_optional_text(prefix_bytes, "prefix_id"),
            entries=decode_entries(reader, count),
        )


def _tier_of(code: int) -> Tier:
    try:
        return Tier(code)
    except ValueError as error:
        raise corrupt("tier", f"code {code} is unknown") from error


def _encode_texts(texts: Sequence[str]) -> bytes:
    pieces = [text_bytes(text) for text in texts]
    return b"".join(U16.pack(len(piece)) + piece for piece in pieces)


def _decode_texts(reader: BodyReader, count: int, name: str) -> tuple[str, ...]:
    if count * U16.size > reader.remaining:
        raise corrupt(name, f"{count} texts do not fit the bytes present")
    return tuple(reader.take_text(reader.take(U16, name)[0], name) for _ in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """PUBLISH: positions [0, header position) of the log are a published prefix.

    `tenants` are those it is granted to besides its owner's scope. `text_bytes` is how many bytes
    of rendered prompt `text_hash` covers. `expires_wall_ms` None: until revoked. The body ends
    with version and flags where they are not 1 and none.
    """

    prefix_id: str
    name: str
    owner_tenant: str
    tenants: tuple[str, ...]
    text_hash: bytes
    ids_hash: bytes
    history_end: bytes
    template_digest: bytes
    kv_digest: bytes
    tokenizer_hash: bytes
    numeric_class_id: int
    text_bytes: int
    created_wall_ms: int
    expires_wall_ms: int | None = None
    version: int = 1
    is_pinned: bool = False

    def encode(self) -> bytes:
        """Return the body."""
        names = [text_bytes(text) for text in (self.prefix_id, self.name, self.owner_tenant)]
        head = _PUBLISH.pack(
            require_size(self.text_hash, HASH_BYTES, "text_hash"),
            require_size(self.ids_hash, HASH_BYTES, "ids_hash"),
            require_size(self.history_end, HASH_BYTES, "history_end"),
            require_size(self.template_digest, DIGEST_BYTES, "template_digest"),
            require_size(self.kv_digest, DIGEST_BYTES, "kv_digest"),
            require_size(self.tokenizer_hash, TOKENIZER_HASH_BYTES, "tokenizer_hash"),
            self.numeric_class_id,
            self.text_bytes,
            self.created_wall_ms,
            self.expires_wall_ms or 0,
            *(len(data) for data in names),
            len(self.tenants),
        )
        more = b""
        if self.version != 1 or self.is_pinned:
            more = _PUBLISH_MORE.pack(self.version, _IS_PINNED * self.is_pinned, 0)
        return head + b"".join(names) + _encode_texts(self.tenants) + more

    @classmethod
    def decode(cls, reader: BodyReader) -> Publish:
        """Read the body."""
        values = reader.take(_PUBLISH, "publish")
        prefix_id, name, owner = (
            reader.take_text(size, field)
            for size, field in zip(
                values[10:13], ("prefix_id", "name", "owner_tenant"), strict=True
            )
        )
        tenants = _decode_texts(reader, values[13], "tenants")
        version, flags, reserved = 1, 0, 0
        if reader.remaining >= _PUBLISH_MORE.size:
            version, flags, reserved = reader.take(_PUBLISH_MORE, "publish")
        require_zero(reserved, "publish.reserved")
        if flags & ~_IS_PINNED or not version:
            raise corrupt("publish", f"has flags {flags:#x} and version {version}")
        return cls(
            prefix_id=prefix_id,
            name=name,
            owner_tenant=owner,
            tenants=tenants,
            text_hash=values[0],
            ids_hash=values[1],
            history_end=values[2],
            template_digest=values[3],
            kv_digest=values[4],
            tokenizer_hash=values[5],
            numeric_class_id=values[6],
            text_bytes=values[7],
            created_wall_ms=values[8],
            expires_wall_ms=values[9] or None,
            version=version,
            is_pinned=bool(flags & _IS_PINNED),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoke:
    """REVOKE: a published prefix serves `tenants` no more; none named: nobody, for good."""

    prefix_id: str
    revoked_wall_ms: int
    tenants: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Return the body."""
        prefix = text_bytes(self.prefix_id)
        head = _REVOKE.pack(self.revoked_wall_ms, len(prefix), len(self.tenants), 0)
        return head + prefix + _encode_texts(self.tenants)

    @classmethod
    def decode(cls, reader: BodyReader) -> Revoke:
        """Read the body."""
        revoked_wall_ms, prefix_bytes, count, reserved = reader.take(_REVOKE, "revoke")
        require_zero(reserved, "revoke.reserved")
        prefix_id = reader.take_text(prefix_bytes, "prefix_id")
        tenants = _decode_texts(reader, count, "tenants")
        return cls(prefix_id=prefix_id, revoked_wall_ms=revoked_wall_ms, tenants=tenants)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """FLUSH: records up to `durable_lsn` are on disk. First record of each group commit."""

    durable_lsn: int

    def encode(self) -> bytes:
        """Return the body."""
        return _FLUSH.pack(self.durable_lsn)

    @classmethod
    def decode(cls, reader: BodyReader) -> Flush:
        """Read the body."""
        return cls(durable_lsn=reader.take(_FLUSH, "flush")[0])


@unique
class CloseReason(IntEnum):
    """Why a log is gone."""

    DELETED = 1
    EXPIRED = 2
    NOT_STORED = 3
    QUOTA = 4
    MOVED_AWAY = 5
    DAMAGED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """CLOSE: the log is gone and its pages are released."""

    reason: CloseReason

    def encode(self) -> bytes:
        """Return the body."""
        return _CLOSE.pack(int(self.reason), 0, 0, 0)

    @classmethod
    def decode(cls, reader: BodyReader) -> Close:
        """Read the body."""
        code, *reserved = reader.take(_CLOSE, "close")
        require_zero(sum(reserved), "close.reserved")
        try:
            return cls(reason=CloseReason(code))
        except ValueError as error:
            raise corrupt("reason", f"code {code} is unknown") from error

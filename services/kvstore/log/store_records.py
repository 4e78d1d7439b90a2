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
    PAGE_REF,
    U16,
    BodyReader,
    PageRef,
    corrupt,
    require_size,
    require_zero,
    text_bytes,
)

_PLACE: Final = struct.Struct("<II")
_PLACEMENT: Final = struct.Struct("<32s32sBBHI")
_PUBLISH: Final = struct.Struct("<32s32s32s16s16s8sIIQQHHHH")
_REVOKE: Final = struct.Struct("<QHHI")
_FLUSH: Final = struct.Struct("<Q")
_CLOSE: Final = struct.Struct("<BBHI")


@unique
class Tier(IntEnum):
    """Kind of arena."""

    HOST = 1
    NVME = 2
    DEVICE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The content of `page` also stands at `target`, a slot of a tier."""

    page: PageRef
    target: PageRef
    tier: Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """PLACE: where pages went, between tiers. The header's log id is zero."""

    placements: tuple[Placement, ...]

    def encode(self) -> bytes:
        """Return the body."""
        rows = [
            _PLACEMENT.pack(item.page.encode(), item.target.encode(), int(item.tier), 0, 0, 0)
            for item in self.placements
        ]
        return _PLACE.pack(len(rows), 0) + b"".join(rows)

    @classmethod
    def decode(cls, reader: BodyReader) -> Place:
        """Read the body."""
        count, reserved = reader.take(_PLACE, "place")
        require_zero(reserved, "place.reserved")
        data = reader.take_bytes(count * _PLACEMENT.size, "placements")
        placements = []
        for page, target, code, *rest in _PLACEMENT.iter_unpack(data):
            require_zero(sum(rest), "placements.reserved")
            placements.append(
                Placement(
                    page=PageRef.decode(page), target=PageRef.decode(target), tier=_tier_of(code)
                )
            )
        return cls(placements=tuple(placements))


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
    of rendered prompt `text_hash` covers. `expires_wall_ms` None: until revoked.
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
        return head + b"".join(names) + _encode_texts(self.tenants)

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
        return cls(
            prefix_id=prefix_id,
            name=name,
            owner_tenant=owner,
            tenants=_decode_texts(reader, values[13], "tenants"),
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


assert _PLACEMENT.size == 2 * PAGE_REF.size + 8

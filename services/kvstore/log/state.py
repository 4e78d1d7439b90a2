"""The records that carry a whole log: OPEN, which starts one, and SNAPSHOT, which compacts one.

Owns their bodies. Never applies them. Log id, generation and position stand in the record's header.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from baton.errors import ServiceError
from baton.kv.digests import HASH_BYTES
from baton.kv.manifest import LOG_ID_BYTES, MANIFEST_BYTES_MAX, Manifest, decode_segments
from services.kvstore.log.fields import (
    U32,
    BodyReader,
    EndReason,
    LogIdentity,
    Logprobs,
    PageEntry,
    corrupt,
    decode_entries,
    decode_logprobs,
    encode_entries,
    end_reason_code,
    end_reason_of,
    pack_u32s,
    require_flags,
    require_size,
    require_zero,
    text_bytes,
)
from services.kvstore.log.records import Grant

_OPEN: Final = struct.Struct("<BBHIIIQ16s")
_SNAPSHOT: Final = struct.Struct("<HBBIIIIIIHH32s")
_LOGPROB: Final = struct.Struct("<IfHH")

_BASE_NONE: Final = 0
_BASE_PARENT: Final = 1
_BASE_MANIFEST: Final = 2
_BASE_ARRIVAL: Final = 3

_SEALED: Final = 1
_ENDED: Final = 2
_FORK: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The (log, generation, position) that a fork continues; it stays pinned until the SNAPSHOT."""

    log_id: bytes
    generation: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """SNAPSHOT: all that replay of the log up to here would give; the header has its generation.

    `token_ids` are all tokens from position 0 (header position: their count). `entries` is the
    whole page table from block 0. `logprobs` are (position, value) of tokens that have them.
    `chunk_list_digest` is None before SEAL. `grants` are outstanding, `worker_id` holds the log.
    `is_ended`: nobody appends to it any more.
    """

    identity: LogIdentity
    token_ids: Sequence[int]
    prompt_tokens: int
    cached_tokens: int
    entries: Sequence[PageEntry]
    chunk_list_digest: bytes | None = None
    end_reason: EndReason | None = None
    logprobs: tuple[tuple[int, Logprobs], ...] = ()
    grants: tuple[Grant, ...] = ()
    worker_id: str | None = None
    is_ended: bool = False

    @property
    def is_sealed(self) -> bool:
        """Whether the log was sealed."""
        return self.chunk_list_digest is not None

    def encode(self) -> bytes:
        """Return the body."""
        worker = text_bytes(self.worker_id)
        digest = self.chunk_list_digest
        head = _SNAPSHOT.pack(
            (_SEALED if self.is_sealed else 0) | (_ENDED if self.is_ended else 0),
            end_reason_code(self.end_reason),
            0,
            self.prompt_tokens,
            self.cached_tokens,
            len(self.token_ids),
            len(self.entries),
            len(self.logprobs),
            len(self.grants),
            len(worker),
            0,
            bytes(HASH_BYTES) if digest is None else require_size(digest, HASH_BYTES, "digest"),
        )
        return b"".join(
            (
                head,
                self.identity.encode(),
                worker,
                pack_u32s(self.token_ids),
                encode_entries(self.entries),
                _encode_logprobs(self.logprobs),
                _encode_grants(self.grants),
            )
        )

    @classmethod
    def decode(cls, reader: BodyReader) -> Snapshot:
        """Read the body."""
        values = reader.take(_SNAPSHOT, "snapshot")
        flags, end_code, reserved, prompt_tokens, cached_tokens, token_count = values[:6]
        entry_count, logprob_count, grant_count, worker_bytes, more, digest = values[6:]
        require_flags(flags, _SEALED | _ENDED, "snapshot.flags")
        require_zero(reserved | more, "snapshot.reserved")
        identity = LogIdentity.decode(reader)
        worker = reader.take_optional_text(worker_bytes, "worker_id")
        return cls(
            identity=identity,
            token_ids=reader.take_u32s(token_count, "token_ids"),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            entries=decode_entries(reader, entry_count),
            chunk_list_digest=digest if flags & _SEALED else None,
            end_reason=end_reason_of(end_code),
            logprobs=_decode_logprob_list(reader, logprob_count),
            grants=_decode_grants(reader, grant_count),
            worker_id=worker,
            is_ended=bool(flags & _ENDED),
        )


def _encode_logprobs(items: Sequence[tuple[int, Logprobs]]) -> bytes:
    return b"".join(
        _LOGPROB.pack(position, item.logprob, len(item.top), 0) + item.encode_top()
        for position, item in items
    )


def _decode_logprob_list(reader: BodyReader, count: int) -> tuple[tuple[int, Logprobs], ...]:
    if count * _LOGPROB.size > reader.remaining:
        raise corrupt("logprobs", f"{count} entries do not fit the bytes present")
    items = []
    for _ in range(count):
        position, logprob, top_count, reserved = reader.take(_LOGPROB, "logprobs")
        require_zero(reserved, "logprobs.reserved")
        items.append((position, decode_logprobs(reader, logprob, top_count)))
    return tuple(items)


def _encode_grants(grants: Sequence[Grant]) -> bytes:
    bodies = [grant.encode() for grant in grants]
    return b"".join(U32.pack(len(body)) + body for body in bodies)


def _decode_grants(reader: BodyReader, count: int) -> tuple[Grant, ...]:
    if count * U32.size > reader.remaining:
        raise corrupt("grants", f"{count} grants do not fit the bytes present")
    grants = []
    for _ in range(count):
        (size,) = reader.take(U32, "grants")
        inner = BodyReader(reader.take_bytes(size, "grants"))
        grants.append(Grant.decode(inner))
        inner.finish()
    return tuple(grants)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The log came from another home, with all its state."""

    from_home: str
    snapshot: Snapshot


Base: TypeAlias = Parent | Manifest | Arrival
"""What a new log starts from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """OPEN: a log begins. A FORK is an OPEN with a `Parent`.

    `token_ids` are the prompt's ids beyond the base (all of it without one; none for an `Arrival`,
    whose snapshot has them and the identity). With a `Parent`, `cached_tokens` are the positions of
    its KV, as it was then, that the log began with; of a fork also its log probabilities are the
    parent's, and it is sealed. A cut inside a block is a copy, but for a fork's.
    """

    identity: LogIdentity
    token_ids: Sequence[int]
    base: Base | None = None
    is_fork: bool = False
    cached_tokens: int = 0

    @property
    def base_tokens(self) -> int:
        """How many tokens stand before `token_ids`."""
        match self.base:
            case None:
                return 0
            case Parent(position=position):
                return position
            case Manifest() as manifest:
                return manifest.total_tokens
            case Arrival(snapshot=snapshot):
                return len(snapshot.token_ids)

    def encode(self) -> bytes:
        """Return the body: fixed part, then (identity, base, token ids) or, of an arrival, (from,
        SNAPSHOT body).
        """
        kind, parent, base = _encode_base(self.base)
        assert kind == _BASE_PARENT or not (self.is_fork or self.cached_tokens)
        assert kind != _BASE_ARRIVAL or not self.token_ids, "an arrival's tokens: in its snapshot"
        head = _OPEN.pack(
            kind,
            _FORK if self.is_fork else 0,
            0,
            self.cached_tokens if kind == _BASE_PARENT else len(base),
            len(self.token_ids),
            parent.position,
            parent.generation,
            require_size(parent.log_id, LOG_ID_BYTES, "parent.log_id"),
        )
        if isinstance(self.base, Arrival):
            assert self.base.snapshot.identity == self.identity, "one identity"
            return head + base + self.base.snapshot.encode()
        return head + self.identity.encode() + base + pack_u32s(self.token_ids)

    @classmethod
    def decode(cls, reader: BodyReader) -> Open:
        """Read the body."""
        kind, flags, reserved, base_bytes, token_count, position, generation, log_id = reader.take(
            _OPEN, "open"
        )
        require_zero(reserved, "open.reserved")
        require_flags(flags, _FORK if kind == _BASE_PARENT else 0, "open.flags")
        if kind == _BASE_ARRIVAL:
            require_zero(token_count, "open.token_count")
            from_home = reader.take_text(base_bytes, "from_home")
            snapshot = Snapshot.decode(reader)
            arrival = Arrival(from_home=from_home, snapshot=snapshot)
            return cls(identity=snapshot.identity, token_ids=(), base=arrival)
        identity = LogIdentity.decode(reader)
        base: Base | None
        if kind == _BASE_MANIFEST:
            base = _decode_manifest(reader, base_bytes)
        else:
            parent = Parent(log_id=log_id, generation=generation, position=position)
            base = _parent_of(kind, parent)
            if base is None:
                require_zero(base_bytes, "open.base_bytes")
            elif base_bytes > position:
                raise corrupt("open.cached_tokens", f"{base_bytes} of {position} tokens")
        return cls(
            identity=identity,
            token_ids=reader.take_u32s(token_count, "token_ids"),
            base=base,
            is_fork=bool(flags & _FORK),
            cached_tokens=base_bytes if kind == _BASE_PARENT else 0,
        )


_NO_PARENT: Final = Parent(log_id=bytes(LOG_ID_BYTES), generation=0, position=0)


def _encode_base(base: Base | None) -> tuple[int, Parent, bytes]:
    match base:
        case None:
            return _BASE_NONE, _NO_PARENT, b""
        case Parent():
            return _BASE_PARENT, base, b""
        case Manifest():
            return _BASE_MANIFEST, _NO_PARENT, base.canonical_bytes()
        case Arrival():
            return _BASE_ARRIVAL, _NO_PARENT, text_bytes(base.from_home)


def _parent_of(kind: int, parent: Parent) -> Parent | None:
    if kind == _BASE_PARENT:
        return parent
    if kind != _BASE_NONE:
        raise corrupt("base", f"kind {kind} is unknown")
    return None


def _decode_manifest(reader: BodyReader, size: int) -> Manifest:
    if size > MANIFEST_BYTES_MAX:
        raise corrupt("manifest", f"{size} bytes, at most {MANIFEST_BYTES_MAX}")
    try:
        return Manifest(segments=decode_segments(reader.take_bytes(size, "manifest")))
    except ServiceError as error:
        raise corrupt("manifest", error.message) from error

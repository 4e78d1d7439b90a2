"""The body of SESSION: a name for a position of a log.

Owns the body, to bytes and back. Never frames it (format.py) and never applies it. The head's log
id, its generation and the position stand in the record's header and are not repeated here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from services.kvstore.log.fields import BodyReader, require_flags, require_zero, text_bytes

_SESSION: Final = struct.Struct("<QQQIHHHHHHII")
SESSION_HEAD_BYTES: Final = _SESSION.size
SESSION_ID_AT: Final = 30
"""Where the size of the session id stands, for readers that look for nothing else."""
SESSION_FLAGS_AT: Final = 28
IS_DELETED: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """SESSION: from here on the session names this head; the last record of an id counts.

    `generation` is the session's, which only grows. `home` is the address of the kvstore that has
    the head log; None: this one. `parent_id` is the session it was forked off, at
    `parent_position`. `team` is None for a session of a whole tenant, whose record has the bytes
    it had before there were teams. `is_deleted`: nothing has this id any more.
    """

    session_id: str
    tenant: str
    generation: int
    created_wall_ms: int
    expires_wall_ms: int
    ttl_s: int
    home: str | None = None
    parent_id: str | None = None
    parent_position: int = 0
    team: str | None = None
    is_deleted: bool = False

    def encode(self) -> bytes:
        """Return the body."""
        texts = [text_bytes(one) for one in (self.session_id, self.tenant, self.home)]
        parent = text_bytes(self.parent_id)
        team = text_bytes(self.team)
        head = _SESSION.pack(
            self.generation,
            self.expires_wall_ms,
            self.created_wall_ms,
            self.ttl_s,
            IS_DELETED if self.is_deleted else 0,
            *(len(text) for text in texts),
            len(parent),
            len(team),
            self.parent_position,
            0,
        )
        return head + b"".join(texts) + parent + team

    @classmethod
    def decode(cls, reader: BodyReader) -> Session:
        """Read the body."""
        generation, expires, created, ttl_s, flags, *rest = reader.take(_SESSION, "session")
        id_bytes, tenant_bytes, home_bytes, parent_bytes, *rest = rest
        team_bytes, parent_position, reserved = rest
        require_flags(flags, IS_DELETED, "session.flags")
        require_zero(reserved, "session.reserved")
        return cls(
            session_id=reader.take_text(id_bytes, "session_id"),
            tenant=reader.take_text(tenant_bytes, "tenant"),
            generation=generation,
            created_wall_ms=created,
            expires_wall_ms=expires,
            ttl_s=ttl_s,
            home=reader.take_optional_text(home_bytes, "home"),
            parent_id=reader.take_optional_text(parent_bytes, "parent_id"),
            parent_position=parent_position,
            team=reader.take_optional_text(team_bytes, "team"),
            is_deleted=bool(flags & IS_DELETED),
        )

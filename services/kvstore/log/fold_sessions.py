"""Sessions as their records tell them.

Owns the fold of SESSION. Pure. The last record of an id counts. Where a SESSION may be missing
nobody can tell an older head from the last one: all sessions known until then are given up (their
logs stay), because a name that quietly means an older context is worse than one that is gone.
"""

from __future__ import annotations

from services.kvstore.log.format import RecordAddress, RecordType
from services.kvstore.log.session_records import Session
from services.kvstore.sessions import Owner, SessionState


class SessionFold:
    """The sessions there are, in the order of their last records."""

    def __init__(self) -> None:
        self._found: dict[str, SessionState] = {}

    def missing(self, type_code: int | None) -> None:
        """Records are missing here; of this type, where that is known."""
        if type_code in (None, RecordType.SESSION):
            self._found.clear()

    def apply(self, at: RecordAddress, record: Session) -> None:
        """SESSION; the same again changes nothing."""
        self._found.pop(record.session_id, None)
        if record.is_deleted:
            return
        self._found[record.session_id] = SessionState(
            session_id=record.session_id,
            owner=Owner(record.tenant, record.team or ""),
            generation=record.generation,
            log_id=at.log_id,
            log_generation=at.generation,
            position=at.position,
            created_wall_s=record.created_wall_ms / 1000.0,
            expires_wall_s=record.expires_wall_ms / 1000.0,
            ttl_s=float(record.ttl_s),
            home=record.home,
            parent_id=record.parent_id,
            parent_position=record.parent_position,
        )

    def result(self) -> list[SessionState]:
        """All of them."""
        return list(self._found.values())

"""Sessions in the store's core: made, changed, deleted, and ended with their heads.

Owns the checks against logs and the records. Pure: time is passed in. A change is one record: a
crash leaves the head before it or the one behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import Reason, ServiceError
from services.kvstore.core import Core, invalid, log_not_found
from services.kvstore.home import Event, require_allowed
from services.kvstore.sessions import (
    FIRST_GENERATION,
    SESSION_TTL_S,
    SESSION_TTL_S_MAX,
    Owner,
    SessionState,
    advanced,
)
from services.kvstore.state import AckLevel, LogState

SESSION_ID_BYTES_MAX = 64
HOME_BYTES_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a session is to name. `home` None: a log of this store."""

    log_id: bytes
    position: int
    home: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetOrder:
    """A request to make a session (`expected` None) or to change one whose generation is
    `expected`. `ttl_s` None: the default, or what it was.
    """

    session_id: str
    owner: Owner
    expected: int | None
    head: Head
    ttl_s: float | None = None
    parent_id: str | None = None
    parent_position: int = 0


def owner_of(log: LogState) -> Owner:
    """Whose a log is; a caller's salt narrows what it shares, not whose it is."""
    return Owner(log.tenant, log.scope.team or "")


def require_owner(log: LogState, owner: Owner) -> None:
    """Another owner's log and none at all look the same: LOG_NOT_FOUND."""
    if owner_of(log) != owner:
        raise log_not_found(log.log_id)


class SessionKeeper:
    """Makes, changes and ends sessions."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def set(self, order: SetOrder, wall_s: float) -> tuple[SessionState, AckLevel]:
        """Compare-and-set; the session as it is now, and the level its record is acked at."""
        self._check(order)
        table = self._core.sessions
        known: SessionState | None = None
        if order.expected is None:
            table.require_new(order.session_id, order.owner.tenant)
        else:
            known = table.require_current(order.session_id, order.owner, order.expected)
        log_generation, level = self._head(order)
        if known is None:
            session = self._made(order, log_generation, wall_s)
        else:
            session = advanced(
                known,
                log_id=order.head.log_id,
                log_generation=log_generation,
                position=order.head.position,
                home=order.head.home,
                wall_s=wall_s,
            )
        table.put(session)
        self._core.journal.session(session, is_deleted=False)
        return session, level

    def _check(self, order: SetOrder) -> None:
        if not 1 <= len(order.session_id.encode()) <= SESSION_ID_BYTES_MAX:
            raise invalid("session_id", f"must have 1 to {SESSION_ID_BYTES_MAX} bytes")
        if order.ttl_s is not None and not 1.0 <= order.ttl_s <= SESSION_TTL_S_MAX:
            raise invalid("ttl", f"must be from 1 to {SESSION_TTL_S_MAX:g} seconds")
        if order.head.home is not None and len(order.head.home.encode()) > HOME_BYTES_MAX:
            raise invalid("home", f"must have at most {HOME_BYTES_MAX} bytes")
        if order.parent_id is not None and len(order.parent_id.encode()) > SESSION_ID_BYTES_MAX:
            raise invalid("parent_session_id", f"may have {SESSION_ID_BYTES_MAX} bytes")
        if order.head.position < 1:
            raise invalid("head.position", "must be at least 1; an empty history is no session")

    def _head(self, order: SetOrder) -> tuple[int, AckLevel]:
        """The head log's generation and ack level; a log elsewhere is believed to be there."""
        head = order.head
        if head.home is not None:
            return 0, AckLevel.OS
        log = self._core.find(head.log_id)
        require_owner(log, order.owner)
        require_allowed(log, Event.FORK)
        if head.position > log.position:
            raise invalid("head.position", f"the log has {log.position} tokens")
        if log.drop_at_end:
            raise ServiceError(
                Reason.INVALID_REQUEST,
                "the log is not kept after its end; open it with store: true",
                field="log_id",
            )
        return log.generation, log.ack_level

    def _made(self, order: SetOrder, log_generation: int, wall_s: float) -> SessionState:
        ttl_s = SESSION_TTL_S if order.ttl_s is None else order.ttl_s
        return SessionState(
            session_id=order.session_id,
            owner=order.owner,
            generation=FIRST_GENERATION,
            log_id=order.head.log_id,
            log_generation=log_generation,
            position=order.head.position,
            created_wall_s=wall_s,
            expires_wall_s=wall_s + ttl_s,
            ttl_s=ttl_s,
            home=order.head.home,
            parent_id=order.parent_id,
            parent_position=order.parent_position,
        )

    def delete(self, session_id: str, owner: Owner, expected: int | None) -> None:
        """The name is gone; its logs stay for their own time."""
        table = self._core.sessions
        if expected is None:
            session = table.find(session_id, owner)
        else:
            session = table.require_current(session_id, owner, expected)
        table.remove(session_id)
        self._core.journal.session(session, is_deleted=True)

    def require_spared(self, log_id: bytes, position: int) -> None:
        """INVALID_REQUEST for a cut behind which a session's head would be gone."""
        for session in self._core.sessions.named_by(log_id):
            if session.position > position:
                raise invalid("position", f"a session needs {session.position} tokens; fork first")

    def expire(self, wall_s: float) -> None:
        """Ends the sessions whose time is over."""
        for session in self._core.sessions.take_over(wall_s):
            self._core.journal.session(session, is_deleted=True)

    def adopt(self, sessions: list[SessionState]) -> None:
        """After a restart: those whose head is there, or elsewhere; the others are deleted."""
        for session in sessions:
            log = self._core.logs.get(session.log_id)
            is_here = log is not None and log.position >= session.position
            if session.home is not None or is_here:
                self._core.sessions.put(session)
            else:
                self._core.journal.session(session, is_deleted=True)

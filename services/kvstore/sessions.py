"""Sessions: names for positions of logs, of a tenant or one of its teams, and who may change them.

Owns the table, the compare-and-set of its entries, their number and their end. Pure; wall time is
passed in. A session's head does not end by its own time while the session names it.

Invariants: a generation only grows; a change under another generation than the session's is
refused and changes nothing; another owner's session and none at all look the same.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from baton.errors import Reason, ServiceError

SESSIONS_MAX: Final = 16_384
SESSIONS_PER_TENANT_MAX: Final = 1_024
SESSION_TTL_S: Final = 86_400.0
SESSION_TTL_S_MAX: Final = 7 * 86_400.0
FIRST_GENERATION: Final = 1
STALE_ENDS_MAX: Final = 1_024


class Owner(NamedTuple):
    """Whose a session is, as the verified credential says; `team` is empty outside teams."""

    tenant: str
    team: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """One session: tokens [0, position) of a log. `home` is the address of the kvstore that has the
    log, None for this one; `parent_id` the session it was forked off at `parent_position`.
    """

    session_id: str
    owner: Owner
    generation: int
    log_id: bytes
    log_generation: int
    position: int
    created_wall_s: float
    expires_wall_s: float
    ttl_s: float
    home: str | None = None
    parent_id: str | None = None
    parent_position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How many sessions there may be."""

    sessions_max: int = SESSIONS_MAX
    per_tenant_max: int = SESSIONS_PER_TENANT_MAX


@dataclass(slots=True)
class SessionTable:
    """All sessions of one kvstore."""

    bounds: Bounds = field(default_factory=Bounds)
    _by_id: dict[str, SessionState] = field(default_factory=dict)
    _by_head: dict[bytes, set[str]] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)
    _ends: list[tuple[float, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._by_id)

    def all(self) -> list[SessionState]:
        """Every session."""
        return list(self._by_id.values())

    def get(self, session_id: str) -> SessionState | None:
        """The session, whoever's it is."""
        return self._by_id.get(session_id)

    def find(self, session_id: str, owner: Owner) -> SessionState:
        """The owner's session; NOT_FOUND for another's and for none."""
        found = self._by_id.get(session_id)
        if found is None or found.owner != owner:
            raise ServiceError(
                Reason.NOT_FOUND,
                "no session of this id; it was deleted, its time was over, or it never was",
                field="session_id",
            )
        return found

    def of_owner(self, owner: Owner) -> list[SessionState]:
        """The owner's sessions, the oldest first."""
        found = [one for one in self._by_id.values() if one.owner == owner]
        return sorted(found, key=lambda one: (one.created_wall_s, one.session_id))

    def require_new(self, session_id: str, tenant: str) -> None:
        """ALREADY_EXISTS for a name in use, QUOTA_EXCEEDED where there are as many as may be."""
        if session_id in self._by_id:
            raise ServiceError(
                Reason.ALREADY_EXISTS, "session_id is in use; draw another", field="session_id"
            )
        bounds = self.bounds
        if self._counts[tenant] >= bounds.per_tenant_max or len(self) >= bounds.sessions_max:
            raise ServiceError(
                Reason.QUOTA_EXCEEDED,
                f"a tenant may have {bounds.per_tenant_max} sessions here, all tenants together "
                f"{bounds.sessions_max}; delete one first",
                field="session_id",
                metadata={"sessions": str(self._counts[tenant])},
            )

    def require_current(self, session_id: str, owner: Owner, generation: int) -> SessionState:
        """The owner's session, if `generation` is its current one; else STALE_GENERATION."""
        found = self.find(session_id, owner)
        if found.generation != generation:
            raise ServiceError(
                Reason.STALE_GENERATION,
                f"the session is at generation {found.generation}, not {generation}: it was "
                "changed meanwhile; read it again and repeat what is still wanted",
                field="generation",
                metadata={"generation": str(generation), "current": str(found.generation)},
            )
        return found

    def put(self, session: SessionState) -> None:
        """Makes the session what is given; the caller has checked it."""
        self.remove(session.session_id)
        self._by_id[session.session_id] = session
        self._counts[session.owner.tenant] += 1
        if session.home is None:
            self._by_head.setdefault(session.log_id, set()).add(session.session_id)
        heapq.heappush(self._ends, (session.expires_wall_s, session.session_id))
        if len(self._ends) > 2 * len(self._by_id) + STALE_ENDS_MAX:
            self._ends = [(one.expires_wall_s, one.session_id) for one in self._by_id.values()]
            heapq.heapify(self._ends)

    def remove(self, session_id: str) -> SessionState | None:
        """Forgets a session; what it was."""
        known = self._by_id.pop(session_id, None)
        if known is None:
            return None
        self._counts[known.owner.tenant] -= 1
        if not self._counts[known.owner.tenant]:
            del self._counts[known.owner.tenant]
        heads = self._by_head.get(known.log_id)
        if heads is not None:
            heads.discard(session_id)
            if not heads:
                del self._by_head[known.log_id]
        return known

    def named_by(self, log_id: bytes) -> list[SessionState]:
        """The sessions whose head is a log of this store."""
        return [self._by_id[one] for one in sorted(self._by_head.get(log_id, ()))]

    def held_until(self, log_id: bytes) -> float | None:
        """The wall time until which a session needs the log; None: no session does."""
        ends = [one.expires_wall_s for one in self.named_by(log_id)]
        return max(ends, default=None)

    def take_over(self, wall_s: float) -> list[SessionState]:
        """Removes and returns the sessions whose time is over."""
        over: list[SessionState] = []
        while self._ends and self._ends[0][0] <= wall_s:
            end, session_id = heapq.heappop(self._ends)
            known = self._by_id.get(session_id)
            if known is not None and known.expires_wall_s == end:
                self.remove(session_id)
                over.append(known)
        return over

    def check_invariants(self, logs: Iterable[bytes]) -> None:
        """Asserts that the indexes agree with the table, and that every local head is a log."""
        assert self._counts == Counter(one.owner.tenant for one in self._by_id.values())
        known = set(logs)
        for log_id, names in self._by_head.items():
            assert names, log_id.hex()
            assert log_id in known, log_id.hex()
            assert all(self._by_id[name].log_id == log_id for name in names)


def advanced(
    session: SessionState, *, log_id: bytes, log_generation: int, position: int, home: str | None,
    wall_s: float,
) -> SessionState:  # fmt: skip
    """The session at its next generation, naming another head; its time begins anew."""
    return replace(
        session,
        generation=session.generation + 1,
        log_id=log_id,
        log_generation=log_generation,
        position=position,
        home=home,
        expires_wall_s=wall_s + session.ttl_s,
    )

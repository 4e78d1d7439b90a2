"""Sessions: conversations under a name, continued, edited, forked, each change all or nothing.

Owns the order of calls. A change computes a new log that begins with the old one's tokens as far as
they are the same, seals it, and only then has the session name it, by compare-and-set of its
generation: whatever dies on the way, the session names the old history or the new one.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from baton.errors import Reason, ServiceError
from baton.faults import faults
from baton.ids import new_log_id, new_request_id
from services.gateway.answers import Emit
from services.gateway.client_sessions import LineageLog, Session, SessionClient, SetSession
from services.gateway.opening import SequenceParts
from services.gateway.prompts import ServedModel, beside_loop
from services.gateway.request import (
    ID_CHARS_MAX,
    ChatPrompt,
    ChatTurn,
    ParentLog,
    SequenceRequest,
    Tenant,
)
from services.gateway.session_compute import HistoryComputer
from services.gateway.session_edit import EditOrder, change_of, edited, refused
from services.gateway.session_naming import SILENT, SessionNames
from services.gateway.session_text import History, next_turn

SESSION_PREFIX: Final = "sess-"
RESPONSE_PREFIXES: Final = ("chatcmpl-", "cmpl-")
SESSION_ID_BYTES: Final = 12

_ENDED: Final = frozenset({Reason.LOG_NOT_FOUND, Reason.STALE_GENERATION})
"""What a store says of a log that is gone, and of one that moved away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recount:
    """What a change took: tokens whose KV was there, was computed; tokens that left, that came."""

    reused: int
    recomputed: int
    dropped: int
    inserted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A session after a change, and what it took."""

    session: Session
    recount: Recount


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What an id names; `session` None: an answer."""

    head: ParentLog
    session: Session | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A history that a request goes on with: all its ids, and where they were."""

    point: Point
    token_ids: tuple[int, ...]


class Sessions:
    """Everything about sessions that REST and gRPC call."""

    def __init__(self, parts: SequenceParts, model: ServedModel, client: SessionClient) -> None:
        self._parts = parts
        self._model = model
        self._client = client
        self._names = SessionNames(parts, client)
        self._computer = HistoryComputer(parts, model)

    # --- reading ----------------------------------------------------------------------------

    async def resolve(self, tenant: Tenant, wanted: str, field: str = "id") -> Point:
        """What an id names: a session, or an answer by its response id. NOT_FOUND naming `field`;
        NO_WORKER where a kvstore that may have it does not answer.
        """
        if wanted.startswith(SESSION_PREFIX) and len(wanted) <= ID_CHARS_MAX:
            session, _ = await self.find(tenant, wanted, field)
            return Point(head=session.head, session=session)
        request_id = wanted
        for prefix in RESPONSE_PREFIXES:
            request_id = request_id.removeprefix(prefix)
        if not 0 < len(wanted) <= ID_CHARS_MAX or not request_id:
            raise _unknown(field)
        return Point(head=await self._answer(tenant, request_id, field), session=None)

    async def _answer(self, tenant: Tenant, request_id: str, field: str) -> ParentLog:
        """The log with an answer's end. One without it is an attempt that was given up, unless no
        store has more; a store that is silent may.
        """
        capability = self._names.capability(tenant)
        silent: ServiceError | None = None
        attempts: list[ParentLog] = []
        for address in self._addresses():
            try:
                head, is_complete = await self._client.find_answer(address, request_id, capability)
            except ServiceError as error:
                silent = _only_silence(error, silent)
                continue
            if is_complete:
                return head
            attempts.append(head)
        if silent is not None:
            raise silent
        if not attempts:
            raise _unknown(field)
        return max(attempts, key=lambda one: one.position)

    async def find(
        self, tenant: Tenant, session_id: str, field: str = "id", *, with_lineage: bool = False
    ) -> tuple[Session, Sequence[LineageLog]]:
        """A session of the tenant, and its tree; NOT_FOUND naming `field`."""
        capability = self._names.capability(tenant)
        silent: ServiceError | None = None
        for address in self._addresses() if session_id.startswith(SESSION_PREFIX) else ():
            try:
                return await self._client.get(
                    address, session_id, capability, with_lineage=with_lineage
                )
            except ServiceError as error:
                silent = _only_silence(error, silent)
        raise silent or _unknown(field)

    async def listed(self, tenant: Tenant) -> list[Session]:
        """The tenant's sessions, the oldest first."""
        capability = self._names.capability(tenant)
        found = [
            one
            for address in self._addresses()
            for one in await self._client.listed(address, capability)
        ]
        return sorted(found, key=lambda one: (one.create_wall_s, one.session_id))

    async def token_ids(
        self, tenant: Tenant, head: ParentLog, field: str = "id"
    ) -> tuple[int, ...]:
        """A history's ids; NOT_FOUND naming `field` where its log has ended."""
        try:
            return await self._client.tokens(head, self._names.capability(tenant, head.log_id))
        except ServiceError as error:
            if error.reason in _ENDED:
                raise _unknown(field) from error
            raise

    async def messages(self, tenant: Tenant, head: ParentLog) -> list[ChatTurn]:
        """A history as turns; empty where it follows no chat template."""
        return History(self._model, await self.token_ids(tenant, head)).chat()

    async def continued(
        self,
        tenant: Tenant,
        wanted: str,
        turns: Sequence[ChatTurn],
        *,
        field: str,
        has_header: bool = True,
    ) -> Continuation:
        """The history of a session or an answer with turns behind it."""
        point = await self.resolve(tenant, wanted, field)
        ids = await self.token_ids(tenant, point.head, field)
        went_on = await beside_loop(
            len(ids) + _chars(turns),
            lambda: next_turn(self._model, ids, turns, has_header=has_header),
        )
        return Continuation(point=point, token_ids=went_on)

    # --- changing ---------------------------------------------------------------------------

    async def create(
        self, tenant: Tenant, *, source: str | None, turns: Sequence[ChatTurn], ttl_s: float | None
    ) -> Changed:
        """A session that names an answer, or begins as another session, or with turns."""
        if source is not None:
            return await self.fork(tenant, source, position=None, ttl_s=ttl_s, field="from")
        prompt = ChatPrompt(turns=tuple(turns), has_assistant_header=False)
        ids = (await self._model.encode(prompt, "messages")).token_ids
        leg, reused = await self._computer.computed(tenant, ids, None)
        head = ParentLog(log_id=leg.log_id, position=len(ids), address=leg.plan.kvstore_address)
        order = _new_session(head, ttl_s)
        session = await self._names.name_computed(leg, tenant, order, head.address)
        recount = Recount(reused=reused, recomputed=len(ids) - reused, dropped=0, inserted=len(ids))
        return Changed(session=session, recount=recount)

    async def fork(
        self,
        tenant: Tenant,
        wanted: str,
        *,
        position: int | None,
        ttl_s: float | None,
        field: str = "id",
    ) -> Changed:
        """A new session with the first `position` tokens (None: all) of a session or an answer."""
        point = await self.resolve(tenant, wanted, field)
        head = self._cut(point.head, position)
        log, cached = await self._forked(tenant, head, field)
        order = _new_session(log, ttl_s)
        if point.session is not None:
            parent = point.session.session_id
            order = replace(order, parent_id=parent, parent_position=head.position)
        session = await self._names.name_fork(log.address, order, tenant)
        dropped = point.head.position - head.position
        recount = Recount(reused=cached, recomputed=0, dropped=dropped, inserted=0)
        return Changed(session=session, recount=recount)

    async def truncate(
        self, tenant: Tenant, session_id: str, position: int, generation: int | None
    ) -> Changed:
        """The session keeps its first `position` tokens; nothing is computed."""
        session = await self._current(tenant, session_id, generation)
        head = self._cut(session.head, position)
        return await self._cut_to(tenant, session, head)

    async def _cut_to(self, tenant: Tenant, session: Session, head: ParentLog) -> Changed:
        log, cached = await self._forked(tenant, head, "id")
        order = SetSession(session_id=session.session_id, expected=session.generation, head=log)
        changed = await self._names.name_fork(session.address, order, tenant)
        dropped = session.head.position - head.position
        recount = Recount(reused=cached, recomputed=0, dropped=dropped, inserted=0)
        return Changed(session=changed, recount=recount)

    async def edit(
        self, tenant: Tenant, session_id: str, order: EditOrder, generation: int | None
    ) -> Changed:
        """Replaces a range; what stands behind it is kept and computed again in this call."""
        session = await self._current(tenant, session_id, generation)
        old = await self.token_ids(tenant, session.head)
        await faults.reach("session.after_read")
        chars = len(old) + len(order.text or "") + _chars(order.turns or ())
        new = await beside_loop(chars, lambda: edited(self._model, old, order))
        if not new:
            raise refused(
                "replacement", "must leave at least one token; delete the session instead"
            )
        change = change_of(old, new)
        if new == old:
            recount = Recount(reused=len(old), recomputed=0, dropped=0, inserted=0)
            return Changed(session=session, recount=recount)
        base = replace(session.head, position=change.common) if change.common else None
        if change.common == len(new):
            return await self._cut_to(tenant, session, replace(session.head, position=len(new)))
        leg, reused = await self._computer.computed(tenant, new, base, session.ttl_s)
        head = ParentLog(log_id=leg.log_id, position=len(new), address=leg.plan.kvstore_address)
        target = SetSession(session_id=session.session_id, expected=session.generation, head=head)
        changed = await self._names.name_computed(leg, tenant, target, session.address)
        recount = Recount(
            reused=reused,
            recomputed=len(new) - reused,
            dropped=change.dropped,
            inserted=change.inserted,
        )
        return Changed(session=changed, recount=recount)

    async def delete(self, tenant: Tenant, session_id: str) -> None:
        """Ends the name; NOT_FOUND."""
        session, _ = await self.find(tenant, session_id)
        await self._client.delete(
            session.address,
            session_id,
            capability=self._names.capability(tenant),
            request_id=new_request_id(),
        )

    def naming(self, request: SequenceRequest, emit: Emit) -> Emit:
        """`emit`, with the request's session naming the answer's end."""
        return self._names.naming(request, emit)

    # --- parts ------------------------------------------------------------------------------

    def _addresses(self) -> tuple[str, ...]:
        found = self._parts.prefixes.addresses()
        if not found:
            raise ServiceError(Reason.NO_WORKER, "no kvstore is known yet", retry_after_s=1.0)
        return found

    def _cut(self, head: ParentLog, position: int | None) -> ParentLog:
        if position is None:
            return head
        if not 1 <= position <= head.position:
            raise ServiceError(
                Reason.INVALID_REQUEST,
                f"position must be from 1 to {head.position}, the history's tokens",
                field="position",
            )
        return replace(head, position=position)

    async def _current(self, tenant: Tenant, session_id: str, generation: int | None) -> Session:
        session, _ = await self.find(tenant, session_id)
        if generation not in (None, session.generation):
            raise ServiceError(
                Reason.STALE_GENERATION,
                f"the session is at generation {session.generation}, not {generation}: it was "
                "changed meanwhile; read it again and repeat what is still wanted",
                field="generation",
            )
        return session

    async def _forked(self, tenant: Tenant, head: ParentLog, field: str) -> tuple[ParentLog, int]:
        """A log of its own for a history's beginning, and how many tokens have KV."""
        log_id = new_log_id()
        # The capability is not bound to one log: it reads the parent and opens the child.
        capability = self._names.capability(tenant)
        try:
            cached = await self._client.fork(
                head, log_id, capability=capability, request_id=new_request_id()
            )
        except ServiceError as error:
            if error.reason in _ENDED:
                raise _unknown(field) from error
            raise
        await faults.reach("session.after_fork")
        return replace(head, log_id=log_id), cached


def _chars(turns: Sequence[ChatTurn]) -> int:
    return sum(len(one.content) for one in turns)


def _new_session(head: ParentLog, ttl_s: float | None) -> SetSession:
    session_id = SESSION_PREFIX + secrets.token_hex(SESSION_ID_BYTES)
    return SetSession(session_id=session_id, expected=None, head=head, ttl_s=ttl_s)


def _only_silence(error: ServiceError, known: ServiceError | None) -> ServiceError | None:
    """Not there is no reason to stop looking; a store that does not answer may have it."""
    if error.reason in (Reason.NOT_FOUND, Reason.LOG_NOT_FOUND):
        return known
    if error.reason in SILENT:
        return ServiceError(
            Reason.NO_WORKER, "a kvstore did not answer; try again shortly", retry_after_s=1.0
        )
    raise error


def _unknown(field: str) -> ServiceError:
    return ServiceError(
        Reason.NOT_FOUND,
        f"{field} names no session and no response of yours that is still kept; "
        "GET /v1/sessions lists your sessions",
        field=field,
    )

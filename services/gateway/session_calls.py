"""Sessions: conversations under a name, continued, edited, forked, each change all or nothing.

Owns the order of calls. A change computes a new log that begins with the old one's tokens as far as
they are the same, seals it, and only then has the session name it, by compare-and-set of its
generation: whatever dies on the way, the session names the old history or the new one.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from baton.capability import Right
from baton.errors import Reason, ServiceError
from baton.ids import new_log_id, new_request_id
from baton.sampling_parameters import SamplingParameters
from services.gateway.answers import Emit
from services.gateway.client_sessions import Session, SessionClient, SetSession
from services.gateway.events import Completed, Event, SessionMark
from services.gateway.legs import Leg, Plan
from services.gateway.opening import LogOpener, SequenceParts
from services.gateway.planner import PlanRequest
from services.gateway.prompts import ServedModel
from services.gateway.publishing import PUBLISH_TIMEOUT_S, prefill_kv
from services.gateway.request import (
    ID_CHARS_MAX,
    CacheMode,
    ChatPrompt,
    ChatTurn,
    EncodedPrompt,
    ParentLog,
    SequenceRequest,
    SessionRef,
    Tenant,
)
from services.gateway.session_edit import EditOrder, change_of, edited, refused
from services.gateway.session_text import History, next_turn

_log = structlog.stdlib.get_logger("baton.gateway.sessions")

SESSION_RIGHTS: Final = frozenset({Right.OPEN, Right.READ, Right.FORK})
SESSION_PREFIX: Final = "sess-"
RESPONSE_PREFIXES: Final = ("chatcmpl-", "cmpl-")
SESSION_ID_BYTES: Final = 12
CALL_TTL_S: Final = 60.0


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
        capability = self._capability(tenant)
        silent: ServiceError | None = None
        for address in self._addresses():
            try:
                head = await self._client.find_answer(address, request_id, capability)
                return Point(head=head, session=None)
            except ServiceError as error:
                silent = _only_silence(error, silent)
        raise silent or _unknown(field)

    async def find(
        self, tenant: Tenant, session_id: str, field: str = "id", *, with_lineage: bool = False
    ) -> tuple[Session, Sequence[Mapping[str, object]]]:
        """A session of the tenant, and its tree; NOT_FOUND naming `field`."""
        capability = self._capability(tenant)
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
        capability = self._capability(tenant)
        found = [
            one
            for address in self._addresses()
            for one in await self._client.listed(address, capability)
        ]
        return sorted(found, key=lambda one: (one.create_wall_s, one.session_id))

    async def token_ids(
        self, tenant: Tenant, head: ParentLog, field: str = "id"
    ) -> tuple[int, ...]:
        """A history's ids."""
        try:
            return await self._client.tokens(head, self._capability(tenant, head.log_id))
        except ServiceError as error:
            if error.reason is Reason.LOG_NOT_FOUND:
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
        return Continuation(
            point=point, token_ids=next_turn(self._model, ids, turns, has_header=has_header)
        )

    # --- changing ---------------------------------------------------------------------------

    async def create(
        self, tenant: Tenant, *, source: str | None, turns: Sequence[ChatTurn], ttl_s: float | None
    ) -> Changed:
        """A session that names an answer, or begins as another session, or with turns."""
        if source is not None:
            return await self.fork(tenant, source, position=None, ttl_s=ttl_s, field="from")
        ids = self._model.encode_turns(ChatPrompt(turns=tuple(turns), has_assistant_header=False))
        leg, reused = await self._computed(tenant, ids, None)
        head = ParentLog(log_id=leg.log_id, position=len(ids), address=leg.plan.kvstore_address)
        session = await self._set_behind(leg, tenant, _new_session(head, ttl_s))
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
        session = await self._name_fork(log.address, order, tenant)
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
        changed = await self._name_fork(session.address, order, tenant)
        dropped = session.head.position - head.position
        recount = Recount(reused=cached, recomputed=0, dropped=dropped, inserted=0)
        return Changed(session=changed, recount=recount)

    async def edit(
        self, tenant: Tenant, session_id: str, order: EditOrder, generation: int | None
    ) -> Changed:
        """Replaces a range; what stands behind it is kept and computed again in this call."""
        session = await self._current(tenant, session_id, generation)
        old = await self.token_ids(tenant, session.head)
        new = edited(self._model, old, order)
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
        leg, reused = await self._computed(tenant, new, base)
        head = ParentLog(log_id=leg.log_id, position=len(new), address=leg.plan.kvstore_address)
        target = SetSession(session_id=session.session_id, expected=session.generation, head=head)
        changed = await self._set_behind(leg, tenant, target, session.address)
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
            capability=self._capability(tenant),
            request_id=new_request_id(),
        )

    def naming(self, request: SequenceRequest, emit: Emit) -> Emit:
        """`emit`, with the session naming an answer's end before the reader is told of the end."""
        session = request.session
        if session is None:
            return emit

        async def emit_named(event: Event) -> None:
            if isinstance(event, Completed):
                mark = await self._named(request.tenant, session, event)
                event = replace(event, session=mark)
            await emit(event)

        return emit_named

    async def _named(
        self, tenant: Tenant, session: SessionRef, completed: Completed
    ) -> SessionMark:
        """The answer stands whatever becomes of its name: a refusal is told, not raised."""
        head = ParentLog(
            log_id=completed.log_id,
            position=completed.position,
            address=completed.kvstore_address,
        )
        order = SetSession(session_id=session.session_id, expected=session.generation, head=head)
        try:
            named = await self._set(session.address, order, tenant)
        except ServiceError as error:
            _log.warning("session_not_named", reason=error.reason.value)
            return SessionMark(
                session_id=session.session_id,
                generation=session.generation,
                refusal=error.reason.value,
            )
        return SessionMark(session_id=session.session_id, generation=named.generation)

    # --- parts ------------------------------------------------------------------------------

    def _addresses(self) -> tuple[str, ...]:
        found = self._parts.prefixes.addresses()
        if not found:
            raise ServiceError(Reason.NO_WORKER, "no kvstore is known yet", retry_after_s=1.0)
        return found

    def _capability(self, tenant: Tenant, log_id: bytes | None = None) -> str:
        return self._parts.mint.mint(
            tenant, SESSION_RIGHTS, ttl_s=CALL_TTL_S, request_id=new_request_id(), log_id=log_id
        )

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
        capability = self._capability(tenant)
        try:
            cached = await self._client.fork(
                head, log_id, capability=capability, request_id=new_request_id()
            )
        except ServiceError as error:
            if error.reason is Reason.LOG_NOT_FOUND:
                raise _unknown(field) from error
            raise
        return replace(head, log_id=log_id), cached

    async def _set(self, address: str, order: SetSession, tenant: Tenant) -> Session:
        return await self._client.set(
            address, order, capability=self._capability(tenant), request_id=new_request_id()
        )

    async def _name_fork(self, address: str, order: SetSession, tenant: Tenant) -> Session:
        """Names a fork that nobody writes; one that nobody names in the end is dropped."""
        is_named = False
        try:
            session = await self._set(address, order, tenant)
            is_named = True
            return session
        finally:
            head = order.head
            capability = self._capability(tenant, head.log_id)
            await self._parts.stores.close(head.address, head.log_id, capability, drop=not is_named)

    async def _set_behind(
        self, leg: Leg, tenant: Tenant, order: SetSession, address: str | None = None
    ) -> Session:
        """Names a computed log; a log that nobody names in the end is given up."""
        is_named = False
        try:
            session = await self._set(address or leg.plan.kvstore_address, order, tenant)
            is_named = True
            return session
        finally:
            self._parts.cleanup.end(leg, is_complete=is_named)

    async def _computed(
        self, tenant: Tenant, ids: tuple[int, ...], base: ParentLog | None
    ) -> tuple[Leg, int]:
        """A sealed log with KV for all of these ids, begun from `base`; how much it began with."""
        limit = self._parts.planner.context_max() or self._model.context_max
        if len(ids) >= min(limit, self._model.context_max):
            raise ServiceError(
                Reason.PROMPT_TOO_LONG,
                f"the history would have {len(ids)} tokens, the context holds {limit}; shorten it",
                field="replacement",
            )
        request = self._request(tenant, ids, base)
        leg = await LogOpener(self._parts, request).open(self._plan(ids, base))
        is_sealed = False
        try:
            await prefill_kv(self._parts, leg)
            is_sealed = True
        finally:
            if not is_sealed:
                self._parts.cleanup.end(leg, is_complete=False)
        return leg, leg.cached_tokens

    def _plan(self, ids: Sequence[int], base: ParentLog | None) -> Plan:
        """A plan whose writer sits where the base is, if there is one."""
        planner = self._parts.planner
        first = plan = planner.plan(PlanRequest(prompt_tokens=len(ids)))
        excluded: list[tuple[str, int]] = []
        while base is not None and plan.kvstore_address != base.address:
            excluded.append((plan.writer.worker_id, plan.writer.incarnation))
            try:
                plan = planner.plan(
                    PlanRequest(prompt_tokens=len(ids), excluded_runs=tuple(excluded))
                )
            except ServiceError:
                return first
        return plan

    def _request(
        self, tenant: Tenant, ids: tuple[int, ...], base: ParentLog | None
    ) -> SequenceRequest:
        now_s = self._parts.clock.monotonic_s()
        return SequenceRequest(
            request_id=new_request_id(),
            tenant=tenant,
            prompt=EncodedPrompt(token_ids=ids, rendered=self._model.spell(ids)),
            sampling=SamplingParameters(temperature=0.0, seed=0, max_tokens=1),
            cache_mode=CacheMode.READ_WRITE,
            cache_salt=None,
            is_dropped_at_end=False,
            received_s=now_s,
            deadline_s=now_s + PUBLISH_TIMEOUT_S,
            ready_s=now_s,
            parent=base,
        )


def _new_session(head: ParentLog, ttl_s: float | None) -> SetSession:
    session_id = SESSION_PREFIX + secrets.token_hex(SESSION_ID_BYTES)
    return SetSession(session_id=session_id, expected=None, head=head, ttl_s=ttl_s)


def _only_silence(error: ServiceError, known: ServiceError | None) -> ServiceError | None:
    """Not there is no reason to stop looking; a store that does not answer may have it."""
    if error.reason in (Reason.NOT_FOUND, Reason.LOG_NOT_FOUND):
        return known
    if error.reason in (Reason.WORKER_LOST, Reason.DEADLINE_EXCEEDED):
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

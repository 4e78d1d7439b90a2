"""What a session names: compare-and-set at its store, and what becomes of logs that nobody names.

Owns the last step of every change and its doubt: a store that does not answer may have done what it
was asked. It is asked again under the same request id; a log is given up only where the store has
refused to name it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

import structlog

from baton.capability import Right
from baton.errors import Reason, ServiceError
from baton.faults import faults
from baton.ids import new_request_id
from services.gateway.answers import Emit
from services.gateway.client_sessions import Session, SessionClient, SetSession
from services.gateway.events import Completed, Event, SessionMark
from services.gateway.legs import Leg
from services.gateway.opening import SequenceParts
from services.gateway.recovery import PATIENCE_S, PAUSE_S
from services.gateway.request import ParentLog, SequenceRequest, SessionRef, Tenant

_log = structlog.stdlib.get_logger("baton.gateway.sessions")

SESSION_RIGHTS: Final = frozenset({Right.OPEN, Right.READ, Right.FORK})
CALL_TTL_S: Final = 60.0

SILENT: Final = frozenset({Reason.WORKER_LOST, Reason.DEADLINE_EXCEEDED})
"""Nobody answered: what was asked may have been done."""

_DOUBTFUL: Final = SILENT | {Reason.QUEUE_FULL}
"""The change may count in the end: a store whose disk is full writes it once there is room."""

_OVERTAKEN: Final = frozenset({Reason.STALE_GENERATION, Reason.ALREADY_EXISTS})
"""What a repeated call is told that was done before the store restarted."""


class SessionNames:
    """Has sessions name logs."""

    def __init__(self, parts: SequenceParts, client: SessionClient) -> None:
        self._parts = parts
        self._client = client

    def capability(self, tenant: Tenant, log_id: bytes | None = None) -> str:
        """What calls about a tenant's sessions and their histories show."""
        return self._parts.mint.mint(
            tenant, SESSION_RIGHTS, ttl_s=CALL_TTL_S, request_id=new_request_id(), log_id=log_id
        )

    async def set(self, address: str, order: SetSession, tenant: Tenant) -> Session:
        """The session names another head, once the store says so.

        STALE_GENERATION when somebody was faster; one of `SILENT`: it may name it, nobody knows.
        """
        capability, request_id = self.capability(tenant), new_request_id()
        clock, is_again = self._parts.clock, False
        until_s = clock.monotonic_s() + PATIENCE_S
        while True:
            try:
                return await self._client.set(
                    address, order, capability=capability, request_id=request_id
                )
            except ServiceError as error:
                if is_again and error.reason in _OVERTAKEN:
                    return await self._done_before(address, order, tenant, error)
                if error.reason not in SILENT or clock.monotonic_s() >= until_s:
                    raise
            is_again = True
            await clock.wait(asyncio.Event(), PAUSE_S)

    async def _done_before(
        self, address: str, order: SetSession, tenant: Tenant, error: ServiceError
    ) -> Session:
        """The session if it names the head already; else the refusal."""
        session, _ = await self._client.get(address, order.session_id, self.capability(tenant))
        named, wanted = session.head, order.head
        if (named.log_id, named.position) != (wanted.log_id, wanted.position):
            raise error
        return session

    async def name_fork(self, address: str, order: SetSession, tenant: Tenant) -> Session:
        """Names a fork that nobody writes; one that is refused its name is dropped."""
        is_refused = False
        try:
            session = await self.set(address, order, tenant)
        except ServiceError as error:
            is_refused = error.reason not in _DOUBTFUL
            raise
        finally:
            await self._close(order, tenant, drop=is_refused)
        await faults.reach("session.after_set")
        return session

    async def _close(self, order: SetSession, tenant: Tenant, *, drop: bool) -> None:
        """Nobody goes on with the log: it may be evicted, or goes at once. Its TTL ends it too."""
        head = order.head
        try:
            capability = self.capability(tenant, head.log_id)
            await self._parts.stores.close(head.address, head.log_id, capability, drop=drop)
        except ServiceError as error:
            _log.warning("fork_not_closed", reason=error.reason.value)

    async def name_computed(
        self, leg: Leg, tenant: Tenant, order: SetSession, address: str
    ) -> Session:
        """Names a computed log; one that is refused its name is fenced and given up."""
        is_refused = False
        try:
            await faults.reach("session.after_seal")
            session = await self.set(address, order, tenant)
        except ServiceError as error:
            is_refused = error.reason not in _DOUBTFUL
            raise
        finally:
            self._parts.cleanup.end(leg, is_complete=not is_refused)
        await faults.reach("session.after_set")
        return session

    # --- answers ----------------------------------------------------------------------------

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
            named = await self.set(session.address, order, tenant)
        except ServiceError as error:
            _log.warning("session_not_named", reason=error.reason.value)
            return SessionMark(
                session_id=session.session_id,
                generation=session.generation,
                refusal=error.reason.value,
            )
        return SessionMark(session_id=session.session_id, generation=named.generation)

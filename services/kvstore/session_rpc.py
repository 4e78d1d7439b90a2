"""`SessionService` on gRPC: the sessions of one kvstore.

Owns the path of these calls: rights, owners, answers to repeated calls, the tree around a head.
Raises ServiceError; the interceptor aborts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import grpc

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import sessions_pb2, sessions_pb2_grpc
from baton.capability import Right
from baton.errors import Reason, ServiceError
from baton.faults import faults
from baton.wire.durations import duration_from_proto, duration_to_proto, timestamp_to_proto
from services.kvstore import wire
from services.kvstore.access import Access
from services.kvstore.answers import Answers
from services.kvstore.core import invalid
from services.kvstore.keeper import CANCELLED
from services.kvstore.listing import Lineage
from services.kvstore.runtime import Runtime
from services.kvstore.session_keeper import Head, SetOrder, owner_of
from services.kvstore.sessions import Owner, SessionState
from services.kvstore.state import LogState, Phase
from services.kvstore.walking import all_logs

SERVICE_NAME: Final = "baton.api.kvstore.v1.SessionService"
LINEAGE_MAX: Final = 1024
CHANGE_RIGHTS: Final = (Right.OPEN, Right.FORK)

_Context = grpc.aio.ServicerContext[Any, Any]


class SessionServicer(sessions_pb2_grpc.SessionServiceServicer):
    """See the module."""

    def __init__(self, runtime: Runtime, access: Access) -> None:
        self._runtime = runtime
        self._access = access
        self._answers = Answers()

    async def SetSession(
        self, request: sessions_pb2.SetSessionRequest, context: _Context
    ) -> sessions_pb2.SetSessionResponse:
        """Compare-and-set."""
        self._runtime.writer.require_room()
        claims = self._access.any_of(request.capability, CHANGE_RIGHTS)
        owner = Owner(*claims.tenant_scope())
        subject = request.session_id.encode()
        await faults.reach("kv.before_session")
        call = self._answers.call(sessions_pb2.SetSessionResponse, owner.tenant, subject, request)
        kept = call.known()
        if kept is None:
            order = _order_of(request, owner)
            keeper = self._runtime.store.session_keeper
            session, level = keeper.set(order, self._runtime.now().wall_s)
            answer = sessions_pb2.SetSessionResponse(session=session_to_proto(session))
            kept = call.keep(answer, level)
        await self._runtime.acked(kept.level)
        await faults.reach("kv.after_session")
        return kept.answer

    async def GetSession(
        self, request: sessions_pb2.GetSessionRequest, context: _Context
    ) -> sessions_pb2.GetSessionResponse:
        """One session, with its tree."""
        owner = self._reader(request.capability)
        session = self._runtime.core.sessions.find(request.session_id, owner)
        answer = sessions_pb2.GetSessionResponse(session=session_to_proto(session))
        if request.with_lineage and session.home is None:
            answer.lineage.extend(await self._lineage(session.log_id, owner))
        return answer

    async def ListSessions(
        self, request: sessions_pb2.ListSessionsRequest, context: _Context
    ) -> sessions_pb2.ListSessionsResponse:
        """The owner's."""
        owner = self._reader(request.capability)
        found = self._runtime.core.sessions.of_owner(owner)
        return sessions_pb2.ListSessionsResponse(sessions=map(session_to_proto, found))

    async def DeleteSession(
        self, request: sessions_pb2.DeleteSessionRequest, context: _Context
    ) -> sessions_pb2.DeleteSessionResponse:
        """Ends a name."""
        self._runtime.writer.require_room()
        claims = self._access.any_of(request.capability, CHANGE_RIGHTS)
        owner = Owner(*claims.tenant_scope())
        subject = request.session_id.encode()
        call = self._answers.call(
            sessions_pb2.DeleteSessionResponse, owner.tenant, subject, request
        )
        kept = call.known()
        if kept is None:
            keeper = self._runtime.store.session_keeper
            keeper.delete(request.session_id, owner, request.expected_generation or None)
            kept = call.keep(sessions_pb2.DeleteSessionResponse())
        await self._runtime.acked(kept.level)
        return kept.answer

    async def FindAnswer(
        self, request: sessions_pb2.FindAnswerRequest, context: _Context
    ) -> sessions_pb2.FindAnswerResponse:
        """The log that has a request's answer to its end, else the newest of its attempts."""
        owner = self._reader(request.capability)
        wanted = wire.require_request_id(request.request_id)
        found: LogState | None = None
        async for logs in all_logs(self._runtime.core):
            for log in logs:
                is_better = found is None or _rank(found) <= _rank(log)
                if is_better and owner_of(log) == owner and _answers(log, wanted):
                    found = log
        if found is None:
            raise ServiceError(
                Reason.NOT_FOUND, "no answer of this request is kept here", field="request_id"
            )
        head = common_pb2.LogPosition(
            log_id=found.log_id, generation=found.generation, position=found.position
        )
        return sessions_pb2.FindAnswerResponse(head=head, complete=_is_complete(found))

    # --- parts ------------------------------------------------------------------------------

    def _reader(self, capability: str) -> Owner:
        claims = self._access.any_of(capability, (Right.READ,))
        return Owner(*claims.tenant_scope())

    async def _lineage(self, log_id: bytes, owner: Owner) -> list[sessions_pb2.LineageLog]:
        lineage = Lineage()
        async for logs in all_logs(self._runtime.core):
            lineage.add([log for log in logs if owner_of(log) == owner])
        tree = lineage.tree(lineage.root_of(log_id))
        return [self._node(*node) for node in islice(tree, LINEAGE_MAX)]

    def _node(self, log_id: bytes, log: LogState | None, depth: int) -> sessions_pb2.LineageLog:
        if log is None:
            return sessions_pb2.LineageLog(log_id=log_id, gone=True, depth=depth)
        names = self._runtime.core.sessions.named_by(log_id)
        return sessions_pb2.LineageLog(
            log_id=log_id,
            parent_log_id=log.parent_id or b"",
            parent_position=log.parent_position,
            position=log.position,
            prompt_tokens=log.prompt_tokens,
            request_id=log.request_id,
            open_time=timestamp_to_proto(log.opened_wall_s),
            session_ids=list(_ids(names)),
            depth=depth,
        )


def _answers(log: LogState, request_id: str) -> bool:
    """Whether a log is of a request: of its first attempt, a later one (a number behind the id), or
    of what went on elsewhere after a loss.
    """
    rest = log.request_id.removeprefix(request_id)
    is_named = log.request_id.startswith(request_id) and (
        not rest or rest.startswith((".", "-again-", "-fork-"))
    )
    return is_named and log.phase is not Phase.PREFILL


def _is_complete(log: LogState) -> bool:
    return log.finish_reason not in (None, CANCELLED)


def _rank(log: LogState) -> tuple[bool, float]:
    return _is_complete(log), log.opened_wall_s


def _ids(sessions: list[SessionState]) -> Iterator[str]:
    return (one.session_id for one in sessions)


def _order_of(request: sessions_pb2.SetSessionRequest, owner: Owner) -> SetOrder:
    if not request.HasField("head"):
        raise invalid("head", "must be given: a log and a position")
    head = Head(
        log_id=wire.require_log_id(request.head.log_id, "head.log_id"),
        position=request.head.position,
        home=request.home or None,
    )
    return SetOrder(
        session_id=request.session_id,
        owner=owner,
        expected=request.expected_generation or None,
        head=head,
        ttl_s=duration_from_proto(request.ttl) if request.HasField("ttl") else None,
        parent_id=request.parent_session_id or None,
        parent_position=request.parent_position,
    )


def session_to_proto(session: SessionState) -> sessions_pb2.StoredSession:
    """As callers see it."""
    return sessions_pb2.StoredSession(
        session_id=session.session_id,
        generation=session.generation,
        head=common_pb2.LogPosition(
            log_id=session.log_id,
            generation=session.log_generation,
            position=session.position,
        ),
        home=session.home or "",
        create_time=timestamp_to_proto(session.created_wall_s),
        expire_time=timestamp_to_proto(session.expires_wall_s),
        ttl=duration_to_proto(session.ttl_s),
        parent_session_id=session.parent_id or "",
        parent_position=session.parent_position,
    )

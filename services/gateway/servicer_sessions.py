"""`SessionsService` on gRPC: the same sessions as over HTTP.

Owns the messages. Raises ServiceError; the interceptor aborts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import grpc

from baton.api.gateway.v1 import gateway_pb2, sessions_pb2, sessions_pb2_grpc
from baton.errors import Reason, ServiceError
from baton.wire.durations import duration_from_proto, timestamp_to_proto
from services.gateway.auth import Authenticator
from services.gateway.client_sessions import LineageLog, Session
from services.gateway.core import GatewayCore
from services.gateway.request import ChatTurn, Tenant
from services.gateway.servicer import turns_of
from services.gateway.session_calls import Changed
from services.gateway.session_edit import Anchor, EditOrder, refused

SERVICE_NAME: Final = "baton.api.gateway.v1.SessionsService"

_Context = grpc.aio.ServicerContext[Any, Any]


class SessionsServicer(sessions_pb2_grpc.SessionsServiceServicer):
    """Implements SessionsService over one core."""

    def __init__(self, core: GatewayCore, authenticator: Authenticator) -> None:
        self._core = core
        self._authenticator = authenticator

    async def CreateSession(
        self, request: sessions_pb2.CreateSessionRequest, context: _Context
    ) -> sessions_pb2.CreateSessionResponse:
        """From an id or from messages."""
        tenant = self._tenant(context)
        source = getattr(request, "from") or None
        if (source is None) == (not request.HasField("chat")):
            raise refused("from", "or chat must be given, and not both")
        turns = turns_of(request.chat) if source is None else ()
        async with self._core.limits.admitted(tenant.name, 1):
            changed = await self._core.sessions.create(
                tenant, source=source, turns=turns, ttl_s=_ttl(request)
            )
        return sessions_pb2.CreateSessionResponse(
            session=_session(changed.session), tokens=_recount(changed)
        )

    async def GetSession(
        self, request: sessions_pb2.GetSessionRequest, context: _Context
    ) -> sessions_pb2.GetSessionResponse:
        """One, with its messages."""
        tenant = self._tenant(context)
        sessions = self._core.sessions
        session, lineage = await sessions.find(tenant, request.id, with_lineage=True)
        turns = await sessions.messages(tenant, session.head)
        return sessions_pb2.GetSessionResponse(
            session=_session(session, turns), lineage=[_log(one) for one in lineage]
        )

    async def ListSessions(
        self, request: sessions_pb2.ListSessionsRequest, context: _Context
    ) -> sessions_pb2.ListSessionsResponse:
        """The caller's."""
        found = await self._core.sessions.listed(self._tenant(context))
        return sessions_pb2.ListSessionsResponse(sessions=[_session(one) for one in found])

    async def EditSession(
        self, request: sessions_pb2.EditSessionRequest, context: _Context
    ) -> sessions_pb2.EditSessionResponse:
        """Replaces a range."""
        tenant = self._tenant(context)
        order = _order(request)
        async with self._core.limits.admitted(tenant.name, 1):
            changed = await self._core.sessions.edit(
                tenant, request.id, order, request.generation or None
            )
        return sessions_pb2.EditSessionResponse(
            session=_session(changed.session), tokens=_recount(changed)
        )

    async def TruncateSession(
        self, request: sessions_pb2.TruncateSessionRequest, context: _Context
    ) -> sessions_pb2.TruncateSessionResponse:
        """Keeps the first tokens."""
        changed = await self._core.sessions.truncate(
            self._tenant(context), request.id, request.position, request.generation or None
        )
        return sessions_pb2.TruncateSessionResponse(
            session=_session(changed.session), tokens=_recount(changed)
        )

    async def ForkSession(
        self, request: sessions_pb2.ForkSessionRequest, context: _Context
    ) -> sessions_pb2.ForkSessionResponse:
        """A new one."""
        changed = await self._core.sessions.fork(
            self._tenant(context),
            request.id,
            position=request.position or None,
            ttl_s=_ttl(request),
        )
        return sessions_pb2.ForkSessionResponse(
            session=_session(changed.session), tokens=_recount(changed)
        )

    async def DeleteSession(
        self, request: sessions_pb2.DeleteSessionRequest, context: _Context
    ) -> sessions_pb2.DeleteSessionResponse:
        """Ends a name."""
        await self._core.sessions.delete(self._tenant(context), request.id)
        return sessions_pb2.DeleteSessionResponse()

    def _tenant(self, context: _Context) -> Tenant:
        found = dict(context.invocation_metadata() or ()).get("authorization")
        return self._authenticator.tenant_of(found if isinstance(found, str) else None)


def _ttl(
    request: sessions_pb2.CreateSessionRequest | sessions_pb2.ForkSessionRequest,
) -> float | None:
    return duration_from_proto(request.ttl) if request.HasField("ttl") else None


def _order(request: sessions_pb2.EditSessionRequest) -> EditOrder:
    if not request.HasField("start"):
        raise refused("start", "must be given: a token, a text or a message")
    start = _anchor(request.start, "start")
    end = _anchor(request.end, "end") if request.HasField("end") else None
    match request.WhichOneof("replacement"):
        case "token_ids":
            return EditOrder(start=start, end=end, token_ids=tuple(request.token_ids.ids))
        case "messages":
            turns = turns_of(request.messages) if request.messages.messages else ()
            return EditOrder(start=start, end=end, turns=turns)
        case _:
            return EditOrder(start=start, end=end, text=request.text)


def _anchor(message: sessions_pb2.EditAnchor, name: str) -> Anchor:
    has_token, has_message = message.HasField("token"), message.HasField("message")
    if has_token + has_message + bool(message.text) != 1:
        raise refused(name, "must have exactly one of token, text and message")
    if message.HasField("byte") and not has_message:
        raise ServiceError(Reason.INVALID_REQUEST, f"{name}.byte needs message", field=name)
    return Anchor(
        token=message.token if has_token else None,
        text=message.text or None,
        message=message.message if has_message else None,
        byte=message.byte if message.HasField("byte") else None,
    )


def _session(session: Session, turns: Sequence[ChatTurn] = ()) -> sessions_pb2.Session:
    return sessions_pb2.Session(
        id=session.session_id,
        generation=session.generation,
        tokens=session.head.position,
        log_id=session.head.log_id,
        create_time=timestamp_to_proto(session.create_wall_s),
        expire_time=timestamp_to_proto(session.expire_wall_s),
        parent_id=session.parent_id or "",
        parent_position=session.parent_position,
        messages=[
            gateway_pb2.ChatMessage(role=turn.role.value, content=turn.content) for turn in turns
        ],
    )


def _log(log: LineageLog) -> sessions_pb2.SessionLog:
    message = sessions_pb2.SessionLog(
        log_id=log.log_id,
        parent_log_id=log.parent_log_id,
        parent_position=log.parent_position,
        tokens=log.tokens,
        prompt_tokens=log.prompt_tokens,
        request_id=log.request_id,
        session_ids=log.session_ids,
        gone=log.is_gone,
        depth=log.depth,
    )
    if log.opened_wall_s is not None:
        message.open_time.CopyFrom(timestamp_to_proto(log.opened_wall_s))
    return message


def _recount(changed: Changed) -> sessions_pb2.Recount:
    recount = changed.recount
    return sessions_pb2.Recount(
        reused=recount.reused,
        recomputed=recount.recomputed,
        dropped=recount.dropped,
        inserted=recount.inserted,
    )

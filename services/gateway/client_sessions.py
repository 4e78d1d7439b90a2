"""Calls about sessions and the histories they name, in the gateway's own words.

Owns the messages and the deadline of each call. Never decides. `_pb2` stops here.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc, sessions_pb2, sessions_pb2_grpc
from baton.client import ChannelPool
from baton.errors import Reason, ServiceError
from baton.wire.durations import duration_from_proto, duration_to_proto, timestamp_from_proto
from services.gateway.clients import CONTROL_TIMEOUT_S
from services.gateway.request import ParentLog, SessionRef

REPLAY_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A session as its store (`address`) has it; the head may be at another one."""

    session_id: str
    generation: int
    head: ParentLog
    address: str
    create_wall_s: float
    expire_wall_s: float
    ttl_s: float
    parent_id: str | None
    parent_position: int

    @property
    def ref(self) -> SessionRef:
        """What a change of it begins with."""
        return SessionRef(
            session_id=self.session_id,
            generation=self.generation,
            address=self.address,
            ttl_s=self.ttl_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageLog:
    """One log of the tree that a session's history grew in. `opened_wall_s` None: it is gone."""

    log_id: bytes
    parent_log_id: bytes
    parent_position: int
    tokens: int
    prompt_tokens: int
    request_id: str
    opened_wall_s: float | None
    session_ids: tuple[str, ...]
    depth: int

    @property
    def is_gone(self) -> bool:
        """Whether it ended; what grew out of it stands on its own."""
        return self.opened_wall_s is None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSession:
    """What a session is to be. `expected` None: it is new; then `ttl_s` and the parent count."""

    session_id: str
    expected: int | None
    head: ParentLog
    ttl_s: float | None = None
    parent_id: str | None = None
    parent_position: int = 0


class SessionClient:
    """Calls to the session services of kvstores, and reads of logs."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    def _stub(self, address: str) -> sessions_pb2_grpc.SessionServiceAsyncStub:
        return sessions_pb2_grpc.SessionServiceStub(self._channels.get(address))

    def _logs(self, address: str) -> kvstore_pb2_grpc.KVStoreServiceAsyncStub:
        return kvstore_pb2_grpc.KVStoreServiceStub(self._channels.get(address))

    async def get(
        self, address: str, session_id: str, capability: str, *, with_lineage: bool = False
    ) -> tuple[Session, list[LineageLog]]:
        """One session, and the tree around its head where it is wanted; NOT_FOUND."""
        message = sessions_pb2.GetSessionRequest(
            capability=capability, session_id=session_id, with_lineage=with_lineage
        )
        answer = await self._stub(address).GetSession(message, timeout=CONTROL_TIMEOUT_S)
        return _session(answer.session, address), [_node(one) for one in answer.lineage]

    async def listed(self, address: str, capability: str) -> list[Session]:
        """The tenant's sessions at a store."""
        message = sessions_pb2.ListSessionsRequest(capability=capability)
        answer = await self._stub(address).ListSessions(message, timeout=CONTROL_TIMEOUT_S)
        return [_session(one, address) for one in answer.sessions]

    async def set(
        self, address: str, order: SetSession, *, capability: str, request_id: str
    ) -> Session:
        """Compare-and-set at a store; STALE_GENERATION when somebody was faster."""
        head = order.head
        message = sessions_pb2.SetSessionRequest(
            capability=capability,
            request_id=request_id,
            session_id=order.session_id,
            expected_generation=order.expected or 0,
            head=common_pb2.LogPosition(log_id=head.log_id, position=head.position),
            home="" if head.address == address else head.address,
            parent_session_id=order.parent_id or "",
            parent_position=order.parent_position,
        )
        if order.ttl_s is not None:
            message.ttl.CopyFrom(duration_to_proto(order.ttl_s))
        answer = await self._stub(address).SetSession(message, timeout=CONTROL_TIMEOUT_S)
        return _session(answer.session, address)

    async def delete(
        self, address: str, session_id: str, *, capability: str, request_id: str
    ) -> None:
        """End a name."""
        message = sessions_pb2.DeleteSessionRequest(
            capability=capability, request_id=request_id, session_id=session_id
        )
        await self._stub(address).DeleteSession(message, timeout=CONTROL_TIMEOUT_S)

    async def find_answer(
        self, address: str, request_id: str, capability: str
    ) -> tuple[ParentLog, bool]:
        """The log of an answer, and whether the answer ended in it; NOT_FOUND."""
        message = sessions_pb2.FindAnswerRequest(capability=capability, request_id=request_id)
        answer = await self._stub(address).FindAnswer(message, timeout=CONTROL_TIMEOUT_S)
        head = answer.head
        log = ParentLog(log_id=head.log_id, position=head.position, address=address)
        return log, answer.complete

    async def tokens(self, log: ParentLog, capability: str) -> tuple[int, ...]:
        """Token ids [0, position) of a log."""
        message = kvstore_pb2.ReplayLogRequest(log_id=log.log_id, capability=capability)
        ids: list[int] = []
        call = self._logs(log.address).ReplayLog(message, timeout=REPLAY_TIMEOUT_S)
        async for piece in call:
            if piece.WhichOneof("content") == "tokens":
                ids.extend(piece.tokens.token_ids)
        if len(ids) < log.position:
            raise ServiceError(
                Reason.LOG_NOT_FOUND, "the history has fewer tokens than it had", field="id"
            )
        return tuple(ids[: log.position])

    async def fork(self, log: ParentLog, log_id: bytes, *, capability: str, request_id: str) -> int:
        """A new log of the first tokens, without a writer; how many of them have KV."""
        message = kvstore_pb2.ForkRequest(
            parent=common_pb2.LogPosition(log_id=log.log_id, position=log.position),
            log_id=log_id,
            capability=capability,
            request_id=request_id,
        )
        answer = await self._logs(log.address).Fork(message, timeout=CONTROL_TIMEOUT_S)
        return answer.cached_tokens


def _session(message: sessions_pb2.StoredSession, address: str) -> Session:
    return Session(
        session_id=message.session_id,
        generation=message.generation,
        head=ParentLog(
            log_id=message.head.log_id,
            position=message.head.position,
            address=message.home or address,
        ),
        address=address,
        create_wall_s=timestamp_from_proto(message.create_time),
        expire_wall_s=timestamp_from_proto(message.expire_time),
        ttl_s=duration_from_proto(message.ttl),
        parent_id=message.parent_session_id or None,
        parent_position=message.parent_position,
    )


def _node(message: sessions_pb2.LineageLog) -> LineageLog:
    return LineageLog(
        log_id=message.log_id,
        parent_log_id=message.parent_log_id,
        parent_position=message.parent_position,
        tokens=message.position,
        prompt_tokens=message.prompt_tokens,
        request_id=message.request_id,
        opened_wall_s=None if message.gone else timestamp_from_proto(message.open_time),
        session_ids=tuple(message.session_ids),
        depth=message.depth,
    )

"""The new home's calls: ExpectLog, AdoptLog, DescribeMove; and its word to the old home at the end.

Owns the order of a move at the side that drives it: follow, make room, Move, fetch, verify, OPEN,
answer, MoveDone once OPEN is on disk. Once the old home has given the log away it is opened here
whatever happens to the rest: KV that cannot be had is computed again from the tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from baton.api.kvstore.v1 import kvstore_pb2
from baton.capability import Right
from baton.clock import WaitingClock
from baton.errors import Reason, ServiceError
from baton.faults import faults
from baton.rpc.deadline import remaining_s
from baton.tracing import span
from baton.wire.durations import duration_from_proto, duration_to_proto
from services.kvstore import wire
from services.kvstore.access import Access
from services.kvstore.answers import Answers
from services.kvstore.core import invalid
from services.kvstore.identity import Identity
from services.kvstore.log.fields import BodyReader
from services.kvstore.log.state import Snapshot
from services.kvstore.moving.arrival import Arrival, Arrivals, Stage, given_up
from services.kvstore.moving.fetching import Fetcher, Job
from services.kvstore.moving.follow_rpc import Follower, FollowParts
from services.kvstore.moving.measures import MoveMeasures, MoveTimes
from services.kvstore.moving.old_home_rpc import Peers
from services.kvstore.moving.own import require_kvstore
from services.kvstore.moving.page_bytes import content_bytes
from services.kvstore.moving.transport import Source
from services.kvstore.runtime import Runtime
from services.kvstore.state import AckLevel, LogState

MOVE_TIMEOUT_S: Final = 10.0
GIVE_TIMEOUT_S: Final = 4.0
"""Longest wait for the old home to give the log away: it is there, or somebody recomputes."""

FETCH_SHARE: Final = 0.8
"""Part of a move's time that may pass before the rest of the KV is given up."""

MOVE_RETRY_PAUSE_S: Final = 0.1
SNAPSHOT_BYTES_MAX: Final = 32 << 20
DONE_TRIES_MAX: Final = 6
DONE_TIMEOUT_S: Final = 2.0
DONE_PAUSE_S: Final = 0.2

PASSING: Final = frozenset(
    {Reason.WORKER_LOST, Reason.DEADLINE_EXCEEDED, Reason.QUEUE_FULL, Reason.CANCELLED}
)
"""The old home restarts or is busy: ask again while there is time."""

Spawn = Callable[[str, Coroutine[Any, Any, None]], None]

_log = structlog.stdlib.get_logger("services.kvstore.moving")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptParts:
    """What the new home's calls work with."""

    runtime: Runtime
    access: Access
    identity: Identity
    arrivals: Arrivals
    fetcher: Fetcher
    follow: FollowParts
    peers: Peers
    clock: WaitingClock
    executor: Executor
    measures: MoveMeasures
    spawn: Spawn
    own_address: Callable[[], str]


class NewHomeCalls:
    """Brings logs here."""

    def __init__(self, parts: AdoptParts) -> None:
        self._parts = parts
        self._runtime = parts.runtime
        self._arrivals = parts.arrivals
        self._followers: dict[bytes, Follower] = {}
        self._turns: dict[bytes, _Turn] = {}
        self._answers = Answers()

    # --- following --------------------------------------------------------------------------

    async def expect(self, request: kvstore_pb2.ExpectLogRequest) -> kvstore_pb2.ExpectLogResponse:
        """ExpectLog."""
        self._begin(request)
        return kvstore_pb2.ExpectLogResponse()

    def _begin(
        self, request: kvstore_pb2.ExpectLogRequest | kvstore_pb2.AdoptLogRequest
    ) -> tuple[Arrival, Follower]:
        """The arrival and who follows it; both are there already when the call is repeated."""
        log_id = wire.require_log_id(request.log_id)
        wire.require_request_id(request.request_id)
        claims = self._parts.access.tenant(request.capability, Right.MOVE, log_id=log_id)
        if not request.from_kvstore_address:
            raise invalid("from_kvstore_address", "name the log's home")
        if self._runtime.store.is_draining:
            raise ServiceError(Reason.DRAINING, "the kvstore is draining; leave the log there")
        tenant, _ = claims.tenant_scope()
        now_s = self._parts.clock.monotonic_s()
        arrival = self._arrivals.follow(log_id, tenant, request.from_kvstore_address, now_s)
        known = self._followers.get(log_id)
        if known is not None and known.arrival is arrival and not known.is_over:
            return arrival, known
        source = Source(
            address=request.from_kvstore_address, log_id=log_id, capability=request.capability
        )
        follower = Follower(self._parts.follow, source, arrival)
        self._followers[log_id] = follower
        self._parts.spawn(f"follow-{log_id.hex()}", self._followed(follower))
        return arrival, follower

    async def _followed(self, follower: Follower) -> None:
        """Follows to the end; a log that ended at its home is not waited for."""
        await follower.run()
        log_id, arrival = follower.source.log_id, follower.arrival
        if self._followers.get(log_id) is follower:
            del self._followers[log_id]
        is_coming = self._arrivals.find(log_id) is arrival and arrival.stage is Stage.FOLLOWING
        if is_coming and not follower.may_move:
            self._arrivals.abandon(log_id)
            self._runtime.order_work()

    def give_up(self, log_id: bytes, capability: str) -> bool:
        """The log is not wanted any more; False when it is not coming here."""
        arrival = self._arrivals.find(log_id)
        if arrival is None or arrival.stage is Stage.OPENED:
            return False
        rights = (Right.CANCEL, Right.WRITE, Right.OPEN, Right.ADMIN)
        claims = self._parts.access.any_of(capability, rights, log_id=log_id)
        if claims.tenant != arrival.tenant:
            return False
        self._arrivals.abandon(log_id)
        follower = self._followers.get(log_id)
        if follower is not None:
            follower.stop()
        self._runtime.order_work()
        return True

    def sweep(self) -> None:
        """Lets go of replicas whose lease passed."""
        for log_id in self._arrivals.expire(self._parts.clock.monotonic_s()):
            _log.info("replica_expired", log_id=log_id.hex())
            follower = self._followers.get(log_id)
            if follower is not None:
                follower.stop()
        self._runtime.order_work()

    # --- the move ---------------------------------------------------------------------------

    async def adopt(self, request: kvstore_pb2.AdoptLogRequest) -> kvstore_pb2.AdoptLogResponse:
        """AdoptLog."""
        log_id = wire.require_log_id(request.log_id)
        claims = self._parts.access.tenant(request.capability, Right.MOVE, log_id=log_id)
        tenant, _ = claims.tenant_scope()
        call = self._answers.call(kvstore_pb2.AdoptLogResponse, tenant, log_id, request)
        async with self._alone(log_id):
            known = call.known()
            if known is not None:
                return known.answer
            if self._arrivals.home_generation(log_id, request.generation) is not None:
                log = self._parts.access.log(request.capability, (Right.MOVE,), log_id)
                return _answer(log, MoveTimes(transport_reason="the log was here already"))
            return call.keep(await self._measured(request)).answer

    @asynccontextmanager
    async def _alone(self, log_id: bytes) -> AsyncIterator[None]:
        """One move of a log at a time; a repeated call waits for the first."""
        turn = self._turns.setdefault(log_id, _Turn())
        turn.users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.users -= 1
            if turn.users == 0:
                del self._turns[log_id]

    async def _measured(self, request: kvstore_pb2.AdoptLogRequest) -> kvstore_pb2.AdoptLogResponse:
        timeout_s = _timeout_s(request)
        began_s = self._parts.clock.monotonic_s()
        times = MoveTimes()
        bound = asyncio.timeout(timeout_s)
        try:
            with span("move", log_id=request.log_id.hex()) as traced:
                async with bound:
                    log = await self._moved(request, began_s + timeout_s, times)
                times.total_s = self._parts.clock.monotonic_s() - began_s
                traced.set(
                    hidden_transfer_share=times.hidden_share,
                    transfer_bytes=times.transfer_bytes,
                    transport=times.transport,
                )
        except ServiceError as error:
            self._failed(request.log_id, error.reason)
            raise
        except TimeoutError as error:
            self._failed(request.log_id, Reason.TRANSFER_TIMEOUT)
            raise _too_late(error) from error
        self._parts.measures.moved(times)
        return _answer(log, times)

    def _failed(self, log_id: bytes, reason: Reason) -> None:
        """What is here of the log stays for a lease: a repeated call goes on from it."""
        self._parts.measures.failed(reason)
        _log.warning("move_failed", log_id=log_id.hex(), reason=reason.value)

    async def _moved(
        self, request: kvstore_pb2.AdoptLogRequest, deadline_s: float, times: MoveTimes
    ) -> LogState:
        """The log, opened here."""
        arrival, follower = self._begin(request)
        arrival.deadline_s = max(arrival.deadline_s, deadline_s + self._arrivals.lease_s)
        clock = self._parts.clock
        give_until_s = min(deadline_s, clock.monotonic_s() + GIVE_TIMEOUT_S)
        if arrival.stage is Stage.FOLLOWING:
            head = await follower.head(give_until_s - clock.monotonic_s())
            await follower.settle(give_until_s - clock.monotonic_s())
            await self._writes_ended()
            if arrival.is_abandoned:
                raise given_up()
            self._arrivals.make_room(arrival, head.tokens)
            self._runtime.order_work()
            await faults.reach("adopt.before_move")
            arrival.choice = head.choice
            await self._given(request, arrival, give_until_s)
            await faults.reach("adopt.after_move")
        self._runtime.order_work()
        return await self._received(follower.source, arrival, deadline_s, times)

    async def _writes_ended(self) -> None:
        """The page thread is idle of what was handed to it: an early copy that was ended, too."""
        await asyncio.get_running_loop().run_in_executor(self._parts.executor, _nothing)

    async def _given(
        self, request: kvstore_pb2.AdoptLogRequest, arrival: Arrival, deadline_s: float
    ) -> None:
        """The old home gives the log away; asked again while it restarts."""
        move = kvstore_pb2.MoveRequest(
            log_id=request.log_id,
            generation=request.generation,
            to_kvstore_address=self._parts.own_address(),
            capability=request.capability,
            request_id=request.request_id,
        )
        answer = await self._asked(request.from_kvstore_address, move, deadline_s)
        body = answer.snapshot or await self._snapshot(request, answer, deadline_s)
        reader = BodyReader(body)
        snapshot = Snapshot.decode(reader)
        reader.finish()
        self._arrivals.moved(arrival, answer.generation, snapshot, answer.chunk_list_digest)

    async def _asked(
        self, address: str, move: kvstore_pb2.MoveRequest, deadline_s: float
    ) -> kvstore_pb2.MoveResponse:
        stub, clock = self._parts.peers.stub(address), self._parts.clock
        while True:
            left_s = max(deadline_s - clock.monotonic_s(), 0.001)
            try:
                return await stub.Move(move, timeout=left_s)
            except ServiceError as error:
                if error.reason not in PASSING:
                    raise
                if clock.monotonic_s() + MOVE_RETRY_PAUSE_S >= deadline_s:
                    raise _too_late(error) from error
                await clock.wait(asyncio.Event(), MOVE_RETRY_PAUSE_S)

    async def _snapshot(
        self,
        request: kvstore_pb2.AdoptLogRequest,
        moved: kvstore_pb2.MoveResponse,
        deadline_s: float,
    ) -> bytes:
        """The state of a long log, in pieces; never more than was promised."""
        size = moved.snapshot_bytes
        if not 0 < size <= SNAPSHOT_BYTES_MAX:
            raise invalid("snapshot_bytes", f"must be 1 to {SNAPSHOT_BYTES_MAX}")
        ask = kvstore_pb2.FetchSnapshotRequest(
            log_id=request.log_id, generation=moved.generation, capability=request.capability
        )
        left_s = max(deadline_s - self._parts.clock.monotonic_s(), 0.001)
        stub = self._parts.peers.stub(request.from_kvstore_address)
        body = bytearray()
        async for piece in stub.FetchSnapshot(ask, timeout=left_s):
            body += piece.chunk
            if len(body) > size:
                raise invalid("chunk", "more bytes than the old home promised")
        if len(body) != size:
            raise ServiceError(Reason.WORKER_LOST, "the log's state ended early")
        return bytes(body)

    async def _received(
        self, source: Source, arrival: Arrival, deadline_s: float, times: MoveTimes
    ) -> LogState:
        """Everything that can be had of the moved log, then the log itself."""
        parts = self._parts
        choice = arrival.choice
        assert choice is not None
        times.transport, times.transport_reason = choice.name, choice.reason
        now_s = parts.clock.monotonic_s()
        fetch_until_s = now_s + FETCH_SHARE * max(deadline_s - now_s, 0.0)
        job = Job(choice=choice, source=source, arrival=arrival, times=times)
        await parts.fetcher.rest(job, fetch_until_s)
        await self._writes_ended()
        await faults.reach("adopt.before_open")
        if arrival.is_abandoned:
            raise given_up()
        self._count(arrival, times)
        log = self._arrivals.open(arrival, self._runtime.now())
        identity = parts.identity
        log.numeric_class = identity.class_text(log.numeric_class_id)
        log.base_numeric_class = identity.class_text(log.base_class_id)
        parts.spawn(f"move-done-{log.log_id.hex()}", self._tell(source, log.log_id, log.generation))
        await self._runtime.acked(log.ack_level)
        await faults.reach("adopt.after_open")
        return log

    def _count(self, arrival: Arrival, times: MoveTimes) -> None:
        geometry = self._runtime.arena.geometry
        for index in range(arrival.usable):
            page = arrival.pages[index]
            size = content_bytes(geometry, page.row)
            times.transfer_bytes += size
            times.hidden_bytes += size if page.is_early else 0

    # --- the end ----------------------------------------------------------------------------

    async def _tell(self, source: Source, log_id: bytes, generation: int) -> None:
        """MoveDone, once OPEN is on disk; where it does not get through the old home will ask."""
        try:
            await self._runtime.acked(AckLevel.DISK)
            await faults.reach("adopt.before_done")
            for attempt in range(DONE_TRIES_MAX):
                if await self._told(source, log_id, generation):
                    break
                await self._parts.clock.wait(asyncio.Event(), DONE_PAUSE_S * (attempt + 1))
        except ServiceError as error:
            _log.warning("move_done_failed", log_id=log_id.hex(), reason=error.reason.value)
        finally:
            self._arrivals.confirmed(log_id)

    async def _told(self, source: Source, log_id: bytes, generation: int) -> bool:
        """False where it is worth trying again."""
        request = kvstore_pb2.MoveDoneRequest(
            log_id=log_id,
            generation=generation,
            capability=self._parts.peers.right.mint(log_id),
        )
        try:
            await self._parts.peers.stub(source.address).MoveDone(request, timeout=DONE_TIMEOUT_S)
        except ServiceError as error:
            if error.reason in PASSING:
                return False
            raise
        return True

    def describe(
        self, request: kvstore_pb2.DescribeMoveRequest
    ) -> kvstore_pb2.DescribeMoveResponse:
        """DescribeMove."""
        log_id = wire.require_log_id(request.log_id)
        claims = self._parts.access.any_of(request.capability, (Right.MOVE,), log_id=log_id)
        require_kvstore(claims)
        is_open = self._arrivals.has_opened(log_id, request.generation)
        return kvstore_pb2.DescribeMoveResponse(opened=is_open)


@dataclass(slots=True)
class _Turn:
    """Whose turn it is to move one log, and how many want it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


def _nothing() -> None:
    """What the page thread does when it is only asked to be done with the rest."""


def _too_late(why: Exception) -> ServiceError:
    return ServiceError(
        Reason.TRANSFER_TIMEOUT,
        "the log did not move in time; fork it or compute it again",
        field="timeout",
        metadata={
            "step": "move",
            "why": why.reason.value if isinstance(why, ServiceError) else "deadline",
        },
    )


def _timeout_s(request: kvstore_pb2.AdoptLogRequest) -> float:
    """As asked for, within what is left of the call."""
    wanted_s = duration_from_proto(request.timeout) if request.HasField("timeout") else 0.0
    left_s = remaining_s()
    timeout_s = min(wanted_s or MOVE_TIMEOUT_S, MOVE_TIMEOUT_S * 30)
    return timeout_s if left_s is None else min(timeout_s, left_s)


def _answer(log: LogState, times: MoveTimes) -> kvstore_pb2.AdoptLogResponse:
    return kvstore_pb2.AdoptLogResponse(
        generation=log.generation,
        position=log.position,
        committed_position=log.committed,
        transfer_bytes=times.transfer_bytes,
        hidden_bytes=times.hidden_bytes,
        hidden_transfer_share=times.hidden_share,
        transport=times.transport,
        transport_reason=times.transport_reason,
        queue=duration_to_proto(times.queue_s),
        transfer=duration_to_proto(times.transfer_s),
        verify=duration_to_proto(times.verify_s),
        total=duration_to_proto(times.total_s),
        registration=duration_to_proto(times.registration_s),
        sync=duration_to_proto(times.sync_s),
    )

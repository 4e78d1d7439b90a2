"""`KVStoreService` on gRPC: each call handed to who serves it.

Owns nothing but the hand-over, the arena's description and the drain. Raises ServiceError; the
interceptor aborts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import grpc

from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.capability import Right
from baton.errors import Reason, ServiceError
from baton.wire.blob_chunks import get_response_bytes, put_request_of
from baton.wire.durations import duration_from_proto
from services.kvstore import wire
from services.kvstore.access import Access
from services.kvstore.append_rpc import AppendCalls
from services.kvstore.blob_rpc import BlobCalls
from services.kvstore.blob_wire import GetPiece, PutPiece, taken_in_time
from services.kvstore.log_rpc import LogCalls
from services.kvstore.moving.assembly import Moves
from services.kvstore.park_rpc import ParkCalls
from services.kvstore.prefix_rpc import PrefixCalls
from services.kvstore.runtime import SWEEP_INTERVAL_S, Runtime
from services.kvstore.worker_rpc import WorkerCalls

SERVICE_NAME: Final = "baton.api.kvstore.v1.KVStoreService"
APPEND_METHOD: Final = f"/{SERVICE_NAME}/Append"
DRAIN_S_MAX: Final = 600.0

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Who serves which calls."""

    logs: LogCalls
    appends: AppendCalls
    blobs: BlobCalls
    prefixes: PrefixCalls
    workers: WorkerCalls
    parking: ParkCalls
    moves: Moves | None = None


class KVStoreServicer(kvstore_pb2_grpc.KVStoreServiceServicer):
    """See the module."""

    def __init__(self, runtime: Runtime, access: Access, calls: Calls) -> None:
        self._runtime = runtime
        self._access = access
        self._calls = calls

    async def Attach(
        self, request: kvstore_pb2.AttachRequest, context: _Context
    ) -> kvstore_pb2.AttachResponse:
        """Admits a worker to the arena."""
        return await self._calls.workers.attach(request)

    async def Open(
        self, request: kvstore_pb2.OpenRequest, context: _Context
    ) -> kvstore_pb2.OpenResponse:
        """Creates a log."""
        self._runtime.writer.require_room()
        return await self._calls.logs.open(request)

    async def Grant(
        self, request: kvstore_pb2.GrantRequest, context: _Context
    ) -> kvstore_pb2.GrantResponse:
        """Gives a writer more pages."""
        self._runtime.writer.require_room()
        return await self._calls.logs.grant(request)

    async def CommitCheckpoint(
        self, request: kvstore_pb2.CommitCheckpointRequest, context: _Context
    ) -> kvstore_pb2.CommitCheckpointResponse:
        """Records KV."""
        self._runtime.writer.require_room()
        return await self._calls.logs.checkpoint(request)

    async def Seal(
        self, request: kvstore_pb2.SealRequest, context: _Context
    ) -> kvstore_pb2.SealResponse:
        """Ends prefill."""
        self._runtime.writer.require_room()
        return await self._calls.logs.seal(request)

    async def Take(
        self, request: kvstore_pb2.TakeRequest, context: _Context
    ) -> kvstore_pb2.TakeResponse:
        """Makes the caller the writer."""
        self._runtime.writer.require_room()
        return await self._calls.logs.take(request)

    @property
    def _moves(self) -> Moves:
        """Who moves logs; a store without other kvstores has nobody."""
        if self._calls.moves is None:
            raise ServiceError(
                Reason.UNSUPPORTED,
                "this kvstore does not move logs; take the log where it is, or open a new one "
                "elsewhere from its tokens",
            )
        return self._calls.moves

    async def Move(
        self, request: kvstore_pb2.MoveRequest, context: _Context
    ) -> kvstore_pb2.MoveResponse:
        """Gives a log away."""
        self._runtime.writer.require_room()
        return await self._moves.old_home.move(request)

    async def ExpectLog(
        self, request: kvstore_pb2.ExpectLogRequest, context: _Context
    ) -> kvstore_pb2.ExpectLogResponse:
        """Follows a log that will come here."""
        self._runtime.writer.require_room()
        return await self._moves.new_home.expect(request)

    async def AdoptLog(
        self, request: kvstore_pb2.AdoptLogRequest, context: _Context
    ) -> kvstore_pb2.AdoptLogResponse:
        """Brings a log here."""
        self._runtime.writer.require_room()
        return await self._moves.new_home.adopt(request)

    async def FollowLog(
        self, request: kvstore_pb2.FollowLogRequest, context: _Context
    ) -> AsyncIterator[kvstore_pb2.FollowLogResponse]:
        """Tells what is committed."""
        async with aclosing(self._moves.old_home.follow(request)) as responses:
            async for response in responses:
                yield response

    async def FetchPages(
        self, request: kvstore_pb2.FetchPagesRequest, context: _Context
    ) -> AsyncIterator[kvstore_pb2.FetchPagesResponse]:
        """Sends pages."""
        async with aclosing(self._moves.old_home.pages(request)) as responses:
            async for response in responses:
                yield response

    async def FetchSnapshot(
        self, request: kvstore_pb2.FetchSnapshotRequest, context: _Context
    ) -> AsyncIterator[kvstore_pb2.FetchSnapshotResponse]:
        """Sends a moved log's state."""
        async with aclosing(self._moves.old_home.snapshot(request)) as responses:
            async for response in responses:
                yield response

    async def MoveDone(
        self, request: kvstore_pb2.MoveDoneRequest, context: _Context
    ) -> kvstore_pb2.MoveDoneResponse:
        """Drops a moved log's pages."""
        return await self._moves.old_home.done(request)

    async def DescribeMove(
        self, request: kvstore_pb2.DescribeMoveRequest, context: _Context
    ) -> kvstore_pb2.DescribeMoveResponse:
        """Says whether a log was opened here."""
        return self._moves.new_home.describe(request)

    async def Append(
        self, request_iterator: AsyncIterator[kvstore_pb2.AppendRequest], context: _Context
    ) -> AsyncIterator[kvstore_pb2.AppendResponse]:
        """Writes tokens in group commits."""
        async for response in self._calls.appends.append(request_iterator):
            yield response

    async def Truncate(
        self, request: kvstore_pb2.TruncateRequest, context: _Context
    ) -> kvstore_pb2.TruncateResponse:
        """Cuts a log back."""
        self._runtime.writer.require_room()
        return await self._calls.logs.truncate(request)

    async def Fork(
        self, request: kvstore_pb2.ForkRequest, context: _Context
    ) -> kvstore_pb2.ForkResponse:
        """Starts a log from another."""
        self._runtime.writer.require_room()
        return await self._calls.logs.fork(request)

    async def Cancel(
        self, request: kvstore_pb2.CancelRequest, context: _Context
    ) -> kvstore_pb2.CancelResponse:
        """Fences a log; one that is only coming here is not wanted any more."""
        moves = self._calls.moves
        if moves is not None and moves.new_home.give_up(request.log_id, request.capability):
            return kvstore_pb2.CancelResponse()
        return await self._calls.logs.cancel(request)

    async def Close(
        self, request: kvstore_pb2.CloseRequest, context: _Context
    ) -> kvstore_pb2.CloseResponse:
        """Ends a log."""
        return await self._calls.logs.close(request)

    async def Park(
        self, request: kvstore_pb2.ParkRequest, context: _Context
    ) -> kvstore_pb2.ParkResponse:
        """Leaves a log without a writer."""
        self._runtime.writer.require_room()
        return await self._calls.parking.park(request)

    async def RenewLeases(
        self, request: kvstore_pb2.RenewLeasesRequest, context: _Context
    ) -> kvstore_pb2.RenewLeasesResponse:
        """Keeps logs owned."""
        return self._calls.workers.renew(request)

    async def Distrust(
        self, request: kvstore_pb2.DistrustRequest, context: _Context
    ) -> kvstore_pb2.DistrustResponse:
        """Gives up KV that its worker does not vouch for."""
        return await self._calls.workers.distrust(request)

    async def ReplayLog(
        self, request: kvstore_pb2.ReplayLogRequest, context: _Context
    ) -> AsyncIterator[kvstore_pb2.ReplayLogResponse]:
        """Streams a log."""
        for piece in await self._calls.logs.replay(request):
            yield piece

    async def PutBlob(
        self, request_iterator: AsyncIterator[PutPiece], context: _Context
    ) -> kvstore_pb2.PutBlobResponse:
        """Stores KV as a log."""
        self._runtime.writer.require_room()
        return await self._calls.blobs.put(request_iterator)

    # Chunks come encoded: `add_to_server` sends them as they are.
    async def GetBlob(  # type: ignore[override]
        self, request: kvstore_pb2.GetBlobRequest, context: _Context
    ) -> AsyncIterator[GetPiece]:
        """Streams KV."""
        async with aclosing(taken_in_time(self._calls.blobs.get(request))) as responses:
            async for response in responses:
                yield response

    async def DescribeBlob(
        self, request: kvstore_pb2.DescribeBlobRequest, context: _Context
    ) -> kvstore_pb2.DescribeBlobResponse:
        """Says what GetBlob would send."""
        return await self._calls.blobs.describe(request)

    async def MapLog(
        self, request: kvstore_pb2.MapLogRequest, context: _Context
    ) -> kvstore_pb2.MapLogResponse:
        """Pins pages for a reader on this node."""
        return await self._calls.blobs.map(request)

    async def UnmapLog(
        self, request: kvstore_pb2.UnmapLogRequest, context: _Context
    ) -> kvstore_pb2.UnmapLogResponse:
        """Lets them go."""
        return self._calls.blobs.unmap(request)

    async def Publish(
        self, request: kvstore_pb2.PublishRequest, context: _Context
    ) -> kvstore_pb2.PublishResponse:
        """Offers a prefix."""
        self._runtime.writer.require_room()
        return await self._calls.prefixes.publish(request)

    async def Revoke(
        self, request: kvstore_pb2.RevokeRequest, context: _Context
    ) -> kvstore_pb2.RevokeResponse:
        """Withdraws a prefix."""
        self._runtime.writer.require_room()
        return await self._calls.prefixes.revoke(request)

    async def ListPrefixes(
        self, request: kvstore_pb2.ListPrefixesRequest, context: _Context
    ) -> kvstore_pb2.ListPrefixesResponse:
        """Lists published prefixes."""
        return self._calls.prefixes.list(request)

    async def DescribeLog(
        self, request: kvstore_pb2.DescribeLogRequest, context: _Context
    ) -> kvstore_pb2.DescribeLogResponse:
        """Says where a log stands."""
        return self._calls.logs.describe(request)

    async def DescribeArena(
        self, request: kvstore_pb2.DescribeArenaRequest, context: _Context
    ) -> kvstore_pb2.DescribeArenaResponse:
        """Counts pages."""
        self._access.genuine(request.capability)
        core = self._runtime.core
        counts = core.pool.counts()
        logs_open = sum(log.is_open for log in core.logs.values())
        return kvstore_pb2.DescribeArenaResponse(
            arena=wire.arena_to_proto(self._runtime.arena),
            pages_free=counts.free,
            pages_granted=counts.granted,
            pages_live=counts.live,
            pages_shared=counts.shared,
            pages_quarantined=counts.quarantined,
            logs_open=logs_open,
            logs_kept=len(core.logs) - logs_open,
            leases=len(core.leases),
            transfers_open=self._calls.blobs.transfers_open,
            nvme=wire.nvme_to_proto(self._runtime.nvme),
        )

    async def ProbeTransfer(
        self, request: kvstore_pb2.ProbeTransferRequest, context: _Context
    ) -> AsyncIterator[kvstore_pb2.ProbeTransferResponse]:
        """Sends generated bytes."""
        async with aclosing(self._moves.probes.probe(request)) as responses:
            async for response in responses:
                yield response

    async def Drain(
        self, request: kvstore_pb2.DrainRequest, context: _Context
    ) -> kvstore_pb2.DrainResponse:
        """Refuses new logs and waits for the written ones."""
        self._access.any_of(request.capability, (Right.ADMIN,))
        timeout_s = min(duration_from_proto(request.timeout), DRAIN_S_MAX)
        remaining = await drain(self._runtime, timeout_s)
        return kvstore_pb2.DrainResponse(remaining=remaining)


def add_to_server(servicer: KVStoreServicer, server: grpc.aio.Server) -> None:
    """Registers every call. The first handler of a name counts: those whose payload protobuf would
    copy are there before the generated ones.
    """
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "PutBlob": grpc.stream_unary_rpc_method_handler(
            servicer.PutBlob,
            request_deserializer=put_request_of,
            response_serializer=kvstore_pb2.PutBlobResponse.SerializeToString,
        ),
        "GetBlob": grpc.unary_stream_rpc_method_handler(
            servicer.GetBlob,
            request_deserializer=kvstore_pb2.GetBlobRequest.FromString,
            response_serializer=get_response_bytes,
        ),
    }
    generic = grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)
    server.add_generic_rpc_handlers((generic,))
    kvstore_pb2_grpc.add_KVStoreServiceServicer_to_server(servicer, server)


async def drain(runtime: Runtime, timeout_s: float) -> int:
    """Refuses new logs; returns how many still have a writer when none has or time is over."""
    runtime.store.is_draining = True
    deadline_s = runtime.clock.monotonic_s() + timeout_s
    never = asyncio.Event()
    while runtime.core.leases and runtime.clock.monotonic_s() < deadline_s:
        left_s = deadline_s - runtime.clock.monotonic_s()
        try:
            async with asyncio.timeout(min(left_s, SWEEP_INTERVAL_S)):
                await never.wait()
        except TimeoutError:
            continue
    return len(runtime.core.leases)

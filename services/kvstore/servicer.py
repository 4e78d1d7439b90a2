"""`KVStoreService` on gRPC: each call handed to who serves it.

Owns nothing but the hand-over, the arena's description and the drain. Raises ServiceError; the
interceptor aborts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import grpc

from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.capability import Right
from baton.errors import Reason, ServiceError
from baton.wire.durations import duration_from_proto
from services.kvstore import wire
from services.kvstore.access import Access
from services.kvstore.append_rpc import AppendCalls
from services.kvstore.blob_rpc import BlobCalls
from services.kvstore.log_rpc import LogCalls
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
        return await self._calls.logs.open(request)

    async def Grant(
        self, request: kvstore_pb2.GrantRequest, context: _Context
    ) -> kvstore_pb2.GrantResponse:
        """Gives a writer more pages."""
        return await self._calls.logs.grant(request)

    async def CommitCheckpoint(
        self, request: kvstore_pb2.CommitCheckpointRequest, context: _Context
    ) -> kvstore_pb2.CommitCheckpointResponse:
        """Records KV."""
        return await self._calls.logs.checkpoint(request)

    async def Seal(
        self, request: kvstore_pb2.SealRequest, context: _Context
    ) -> kvstore_pb2.SealResponse:
        """Ends prefill."""
        return await self._calls.logs.seal(request)

    async def Take(
        self, request: kvstore_pb2.TakeRequest, context: _Context
    ) -> kvstore_pb2.TakeResponse:
        """Makes the caller the writer."""
        return await self._calls.logs.take(request)

    async def Move(
        self, request: kvstore_pb2.MoveRequest, context: _Context
    ) -> kvstore_pb2.MoveResponse:
        """Refuses: logs do not change their kvstore yet."""
        raise ServiceError(
            Reason.UNSUPPORTED,
            "this version does not move logs between kvstores; take the log at its own kvstore, "
            "or open a new one elsewhere from its tokens",
            field="to_kvstore_address",
        )

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
        return await self._calls.logs.truncate(request)

    async def Fork(
        self, request: kvstore_pb2.ForkRequest, context: _Context
    ) -> kvstore_pb2.ForkResponse:
        """Starts a log from another."""
        return await self._calls.logs.fork(request)

    async def Cancel(
        self, request: kvstore_pb2.CancelRequest, context: _Context
    ) -> kvstore_pb2.CancelResponse:
        """Fences a log."""
        return await self._calls.logs.cancel(request)

    async def Close(
        self, request: kvstore_pb2.CloseRequest, context: _Context
    ) -> kvstore_pb2.CloseResponse:
        """Ends a log."""
        return await self._calls.logs.close(request)

    async def RenewLeases(
        self, request: kvstore_pb2.RenewLeasesRequest, context: _Context
    ) -> kvstore_pb2.RenewLeasesResponse:
        """Keeps logs owned."""
        return self._calls.workers.renew(request)

    async def ReplayLog(
        self, request: kvstore_pb2.ReplayLogRequest, context: _Context
    ) -> AsyncIterator[kvstore_pb2.ReplayLogResponse]:
        """Streams a log."""
        for piece in await self._calls.logs.replay(request):
            yield piece

    async def PutBlob(
        self, request_iterator: AsyncIterator[kvstore_pb2.PutBlobRequest], context: _Context
    ) -> kvstore_pb2.PutBlobResponse:
        """Stores KV as a log."""
        return await self._calls.blobs.put(request_iterator)

    async def GetBlob(
        self, request: kvstore_pb2.GetBlobRequest, context: _Context
    ) -> AsyncIterator[kvstore_pb2.GetBlobResponse]:
        """Streams KV."""
        async for response in self._calls.blobs.get(request):
            yield response

    async def DescribeBlob(
        self, request: kvstore_pb2.DescribeBlobRequest, context: _Context
    ) -> kvstore_pb2.DescribeBlobResponse:
        """Says what GetBlob would send."""
        return await self._calls.blobs.describe(request)

    async def Publish(
        self, request: kvstore_pb2.PublishRequest, context: _Context
    ) -> kvstore_pb2.PublishResponse:
        """Offers a prefix."""
        return await self._calls.prefixes.publish(request)

    async def Revoke(
        self, request: kvstore_pb2.RevokeRequest, context: _Context
    ) -> kvstore_pb2.RevokeResponse:
        """Withdraws a prefix."""
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
        )

    async def Drain(
        self, request: kvstore_pb2.DrainRequest, context: _Context
    ) -> kvstore_pb2.DrainResponse:
        """Refuses new logs and waits for the written ones."""
        self._access.any_of(request.capability, (Right.ADMIN,))
        timeout_s = min(duration_from_proto(request.timeout), DRAIN_S_MAX)
        remaining = await drain(self._runtime, timeout_s)
        return kvstore_pb2.DrainResponse(remaining=remaining)


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

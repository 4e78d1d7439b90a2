"""The `ucx` transport: agreed on over FetchPages, its bytes beside it. Both ends' protocol.

Owns the one-time target (an address of UCX and random tags) that the new home gives with its call,
and the token that makes it worth believing: an address that is not one ends the process that
decodes it, so only a kvstore, which has the cluster's key, may name one. Never touches `ucxx`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, Final

from blake3 import blake3

from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.capability import Claims
from baton.client import ChannelPool
from baton.errors import Reason, ServiceError
from baton.faults import faults
from baton.kv.crc import ByteArray, as_bytes, crc32c
from baton.wire.durations import duration_from_proto, duration_to_proto
from services.kvstore import wire
from services.kvstore.arena import Arena
from services.kvstore.core import invalid
from services.kvstore.moving.own import OwnRight, require_kvstore
from services.kvstore.moving.page_bytes import row_content
from services.kvstore.moving.transport import UCX, Sink, Source, Waits
from services.kvstore.moving.ucx import (
    ADDRESS_BYTES_MAX,
    HOST_BYTES,
    Lane,
    Target,
    UcxPlane,
)
from services.kvstore.state import PageRow

THREADS: Final = 8
"""As many transfers as come and go at a time, so that none waits for another's end."""


class UcxTransport:
    """See the module."""

    name = UCX

    def __init__(
        self,
        plane: UcxPlane,
        executor: Executor,
        channels: ChannelPool,
        right: OwnRight,
        block_tokens: int,
    ) -> None:
        self._plane = plane
        self._executor = executor
        self._channels = channels
        self._right = right
        self._block_tokens = block_tokens

    async def fetch(self, source: Source, blocks: range, sink: Sink, timeout_s: float) -> Waits:
        """See `transport.Transport`."""
        began_s = time.perf_counter()
        loop = asyncio.get_running_loop()
        lane = await loop.run_in_executor(self._executor, self._plane.take)
        stopped = threading.Event()
        try:
            registered_s = time.perf_counter()
            waits = await self._fetched(_Run(source, blocks, lane, stopped), sink, timeout_s)
        finally:
            # The thread that fills pages sees it and drives the lane no more.
            stopped.set()
            sink.when_idle(lambda: self._plane.give_back(lane))
        return Waits(
            queue_s=waits.queue_s,
            registration_s=registered_s - began_s,
            sync_s=waits.sync_s,
        )

    async def _fetched(self, run: _Run, sink: Sink, timeout_s: float) -> Waits:
        stub = kvstore_pb2_grpc.KVStoreServiceStub(self._channels.get(run.source.address))
        target = self._plane.target(run.lane)
        request = kvstore_pb2.FetchPagesRequest(
            log_id=run.source.log_id,
            capability=run.source.capability,
            first_index=run.blocks.start,
            page_count=len(run.blocks),
            transport=UCX,
            ucx=target_to_proto(target, self._right, run.source.log_id),
        )
        began_s, first_s = time.perf_counter(), 0.0
        filling: asyncio.Future[None] | None = None
        call = stub.FetchPages(request, timeout=timeout_s)
        try:
            async for response in call:
                match response.WhichOneof("content"):
                    case "pages":
                        first_s = time.perf_counter() - began_s
                        rows = [
                            wire.moved_row_of(row, self._block_tokens)
                            for row in response.pages.pages
                        ]
                        sink.begin(rows)
                        filling = sink.place(self._executor, self._fill(run, target))
                        filling.add_done_callback(lambda done: _end_broken(call, done))
                    case "end":
                        await sink.flush()
                        sink.sent(response.end.page_crc32c)
                        queue_s = duration_from_proto(response.end.queue)
                        sync_s = duration_from_proto(response.end.sync)
                        return Waits(queue_s=queue_s, sync_s=max(first_s - queue_s, 0.0) + sync_s)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if filling is None or not filling.done() or (task is not None and task.cancelling()):
                raise
            # The pages broke off and took the call with them: that is what there is to say.
            await sink.flush()
        finally:
            call.cancel()
        raise ServiceError(Reason.WORKER_LOST, "the call beside the pages ended early")

    def _fill(
        self, run: _Run, target: Target
    ) -> Callable[[Sequence[ByteArray], Callable[[int], None]], None]:
        def fill(buffers: Sequence[ByteArray], arrived: Callable[[int], None]) -> None:
            self._plane.receive(run.lane, target, buffers, arrived, run.stopped)

        return fill


class UcxSender:
    """The old home's end: pages out of its arena."""

    def __init__(self, plane: UcxPlane, executor: Executor) -> None:
        self._plane = plane
        self._executor = executor

    async def send(
        self, target: Target, arena: Arena, rows: Sequence[PageRow]
    ) -> kvstore_pb2.FetchEnd:
        """Returns when the other side has taken everything; the rows' pages are pinned. However it
        ends, nothing reads them any more then.
        """
        stopped, crcs = threading.Event(), list[int]()

        def pages() -> Iterator[ByteArray]:
            for row in rows:
                content = row_content(arena, row)
                crcs.append(crc32c(content))
                if faults.is_enabled:
                    content = as_bytes(faults.flipped("move.mid_send", content.tobytes()))
                yield content

        sending = asyncio.get_running_loop().run_in_executor(
            self._executor, self._plane.send, target, pages(), stopped
        )
        try:
            sync_s = await asyncio.shield(sending)
        finally:
            stopped.set()
            await asyncio.wait({sending})
        return kvstore_pb2.FetchEnd(sync=duration_to_proto(sync_s), page_crc32c=crcs)


class _Run:
    """One fetch: whose pages, on which lane, and how to give it up."""

    def __init__(self, source: Source, blocks: range, lane: Lane, stopped: threading.Event) -> None:
        self.source = source
        self.blocks = blocks
        self.lane = lane
        self.stopped = stopped


def _end_broken(call: Any, filling: asyncio.Future[None]) -> None:
    """Pages that broke off do not wait for the other side to notice."""
    if not filling.cancelled() and filling.exception() is not None:
        call.cancel()


def target_to_proto(target: Target, right: OwnRight, log_id: bytes) -> kvstore_pb2.UcxTarget:
    """With the token that is good for this target alone."""
    return kvstore_pb2.UcxTarget(
        address=target.address,
        tag=target.tag,
        host=target.host,
        token=right.mint(log_id, purpose=_purpose(target)),
    )


def target_of(message: kvstore_pb2.UcxTarget, verify: Callable[[str], Claims]) -> Target:
    """The target, if a kvstore named it. `verify` gives the token's claims or refuses it.

    INVALID_REQUEST for sizes; PERMISSION_DENIED for a token of anybody or anything else.
    """
    if not 0 < len(message.address) <= ADDRESS_BYTES_MAX:
        raise invalid("ucx.address", f"must be 1 to {ADDRESS_BYTES_MAX} bytes")
    if len(message.host) != HOST_BYTES:
        raise invalid("ucx.host", f"must be {HOST_BYTES} bytes")
    target = Target(address=message.address, tag=message.tag, host=message.host)
    claims = verify(message.token)
    require_kvstore(claims)
    if claims.request_id != _purpose(target):
        raise ServiceError(
            Reason.PERMISSION_DENIED, "the token is for another target", field="ucx.token"
        )
    return target


def _purpose(target: Target) -> str:
    """What a token says it is for."""
    told = target.address + target.tag.to_bytes(8, "little") + target.host
    return f"ucx:{blake3(told).hexdigest()}"

"""The `stream` transport: pages as chunks of a gRPC stream. The new home's end of FetchPages.

Owns the call and its deadline. One chunk is written while the next one arrives; gRPC's flow control
bounds what is under way beyond that.
"""

from __future__ import annotations

import time
from typing import Final

from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.client import ChannelPool
from baton.errors import Reason, ServiceError
from baton.faults import faults
from baton.wire.durations import duration_from_proto
from services.kvstore import wire
from services.kvstore.moving.transport import STREAM, Sink, Source, Waits

PAGES_MAX: Final = 2048


class StreamTransport:
    """See the module."""

    name = STREAM

    def __init__(self, channels: ChannelPool, block_tokens: int) -> None:
        self._channels = channels
        self._block_tokens = block_tokens

    async def fetch(self, source: Source, blocks: range, sink: Sink, timeout_s: float) -> Waits:
        """See `transport.Transport`."""
        stub = kvstore_pb2_grpc.KVStoreServiceStub(self._channels.get(source.address))
        request = kvstore_pb2.FetchPagesRequest(
            log_id=source.log_id,
            capability=source.capability,
            first_index=blocks.start,
            page_count=len(blocks),
            transport=STREAM,
        )
        began_s, first_s = time.perf_counter(), 0.0
        call = stub.FetchPages(request, timeout=timeout_s)
        try:
            async for response in call:
                match response.WhichOneof("content"):
                    case "pages":
                        first_s = time.perf_counter() - began_s
                        sink.begin(
                            [
                                wire.moved_row_of(row, self._block_tokens)
                                for row in response.pages.pages
                            ]
                        )
                    case "chunk":
                        chunk = response.chunk
                        await faults.reach("adopt.mid_fetch")
                        await sink.chunk(chunk.offset_bytes, chunk.data, chunk.crc32c)
                    case "end":
                        queue_s = duration_from_proto(response.end.queue)
                        return Waits(queue_s=queue_s, sync_s=max(first_s - queue_s, 0.0))
        finally:
            call.cancel()
        raise ServiceError(Reason.WORKER_LOST, "the stream of pages ended early")

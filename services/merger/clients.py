"""Calls to a kvstore's blob interface; messages stop here.

Owns the deadline of each call and the check of what a store sends against its descriptor.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.client import ChannelPool
from baton.errors import Reason, ServiceError
from baton.kv.manifest import Segment

CHUNK_BYTES_MAX: Final = 1 << 20
FETCH_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobStart:
    """A blob begins: its descriptor as the store sent it (protobuf bytes), and its size."""

    descriptor: bytes
    payload_bytes: int


Piece = BlobStart | bytes


class BlobClient:
    """Blob calls at one store."""

    def __init__(self, channels: ChannelPool, address: str) -> None:
        self._stub = kvstore_pb2_grpc.KVStoreServiceStub(channels.get(address))

    async def tokens_at(self, segment: Segment, position: int, capability: str) -> int:
        """How many tokens one blob from `position` on would hold."""
        message = kvstore_pb2.DescribeBlobRequest(
            log_id=segment.log_id, from_position=position, to_position=0, capability=capability
        )
        answer = await self._stub.DescribeBlob(message, timeout=FETCH_TIMEOUT_S)
        return int(answer.descriptor.total_tokens)

    async def blob(
        self, segment: Segment, bounds: tuple[int, int], capability: str
    ) -> AsyncIterator[Piece]:
        """One blob of positions [bounds); BLOB_INVALID when it does not keep to its descriptor."""
        message = kvstore_pb2.GetBlobRequest(
            log_id=segment.log_id,
            from_position=bounds[0],
            to_position=bounds[1],
            capability=capability,
        )
        left: int | None = None
        async for response in self._stub.GetBlob(message, timeout=FETCH_TIMEOUT_S):
            if response.WhichOneof("content") == "descriptor":
                if left is not None or response.descriptor.kv_digest != segment.kv_digest:
                    raise _broken("its descriptor is not that of the segment")
                left = response.descriptor.payload_bytes
                raw = response.descriptor.SerializeToString()
                yield BlobStart(descriptor=raw, payload_bytes=left)
                continue
            if left is None or not 0 < len(response.chunk) <= min(left, CHUNK_BYTES_MAX):
                raise _broken("a chunk does not fit its descriptor")
            left -= len(response.chunk)
            yield response.chunk
        if left != 0:
            raise _broken("it ended early")


def _broken(why: str) -> ServiceError:
    return ServiceError(Reason.BLOB_INVALID, f"the store's blob is malformed: {why}")

"""A manifest's KV as blobs: fetched from the store that is home to its parts, and passed on.

Owns the order of blobs and the bounds of what passes through. Never keeps more than one message
and never changes a byte: descriptors carry the CRCs, and whoever reads checks them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.client import ChannelPool
from baton.errors import Reason, ServiceError
from baton.kv.manifest import Manifest, Segment

CHUNK_BYTES_MAX: Final = 1 << 20
FETCH_TIMEOUT_S: Final = 120.0
BLOBS_PER_SEGMENT_MAX: Final = 65_536

Piece = common_pb2.KvBlobDescriptor | bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MaterialiseOrder:
    """What to fetch from where, with one capability per segment."""

    manifest: Manifest
    kvstore_address: str
    capabilities: tuple[str, ...]


class Materialiser:
    """Fetches blobs over a pool of channels."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    async def pieces(self, order: MaterialiseOrder) -> AsyncIterator[Piece]:
        """Descriptors and payload chunks, part by part in position order."""
        segments: Sequence[Segment] = order.manifest.segments
        if len(order.capabilities) != len(segments):
            raise ServiceError(
                Reason.INVALID_REQUEST,
                f"capabilities must hold {len(segments)} tokens, one per part",
                field="capabilities",
            )
        if not order.kvstore_address:
            raise ServiceError(
                Reason.INVALID_REQUEST, "kvstore_address must be given", field="kvstore_address"
            )
        stub = kvstore_pb2_grpc.KVStoreServiceStub(self._channels.get(order.kvstore_address))
        for segment, capability in zip(segments, order.capabilities, strict=True):
            async for piece in _segment_pieces(stub, segment, capability):
                yield piece


async def _segment_pieces(
    stub: kvstore_pb2_grpc.KVStoreServiceAsyncStub, segment: Segment, capability: str
) -> AsyncIterator[Piece]:
    """The blobs of one segment; a range over the blob limit is several."""
    position = segment.from_position
    for _ in range(BLOBS_PER_SEGMENT_MAX):
        if position >= segment.to_position:
            return
        end = await _blob_end(stub, segment, position, capability)
        async for piece in _blob(stub, segment, (position, end), capability):
            yield piece
        position = end
    raise ServiceError(Reason.INTERNAL, "a segment needs too many blobs")


async def _blob_end(
    stub: kvstore_pb2_grpc.KVStoreServiceAsyncStub,
    segment: Segment,
    position: int,
    capability: str,
) -> int:
    """Where the next blob ends: at the segment's end, or where the store says one is full."""
    answer = await stub.DescribeBlob(
        kvstore_pb2.DescribeBlobRequest(
            log_id=segment.log_id, from_position=position, to_position=0, capability=capability
        ),
        timeout=FETCH_TIMEOUT_S,
    )
    end = min(position + answer.descriptor.total_tokens, segment.to_position)
    if end <= position:
        raise ServiceError(
            Reason.BLOB_INVALID,
            f"the store has no KV at position {position} of this segment",
            field="manifest",
        )
    return int(end)


async def _blob(
    stub: kvstore_pb2_grpc.KVStoreServiceAsyncStub,
    segment: Segment,
    bounds: tuple[int, int],
    capability: str,
) -> AsyncIterator[Piece]:
    message = kvstore_pb2.GetBlobRequest(
        log_id=segment.log_id,
        from_position=bounds[0],
        to_position=bounds[1],
        capability=capability,
    )
    left: int | None = None
    async for response in stub.GetBlob(message, timeout=FETCH_TIMEOUT_S):
        if response.WhichOneof("content") == "descriptor":
            if left is not None or response.descriptor.kv_digest != segment.kv_digest:
                raise _broken("its descriptor is not that of the segment")
            left = response.descriptor.payload_bytes
            yield response.descriptor
            continue
        if left is None or not 0 < len(response.chunk) <= min(left, CHUNK_BYTES_MAX):
            raise _broken("a chunk does not fit its descriptor")
        left -= len(response.chunk)
        yield response.chunk
    if left != 0:
        raise _broken("it ended early")


def _broken(why: str) -> ServiceError:
    return ServiceError(Reason.BLOB_INVALID, f"the store's blob is malformed: {why}")

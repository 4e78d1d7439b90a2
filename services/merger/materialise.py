"""A manifest's KV as blobs: fetched from the store that is home to its parts, and passed on.

Owns the order of blobs and the bounds of what passes through. Never keeps more than one message
and never changes a byte: descriptors carry the CRCs, and whoever reads checks them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from baton.client import ChannelPool
from baton.errors import Reason, ServiceError
from baton.kv.manifest import Manifest, Segment
from services.merger.clients import BlobClient, Piece

BLOBS_PER_SEGMENT_MAX: Final = 65_536


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
        client = BlobClient(self._channels, order.kvstore_address)
        for segment, capability in zip(segments, order.capabilities, strict=True):
            async for piece in _segment_pieces(client, segment, capability):
                yield piece


async def _segment_pieces(
    client: BlobClient, segment: Segment, capability: str
) -> AsyncIterator[Piece]:
    """The blobs of one segment; a range over the blob limit is several."""
    position = segment.from_position
    for _ in range(BLOBS_PER_SEGMENT_MAX):
        if position >= segment.to_position:
            return
        tokens = await client.tokens_at(segment, position, capability)
        end = min(position + tokens, segment.to_position)
        if end <= position:
            raise ServiceError(
                Reason.BLOB_INVALID,
                f"the store has no KV at position {position} of this segment",
                field="manifest",
            )
        async for piece in client.blob(segment, (position, end), capability):
            yield piece
        position = end
    raise ServiceError(Reason.INTERNAL, "a segment needs too many blobs")

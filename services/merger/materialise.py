"""A manifest's KV as blobs: fetched from the store that is home to its parts, and passed on.

Owns the order of blobs, the bounds of what passes through, and the check that it is the history
that the manifest says: every part is compared with its log's generation before a byte flows, and
the token ids that come with the KV with the history digest at each part's end. Never keeps more
than one message and the ids of one blob, and never changes a byte: descriptors carry the CRCs, and
whoever reads checks them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from baton.client import ChannelPool
from baton.errors import Reason, ServiceError
from baton.kv.blob import TOKEN_ID_BYTES, split_range
from baton.kv.digests import HistoryDigest
from baton.kv.manifest import Manifest, Segment, refuse
from baton.kv.splice import check_generation
from services.merger.clients import BlobClient, Piece

TRANSFERS_MAX: Final = 16
"""Materialize calls under way; each holds a message of a blob in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaterialiseOrder:
    """What to fetch from where, with one capability per segment."""

    manifest: Manifest
    kvstore_address: str
    capabilities: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A segment, checked at its store, and the ranges whose blobs are small enough."""

    index: int
    segment: Segment
    capability: str
    ranges: list[tuple[int, int]]


class Materialiser:
    """Fetches blobs over a pool of channels."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels
        self.under_way = 0
        """Calls that hold a place now."""

    async def messages(self, order: MaterialiseOrder) -> AsyncGenerator[Piece, None]:
        """Descriptors and payload chunks, part by part in position order.

        Raises STALE_GENERATION, INVALID_REQUEST or what the store says, each naming the segment.
        """
        segments = order.manifest.segments
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
        with self._transfer():
            client = BlobClient(self._channels, order.kvstore_address)
            parts = [
                await _part(client, index, segment, order.capabilities[index])
                for index, segment in enumerate(segments)
            ]
            history = HistoryDigest(order.manifest.kv_digest, order.manifest.block_tokens)
            for part in parts:
                async with aclosing(_part_pieces(client, part, history)) as pieces:
                    async for piece in pieces:
                        yield piece

    @contextmanager
    def _transfer(self) -> Iterator[None]:
        if self.under_way >= TRANSFERS_MAX:
            raise ServiceError(
                Reason.QUEUE_FULL,
                f"{TRANSFERS_MAX} manifests are being materialised; retry or ask another merger",
                retry_after_s=0.5,
            )
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1


async def _part(client: BlobClient, index: int, segment: Segment, capability: str) -> _Part:
    """Asks the store about the segment: before a byte flows."""
    with _naming(index):
        header = await client.header_of(segment, capability)
    check_generation(segment, index, header.generation)
    ends = (segment.from_position, segment.to_position)
    ranges = split_range(header.geometry, *ends)
    return _Part(index=index, segment=segment, capability=capability, ranges=ranges)


async def _part_pieces(
    client: BlobClient, part: _Part, history: HistoryDigest
) -> AsyncGenerator[Piece, None]:
    """The part's blobs; `history` goes on over their token ids."""
    segment = part.segment
    for bounds in part.ranges:
        ids = _IdsOfBlob()
        with _naming(part.index):
            async with aclosing(client.blob(segment, bounds, part.capability)) as pieces:
                async for piece in pieces:
                    if piece.header is not None:
                        # It may have been cut between the question and the fetch.
                        check_generation(segment, part.index, piece.header.generation)
                    ids.take(piece)
                    yield piece
        history.extend(ids.token_ids())
    if history.digest() != segment.history_end:
        raise refuse("history_end", "is not that of the log's tokens", index=part.index)


class _IdsOfBlob:
    """The token ids of a blob that goes by: the last bytes of its payload."""

    def __init__(self) -> None:
        self._until_ids = 0
        self._bytes = bytearray()

    def take(self, piece: Piece) -> None:
        """The next message."""
        if piece.header is not None:
            header = piece.header
            self._until_ids = header.payload_bytes - TOKEN_ID_BYTES * header.total_tokens
        self._bytes += piece.payload[max(self._until_ids, 0) :]
        self._until_ids -= piece.payload.nbytes

    def token_ids(self) -> list[int]:
        """All of them, when the blob has gone by."""
        ids: list[int] = np.frombuffer(self._bytes, dtype="<u4").tolist()
        return ids


@contextmanager
def _naming(index: int) -> Iterator[None]:
    """What the store refuses names the segment."""
    try:
        yield
    except ServiceError as error:
        if "segment" in error.metadata:
            raise
        raise ServiceError(
            error.reason,
            f"segments[{index}]: {error.message}",
            field=f"segments[{index}]" + (f".{error.field}" if error.field else ""),
            metadata={**error.metadata, "segment": str(index)},
            retry_after_s=error.retry_after_s,
        ) from error

"""Calls to a kvstore's blob interface; messages stop here.

Owns the deadline of each call and the check of what a store sends against what was asked for. A
message of a blob has the same bytes in GetBlob's answer and in Materialize's: it is looked at and
passed on, never built again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final

from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.client import ChannelPool
from baton.errors import Reason, ServiceError
from baton.kv.blob import BlobHeader
from baton.kv.manifest import Segment
from baton.rpc.deadline import timeout_within
from baton.wire.blob import header_from_descriptor
from baton.wire.blob_chunks import CHUNK_BYTES_MAX, chunk_of

FETCH_TIMEOUT_S: Final = 120.0
_GET_BLOB: Final = "/baton.api.kvstore.v1.KVStoreService/GetBlob"
_EMPTY: Final = memoryview(b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A message of a blob as it came. The first has the blob's header, the others payload."""

    message: bytes
    header: BlobHeader | None = None
    payload: memoryview = _EMPTY


class BlobClient:
    """Blob calls at one store."""

    def __init__(self, channels: ChannelPool, address: str) -> None:
        channel = channels.get(address)
        self._stub = kvstore_pb2_grpc.KVStoreServiceStub(channel)
        self._get: Any = channel.unary_stream(
            _GET_BLOB, request_serializer=kvstore_pb2.GetBlobRequest.SerializeToString
        )

    async def header_of(self, segment: Segment, capability: str) -> BlobHeader:
        """What a blob of the segment's first token would say."""
        first = segment.from_position
        message = kvstore_pb2.DescribeBlobRequest(
            log_id=segment.log_id,
            from_position=first,
            to_position=first + 1,
            capability=capability,
        )
        timeout_s = timeout_within(FETCH_TIMEOUT_S)
        answer = await self._stub.DescribeBlob(message, timeout=timeout_s)
        return _checked(answer.descriptor, segment, (first, first + 1))

    async def blob(
        self, segment: Segment, bounds: tuple[int, int], capability: str
    ) -> AsyncGenerator[Piece, None]:
        """One blob of positions [bounds); BLOB_INVALID when it does not keep to its descriptor."""
        request = kvstore_pb2.GetBlobRequest(
            log_id=segment.log_id,
            from_position=bounds[0],
            to_position=bounds[1],
            capability=capability,
        )
        left: int | None = None
        call = self._get(request, timeout=timeout_within(FETCH_TIMEOUT_S))
        try:
            async for message in call:
                piece = _piece_of(message, segment, bounds)
                size = piece.payload.nbytes
                if piece.header is not None and left is None:
                    left = piece.header.payload_bytes
                elif left is None or not 0 < size <= min(left, CHUNK_BYTES_MAX):
                    raise _broken("a chunk does not fit its descriptor")
                else:
                    left -= size
                yield piece
        finally:
            # Whoever asked may be gone: the store need not read on.
            call.cancel()
        if left != 0:
            raise _broken("it ended early")


def _piece_of(message: bytes, segment: Segment, bounds: tuple[int, int]) -> Piece:
    payload = chunk_of(message)
    if payload is not None:
        return Piece(message=message, payload=payload)
    response = kvstore_pb2.GetBlobResponse.FromString(message)
    if response.WhichOneof("content") == "chunk":
        return Piece(message=message, payload=memoryview(response.chunk))
    return Piece(message=message, header=_checked(response.descriptor, segment, bounds))


def _checked(descriptor: Any, segment: Segment, bounds: tuple[int, int]) -> BlobHeader:
    """The header, if it is that of what was asked for."""
    header = header_from_descriptor(descriptor)
    for name, asked in (
        ("log_id", segment.log_id),
        ("kv_digest", segment.kv_digest),
        ("tokenizer_hash", segment.tokenizer_hash),
        ("block_tokens", segment.block_tokens),
        ("first_position", bounds[0]),
        ("end_position", bounds[1]),
    ):
        if getattr(header, name) != asked:
            raise _broken(f"its {name} is not what was asked for")
    return header


def _broken(why: str) -> ServiceError:
    return ServiceError(Reason.BLOB_INVALID, f"the store's blob is malformed: {why}")

"""The messages of a blob's streams, as they come and go.

Owns how long a sender may be silent and a receiver take nothing, and the bounds of a chunk. Never
touches a page.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Final, TypeVar

from baton.api.kvstore.v1 import kvstore_pb2
from baton.errors import Reason, ServiceError
from baton.faults import faults
from baton.kv.blob import invalid
from baton.wire.blob_chunks import CHUNK_BYTES_MAX, chunk_of, encoded_chunk
from services.kvstore.core import invalid as invalid_request

CHUNK_TIMEOUT_S: Final = 30.0
"""A sender that is silent for longer gives its transfer up: it holds pages. So does a receiver that
takes nothing for so long.
"""

_Piece = TypeVar("_Piece")

PutPiece = kvstore_pb2.PutBlobRequest | memoryview
"""The header, or a chunk's payload."""

GetPiece = kvstore_pb2.GetBlobResponse | bytes
"""The descriptor, or an encoded chunk."""


async def next_piece(requests: AsyncIterator[_Piece]) -> _Piece | None:
    """The next message; None at the stream's end. TRANSFER_TIMEOUT when none comes."""
    try:
        async with asyncio.timeout(CHUNK_TIMEOUT_S):
            return await anext(requests, None)
    except TimeoutError as error:
        raise ServiceError(
            Reason.TRANSFER_TIMEOUT, f"no chunk came for {CHUNK_TIMEOUT_S:g} s; send it all again"
        ) from error


async def next_chunk(requests: AsyncIterator[PutPiece]) -> memoryview | None:
    """The next chunk's payload; None at the end."""
    piece = await next_piece(requests)
    if piece is None:
        return None
    if not isinstance(piece, memoryview):
        raise invalid_request("chunk", "payload follows the header")
    if piece.nbytes > CHUNK_BYTES_MAX:
        raise invalid_request("chunk", f"at most {CHUNK_BYTES_MAX} bytes")
    return piece


async def taken_in_time(pieces: AsyncGenerator[GetPiece, None]) -> AsyncGenerator[GetPiece, None]:
    """The pieces, for a task that hands each on at once: it is cancelled, and they are closed,
    where handing one on takes too long. Such a call may have no deadline, and places are few.
    """
    async with aclosing(pieces):
        async for piece in pieces:
            async with asyncio.timeout(CHUNK_TIMEOUT_S):
                yield piece


async def collect(requests: AsyncIterator[PutPiece], payload_bytes: int) -> bytearray:
    """Exactly `payload_bytes` bytes of chunks; BLOB_INVALID for fewer or more."""
    payload = bytearray()
    while (chunk := await next_chunk(requests)) is not None:
        if len(payload) + chunk.nbytes > payload_bytes:
            raise invalid("payload", "bytes follow the blob's end", offset=payload_bytes)
        payload += chunk
    if len(payload) < payload_bytes:
        raise invalid(
            "payload", f"ends early, the header promises {payload_bytes}", offset=len(payload)
        )
    return payload


async def with_faults(chunk: bytes) -> bytes:
    """The chunk as the fault points leave it; nothing happens while they are off."""
    await faults.reach("kv.read_chunk")
    if not faults.is_enabled:
        return chunk
    payload = chunk_of(chunk)
    assert payload is not None
    data = faults.shorten("kv.read_chunk", bytes(payload))
    return encoded_chunk([faults.flipped("kv.read_chunk", data)])

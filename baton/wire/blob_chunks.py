"""The chunk messages of PutBlob and GetBlob, without a copy of the payload.

Owns their encoding by hand: one tag, one length, the bytes. A message that is anything else is
parsed by protobuf, so whoever speaks the contract is understood. The payload of a blob is megabytes
a message; protobuf would copy it twice on either side.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from baton.api.kvstore.v1 import kvstore_pb2

CHUNK_BYTES_MAX: Final = 1 << 20
"""A message's payload is at most so long."""

_TAG: Final = 0x12
"""Field 2, length-delimited: `chunk` of both messages."""

_LENGTH_BYTES_MAX: Final = 4


def encoded_chunk(pieces: Iterable[memoryview | bytes]) -> bytes:
    """The message, of either call, whose `chunk` is the pieces one after the other."""
    parts = list(pieces)
    size = sum(memoryview(part).nbytes for part in parts)
    return b"".join([_head(size), *parts])


def _head(size: int) -> bytes:
    head = bytearray((_TAG,))
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head)


def chunk_of(message: bytes) -> memoryview | None:
    """The payload of a message that is a chunk and nothing else; None for any other."""
    if not message or message[0] != _TAG:
        return None
    size, shift = 0, 0
    for at in range(1, min(1 + _LENGTH_BYTES_MAX, len(message))):
        size |= (message[at] & 0x7F) << shift
        shift += 7
        if message[at] < 0x80:
            payload = memoryview(message)[at + 1 :]
            return payload if payload.nbytes == size else None
    return None


def put_request_of(message: bytes) -> kvstore_pb2.PutBlobRequest | memoryview:
    """A message of PutBlob: its header, or a chunk's payload."""
    payload = chunk_of(message)
    if payload is not None:
        return payload
    request = kvstore_pb2.PutBlobRequest.FromString(message)
    if request.WhichOneof("content") == "chunk":
        return memoryview(request.chunk)
    return request


def put_request_bytes(request: kvstore_pb2.PutBlobRequest | bytes) -> bytes:
    """A message of PutBlob to send: a header, or an encoded chunk as it is."""
    return request if isinstance(request, bytes) else request.SerializeToString()


def get_response_of(message: bytes) -> kvstore_pb2.GetBlobResponse | memoryview:
    """A message of GetBlob: its descriptor, or a chunk's payload."""
    payload = chunk_of(message)
    if payload is not None:
        return payload
    response = kvstore_pb2.GetBlobResponse.FromString(message)
    if response.WhichOneof("content") == "chunk":
        return memoryview(response.chunk)
    return response


def get_response_bytes(response: kvstore_pb2.GetBlobResponse | bytes) -> bytes:
    """A message of GetBlob to send: a descriptor, or an encoded chunk as it is."""
    return response if isinstance(response, bytes) else response.SerializeToString()

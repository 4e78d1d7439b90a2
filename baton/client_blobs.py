"""KV in and out of a kvstore over the network, for programs without an event loop.

Owns PutBlob and GetBlob of one store: payloads go out and come in without being held twice, every
byte that comes in is covered by a CRC, and a fetch that breaks off goes on where it was. Never
converts, never chooses a store, never mints a capability (a gateway's GetCapability does).

    with BlobClient("127.0.0.1:7101") as store:
        blob = store.get_blob(log_id, capability=capability)
        store.put_blob(replace(blob.header, log_id=new_id), blob.pages, blob.token_ids,
                       capability=another)

A process on the store's own host that holds the cluster key can do without the copies:
`baton.client_shm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from baton.api.kvstore.v1 import kvstore_pb2
from baton.arena.copying import checksum, copy_crc32c
from baton.errors import Reason, ServiceError
from baton.ids import new_request_id
from baton.kv.blob import (
    Blob,
    BlobHeader,
    checksum_mismatch,
    seal_header,
    split_payload,
)
from baton.kv.crc import Buffer, ByteArray, as_bytes
from baton.kv.digests import TokenIds, ids_bytes
from baton.rpc.blocking import metadata, open_blocking_channel, translated
from baton.wire.blob import descriptor_from_header, header_from_descriptor
from baton.wire.blob_chunks import (
    encoded_chunk,
    get_response_of,
    put_request_bytes,
)
from baton.wire.durations import duration_to_proto

CHUNK_BYTES: Final = (1 << 20) - 4096
TIMEOUT_S: Final = 120.0
RESUMES_MAX: Final = 3

_SERVICE: Final = "/baton.api.kvstore.v1.KVStoreService/"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlob:
    """A blob that is a log now, of `tokens` positions."""

    log_id: bytes
    generation: int
    tokens: int


class BlobClient:
    """Blob calls at one kvstore ("host:port" or "unix:/path"). Threads may share it.

    Every call has a deadline of `timeout_s`, and raises ServiceError with the store's reason.
    """

    def __init__(self, target: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._channel = open_blocking_channel(target)
        self._timeout_s = timeout_s
        self._put: Any = self._channel.stream_unary(
            f"{_SERVICE}PutBlob",
            request_serializer=put_request_bytes,
            response_deserializer=kvstore_pb2.PutBlobResponse.FromString,
        )
        self._get: Any = self._channel.unary_stream(
            f"{_SERVICE}GetBlob",
            request_serializer=kvstore_pb2.GetBlobRequest.SerializeToString,
            response_deserializer=get_response_of,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def put_blob(
        self,
        header: BlobHeader,
        pages: Sequence[Buffer],
        token_ids: TokenIds,
        *,
        capability: str,
        request_id: str | None = None,
        ttl_s: float | None = None,
        may_convert: bool = False,
    ) -> StoredBlob:
        """Stores KV as the new log `header.log_id`, sealed, for its tenant to fork and fetch.

        `pages` are the packed contents of `header.spans()` (a partial last page holds its tokens
        only), `token_ids` the ids of the range; sizes and CRCs of the header are computed here.
        `ttl_s`: how long the log is kept (the store's default). `may_convert`: take another dtype
        or page size than the store's. The same `request_id` again is the same call: use it to
        repeat one whose answer was lost.
        """
        crcs = [checksum(page) for page in pages]
        sealed = seal_header(header, pages, token_ids, page_crcs=crcs)
        head = kvstore_pb2.PutBlobHeader(
            request_id=request_id or new_request_id(),
            capability=capability,
            descriptor=descriptor_from_header(sealed, crcs),
            convert=may_convert,
        )
        if ttl_s is not None:
            head.ttl.CopyFrom(duration_to_proto(ttl_s))
        parts = [*(as_bytes(page).data for page in pages), memoryview(ids_bytes(token_ids))]
        with translated():
            answer = self._put(
                _put_messages(head, parts), timeout=self._timeout_s, metadata=metadata()
            )
        return StoredBlob(
            log_id=answer.log.log_id,
            generation=answer.log.generation,
            tokens=answer.log.position,
        )

    def get_blob(
        self,
        log_id: bytes,
        *,
        capability: str,
        from_position: int = 0,
        to_position: int | None = None,
        into: Buffer | None = None,
    ) -> Blob:
        """Positions [from, to) of a log, verified; None: all that is committed and fits into one
        blob (64 MiB; `header.end_position` says where the next one starts).

        `into`: a buffer for the payload, at least as long, to be used again for the next fetch;
        the blob's pages and token ids are views of it. A stream that breaks off is continued where
        it was, up to three times.
        """
        request = kvstore_pb2.GetBlobRequest(
            log_id=log_id,
            from_position=from_position,
            to_position=to_position or 0,
            capability=capability,
        )
        fetch = _Fetch(None if into is None else as_bytes(into))
        for attempt in range(RESUMES_MAX + 1):
            request.offset_bytes = fetch.received_bytes
            try:
                with translated():
                    call = self._get(request, timeout=self._timeout_s, metadata=metadata())
                    for piece in call:
                        fetch.take(piece)
                return fetch.blob()
            except ServiceError as error:
                if error.reason is not Reason.WORKER_LOST or attempt == RESUMES_MAX:
                    raise
        raise AssertionError("the loop returns or raises")


def _put_messages(
    head: kvstore_pb2.PutBlobHeader, parts: Sequence[memoryview]
) -> Iterator[kvstore_pb2.PutBlobRequest | bytes]:
    """The header, then the parts' bytes in chunks; each byte is copied once, into its message."""
    yield kvstore_pb2.PutBlobRequest(header=head)
    pieces: list[memoryview] = []
    room = CHUNK_BYTES
    for part in parts:
        at = 0
        while at < part.nbytes:
            piece = part[at : at + room]
            pieces.append(piece)
            at += piece.nbytes
            room -= piece.nbytes
            if not room:
                yield encoded_chunk(pieces)
                pieces, room = [], CHUNK_BYTES
    if pieces:
        yield encoded_chunk(pieces)


class _Fetch:
    """A payload on its way in, over one stream or several."""

    def __init__(self, into: ByteArray | None) -> None:
        self._into = into
        self._payload: ByteArray | None = None
        self._header: BlobHeader | None = None
        self._crc = 0
        self.received_bytes = 0

    def take(self, piece: kvstore_pb2.GetBlobResponse | memoryview) -> None:
        """The next message."""
        if isinstance(piece, memoryview):
            self._chunk(piece)
        else:
            self._begin(header_from_descriptor(piece.descriptor))

    def _begin(self, header: BlobHeader) -> None:
        before, self._header = self._header, header
        if before is not None:
            if _content(before) != _content(header):
                raise _broken("the log changed between two parts of the fetch; fetch it again")
            return
        size = header.payload_bytes
        if self._into is None:
            self._payload = np.empty(size, dtype=np.uint8)
        elif self._into.size >= size:
            self._payload = self._into[:size]
        else:
            raise ServiceError(
                Reason.INVALID_REQUEST,
                f"into: has {self._into.size} bytes, the payload {size}",
                field="into",
            )

    def _chunk(self, piece: memoryview) -> None:
        end = self.received_bytes + piece.nbytes
        if self._payload is None or end > self._payload.size:
            raise _broken("a chunk does not fit its descriptor")
        self._crc = copy_crc32c(self._payload[self.received_bytes : end], piece, self._crc)
        self.received_bytes = end

    def blob(self) -> Blob:
        """All of it, or the error."""
        if self._header is None or self._payload is None:
            raise _broken("it has no descriptor")
        if self.received_bytes < self._payload.size:
            raise _broken(f"it ended after {self.received_bytes} of {self._payload.size} bytes")
        if self._crc != self._header.payload_crc:
            raise checksum_mismatch("payload_crc")
        return split_payload(self._header, self._payload)


def _content(header: BlobHeader) -> tuple[int, int, int]:
    return header.payload_crc, header.payload_bytes, header.first_position


def _broken(why: str) -> ServiceError:
    return ServiceError(Reason.BLOB_INVALID, f"the store's blob is malformed: {why}")

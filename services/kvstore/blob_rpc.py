"""PutBlob, GetBlob and DescribeBlob.

Owns their streams and bounds: descriptor checked before anything is allocated, a few transfers at a
time, pages pinned while they are read. Never touches page bytes itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Final, TypeVar

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.capability import Right
from baton.errors import Reason, ServiceError
from baton.faults import faults
from baton.kv.blob import BlobExpectation, BlobHeader, check_label, invalid, split_range
from baton.kv.digests import HASH_BYTES, body_hash, history_at
from baton.wire.blob import descriptor_from_header, header_from_descriptor
from baton.wire.durations import duration_from_proto
from services.kvstore import wire
from services.kvstore.access import Access
from services.kvstore.answers import Answers, body_of
from services.kvstore.blobs import (
    DamagedBlock,
    PackedRange,
    check_payload,
    pack_range,
    require_shape,
    require_whole,
    unpack_payload,
)
from services.kvstore.core import invalid as invalid_request
from services.kvstore.core import log_not_found
from services.kvstore.home import Event, require_allowed
from services.kvstore.identity import Identity
from services.kvstore.importing import Importer, ImportOrder
from services.kvstore.measures import StoreMeasures
from services.kvstore.runtime import Runtime
from services.kvstore.state import AckLevel, LogState, PageRow

CHUNK_BYTES: Final = (1 << 20) - 4096
CHUNK_BYTES_MAX: Final = 1 << 20
TRANSFERS_MAX: Final = 4

_T = TypeVar("_T")


class BlobCalls:
    """Serves the blob calls of one store; `executor` is the page thread."""

    def __init__(
        self,
        runtime: Runtime,
        access: Access,
        identity: Identity,
        measures: StoreMeasures,
        executor: Executor,
    ) -> None:
        self._runtime = runtime
        self._access = access
        self._identity = identity
        self._measures = measures
        self._executor = executor
        self._importer = Importer(runtime.store)
        self._answers = Answers()
        self.transfers_open = 0

    # --- put --------------------------------------------------------------------------------

    async def put(
        self, requests: AsyncIterator[kvstore_pb2.PutBlobRequest]
    ) -> kvstore_pb2.PutBlobResponse:
        """PutBlob."""
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("content") != "header":
            raise invalid_request("header", "must be the stream's first message")
        head = first.header
        log_id = wire.require_log_id(head.descriptor.log_id, "descriptor.log_id")
        claims = self._access.tenant(head.capability, Right.BLOB_PUT, log_id=log_id)
        wire.require_request_id(head.request_id)
        body = body_of(head)
        known = self._answers.recall(kvstore_pb2.PutBlobResponse, log_id, head.request_id, body)
        if known is not None:
            return known
        header = self._checked_header(head)
        with self._transfer():
            payload = await _collect(requests, header.payload_bytes)
            page_crcs = [page.crc32c for page in head.descriptor.pages]
            token_ids = await self._run(lambda: check_payload(header, payload, page_crcs))
            self._check_tokens(token_ids)
            tenant, scope = claims.tenant_scope()
            order = ImportOrder(
                log_id=log_id,
                request_id=head.request_id,
                body_hash=body_hash(body),
                tenant=tenant,
                scope=wire.scope_of(tenant, scope, ""),
                label_digest=self._identity.label.digest(),
                numeric_class=self._identity.class_text(header.numeric_class_id),
                numeric_class_id=header.numeric_class_id,
                ttl_s=duration_from_proto(head.ttl) if head.HasField("ttl") else None,
            )
            log = await self._import(order, header, payload, token_ids)
        self._measures.blob_moved("in", header.payload_bytes)
        limits = self._runtime.core.limits
        answer = kvstore_pb2.PutBlobResponse(
            log=common_pb2.LogPosition(
                log_id=log_id, generation=log.generation, position=log.position
            ),
            history_end=history_at(limits.kv_digest, limits.block_tokens, log.tokens),
        )
        return self._answers.remember(log_id, head.request_id, body, answer)

    def _checked_header(self, head: kvstore_pb2.PutBlobHeader) -> BlobHeader:
        """Everything that can be refused before a byte of payload is held."""
        label, geometry = self._identity.label, self._identity.geometry
        if head.descriptor.tokenizer_hash != label.tokenizer:
            # Compared first and never adapted.
            check_tokenizer(head.descriptor.tokenizer_hash, label.tokenizer)
        header = header_from_descriptor(head.descriptor)
        check_label(
            header,
            BlobExpectation(tokenizer_hash=label.tokenizer, model_digest=label.model),
        )
        require_whole(header)
        require_shape(header, geometry, may_convert=head.convert)
        is_same_shape = header.geometry == geometry
        if is_same_shape:
            check_label(header, BlobExpectation(kv_digest=label.kv_digest()))
        if header.total_tokens > self._runtime.core.limits.tokens_max:
            raise invalid("total_tokens", "is more than a log holds")
        return header

    def _check_tokens(self, token_ids: list[int]) -> None:
        size = self._runtime.core.limits.vocabulary_size
        if size is not None and max(token_ids) >= size:
            raise invalid("payload", f"a token id is not in the vocabulary of {size} tokens")

    async def _import(
        self, order: ImportOrder, header: BlobHeader, payload: bytearray, token_ids: list[int]
    ) -> LogState:
        rows = self._importer.reserve(order.log_id, header.total_tokens)
        is_adopted = False
        try:
            await self._runtime.ready([row.page for row in rows], AckLevel.OS)
            await self._run(lambda: unpack_payload(self._runtime.arena, header, payload, rows))
            log = self._importer.adopt(order, rows, token_ids, self._runtime.now())
            is_adopted = True
        finally:
            if not is_adopted:
                self._importer.abandon(rows)
                self._runtime.order_work()
        await self._runtime.acked(log.ack_level)
        return log

    # --- get --------------------------------------------------------------------------------

    async def get(
        self, request: kvstore_pb2.GetBlobRequest
    ) -> AsyncIterator[kvstore_pb2.GetBlobResponse]:
        """GetBlob."""
        with self._transfer():
            packed = await self._packed(request)
            descriptor = descriptor_from_header(packed.header, packed.page_crcs)
            yield kvstore_pb2.GetBlobResponse(descriptor=descriptor)
            for start in range(0, len(packed.payload), CHUNK_BYTES):
                chunk = bytes(packed.payload[start : start + CHUNK_BYTES])
                await faults.reach("kv.read_chunk")
                chunk = faults.flipped("kv.read_chunk", faults.shorten("kv.read_chunk", chunk))
                yield kvstore_pb2.GetBlobResponse(chunk=chunk)
        self._measures.blob_moved("out", packed.header.payload_bytes)

    async def describe(
        self, request: kvstore_pb2.DescribeBlobRequest
    ) -> kvstore_pb2.DescribeBlobResponse:
        """DescribeBlob."""
        with self._transfer():
            packed = await self._packed(request)
        descriptor = descriptor_from_header(packed.header, packed.page_crcs)
        return kvstore_pb2.DescribeBlobResponse(descriptor=descriptor)

    async def _packed(
        self, request: kvstore_pb2.GetBlobRequest | kvstore_pb2.DescribeBlobRequest
    ) -> PackedRange:
        log_id = wire.require_log_id(request.log_id)
        log = self._access.log(request.capability, (Right.BLOB_GET,), log_id)
        await faults.reach("kv.get")
        if faults.is_absent("kv.get"):
            raise log_not_found(log_id)
        require_allowed(log, Event.FORK)
        first, end = self._range(log, request.from_position, request.to_position)
        header = self._header(log, first, end)
        await self._runtime.ready([row.page for row in log.rows], AckLevel.OS)
        rows = [_frozen(row) for row in log.rows]
        ids = list(log.tokens[first:end])
        with self._pinned(rows):
            try:
                return await self._run(lambda: pack_range(self._runtime.arena, header, rows, ids))
            except DamagedBlock as damage:
                self._forget_damaged(log, damage.block_index)
                raise ServiceError(
                    Reason.CHECKSUM_MISMATCH,
                    f"KV block {damage.block_index} of the log is damaged; compute it again",
                    metadata={"block_index": str(damage.block_index)},
                ) from damage

    def _range(self, log: LogState, first: int, end: int) -> tuple[int, int]:
        if not first < log.committed:
            raise invalid_request("from_position", f"the log has KV for {log.committed} positions")
        if end and not first < end <= log.committed:
            raise invalid_request("to_position", f"must be over {first}, at most {log.committed}")
        ranges = split_range(self._identity.geometry, first, end or log.committed)
        if end and len(ranges) > 1:
            raise invalid_request(
                "to_position",
                f"the range needs {len(ranges)} blobs; the first ends at {ranges[0][1]}",
            )
        return ranges[0]

    def _header(self, log: LogState, first: int, end: int) -> BlobHeader:
        label, geometry = self._identity.label, self._identity.geometry
        return BlobHeader(
            tokenizer_hash=label.tokenizer,
            dtype=geometry.dtype,
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            head_dim_v=geometry.head_dim_v,
            block_tokens=geometry.block_tokens,
            first_position=first,
            total_tokens=end - first,
            generation=log.generation,
            model_digest=label.model,
            kv_digest=label.kv_digest(),
            log_id=log.log_id,
            numeric_class_id=log.numeric_class_id,
            layers_total=geometry.layers,
            kv_heads_total=geometry.kv_heads,
        )

    def _forget_damaged(self, log: LogState, block_index: int) -> None:
        """Nothing finds the block again; a log nobody writes loses its KV from there on."""
        core = self._runtime.core
        if block_index < len(log.rows):
            core.index.forget_page(log.rows[block_index].page)
            if log.writer is None and core.logs.get(log.log_id) is log:
                self._runtime.store.cut_kv(log, block_index * core.block_tokens)
        self._runtime.order_work()

    # --- shared -----------------------------------------------------------------------------

    @contextmanager
    def _transfer(self) -> Iterator[None]:
        """At most a few at once: each holds up to a blob's bytes in memory."""
        if self.transfers_open >= TRANSFERS_MAX:
            raise ServiceError(
                Reason.QUEUE_FULL,
                f"{TRANSFERS_MAX} blob transfers are under way; retry",
                retry_after_s=0.5,
            )
        self.transfers_open += 1
        try:
            yield
        finally:
            self.transfers_open -= 1

    @contextmanager
    def _pinned(self, rows: list[PageRow]) -> Iterator[None]:
        core = self._runtime.core
        for row in rows:
            core.pool.hold(row.page)
            core.transfers[row.page] = core.transfers.get(row.page, 0) + 1
        try:
            yield
        finally:
            for row in rows:
                core.transfers[row.page] -= 1
                if not core.transfers[row.page]:
                    del core.transfers[row.page]
                core.pool.drop(row.page)
            core.drain_freed()
            self._runtime.order_work()

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def check_tokenizer(theirs: bytes, ours: bytes) -> None:
    """TOKENIZER_MISMATCH unless they are the same."""
    if theirs != ours:
        raise ServiceError(
            Reason.TOKENIZER_MISMATCH,
            f"tokenizer_hash differs: ours {ours.hex()}, theirs {theirs[:HASH_BYTES].hex()}",
            field="tokenizer_hash",
            metadata={"field": "tokenizer_hash", "ours": ours.hex(), "theirs": theirs[:8].hex()},
        )


def _frozen(row: PageRow) -> PageRow:
    return PageRow(
        page=row.page,
        page_generation=row.page_generation,
        tokens=row.tokens,
        crc=row.crc,
        slot_crcs=list(row.slot_crcs),
    )


async def _collect(
    requests: AsyncIterator[kvstore_pb2.PutBlobRequest], payload_bytes: int
) -> bytearray:
    """Exactly `payload_bytes` bytes of chunks; BLOB_INVALID for fewer or more."""
    payload = bytearray()
    async for request in requests:
        if request.WhichOneof("content") != "chunk":
            raise invalid_request("chunk", "payload follows the header")
        if len(request.chunk) > CHUNK_BYTES_MAX:
            raise invalid_request("chunk", f"at most {CHUNK_BYTES_MAX} bytes")
        if len(payload) + len(request.chunk) > payload_bytes:
            raise invalid("payload", "bytes follow the blob's end", offset=payload_bytes)
        payload += request.chunk
    if len(payload) < payload_bytes:
        raise invalid(
            "payload", f"ends early, the header promises {payload_bytes}", offset=len(payload)
        )
    return payload

"""PutBlob, GetBlob and DescribeBlob; MapLog and UnmapLog for who reads in place.

Owns their streams and bounds: descriptor checked before anything is allocated, a few transfers at a
time, pages pinned while they are read. Chunks go straight into pages and come straight from them,
one in the page thread while gRPC has the next. Never touches page bytes itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.capability import Claims, Right
from baton.errors import Reason, ServiceError
from baton.faults import faults
from baton.kv.blob import BlobExpectation, BlobHeader, check_label, invalid, split_range
from baton.kv.digests import HASH_BYTES, body_hash, history_at, ids_bytes
from baton.wire.blob import descriptor_from_header, header_from_descriptor
from baton.wire.blob_chunks import encoded_chunk
from baton.wire.durations import duration_to_proto
from services.kvstore import wire
from services.kvstore.access import Access
from services.kvstore.answers import Answers, Call, Kept, body_of
from services.kvstore.blob_sink import PayloadSink
from services.kvstore.blob_source import DamagedBlock, PayloadSource
from services.kvstore.blob_wire import (
    GetPiece,
    PutPiece,
    collect,
    next_chunk,
    next_piece,
    with_faults,
)
from services.kvstore.blobs import check_payload, require_shape, require_whole, unpack_payload
from services.kvstore.core import invalid as invalid_request
from services.kvstore.core import log_not_found
from services.kvstore.home import Event, require_allowed
from services.kvstore.identity import Identity
from services.kvstore.importing import Importer, ImportOrder
from services.kvstore.maps import LEASE_MAX_S, LEASE_S
from services.kvstore.measures import StoreMeasures
from services.kvstore.moving.pins import pinned
from services.kvstore.runtime import Runtime
from services.kvstore.state import AckLevel, LogState, PageRow
from services.kvstore.tiers.promotion import Asked
from services.kvstore.tiers.wants import want_of_log

CHUNK_BYTES: Final = (1 << 20) - 4096
TRANSFERS_MAX: Final = 4
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a blob is made of: the log, the header of the range, its page table and token ids."""

    log: LogState
    header: BlobHeader
    rows: list[PageRow]
    token_ids: list[int]

    @property
    def rows_read(self) -> list[PageRow]:
        """The rows that the range touches."""
        return [self.rows[span.block_index] for span in self.header.spans()]


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

    async def put(self, requests: AsyncIterator[PutPiece]) -> kvstore_pb2.PutBlobResponse:
        """PutBlob."""
        first = await next_piece(requests)
        if first is None or isinstance(first, memoryview) or not first.HasField("header"):
            raise invalid_request("header", "must be the stream's first message")
        head = first.header
        log_id = wire.require_log_id(head.descriptor.log_id, "descriptor.log_id")
        claims = self._access.tenant(head.capability, Right.BLOB_PUT, log_id=log_id)
        wire.require_request_id(head.request_id)
        call = self._answers.call(kvstore_pb2.PutBlobResponse, claims.tenant, log_id, head)
        kept = call.known()
        if kept is None:
            kept = await self._put(requests, head, claims, call)
        await self._runtime.acked(kept.level)
        return kept.answer

    async def _put(
        self,
        requests: AsyncIterator[PutPiece],
        head: kvstore_pb2.PutBlobHeader,
        claims: Claims,
        call: Call[kvstore_pb2.PutBlobResponse],
    ) -> Kept[kvstore_pb2.PutBlobResponse]:
        header = self._checked_header(head)
        order = self._order(head, header, claims)
        is_adopted = False
        with self._transfer():
            rows = self._importer.reserve(order.log_id, header.total_tokens, order.tenant)
            try:
                await self._runtime.ready([row.page for row in rows], AckLevel.OS)
                crcs = [page.crc32c for page in head.descriptor.pages]
                token_ids = await self._filled(requests, header, rows, crcs)
                self._check_tokens(token_ids)
                # A repetition of this call may have come in whole meanwhile.
                kept = call.known()
                if kept is None:
                    log = self._importer.adopt(order, rows, token_ids, self._runtime.now())
                    is_adopted = True
                    kept = call.keep(self._put_answer(log), log.ack_level)
            finally:
                # A chunk may still be on its way into these pages: it is written before they are
                # zeroed, by the same thread.
                if not is_adopted:
                    self._importer.abandon(rows)
                    self._runtime.order_work()
        self._measures.blob_moved("in", header.payload_bytes)
        return kept

    def _order(
        self, head: kvstore_pb2.PutBlobHeader, header: BlobHeader, claims: Claims
    ) -> ImportOrder:
        tenant, scope = claims.tenant_scope()
        return ImportOrder(
            log_id=head.descriptor.log_id,
            request_id=head.request_id,
            body_hash=body_hash(body_of(head)),
            tenant=tenant,
            scope=wire.scope_of(tenant, scope, ""),
            label_digest=self._identity.label.digest(),
            numeric_class=self._identity.class_text(header.numeric_class_id),
            numeric_class_id=header.numeric_class_id,
            ttl_s=wire.seconds_of(head.ttl, "ttl") if head.HasField("ttl") else None,
        )

    async def _filled(
        self,
        requests: AsyncIterator[PutPiece],
        header: BlobHeader,
        rows: list[PageRow],
        crcs: Sequence[int],
    ) -> list[int]:
        """The payload, checked and in its pages; the token ids."""
        arena = self._runtime.arena
        if header.geometry == arena.geometry:
            return await self._written(requests, PayloadSink(arena, header, rows, crcs))
        # What is converted must be there whole first.
        payload = await collect(requests, header.payload_bytes)
        token_ids = await self._run(lambda: check_payload(header, payload, crcs))
        await self._run(lambda: unpack_payload(arena, header, payload, rows))
        return token_ids

    async def _written(self, requests: AsyncIterator[PutPiece], sink: PayloadSink) -> list[int]:
        """One chunk is written while the next one arrives."""
        loop, writing = asyncio.get_running_loop(), None
        try:
            while (chunk := await next_chunk(requests)) is not None:
                if writing is not None:
                    await writing
                writing = loop.run_in_executor(self._executor, sink.write, chunk)
            if writing is not None:
                await writing
        finally:
            if writing is not None:
                # What went wrong with it is of no interest when something else did before.
                writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await self._run(sink.finish)

    def _put_answer(self, log: LogState) -> kvstore_pb2.PutBlobResponse:
        limits = self._runtime.core.limits
        return kvstore_pb2.PutBlobResponse(
            log=common_pb2.LogPosition(
                log_id=log.log_id, generation=log.generation, position=log.position
            ),
            history_end=history_at(limits.kv_digest, limits.block_tokens, log.tokens),
        )

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

    # --- get --------------------------------------------------------------------------------

    async def get(self, request: kvstore_pb2.GetBlobRequest) -> AsyncGenerator[GetPiece, None]:
        """GetBlob."""
        with self._transfer():
            found = await self._found(request)
            with pinned(self._runtime, found.rows_read):
                source = await self._source(found)
                total, offset = source.header.payload_bytes, request.offset_bytes
                if offset > total:
                    raise invalid_request("offset_bytes", f"the payload has {total} bytes")
                descriptor = descriptor_from_header(source.header, source.page_crcs)
                yield kvstore_pb2.GetBlobResponse(descriptor=descriptor)
                reading = self._reading(source, offset)
                while offset < total:
                    chunk = await self._guarded(found.log, reading)
                    offset += CHUNK_BYTES
                    reading = self._reading(source, offset)
                    yield await with_faults(chunk)
        self._measures.blob_moved("out", total - request.offset_bytes)

    def _reading(self, source: PayloadSource, offset: int) -> asyncio.Future[bytes]:
        """A chunk, read and verified by the page thread while gRPC has the one before."""

        def read() -> bytes:
            return encoded_chunk(source.read(offset, CHUNK_BYTES))

        reading = asyncio.get_running_loop().run_in_executor(self._executor, read)
        # The client may leave before it is asked for.
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        return reading

    async def describe(
        self, request: kvstore_pb2.DescribeBlobRequest
    ) -> kvstore_pb2.DescribeBlobResponse:
        """DescribeBlob."""
        with self._transfer():
            found = await self._found(request)
            with pinned(self._runtime, found.rows_read):
                source = await self._source(found)
                await self._guarded(found.log, self._run(source.verify))
        descriptor = descriptor_from_header(source.header, source.page_crcs)
        return kvstore_pb2.DescribeBlobResponse(descriptor=descriptor)

    async def _found(
        self, request: kvstore_pb2.GetBlobRequest | kvstore_pb2.DescribeBlobRequest
    ) -> _Found:
        log_id = wire.require_log_id(request.log_id)
        log = self._access.log(request.capability, (Right.BLOB_GET,), log_id)
        await faults.reach("kv.get")
        if faults.is_absent("kv.get"):
            raise log_not_found(log_id)
        require_allowed(log, Event.FORK)
        await self._in_host(log)
        await self._runtime.readable(log_id, log.rows.pages())
        # From here on in one step: what the log has now is what is pinned.
        if self._runtime.core.logs.get(log_id) is not log:
            raise log_not_found(log_id)
        first, end = self._range(log, request.from_position, request.to_position)
        return _Found(
            log=log,
            header=self._header(log, first, end),
            rows=list(log.rows.head(log.committed, self._runtime.core.block_tokens)),
            token_ids=list(log.tokens[first:end]),
        )

    async def _source(self, found: _Found) -> PayloadSource:
        arena = self._runtime.arena

        def make() -> PayloadSource:
            return PayloadSource(arena, found.header, found.rows, found.token_ids)

        return await self._guarded(found.log, self._run(make))

    async def _guarded(self, log: LogState, work: Awaitable[_T]) -> _T:
        """Awaits page work; what is damaged is found by nobody any more."""
        try:
            return await work
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
            core.disbelieve(log.rows[block_index].page)
            if log.writer is None and core.logs.get(log.log_id) is log:
                self._runtime.store.home.give_up_kv(log, block_index)
        self._runtime.order_work()

    # --- in place ---------------------------------------------------------------------------

    async def map(self, request: kvstore_pb2.MapLogRequest) -> kvstore_pb2.MapLogResponse:
        """MapLog."""
        log_id = wire.require_log_id(request.log_id)
        log = self._access.log(request.capability, (Right.BLOB_GET,), log_id)
        self._access.worker(request.worker_capability)
        worker = self._runtime.workers.find(request.worker_id)
        require_allowed(log, Event.FORK)
        await self._in_host(log)
        await self._runtime.readable(log_id, log.rows.pages())
        # From here on in one step: what the log has now is what is pinned.
        if self._runtime.core.logs.get(log_id) is not log:
            raise log_not_found(log_id)
        if not log.committed:
            raise invalid_request("log_id", "the log has no KV here; compute it or open it again")
        lease_s = LEASE_S
        if request.HasField("lease"):
            lease_s = min(wire.seconds_of(request.lease, "lease"), LEASE_MAX_S)
        expires_s = self._runtime.now().monotonic_s + lease_s
        rows = log.rows.head(log.committed, self._runtime.core.block_tokens)
        pages, last = rows.pages(), rows[-1]
        crcs = rows.columns().crcs.tolist()
        if last.crc is not None:
            crcs.append(last.crc)
        return kvstore_pb2.MapLogResponse(
            map_id=self._runtime.maps.add(worker.writer.slot, pages, expires_s),
            committed_position=log.committed,
            pages=pages.tolist(),
            page_crc32c=crcs,
            slot_crc32c=() if last.crc is not None else last.slot_crcs,
            token_ids=ids_bytes(log.tokens[: log.committed]),
            lease=duration_to_proto(lease_s),
            generation=log.generation,
        )

    def unmap(self, request: kvstore_pb2.UnmapLogRequest) -> kvstore_pb2.UnmapLogResponse:
        """UnmapLog."""
        self._access.worker(request.capability)
        worker = self._runtime.workers.find(request.worker_id)
        is_held = self._runtime.maps.end(request.map_id, worker.writer.slot)
        self._runtime.order_work()
        return kvstore_pb2.UnmapLogResponse(held=is_held)

    # --- shared -----------------------------------------------------------------------------

    async def _in_host(self, log: LogState) -> None:
        """KV that is on NVMe only comes back first: a blob's reader cannot compute it."""
        promoter = self._runtime.promoter
        if promoter is not None:
            asked = Asked(prompt_tokens=log.position, tokens_per_s=None)
            await promoter.prepare(want_of_log(log, log.position), asked)

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

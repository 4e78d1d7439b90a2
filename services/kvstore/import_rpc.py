"""ImportLog: consecutive blobs that become one log.

Owns the stream's order and bounds: each descriptor is checked before a byte of its payload is held,
pages are reserved once for all tokens, one blob at a time is in memory. Never touches page bytes
itself: that is the page thread's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import operators_pb2
from baton.capability import Claims, Right
from baton.errors import Reason, ServiceError
from baton.kv.blob import BlobExpectation, BlobHeader, check_label, invalid
from baton.kv.digests import body_hash, history_at
from baton.kv.sizing import pages_for
from baton.wire.blob import header_from_descriptor
from services.kvstore import wire
from services.kvstore.access import Access
from services.kvstore.answers import Answers, Call, Kept, body_of
from services.kvstore.blob_wire import next_piece
from services.kvstore.blobs import check_payload, require_shape, require_whole, unpack_payload
from services.kvstore.core import invalid as invalid_request
from services.kvstore.identity import Identity
from services.kvstore.importing import Importer, ImportOrder
from services.kvstore.measures import StoreMeasures
from services.kvstore.pages import pages_exhausted
from services.kvstore.runtime import Runtime
from services.kvstore.state import AckLevel, PageRow

IMPORTS_MAX: Final = 2
CHUNK_BYTES_MAX: Final = 1 << 20

_T = TypeVar("_T")
_Requests = AsyncIterator[operators_pb2.ImportLogRequest]
_Response = operators_pb2.ImportLogResponse


@dataclass(slots=True, kw_only=True)
class _Import:
    """One import on its way: its head, the reserved rows, and what has come in."""

    head: operators_pb2.ImportLogHeader
    claims: Claims
    rows: list[PageRow] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    position: int = 0
    numeric_class_id: int = 0


class ImportCalls:
    """Serves ImportLog of one store; `executor` is the page thread."""

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
        self._open = 0

    async def import_log(self, requests: _Requests) -> _Response:
        """ImportLog."""
        first = await next_piece(requests)
        if first is None or first.WhichOneof("content") != "header":
            raise invalid_request("header", "must be the stream's first message")
        head = first.header
        log_id = wire.require_log_id(head.log_id)
        claims = self._access.tenant(head.capability, Right.BLOB_PUT, log_id=log_id)
        wire.require_request_id(head.request_id)
        _ttl_s(head)  # refused now, not when everything is here
        call = self._answers.call(_Response, claims.tenant, log_id, head)
        kept = call.known()
        if head.only_check:
            return await self._check(requests, _Import(head=head, claims=claims))
        if kept is None:
            with self._turn():
                kept = await self._whole(requests, _Import(head=head, claims=claims), call)
        await self._runtime.acked(kept.level)
        return kept.answer

    async def _check(self, requests: _Requests, one: _Import) -> _Response:
        """What the descriptors promise, and whether there is room for it at all."""
        self._require_total(one.head.total_tokens)
        while one.position < one.head.total_tokens:
            header = self._checked(await _descriptor(requests, one), one)
            one.numeric_class_id, one.position = header.numeric_class_id, header.end_position
        core = self._runtime.core
        pages = pages_for(one.head.total_tokens, core.block_tokens)
        self._importer.require_new(one.head.log_id)
        if pages > core.pool.page_count:
            raise pages_exhausted(pages, core.pool.free_count)
        return _Response(pages=pages)

    def _require_total(self, total: int) -> None:
        most = self._runtime.core.limits.tokens_max
        if not 1 <= total <= most:
            raise invalid_request("total_tokens", f"must be 1 to {most}")

    async def _whole(
        self, requests: _Requests, one: _Import, call: Call[_Response]
    ) -> Kept[_Response]:
        """All blobs, or nothing."""
        total = one.head.total_tokens
        self._require_total(total)
        is_adopted = False
        try:
            while one.position < total:
                await self._blob(requests, one)
            if await next_piece(requests) is not None:
                raise invalid_request("descriptor", f"follows the last of {total} tokens")
            kept = call.known()
            if kept is None:
                kept = call.keep(self._adopt(one))
                is_adopted = True
        finally:
            if one.rows and not is_adopted:
                self._importer.abandon(one.rows)
                self._runtime.order_work()
        return kept

    async def _blob(self, requests: _Requests, one: _Import) -> None:
        """The next blob: checked, collected, checked again, unpacked into its pages."""
        descriptor = await _descriptor(requests, one)
        header = self._checked(descriptor, one)
        if not one.rows:
            await self._reserve(one, header)
        payload = await _collect(requests, header.payload_bytes)
        crcs = [page.crc32c for page in descriptor.pages]
        token_ids = await self._run(lambda: check_payload(header, payload, crcs))
        size = self._runtime.core.limits.vocabulary_size
        if size is not None and max(token_ids) >= size:
            raise invalid("payload", f"a token id is not in the vocabulary of {size} tokens")
        block_tokens = self._runtime.core.block_tokens
        first, end = header.first_position, header.end_position
        rows = one.rows[first // block_tokens : pages_for(end, block_tokens)]
        await self._run(lambda: unpack_payload(self._runtime.arena, header, payload, rows))
        one.token_ids += token_ids
        one.position = end
        self._measures.blob_moved("in", header.payload_bytes)

    def _checked(self, descriptor: common_pb2.KvBlobDescriptor, one: _Import) -> BlobHeader:
        """Everything that can be refused before a byte of payload is held, the tokenizer first."""
        label, geometry = self._identity.label, self._identity.geometry
        if descriptor.tokenizer_hash != label.tokenizer:
            require_tokenizer(descriptor.tokenizer_hash, label.tokenizer)
        header = header_from_descriptor(descriptor)
        check_label(
            header, BlobExpectation(tokenizer_hash=label.tokenizer, model_digest=label.model)
        )
        require_whole(replace(header, first_position=0))
        require_shape(header, geometry, may_convert=one.head.convert)
        if header.geometry == geometry:
            check_label(header, BlobExpectation(kv_digest=label.kv_digest()))
        if header.first_position != one.position:
            raise invalid(
                "first_position",
                f"is {header.first_position}, the next blob is from {one.position}",
            )
        if header.end_position > one.head.total_tokens:
            raise invalid("total_tokens", f"runs past the {one.head.total_tokens} of the import")
        if one.position and header.numeric_class_id != one.numeric_class_id:
            raise invalid("numeric_class_id", "is not that of the blob before")
        return header

    async def _reserve(self, one: _Import, header: BlobHeader) -> None:
        one.numeric_class_id = header.numeric_class_id
        tenant, _ = one.claims.tenant_scope()
        one.rows = self._importer.reserve(one.head.log_id, one.head.total_tokens, tenant)
        await self._runtime.ready([row.page for row in one.rows], AckLevel.OS)

    def _adopt(self, one: _Import) -> _Response:
        head, (tenant, scope) = one.head, one.claims.tenant_scope()
        order = ImportOrder(
            log_id=head.log_id,
            request_id=head.request_id,
            body_hash=body_hash(body_of(head)),
            tenant=tenant,
            scope=wire.scope_of(tenant, scope, ""),
            label_digest=self._identity.label.digest(),
            numeric_class=self._identity.class_text(one.numeric_class_id),
            numeric_class_id=one.numeric_class_id,
            ttl_s=_ttl_s(head),
        )
        log = self._importer.adopt(order, one.rows, one.token_ids, self._runtime.now())
        limits = self._runtime.core.limits
        return _Response(
            log=common_pb2.LogPosition(
                log_id=log.log_id, generation=log.generation, position=log.position
            ),
            history_end=history_at(limits.kv_digest, limits.block_tokens, log.tokens),
            pages=len(one.rows),
        )

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """At most a few at once: each holds a blob's bytes in memory."""
        if self._open >= IMPORTS_MAX:
            raise ServiceError(
                Reason.QUEUE_FULL, f"{IMPORTS_MAX} imports are under way; retry", retry_after_s=0.5
            )
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _ttl_s(head: operators_pb2.ImportLogHeader) -> float | None:
    return wire.seconds_of(head.ttl, "ttl") if head.HasField("ttl") else None


def require_tokenizer(theirs: bytes, ours: bytes) -> None:
    """TOKENIZER_MISMATCH unless they are the same; compared before anything else."""
    if theirs != ours:
        raise ServiceError(
            Reason.TOKENIZER_MISMATCH,
            f"tokenizer_hash differs: ours {ours.hex()}, theirs {theirs[: len(ours)].hex()}",
            field="tokenizer_hash",
            metadata={"field": "tokenizer_hash", "ours": ours.hex(), "theirs": theirs[:8].hex()},
        )


async def _descriptor(requests: _Requests, one: _Import) -> common_pb2.KvBlobDescriptor:
    """The next message, which is a blob's descriptor."""
    request = await next_piece(requests)
    if request is None or request.WhichOneof("content") != "descriptor":
        raise invalid_request("descriptor", f"of the blob from position {one.position} is missing")
    return request.descriptor


async def _collect(requests: _Requests, payload_bytes: int) -> bytearray:
    """Exactly `payload_bytes` bytes of chunks; BLOB_INVALID for fewer or more."""
    payload = bytearray()
    while len(payload) < payload_bytes:
        request = await next_piece(requests)
        if request is None or request.WhichOneof("content") != "chunk":
            raise invalid(
                "payload", f"ends early, the header promises {payload_bytes}", offset=len(payload)
            )
        if len(request.chunk) > CHUNK_BYTES_MAX:
            raise invalid_request("chunk", f"at most {CHUNK_BYTES_MAX} bytes")
        if len(payload) + len(request.chunk) > payload_bytes:
            raise invalid("payload", "bytes follow the blob's end", offset=payload_bytes)
        payload += request.chunk
    return payload

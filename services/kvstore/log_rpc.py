"""The calls that gateways and writers make on one log.

Owns the path of each call: capability, core, records and page work, answer. Never keeps state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.capability import Right
from baton.faults import faults
from baton.kv.digests import history_at
from baton.kv.label import PairLabel
from baton.wire.durations import duration_from_proto, duration_to_proto
from baton.wire.finish import finish_from_proto
from baton.wire.label import label_from_proto
from baton.wire.sampling import sampling_from_proto
from services.kvstore import wire
from services.kvstore.access import Access
from services.kvstore.answers import Answers, body_of
from services.kvstore.core import invalid, log_not_found, stale
from services.kvstore.identity import Identity
from services.kvstore.keeper import require_tenant
from services.kvstore.pages import pages_exhausted
from services.kvstore.runtime import Runtime
from services.kvstore.state import AckLevel, LogState, Writer
from services.kvstore.store import ForkOrder, OpenOrder
from services.kvstore.writes import SealEnd

HASH_BYTES = 32
PAGES_PER_CALL_MAX = 65_536


class LogCalls:
    """Open, Grant, CommitCheckpoint, Seal, Take, Truncate, Fork, Cancel, Close, replay."""

    def __init__(self, runtime: Runtime, access: Access, identity: Identity) -> None:
        self._runtime = runtime
        self._store = runtime.store
        self._core = runtime.core
        self._access = access
        self._identity = identity
        self._answers = Answers()

    # --- life -------------------------------------------------------------------------------

    async def open(self, request: kvstore_pb2.OpenRequest) -> kvstore_pb2.OpenResponse:
        """Open."""
        log_id = wire.require_log_id(request.log_id)
        claims = self._access.tenant(request.capability, Right.OPEN, log_id=log_id)
        tenant, scope = claims.tenant_scope()
        label = label_from_proto(request.label)
        self._identity.require_suits(label)
        await faults.reach("kv.get")
        await self._reach_alloc(request.output_pages)
        worker = self._runtime.workers.find(request.writer_worker_id)
        order = self._open_order(request, label, tenant, scope)
        if faults.is_absent("kv.get"):
            order = _without_base(order)
        answer = self._store.open(order, worker.writer, self._runtime.now())
        log = self._core.logs[log_id]
        log.base_numeric_class = self._identity.class_text(log.base_class_id)
        await self._runtime.ready(_pages(log), order.ack_level)
        cached_tokens = min(answer.cached_tokens, log.cached_tokens)
        self._core.lookup_tokens += len(order.tokens)
        self._core.hit_tokens += cached_tokens
        # A damaged base was found while copying: what is said is what is left.
        return kvstore_pb2.OpenResponse(
            generation=answer.generation,
            cached_tokens=cached_tokens,
            granted_pages=[page.page for page in answer.granted],
            prefix_id=answer.prefix_id or "",
            lease=duration_to_proto(self._core.leases.lease_s),
        )

    def _open_order(
        self, request: kvstore_pb2.OpenRequest, label: PairLabel, tenant: str, scope: str
    ) -> OpenOrder:
        if len(request.body_hash) != HASH_BYTES:
            raise invalid("body_hash", f"must be {HASH_BYTES} bytes")
        if request.base_capability:
            self._check_base(request)
        return OpenOrder(
            request_id=wire.require_request_id(request.request_id),
            body_hash=request.body_hash,
            log_id=request.log_id,
            tenant=tenant,
            scope=wire.scope_of(tenant, scope, request.cache_salt),
            tokens=request.prompt_token_ids,
            sampling=sampling_from_proto(request.sampling),
            numeric_class=label.numeric_class,
            label_digest=label.digest(),
            base=wire.base_of(request),
            is_cacheable=request.cache_mode != common_pb2.CACHE_MODE_OFF,
            output_pages=max(request.output_pages, 1),
            ttl_s=duration_from_proto(request.ttl) if request.HasField("ttl") else None,
            drop_at_end=request.drop_at_end,
            ack_level=wire.ack_level_of(request.ack_level),
        )

    def _check_base(self, request: kvstore_pb2.OpenRequest) -> None:
        """A capability to read the base must be for the base and of its tenant."""
        if request.WhichOneof("base") != "parent":
            raise invalid("base_capability", "is only for a parent; a manifest needs a grant")
        self._access.log(request.base_capability, (Right.READ, Right.FORK), request.parent.log_id)

    async def fork(self, request: kvstore_pb2.ForkRequest) -> kvstore_pb2.ForkResponse:
        """Fork."""
        log_id = wire.require_log_id(request.log_id)
        claims = self._access.tenant(request.capability, Right.FORK, log_id=log_id)
        tenant, scope = claims.tenant_scope()
        body = body_of(request)
        wire.require_request_id(request.request_id)
        known = self._answers.recall(kvstore_pb2.ForkResponse, log_id, request.request_id, body)
        if known is not None:
            return known
        parent = wire.parent_of(request.parent)
        require_tenant(self._core.find(parent.log_id), tenant)
        writer: Writer | None = None
        if request.writer_worker_id:
            worker = self._runtime.workers.find(request.writer_worker_id)
            writer = worker.writer
            source = self._core.find(parent.log_id)
            self._store.home.check_readable(source.numeric_class_id, worker.numeric_class)
        order = ForkOrder(
            log_id=log_id,
            request_id=request.request_id,
            scope=wire.scope_of(tenant, scope, ""),
            sampling=(
                sampling_from_proto(request.sampling) if request.HasField("sampling") else None
            ),
        )
        log = self._store.fork(parent, order, writer, self._runtime.now())
        await self._runtime.ready(_pages(log), log.ack_level)
        answer = kvstore_pb2.ForkResponse(
            generation=log.generation, cached_tokens=log.cached_tokens
        )
        return self._answers.remember(log_id, request.request_id, body, answer)

    async def truncate(self, request: kvstore_pb2.TruncateRequest) -> kvstore_pb2.TruncateResponse:
        """Truncate."""
        log_id = wire.require_log_id(request.log_id)
        log = self._access.log(request.capability, (Right.TRUNCATE, Right.WRITE), log_id)
        body = body_of(request)
        known = self._answers.recall(kvstore_pb2.TruncateResponse, log_id, request.request_id, body)
        if known is not None:
            return known
        self._store.truncate(log_id, request.generation, request.position, self._runtime.now())
        answer = kvstore_pb2.TruncateResponse(generation=log.generation)
        await self._runtime.acked(log.ack_level)
        return self._answers.remember(log_id, request.request_id, body, answer)

    async def cancel(self, request: kvstore_pb2.CancelRequest) -> kvstore_pb2.CancelResponse:
        """Cancel."""
        log_id = wire.require_log_id(request.log_id)
        rights = (Right.CANCEL, Right.WRITE, Right.OPEN, Right.ADMIN)
        self._access.own(request.capability, rights, log_id)
        generation = self._store.keeper.cancel(log_id, self._runtime.now().wall_s)
        await self._runtime.acked(AckLevel.OS)
        return kvstore_pb2.CancelResponse(generation=generation)

    async def close(self, request: kvstore_pb2.CloseRequest) -> kvstore_pb2.CloseResponse:
        """Close."""
        log_id = wire.require_log_id(request.log_id)
        self._access.own(request.capability, (Right.WRITE, Right.OPEN, Right.ADMIN), log_id)
        self._store.keeper.close(log_id, is_dropped=request.drop, wall_s=self._runtime.now().wall_s)
        await self._runtime.acked(AckLevel.OS)
        return kvstore_pb2.CloseResponse()

    # --- writes -----------------------------------------------------------------------------

    async def grant(self, request: kvstore_pb2.GrantRequest) -> kvstore_pb2.GrantResponse:
        """Grant."""
        log_id = wire.require_log_id(request.log_id)
        body = request.SerializeToString(deterministic=True)
        known = self._answers.recall(kvstore_pb2.GrantResponse, log_id, request.request_id, body)
        if known is not None:
            return known
        _require_pages(request.pages)
        await self._reach_alloc(request.pages)
        pages = self._store.home.grant(log_id, request.generation, request.worker_id, request.pages)
        await self._runtime.ready([page.page for page in pages], AckLevel.OS)
        answer = kvstore_pb2.GrantResponse(pages=wire.grants_to_proto(pages))
        return self._answers.remember(log_id, request.request_id, body, answer)

    async def checkpoint(
        self, request: kvstore_pb2.CommitCheckpointRequest
    ) -> kvstore_pb2.CommitCheckpointResponse:
        """CommitCheckpoint."""
        log_id = wire.require_log_id(request.log_id)
        self._access.writer(request.capability, Right.WRITE, log_id, request.generation)
        block_tokens = self._core.block_tokens
        await faults.reach("kv.before_commit")
        committed = self._store.writes.checkpoint(
            log_id,
            request.generation,
            (request.from_position, request.to_position),
            [wire.row_of(entry, block_tokens) for entry in request.pages],
            self._runtime.clock.monotonic_s(),
        )
        level = self._core.logs[log_id].ack_level
        await self._runtime.acked(level)
        await faults.reach("kv.after_commit")
        return kvstore_pb2.CommitCheckpointResponse(
            committed_position=committed, ack_level=wire.ack_level_to_proto(level)
        )

    async def seal(self, request: kvstore_pb2.SealRequest) -> kvstore_pb2.SealResponse:
        """Seal."""
        log_id = wire.require_log_id(request.log_id)
        self._access.writer(request.capability, Right.SEAL, log_id, request.generation)
        has_token = request.HasField("first_token_id")
        end = SealEnd(
            token_id=request.first_token_id if has_token else None,
            logprob=wire.logprob_of(request.logprob) if request.HasField("logprob") else None,
            finish_reason=finish_from_proto(request.finish_reason),
        )
        log = self._store.seal(
            log_id,
            request.generation,
            request.chunk_list_digest,
            end,
            self._runtime.clock.monotonic_s(),
        )
        position, level = log.position, log.ack_level
        await self._runtime.acked(level)
        return kvstore_pb2.SealResponse(position=position, ack_level=wire.ack_level_to_proto(level))

    async def take(self, request: kvstore_pb2.TakeRequest) -> kvstore_pb2.TakeResponse:
        """Take."""
        log_id = wire.require_log_id(request.log_id)
        log = self._access.log(request.capability, (Right.TAKE,), log_id)
        body = body_of(request)
        known = self._answers.recall(kvstore_pb2.TakeResponse, log_id, request.request_id, body)
        if known is not None:
            return known
        worker = self._runtime.workers.find(request.worker_id)
        _require_pages(request.pages)
        await self._reach_alloc(request.pages)
        taken = self._store.home.take(
            log_id,
            request.generation,
            worker.writer,
            worker.numeric_class,
            pages=request.pages,
            now_s=self._runtime.clock.monotonic_s(),
        )
        self._runtime.recovered_writers.pop(log_id, None)
        await self._runtime.ready(_pages(log), log.ack_level)
        answer = kvstore_pb2.TakeResponse(
            generation=taken.generation,
            position=taken.position,
            pages=wire.grants_to_proto(taken.granted),
            lease=duration_to_proto(self._core.leases.lease_s),
        )
        return self._answers.remember(log_id, request.request_id, body, answer)

    async def _reach_alloc(self, pages: int) -> None:
        """The fault point of grants; `absent` is an arena without a free page."""
        await faults.reach("pool.alloc")
        if faults.is_absent("pool.alloc"):
            raise pages_exhausted(pages, 0)

    # --- reads ------------------------------------------------------------------------------

    async def replay(
        self, request: kvstore_pb2.ReplayLogRequest
    ) -> list[kvstore_pb2.ReplayLogResponse]:
        """ReplayLog: all pieces of one moment."""
        log_id = wire.require_log_id(request.log_id)
        log = self._access.log(request.capability, (Right.READ, Right.WRITE), log_id)
        await faults.reach("kv.get")
        if request.generation not in (0, log.generation):
            raise stale(log_id, request.generation, log.generation)
        # What is told must not be lost by a crash right after, nor name a page still being filled.
        await self._runtime.ready(_pages(log), AckLevel.OS)
        log = self._access.log(request.capability, (Right.READ, Right.WRITE), log_id)
        return list(self._pieces(log, request.from_position))

    def _pieces(self, log: LogState, from_position: int) -> Iterator[kvstore_pb2.ReplayLogResponse]:
        if from_position > log.position:
            raise invalid("from_position", f"the log has {log.position} tokens")
        yield kvstore_pb2.ReplayLogResponse(head=wire.head_to_proto(log))
        for run in wire.token_runs(log.tokens, from_position):
            yield kvstore_pb2.ReplayLogResponse(tokens=run)
        for pages in wire.page_runs(log.rows):
            yield kvstore_pb2.ReplayLogResponse(pages=pages)
        end = kvstore_pb2.ReplayEnd(lsn=self._runtime.writer.newest_lsn)
        yield kvstore_pb2.ReplayLogResponse(end=end)

    def describe(self, request: kvstore_pb2.DescribeLogRequest) -> kvstore_pb2.DescribeLogResponse:
        """DescribeLog."""
        log_id = wire.require_log_id(request.log_id)
        log = self._access.log(request.capability, (Right.READ, Right.WRITE), log_id)
        limits = self._core.limits
        return kvstore_pb2.DescribeLogResponse(
            head=wire.head_to_proto(log),
            history_end=history_at(
                limits.kv_digest, limits.block_tokens, log.tokens[: log.committed]
            ),
            closed=not log.is_open,
        )


def _without_base(order: OpenOrder) -> OpenOrder:
    """The order where nothing to start from is there, as after an eviction."""
    if order.base is not None:
        raise log_not_found(order.log_id)
    return replace(order, is_cacheable=False)


def _pages(log: LogState) -> list[int]:
    """The pages of a log that may still be zeroed or filled: granted ones and its rows."""
    return [*log.granted, *(row.page for row in log.rows)]


def _require_pages(pages: int) -> None:
    if pages > PAGES_PER_CALL_MAX:
        raise invalid("pages", f"at most {PAGES_PER_CALL_MAX} a call")

"""The calls that gateways and writers make on one log.

Owns the path of each call: capability, core, records and page work, answer. Never keeps state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from google.protobuf.message import Message

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.capability import Claims, Right
from baton.faults import faults
from baton.kv.digests import history_at
from baton.kv.label import PairLabel
from baton.wire.durations import duration_to_proto
from baton.wire.finish import finish_from_proto
from baton.wire.label import label_from_proto
from baton.wire.sampling import sampling_from_proto
from services.kvstore import wire
from services.kvstore.access import Access
from services.kvstore.answers import Answers, Kept
from services.kvstore.core import invalid, log_not_found, stale
from services.kvstore.identity import Identity
from services.kvstore.keeper import require_tenant
from services.kvstore.pages import pages_exhausted
from services.kvstore.reopening import reopen
from services.kvstore.rows import PageArray
from services.kvstore.runtime import Runtime
from services.kvstore.state import AckLevel, LogState
from services.kvstore.store import ForkOrder, OpenOrder
from services.kvstore.tiers.promotion import Asked, Want
from services.kvstore.tiers.wants import want_of_log, wants_of_open
from services.kvstore.workers import AttachedWorker
from services.kvstore.writes import SealEnd

HASH_BYTES = 32
PAGES_PER_CALL_MAX = 65_536
LOG_WITH_TAKE_TOKENS_MAX = 65_536
"""A longer log does not come with its Take: one message holds so much."""

_Answer = TypeVar("_Answer", bound=Message)


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
        wire.require_request_id(request.request_id)
        call = self._answers.call(kvstore_pb2.OpenResponse, tenant, log_id, request)
        kept = call.known()
        if kept is None:
            kept = call.keep(*await self._open(request, tenant, scope))
            self._core.lookup_tokens += len(request.prompt_token_ids)
            self._core.hit_tokens += kept.answer.cached_tokens
        answer = await self._answered(kept)
        log = self._core.logs.get(log_id)
        if log is not None and log.generation == answer.generation:
            # A damaged base was found while copying: what is said is what is left.
            answer.cached_tokens = min(answer.cached_tokens, log.cached_tokens)
        return answer

    async def _open(
        self, request: kvstore_pb2.OpenRequest, tenant: str, scope: str
    ) -> tuple[kvstore_pb2.OpenResponse, AckLevel, PageArray]:
        label = label_from_proto(request.label)
        self._identity.require_suits(label)
        await faults.reach("kv.get")
        await self._reach_alloc(request.output_pages)
        worker = self._runtime.workers.find(request.writer_worker_id)
        order = self._open_order(request, label, tenant, scope)
        if faults.is_absent("kv.get"):
            order = _without_base(order)
        loaded = await self._load(
            wants_of_open(self._store, order), len(order.tokens), request.compute_tokens_per_s
        )
        if request.WhichOneof("base") == "parent":
            await self._filled(request.parent.log_id)
        if request.forced_output_tokens:
            return self._reopened(order, worker, request.forced_output_tokens)
        opened = self._store.open(order, worker.writer, self._runtime.now())
        log = self._core.logs[order.log_id]
        log.base_numeric_class = self._identity.class_text(log.base_class_id)
        self._core.loaded_hit_tokens += min(loaded, opened.cached_tokens)
        answer = kvstore_pb2.OpenResponse(
            generation=opened.generation,
            cached_tokens=opened.cached_tokens,
            granted_pages=[page.page for page in opened.granted],
            prefix_id=opened.prefix_id or "",
            lease=duration_to_proto(self._core.leases.lease_s),
            granted=wire.grants_to_proto(opened.granted),
        )
        return answer, log.ack_level, _pages(log)

    async def _load(self, wants: Sequence[Want], tokens: int, tokens_per_s: float) -> int:
        """What a request would use comes from NVMe into the host as far as that is worth it;
        returns how many tokens did.
        """
        promoter = self._runtime.promoter
        if promoter is None or not wants:
            return 0
        is_known = math.isfinite(tokens_per_s) and tokens_per_s > 0.0
        rate = tokens_per_s if is_known else None
        return await promoter.prepare(wants, Asked(prompt_tokens=tokens, tokens_per_s=rate))

    def _reopened(
        self, order: OpenOrder, worker: AttachedWorker, forced_tokens: int
    ) -> tuple[kvstore_pb2.OpenResponse, AckLevel, PageArray]:
        """A log of tokens that a client has already: nobody writes it until it is taken."""
        log = reopen(self._store, order, worker.writer, forced_tokens, self._runtime.now())
        log.base_numeric_class = self._identity.class_text(log.base_class_id)
        answer = kvstore_pb2.OpenResponse(
            generation=log.generation,
            cached_tokens=log.cached_tokens,
            lease=duration_to_proto(self._core.leases.lease_s),
        )
        return answer, log.ack_level, _pages(log)

    async def _answered(self, kept: Kept[_Answer]) -> _Answer:
        """The answer, once its records are acked and its pages ready."""
        await self._runtime.ready(kept.pages, kept.level)
        kept.pages = ()
        return kept.answer

    async def _filled(self, log_id: bytes) -> None:
        """What is copied from has been copied itself, so that its CRCs are known."""
        log = self._core.logs.get(log_id)
        if log is not None and log.rows.known() < len(log.rows):
            await self._runtime.pages.ready(log.rows.pages())

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
            ttl_s=wire.seconds_of(request.ttl, "ttl") if request.HasField("ttl") else None,
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
        wire.require_request_id(request.request_id)
        call = self._answers.call(kvstore_pb2.ForkResponse, tenant, log_id, request)
        kept = call.known()
        if kept is None:
            await self._load_for_fork(request, tenant)
            # A repetition may have overtaken the wait.
            kept = call.known() or call.keep(*self._fork(request, tenant, scope))
        return await self._answered(kept)

    async def _load_for_fork(self, request: kvstore_pb2.ForkRequest, tenant: str) -> None:
        """What the new log's writer begins with is in the host as far as that is worth it."""
        parent = wire.parent_of(request.parent)
        source = self._core.find(parent.log_id)
        require_tenant(source, tenant)
        if request.writer_worker_id:
            worker = self._runtime.workers.find(request.writer_worker_id)
            self._store.home.check_readable(source.numeric_class_id, worker.numeric_class)
            wants = want_of_log(source, parent.position - 1)
            await self._load(wants, parent.position, request.compute_tokens_per_s)
        await self._filled(parent.log_id)

    def _fork(
        self, request: kvstore_pb2.ForkRequest, tenant: str, scope: str
    ) -> tuple[kvstore_pb2.ForkResponse, AckLevel, PageArray]:
        parent = wire.parent_of(request.parent)
        source = self._core.find(parent.log_id)
        require_tenant(source, tenant)
        worker: AttachedWorker | None = None
        if request.writer_worker_id:
            worker = self._runtime.workers.find(request.writer_worker_id)
            # The source may have had another writer during the wait.
            self._store.home.check_readable(source.numeric_class_id, worker.numeric_class)
        has_sampling = request.HasField("sampling")
        order = ForkOrder(
            log_id=request.log_id,
            request_id=request.request_id,
            scope=wire.scope_of(tenant, scope, ""),
            sampling=sampling_from_proto(request.sampling) if has_sampling else None,
            numeric_class=None if worker is None else worker.numeric_class,
        )
        writer = None if worker is None else worker.writer
        log = self._store.fork(parent, order, writer, self._runtime.now())
        answer = kvstore_pb2.ForkResponse(
            generation=log.generation, cached_tokens=log.cached_tokens
        )
        return answer, log.ack_level, _pages(log)

    async def truncate(self, request: kvstore_pb2.TruncateRequest) -> kvstore_pb2.TruncateResponse:
        """Truncate."""
        log_id = wire.require_log_id(request.log_id)
        rights = (Right.TRUNCATE, Right.WRITE)
        claims = self._access.any_of(request.capability, rights, log_id=log_id)
        call = self._answers.call(kvstore_pb2.TruncateResponse, claims.tenant, log_id, request)
        kept = call.known()
        if kept is None:
            await self._filled(log_id)
            self._access.log_of(claims, log_id)
            log = self._store.truncate(
                log_id, request.generation, request.position, self._runtime.now()
            )
            answer = kvstore_pb2.TruncateResponse(generation=log.generation)
            kept = call.keep(answer, log.ack_level)
        return await self._answered(kept)

    async def cancel(self, request: kvstore_pb2.CancelRequest) -> kvstore_pb2.CancelResponse:
        """Cancel."""
        log_id = wire.require_log_id(request.log_id)
        rights = (Right.CANCEL, Right.WRITE, Right.OPEN, Right.ADMIN)
        claims = self._access.any_of(request.capability, rights, log_id=log_id)
        call = self._answers.call(kvstore_pb2.CancelResponse, claims.tenant, log_id, request)
        kept = call.known()
        if kept is None:
            self._access.own(claims, log_id)
            generation = self._store.keeper.cancel(log_id, self._runtime.now().wall_s)
            kept = call.keep(kvstore_pb2.CancelResponse(generation=generation))
        return await self._answered(kept)

    async def close(self, request: kvstore_pb2.CloseRequest) -> kvstore_pb2.CloseResponse:
        """Close."""
        log_id = wire.require_log_id(request.log_id)
        rights = (Right.WRITE, Right.OPEN, Right.ADMIN)
        claims = self._access.any_of(request.capability, rights, log_id=log_id)
        call = self._answers.call(kvstore_pb2.CloseResponse, claims.tenant, log_id, request)
        kept = call.known()
        if kept is None:
            self._access.own(claims, log_id)
            wall_s = self._runtime.now().wall_s
            self._store.keeper.close(log_id, is_dropped=request.drop, wall_s=wall_s)
            kept = call.keep(kvstore_pb2.CloseResponse())
        return await self._answered(kept)

    # --- writes -----------------------------------------------------------------------------

    async def grant(self, request: kvstore_pb2.GrantRequest) -> kvstore_pb2.GrantResponse:
        """Grant."""
        log_id = wire.require_log_id(request.log_id)
        claims = self._access.worker(request.capability)
        call = self._answers.call(kvstore_pb2.GrantResponse, claims.tenant, log_id, request)
        kept = call.known()
        if kept is None:
            _require_pages(request.pages)
            await self._reach_alloc(request.pages)
            pages = self._store.home.grant(
                log_id, request.generation, request.worker_id, request.pages
            )
            answer = kvstore_pb2.GrantResponse(pages=wire.grants_to_proto(pages))
            kept = call.keep(answer, pages=[page.page for page in pages])
        return await self._answered(kept)

    async def checkpoint(
        self, request: kvstore_pb2.CommitCheckpointRequest
    ) -> kvstore_pb2.CommitCheckpointResponse:
        """CommitCheckpoint."""
        log_id = wire.require_log_id(request.log_id)
        claims = self._access.writer(request.capability, Right.WRITE, log_id, request.generation)
        await faults.reach("kv.before_commit")
        call = self._answers.call(
            kvstore_pb2.CommitCheckpointResponse, claims.tenant, log_id, request
        )
        kept = call.known()
        if kept is None:
            block_tokens = self._core.block_tokens
            committed = self._store.writes.checkpoint(
                log_id,
                request.generation,
                (request.from_position, request.to_position),
                [wire.row_of(entry, block_tokens) for entry in request.pages],
                self._runtime.clock.monotonic_s(),
            )
            level = self._core.logs[log_id].ack_level
            answer = kvstore_pb2.CommitCheckpointResponse(
                committed_position=committed, ack_level=wire.ack_level_to_proto(level)
            )
            kept = call.keep(answer, level)
        answer = await self._answered(kept)
        await faults.reach("kv.after_commit")
        return answer

    async def seal(self, request: kvstore_pb2.SealRequest) -> kvstore_pb2.SealResponse:
        """Seal."""
        log_id = wire.require_log_id(request.log_id)
        claims = self._access.writer(request.capability, Right.SEAL, log_id, request.generation)
        call = self._answers.call(kvstore_pb2.SealResponse, claims.tenant, log_id, request)
        kept = call.known()
        has_checkpoint = request.HasField("last_checkpoint")
        if has_checkpoint:
            self._access.writer(request.capability, Right.WRITE, log_id, request.generation)
            await faults.reach("kv.before_commit")
        if kept is None:
            if has_checkpoint:
                self._commit_last(log_id, request)
            has_token = request.HasField("first_token_id")
            has_logprob = request.HasField("logprob")
            end = SealEnd(
                token_id=request.first_token_id if has_token else None,
                logprob=wire.logprob_of(request.logprob) if has_logprob else None,
                finish_reason=finish_from_proto(request.finish_reason),
            )
            log = self._store.seal(
                log_id,
                request.generation,
                request.chunk_list_digest,
                end,
                self._runtime.clock.monotonic_s(),
            )
            answer = kvstore_pb2.SealResponse(
                position=log.position, ack_level=wire.ack_level_to_proto(log.ack_level)
            )
            kept = call.keep(answer, log.ack_level)
        answer = await self._answered(kept)
        if has_checkpoint:
            await faults.reach("kv.after_commit")
        return answer

    def _commit_last(self, log_id: bytes, request: kvstore_pb2.SealRequest) -> None:
        """The chunk that comes with a seal; one that is there already, with a repeated seal, is not
        looked at again.
        """
        last = request.last_checkpoint
        if self._core.current(log_id, request.generation).committed >= last.to_position:
            return
        self._store.writes.checkpoint(
            log_id,
            request.generation,
            (last.from_position, last.to_position),
            [wire.row_of(entry, self._core.block_tokens) for entry in last.pages],
            self._runtime.clock.monotonic_s(),
        )

    async def take(self, request: kvstore_pb2.TakeRequest) -> kvstore_pb2.TakeResponse:
        """Take."""
        log_id = wire.require_log_id(request.log_id)
        claims = self._access.any_of(request.capability, (Right.TAKE,), log_id=log_id)
        if request.with_log:
            self._access.log(request.capability, (Right.READ, Right.WRITE), log_id)
        call = self._answers.call(kvstore_pb2.TakeResponse, claims.tenant, log_id, request)
        kept = call.known()
        if kept is None:
            await self._load_for_take(request, claims)
            # A repetition may have overtaken the wait.
            kept = call.known() or call.keep(*self._take(request, claims))
        answer = await self._answered(kept)
        return await self._with_log(log_id, answer) if request.with_log else answer

    async def _with_log(
        self, log_id: bytes, taken: kvstore_pb2.TakeResponse
    ) -> kvstore_pb2.TakeResponse:
        """The answer and the log as it is now. What is kept for repetitions is without it."""
        log = self._core.logs.get(log_id)
        if log is not None:
            await self._runtime.readable(log_id, _pages(log))
            log = self._core.logs.get(log_id)
        if (
            log is None
            or log.generation != taken.generation
            or log.position > LOG_WITH_TAKE_TOKENS_MAX
        ):
            return taken
        answer = kvstore_pb2.TakeResponse()
        answer.CopyFrom(taken)
        answer.log.extend(wire.replay_to_proto(log, 0, self._runtime.writer.newest_lsn))
        return answer

    async def _load_for_take(self, request: kvstore_pb2.TakeRequest, claims: Claims) -> None:
        """The log's KV is in the host as far as that is worth it."""
        _require_pages(request.pages)
        await self._reach_alloc(request.pages)
        await self._filled(request.log_id)
        log = self._access.log_of(claims, request.log_id)
        self._runtime.workers.find(request.worker_id)
        if log.generation == request.generation:
            wants = want_of_log(log, log.position - 1)
            await self._load(wants, log.position, request.compute_tokens_per_s)

    def _take(
        self, request: kvstore_pb2.TakeRequest, claims: Claims
    ) -> tuple[kvstore_pb2.TakeResponse, AckLevel, PageArray]:
        log = self._access.log_of(claims, request.log_id)
        worker = self._runtime.workers.find(request.worker_id)
        taken = self._store.home.take(
            log.log_id,
            request.generation,
            worker.writer,
            worker.numeric_class,
            pages=request.pages,
            now_s=self._runtime.clock.monotonic_s(),
        )
        self._runtime.former.pop(log.log_id, None)
        answer = kvstore_pb2.TakeResponse(
            generation=taken.generation,
            position=taken.position,
            pages=wire.grants_to_proto(taken.granted),
            lease=duration_to_proto(self._core.leases.lease_s),
        )
        return answer, log.ack_level, _pages(log)

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
        await self._runtime.readable(log_id, _pages(log))
        log = self._access.log(request.capability, (Right.READ, Right.WRITE), log_id)
        if request.from_position > log.position:
            raise invalid("from_position", f"the log has {log.position} tokens")
        newest_lsn = self._runtime.writer.newest_lsn
        return list(wire.replay_to_proto(log, request.from_position, newest_lsn))

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


def _pages(log: LogState) -> PageArray:
    """The pages of a log that may still be zeroed or filled: granted ones and its rows."""
    return np.concatenate((np.fromiter(log.granted, dtype=np.uint32), log.rows.pages()))


def _require_pages(pages: int) -> None:
    if pages > PAGES_PER_CALL_MAX:
        raise invalid("pages", f"at most {PAGES_PER_CALL_MAX} a call")

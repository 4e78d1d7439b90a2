"""`OperatorService` on gRPC: what people and their tools ask of a kvstore.

Owns the path of these calls: an operator's capability, a bounded answer, no content. Raises
ServiceError; the interceptor aborts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from baton.api.kvstore.v1 import operators_pb2, operators_pb2_grpc
from baton.errors import Reason, ServiceError
from baton.kv.digests import history_at
from baton.wire.durations import duration_to_proto
from services.kvstore import wire
from services.kvstore.access import Access
from services.kvstore.core import invalid
from services.kvstore.import_rpc import ImportCalls
from services.kvstore.listing import (
    Lineage,
    Listing,
    Wanted,
    covered_tokens,
    parse_page_token,
    require_log_id_or_none,
    share_of,
)
from services.kvstore.operator_wire import (
    PHASE_OF,
    scrub_to_proto,
    share_to_proto,
    summary_to_proto,
    use_to_proto,
)
from services.kvstore.quotas import Tier
from services.kvstore.runtime import Runtime
from services.kvstore.scrubbing import Scrubber
from services.kvstore.state import LogState, Phase
from services.kvstore.usage import usage_of
from services.kvstore.walking import all_logs

SERVICE_NAME: Final = "baton.api.kvstore.v1.OperatorService"
PAGE_SIZE_DEFAULT: Final = 100
LOGS_MAX: Final = 1000
CHILDREN_MAX: Final = 1000

_Context = grpc.aio.ServicerContext[Any, Any]


class OperatorServicer(operators_pb2_grpc.OperatorServiceServicer):
    """See the module."""

    def __init__(
        self, runtime: Runtime, access: Access, imports: ImportCalls, scrubber: Scrubber
    ) -> None:
        self._runtime = runtime
        self._core = runtime.core
        self._access = access
        self._imports = imports
        self._scrubber = scrubber

    async def ListLogs(
        self, request: operators_pb2.ListLogsRequest, context: _Context
    ) -> operators_pb2.ListLogsResponse:
        """A page of logs."""
        self._access.operator(request.capability)
        size = _bounded("page_size", request.page_size, PAGE_SIZE_DEFAULT)
        phase = None if not request.phase else PHASE_OF.get(request.phase)
        if request.phase and phase is None:
            raise invalid("phase", f"has the unknown value {request.phase}")
        wanted = Wanted(
            tenant=request.tenant or None,
            phase=phase,
            request_id=request.request_id or None,
            id_prefix=request.log_id_prefix.lower() or None,
        )
        listing = Listing(wanted, parse_page_token(request.page_token), size)
        async for logs in all_logs(self._core):
            listing.add(logs)
        found = (self._core.logs.get(log_id) for _, log_id in listing.page())
        return operators_pb2.ListLogsResponse(
            logs=[self._summary(log) for log in found if log is not None],
            next_page_token=listing.next_token(),
            total=listing.total,
        )

    async def InspectLog(
        self, request: operators_pb2.InspectLogRequest, context: _Context
    ) -> operators_pb2.InspectLogResponse:
        """One log."""
        self._access.operator(request.capability)
        log = self._core.find(wire.require_log_id(request.log_id))
        lineage = await self._lineage()
        children = lineage.children(log.log_id)
        limits = self._core.limits
        return operators_pb2.InspectLogResponse(
            log=self._summary(log),
            prompt_tokens=log.prompt_tokens,
            cached_tokens=log.cached_tokens,
            finish_reason=log.finish_reason or "",
            scope=log.scope.team or "",
            numeric_class=log.numeric_class,
            history_end=history_at(
                limits.kv_digest, limits.block_tokens, log.tokens[: log.committed]
            ),
            tiers=self._tiers(log),
            granted_pages=len(log.granted),
            findable_blocks=log.indexed_blocks,
            prefix_ids=[
                prefix.prefix_id
                for prefix in self._core.prefixes.all()
                if prefix.log_id == log.log_id
            ],
            child_log_ids=[child.log_id for child in children[:CHILDREN_MAX]],
            child_count=len(children),
            moved_to=log.moved_to or "",
            drop_at_end=log.drop_at_end,
            ttl=duration_to_proto(log.ttl_s),
            ack_level=wire.ack_level_to_proto(log.ack_level),
        )

    async def ListLineage(
        self, request: operators_pb2.ListLineageRequest, context: _Context
    ) -> operators_pb2.ListLineageResponse:
        """A tree of forks, or all of them."""
        self._access.operator(request.capability)
        size = _bounded("logs_max", request.logs_max, LOGS_MAX)
        log_id = require_log_id_or_none(request.log_id)
        if log_id is not None:
            self._core.find(log_id)
        lineage = await self._lineage()
        roots = lineage.roots(request.tenant or None)
        if log_id is not None:
            roots = [lineage.root_of(log_id)]
        answer = operators_pb2.ListLineageResponse()
        for root in roots:
            for found_id, log, depth in lineage.tree(root):
                if len(answer.entries) == size:
                    answer.truncated = True
                    return answer
                line = operators_pb2.LogSummary(log_id=found_id)
                if log is not None:
                    line = self._summary(log)
                answer.entries.add(log=line, depth=depth, gone=log is None)
        return answer

    async def ReportUsage(
        self, request: operators_pb2.ReportUsageRequest, context: _Context
    ) -> operators_pb2.ReportUsageResponse:
        """Pages by tier and tenant."""
        self._access.operator(request.capability)
        tiers = await usage_of(self._core)
        return operators_pb2.ReportUsageResponse(
            tiers=[use_to_proto(tier, self._page) for tier in tiers]
        )

    async def EvictLog(
        self, request: operators_pb2.EvictLogRequest, context: _Context
    ) -> operators_pb2.EvictLogResponse:
        """Drops KV from the host's memory."""
        self._access.operator(request.capability)
        self._runtime.writer.require_room()
        log = self._core.find(wire.require_log_id(request.log_id))
        require_evictable(log)
        pages, before = len(log.rows), self._core.pool.free_count
        self._runtime.store.home.give_up_kv(log, 0)
        freed = self._core.pool.free_count - before
        await self._runtime.acked(log.ack_level)
        return operators_pb2.EvictLogResponse(
            pages=pages,
            freed_pages=freed,
            tokens=log.position,
            cold_tokens=covered_tokens(log.cold, self._core.block_tokens),
        )

    async def ReportScrub(
        self, request: operators_pb2.ReportScrubRequest, context: _Context
    ) -> operators_pb2.ReportScrubResponse:
        """What scrub did and found."""
        self._access.operator(request.capability)
        scrubber = self._scrubber
        return scrub_to_proto(scrubber.tiers(), self._page, scrubber.pace)

    async def CheckOperator(
        self, request: operators_pb2.CheckOperatorRequest, context: _Context
    ) -> operators_pb2.CheckOperatorResponse:
        """Whether a capability that a worker was shown is an operator's."""
        self._access.operator(request.capability)
        return operators_pb2.CheckOperatorResponse()

    async def ImportLog(
        self,
        request_iterator: AsyncIterator[operators_pb2.ImportLogRequest],
        context: _Context,
    ) -> operators_pb2.ImportLogResponse:
        """Stores blobs as a log."""
        self._runtime.writer.require_room()
        return await self._imports.import_log(request_iterator)

    # --- parts ------------------------------------------------------------------------------

    async def _lineage(self) -> Lineage:
        lineage = Lineage()
        async for logs in all_logs(self._core):
            lineage.add(logs)
        return lineage

    def _summary(self, log: LogState) -> operators_pb2.LogSummary:
        return summary_to_proto(log, self._core.block_tokens, self._runtime.now())

    def _tiers(self, log: LogState) -> list[operators_pb2.LogTier]:
        core = self._core
        found = [
            share_to_proto(Tier.HOST, share_of(log.rows, core.pool, core.block_tokens), self._page)
        ]
        if core.slots is not None:
            share = share_of(log.cold, core.slots.pool, core.block_tokens)
            found.append(share_to_proto(Tier.NVME, share, self._page))
        return found

    @property
    def _page(self) -> int:
        return self._runtime.arena.slot_bytes


def _bounded(field: str, wanted: int, default: int) -> int:
    if wanted > LOGS_MAX:
        raise invalid(field, f"at most {LOGS_MAX}")
    return wanted or default


def require_evictable(log: LogState) -> None:
    """INVALID_REQUEST, saying why, for a log whose KV somebody needs just now."""
    why = None
    if log.writer is not None:
        why = f"worker {log.writer.worker_id} writes it; cancel it first, or wait for its end"
    elif log.phase is Phase.MOVED:
        why = f"it moved to {log.moved_to}, which still fetches its pages"
    if why is not None:
        raise ServiceError(
            Reason.INVALID_REQUEST,
            f"log {log.log_id.hex()} keeps its KV: {why}",
            field="log_id",
            metadata={"phase": log.phase.value},
        )

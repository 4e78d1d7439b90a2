"""The Append stream: one group commit per message, grants with the acks.

Owns the stream's order and its hot path. One bad entry never stops the others; a bad first message
ends the stream. Never holds an ack longer than its own records need.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from baton.api.kvstore.v1 import kvstore_pb2
from baton.errors import ServiceError
from baton.faults import faults
from baton.tracing import continued_trace, parse_traceparent, span
from baton.wire.errors import error_to_proto
from services.kvstore import wire
from services.kvstore.access import Access
from services.kvstore.core import invalid
from services.kvstore.measures import StoreMeasures
from services.kvstore.runtime import Runtime
from services.kvstore.state import AckLevel, GrantedPage

ENTRIES_MAX = 4096
PAGES_WANTED_MAX = 4096


class AppendCalls:
    """Serves Append."""

    def __init__(self, runtime: Runtime, access: Access, measures: StoreMeasures) -> None:
        self._runtime = runtime
        self._access = access
        self._measures = measures

    async def append(
        self, requests: AsyncIterator[kvstore_pb2.AppendRequest]
    ) -> AsyncIterator[kvstore_pb2.AppendResponse]:
        """Append: the first message introduces the worker."""
        worker_id: str | None = None
        async for request in requests:
            if worker_id is None:
                worker_id = self._introduced(request)
            with _traced(request):
                response = await self._commit(request, worker_id)
            yield response

    def _introduced(self, request: kvstore_pb2.AppendRequest) -> str:
        self._access.worker(request.capability)
        self._runtime.workers.find(request.worker_id)
        return request.worker_id

    async def _commit(
        self, request: kvstore_pb2.AppendRequest, worker_id: str
    ) -> kvstore_pb2.AppendResponse:
        if len(request.entries) > ENTRIES_MAX:
            raise invalid("entries", f"at most {ENTRIES_MAX} a message")
        await faults.reach("kv.before_append")
        self._runtime.writer.require_room()
        response = kvstore_pb2.AppendResponse(batch_id=request.batch_id)
        home, writes = self._runtime.store.home, self._runtime.store.writes
        now_s = self._runtime.clock.monotonic_s()
        level = AckLevel.OS
        fresh: list[int] = []
        add_outcome, append, item_of = response.outcomes.add, writes.append, wire.append_item_of
        for entry in request.entries:
            outcome = add_outcome()
            try:
                is_again = bool(entry.pages_wanted) and self._is_again(entry)
                log = append(item_of(entry), worker_id, now_s)
                if log.ack_level is AckLevel.DISK:
                    level = AckLevel.DISK
                if entry.pages_wanted and log.writer is not None:
                    wanted = min(entry.pages_wanted, PAGES_WANTED_MAX)
                    grant = home.grant_again if is_again else home.grant_up_to
                    pages = grant(log, wanted)
                    _add_pages(outcome, pages)
                    fresh += [page.page for page in pages]
            except ServiceError as error:
                outcome.error.CopyFrom(error_to_proto(error))
                self._measures.append_refused(error.reason)
        await self._runtime.ready(fresh, level)
        self._measures.appended(len(request.entries))
        response.ack_level = wire.ack_level_to_proto(level)
        return response

    def _is_again(self, entry: kvstore_pb2.AppendEntry) -> bool:
        """Whether the entry's token is there already: its ack, and pages with it, were lost."""
        log = self._runtime.core.logs.get(entry.log_id)
        return log is not None and entry.position < log.position


@contextmanager
def _traced(request: kvstore_pb2.AppendRequest) -> Iterator[None]:
    """A span for the few messages that bring a trace."""
    trace = parse_traceparent(request.traceparent) if request.traceparent else None
    if trace is None:
        yield
        return
    with continued_trace(trace), span("Append", entries=len(request.entries)):
        yield


def _add_pages(outcome: kvstore_pb2.AppendOutcome, pages: tuple[GrantedPage, ...]) -> None:
    for page in pages:
        outcome.pages.add(page=page.page, page_generation=page.page_generation)

"""One log that is followed while its prompt is still computed elsewhere.

Owns the FollowLog call and the replica's growth. Ends by itself with the call; `stop` ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import structlog

from baton.api.kvstore.v1 import kvstore_pb2
from baton.clock import WaitingClock
from baton.errors import Reason, ServiceError
from services.kvstore import wire
from services.kvstore.core import Limits
from services.kvstore.moving.arrival import Arrival, Arrivals, Stage
from services.kvstore.moving.fetching import Fetcher, Job
from services.kvstore.moving.measures import MoveMeasures, MoveTimes
from services.kvstore.moving.old_home_rpc import Peers
from services.kvstore.moving.transport import Choice, Source, Transports

FOLLOW_MAX_S: Final = 600.0

_log = structlog.stdlib.get_logger("services.kvstore.moving")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """How many tokens' KV the log has, or will have once it is sealed, and how its pages come."""

    tokens: int
    choice: Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowParts:
    """What every follower of a store uses."""

    arrivals: Arrivals
    fetcher: Fetcher
    peers: Peers
    limits: Limits
    transports: Transports
    measures: MoveMeasures
    clock: WaitingClock


class Follower:
    """Follows one log into one arrival."""

    def __init__(self, parts: FollowParts, source: Source, arrival: Arrival) -> None:
        self._parts = parts
        self.source = source
        self.arrival = arrival
        self._head: Head | None = None
        self._fault: ServiceError | None = None
        self._has_head = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stop: Callable[[], object] | None = None
        self._is_copying = True
        self.is_over = False
        self.may_move = True

    async def run(self) -> None:
        """To the end of the call, whatever ends it."""
        try:
            await self._follow()
        except ServiceError as error:
            self._fault = error
            _log.info("follow_ended", log_id=self.source.log_id.hex(), reason=error.reason.value)
        finally:
            self.is_over = True
            self._stop = None
            self._has_head.set()
            self._idle.set()

    async def _follow(self) -> None:
        limits = self._parts.limits
        request = kvstore_pb2.FollowLogRequest(
            log_id=self.source.log_id,
            capability=self.source.capability,
            kv_digest=limits.kv_digest,
            tokenizer_hash=limits.tokenizer_hash,
            block_tokens=limits.block_tokens,
            transports=self._parts.transports.names,
        )
        call = self._parts.peers.stub(self.source.address).FollowLog(request, timeout=FOLLOW_MAX_S)
        self._stop = call.cancel
        try:
            async for response in call:
                match response.WhichOneof("content"):
                    case "head":
                        self._begin(response.head)
                    case "pages":
                        await self._copy(response.pages)
                    case "end":
                        self.may_move = response.end.may_move
                        return
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling() or self._is_copying:
                raise
        finally:
            call.cancel()

    def _begin(self, head: kvstore_pb2.FollowHead) -> None:
        parts, address = self._parts, self.source.address
        choice = parts.transports.choose(address, head.transports, parts.clock.monotonic_s())
        parts.measures.chosen(choice)
        _log.info(
            "transport_chosen",
            log_id=self.source.log_id.hex(),
            transport=choice.name,
            reason=choice.reason,
        )
        tokens = head.committed_position if head.sealed else head.position
        self._head = Head(tokens=tokens, choice=choice)
        self._has_head.set()

    async def _copy(self, run: kvstore_pb2.PageRun) -> None:
        """Copies announced pages, unless the move has begun: then the rest is fetched with it."""
        arrival, parts = self.arrival, self._parts
        if not self._is_copying or arrival.is_abandoned or arrival.stage is not Stage.FOLLOWING:
            return
        rows = [wire.moved_row_of(row, parts.limits.block_tokens) for row in run.pages]
        self._idle.clear()
        try:
            arrival.deadline_s = max(
                arrival.deadline_s, parts.clock.monotonic_s() + parts.arrivals.lease_s
            )
            blocks = parts.arrivals.announced(arrival, run.first_index, rows)
            assert self._head is not None
            choice = self._head.choice
            job = Job(choice=choice, source=self.source, arrival=arrival, times=MoveTimes())
            await parts.fetcher.early(job, blocks, lambda: self._is_copying)
            if job.choice is not choice:
                self._head = replace(self._head, choice=job.choice)
        finally:
            self._idle.set()

    async def head(self, timeout_s: float) -> Head:
        """Where the log stands at its home; TRANSFER_TIMEOUT, or what refused us."""
        if not await self._parts.clock.wait(self._has_head, timeout_s):
            raise ServiceError(
                Reason.TRANSFER_TIMEOUT,
                "the log's home did not answer in time",
                metadata={"step": "follow"},
            )
        if self._head is None:
            raise self._fault or ServiceError(
                Reason.WORKER_LOST, "the log's home ended the call without an answer"
            )
        return self._head

    async def settle(self, timeout_s: float) -> None:
        """No more pages are copied early; returns once the copy under way has ended.

        TRANSFER_TIMEOUT if it does not end in time.
        """
        self._is_copying = False
        if not await self._parts.clock.wait(self._idle, timeout_s):
            self.stop()
            raise ServiceError(
                Reason.TRANSFER_TIMEOUT,
                "pages that were being copied did not come in time",
                metadata={"step": "follow"},
            )

    def stop(self) -> None:
        """Ends the call; `run` returns."""
        self._is_copying = False
        if self._stop is not None:
            self._stop()

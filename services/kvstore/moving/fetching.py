"""Pages of a log that is coming: fetched in runs, verified, tried again a few times.

Owns the bound on transfers under way at the new home and what becomes of a broken or damaged one.
Never opens a log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Final

import structlog

from baton.clock import WaitingClock
from baton.errors import Reason, ServiceError
from services.kvstore.moving.arrival import Arrival, Arrivals, Stage, given_up
from services.kvstore.moving.measures import MoveMeasures, MoveTimes
from services.kvstore.moving.sink import PageSink
from services.kvstore.moving.transport import Choice, Source, Transports, Waits
from services.kvstore.runtime import Runtime

TRANSFERS_MAX: Final = 4
RUN_PAGES_MAX: Final = 512
EARLY_RUN_BYTES: Final = 4 << 20
RETRIES_MAX: Final = 3
RETRY_PAUSE_S: Final = 0.1
RETRY_PAUSE_MAX_S: Final = 1.0
EARLY_TIMEOUT_S: Final = 30.0
STALL_S: Final = 3.0
"""A transfer of which nothing has come for so long is broken: tried again while there is time."""

_SILENT: Final = frozenset({Reason.WORKER_LOST, Reason.QUEUE_FULL, Reason.TRANSFER_TIMEOUT})

_TRANSPORT_FAULTS: Final = frozenset(
    {
        *_SILENT,
        Reason.UNSUPPORTED,
        Reason.CHECKSUM_MISMATCH,
        Reason.CANCELLED,
        Reason.DEADLINE_EXCEEDED,
        Reason.INTERNAL,
    }
) - {Reason.QUEUE_FULL}

_log = structlog.stdlib.get_logger("services.kvstore.moving")


@dataclass(slots=True, kw_only=True)
class Job:
    """Whose pages come into which arrival, how, and where the time is noted."""

    choice: Choice
    source: Source
    arrival: Arrival
    times: MoveTimes


class Fetcher:
    """Fetches for one store; `executor` is the page thread. `stall_s`: see `STALL_S`."""

    def __init__(
        self,
        runtime: Runtime,
        arrivals: Arrivals,
        executor: Executor,
        *,
        clock: WaitingClock,
        transports: Transports,
        measures: MoveMeasures,
        stall_s: float = STALL_S,
    ) -> None:
        self._runtime = runtime
        self._arrivals = arrivals
        self._clock = clock
        self._executor = executor
        self._transports = transports
        self._measures = measures
        self._stall_s = stall_s
        self._places = asyncio.Semaphore(TRANSFERS_MAX)

    async def early(self, job: Job, blocks: Sequence[int], is_wanted: Callable[[], bool]) -> None:
        """Copies announced pages of a log that is still being prefilled, once.

        In small runs, so that a move does not wait long for the one under way.
        """
        pages_max = max(1, EARLY_RUN_BYTES // self._runtime.arena.page_bytes)
        for run in _runs(blocks, min(pages_max, RUN_PAGES_MAX)):
            if not is_wanted():
                return
            try:
                await self._run(job, run, EARLY_TIMEOUT_S)
            except ServiceError as error:
                if not self._fall_back(job, error.reason):
                    raise
                await self._run(job, run, EARLY_TIMEOUT_S)

    async def rest(self, job: Job, deadline_s: float) -> None:
        """Fetches what is missing of a moved log until it is complete.

        KV that cannot be had in time, or is damaged where it comes from, is cut: never an error.
        """
        retries = breaks = 0
        while blocks := _missing(job.arrival):
            left_s = deadline_s - self._clock.monotonic_s()
            if left_s <= 0.0 or retries > RETRIES_MAX:
                self._cut(job.arrival, blocks[0], "deadline" if left_s <= 0.0 else "retries")
                return
            try:
                run = next(iter(_runs(blocks, RUN_PAGES_MAX)))
                await self._run(job, run, left_s)
            except ServiceError as error:
                # A silent or restarting home is waited for; one that sends rubbish is not.
                retries += error.reason not in _SILENT
                breaks += 1
                self._measures.retried(job.choice.name)
                self._fall_back(job, error.reason)
                pause_s = min(RETRY_PAUSE_S * breaks, RETRY_PAUSE_MAX_S)
                await self._clock.wait(asyncio.Event(), pause_s)

    def _fall_back(self, job: Job, reason: Reason) -> bool:
        """What broke over another transport goes on over `stream`, where that is allowed; False
        where it goes on, or not, as it was.
        """
        if reason not in _TRANSPORT_FAULTS:
            return False
        now_s = self._clock.monotonic_s()
        choice = self._transports.failed(job.source.address, job.choice, now_s)
        if choice is job.choice:
            return False
        self._measures.chosen(choice)
        job.choice = job.arrival.choice = choice
        job.times.transport, job.times.transport_reason = choice.name, choice.reason
        _log.warning("transport_fell_back", reason=choice.reason, why=reason.value)
        return True

    def _cut(self, arrival: Arrival, block: int, why: str) -> None:
        _log.warning("moved_kv_cut", log_id=arrival.log_id.hex(), block_index=block, why=why)
        self._arrivals.damaged(arrival, block)

    async def _run(self, job: Job, run: range, timeout_s: float) -> None:
        """One run of pages, through one of the few places."""
        try:
            await self._timed(job, run, timeout_s)
        except ServiceError as error:
            self._measures.broken(job.choice.name, error.reason)
            _log.warning(
                "transfer_broken",
                log_id=job.arrival.log_id.hex(),
                transport=job.choice.name,
                reason=error.reason.value,
                step=error.metadata.get("step", "fetch"),
            )
            raise

    async def _timed(self, job: Job, run: range, timeout_s: float) -> None:
        began_s = self._clock.monotonic_s()
        try:
            async with asyncio.timeout(timeout_s), self._places:
                waited_s = self._clock.monotonic_s()
                waits = await self._unstalled(job, run, timeout_s - (waited_s - began_s))
        except TimeoutError as error:
            raise _too_late(f"pages did not come within {timeout_s:.1f} s", "deadline") from error
        ended_s = self._clock.monotonic_s()
        times = job.times
        times.queue_s += waited_s - began_s + waits.queue_s
        times.registration_s += waits.registration_s
        times.sync_s += waits.sync_s
        apart_s = waits.queue_s + waits.registration_s + waits.sync_s
        times.transfer_s += max(ended_s - waited_s - apart_s, 0.0)
        self._measures.waited(job.choice.name, waits)

    async def _unstalled(self, job: Job, run: range, timeout_s: float) -> Waits:
        """As long as something comes."""
        loop = asyncio.get_running_loop()
        bound = asyncio.timeout(self._stall_s)

        def moved() -> None:
            if not bound.expired():
                bound.reschedule(loop.time() + self._stall_s)

        try:
            async with bound:
                return await self._through(job, run, timeout_s, moved)
        except TimeoutError as error:
            if not bound.expired():
                raise
            raise _too_late(f"nothing came for {self._stall_s:.1f} s", "stall") from error

    async def _through(
        self, job: Job, run: range, timeout_s: float, moved: Callable[[], None]
    ) -> Waits:
        """What it took beside copying."""
        arrival, arrivals, transport = job.arrival, self._arrivals, job.choice.name
        is_moved = arrival.stage is not Stage.FOLLOWING
        if arrival.is_abandoned:
            raise given_up()
        rows = [page.row for page in arrivals.writing(arrival, run)]
        sink = PageSink(self._runtime.arena, self._executor, run.start, rows, moved=moved)
        began_s = self._clock.monotonic_s()
        try:
            # Fresh pages are zeroed first; what is written before that would be lost.
            self._runtime.order_work()
            await self._runtime.pages.ready([row.page for row in rows])
            ready_s = self._clock.monotonic_s()
            fetched = self._transports.of(job.choice).fetch(job.source, run, sink, timeout_s)
            waits = await fetched
            await sink.flush()
        finally:
            sink.when_idle(lambda: self._ended(arrival, sink, transport))
        result, seconds = sink.result, self._clock.monotonic_s() - began_s
        job.times.verify_s += result.verify_s
        job.times.fetched_bytes += result.received_bytes
        self._measures.fetched(transport, result.received_bytes, seconds)
        gone = [*result.damaged, *([run.start + sink.offered] if sink.offered < len(run) else [])]
        if gone and is_moved and not arrival.is_abandoned:
            self._cut(arrival, min(gone), "damaged" if result.damaged else "not there")
        return replace(waits, registration_s=waits.registration_s + ready_s - began_s)

    def _ended(self, arrival: Arrival, sink: PageSink, transport: str) -> None:
        """No write is left: what verified counts, and an abandoned arrival's pages are free."""
        if sink.result.damaged:
            self._measures.damaged(transport)
        self._arrivals.written(arrival, sink.result.verified)
        self._runtime.order_work()


def _too_late(message: str, step: str) -> ServiceError:
    return ServiceError(Reason.TRANSFER_TIMEOUT, message, metadata={"step": step})


def _missing(arrival: Arrival) -> list[int]:
    """Blocks still to be fetched; LEASE_EXPIRED once the move was given up."""
    if arrival.is_abandoned:
        raise given_up()
    return [index for index in range(arrival.usable) if not arrival.pages[index].is_filled]


def _runs(blocks: Sequence[int], pages_max: int) -> Iterator[range]:
    """Consecutive blocks together, at most `pages_max` each."""
    start = previous = None
    for block in blocks:
        if start is None or previous is None:
            start = previous = block
        elif block == previous + 1 and block - start < pages_max:
            previous = block
        else:
            yield range(start, previous + 1)
            start = previous = block
    if start is not None and previous is not None:
        yield range(start, previous + 1)

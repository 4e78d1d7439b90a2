"""Group commit: records from the event loop to segments, acknowledged at their level.

Owns the queue, LSNs, and which segments hold records of which living logs. One thread writes,
another flushes: an `os` ack never waits for the disk, and while a group is flushed the next is
written. Nothing is acknowledged that is not at its level.

A log that cannot be written (no space, a failing disk) does not end the service: everything
submitted is kept and tried again every `retry_s`; whoever waits for an ack, or asks for room, is
refused with the cause, until the disk takes it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog

from baton.errors import Reason, ServiceError
from services.kvstore.log.format import (
    HEADER_BYTES,
    RecordAddress,
    RecordType,
    unsealed_record,
)
from services.kvstore.log.groups import Group, make_group
from services.kvstore.log.living import LivingSegments
from services.kvstore.log.segments import UNFLUSHED_BYTES_MAX, SegmentWriter
from services.kvstore.progress import Progress
from services.kvstore.state import AckLevel

_T = TypeVar("_T")

GROUP_RECORDS_MAX: Final = 8192
GROUP_BYTES_MAX: Final = 4 << 20
QUEUE_BYTES_MAX: Final = 32 << 20
IDLE_FLUSH_S: Final = 1.0
RETRY_S: Final = 1.0

_LOOKED_INTO: Final = frozenset(
    (
        RecordType.OPEN,
        RecordType.SNAPSHOT,
        RecordType.CLOSE,
        RecordType.PUBLISH,
        RecordType.REVOKE,
        RecordType.SESSION,
    )
)
"""The kinds that change what is needed before them."""

_log = structlog.stdlib.get_logger("services.kvstore.log")


@dataclass(slots=True)
class WriterCounters:
    """For metrics; totals since start."""

    groups: int = 0
    records: int = 0
    bytes: int = 0
    flushes: int = 0
    flush_seconds: float = 0.0
    refused: int = 0


@dataclass(slots=True)
class _Queued:
    kind: RecordType
    log_id: bytes
    record: bytes


class LogWriter:
    """Takes records in order and makes them durable in groups.

    `executor`: the thread that writes; `flusher`: the one that flushes, its own unless given, which
    `close` ends. `on_flush(seconds)` is called on the loop for each fdatasync.
    """

    def __init__(
        self,
        segments: SegmentWriter,
        executor: Executor,
        *,
        next_lsn: int,
        on_flush: Callable[[float], None] = lambda seconds: None,
        retry_s: float = RETRY_S,
        flusher: Executor | None = None,
    ) -> None:
        self._segments = segments
        self._executor = executor
        self._flusher = flusher or ThreadPoolExecutor(1, thread_name_prefix="kvstore-log-flush")
        self._next_lsn = next_lsn
        self._on_flush = on_flush
        self._retry_s = retry_s
        self._pending: deque[_Queued] = deque()
        self._written = Progress()
        self._durable = Progress()
        self._wake = asyncio.Event()
        self._flush_wake = asyncio.Event()
        self._flushed = asyncio.Event()
        self._ending = asyncio.Event()
        self._has_written_all = False
        self._has_flushed_all = False
        self._unflushed_since_s: float | None = None
        self._spare_due_s = 0.0
        self.living = LivingSegments()
        self._write_fault: ServiceError | None = None
        self._flush_fault: ServiceError | None = None
        self._failed_flushes = 0
        self._in_flight: list[_Queued] = []
        self.counters = WriterCounters()
        self.queue_bytes = 0

    # --- for the cores ------------------------------------------------------------------------

    def submit(self, kind: RecordType, payload: bytes, address: RecordAddress) -> None:
        """Queues one encoded record body; wait with `acked`."""
        record = unsealed_record(kind, payload, address)
        self._pending.append(_Queued(kind, address.log_id, record))
        self.queue_bytes += len(record)
        self._written.ordered += 1
        self._durable.ordered += 1
        self._wake.set()

    def require_room(self) -> None:
        """Before anything is changed: QUEUE_FULL with retry-after while the log takes no more."""
        fault = self.fault
        if fault is None and self.queue_bytes < QUEUE_BYTES_MAX:
            return
        self.counters.refused += 1
        raise fault or ServiceError(
            Reason.QUEUE_FULL,
            f"{self.queue_bytes} bytes wait to be written to the log; the disk is slow, retry",
            retry_after_s=RETRY_S,
        )

    async def acked(self, level: AckLevel) -> None:
        """Returns when everything submitted before has reached `level`.

        QUEUE_FULL with retry-after while the log cannot be written: what was submitted is kept and
        may become durable later. WORKER_LOST when the service ends.
        """
        is_disk = level is AckLevel.DISK
        progress = self._durable if is_disk else self._written
        if progress.done >= progress.ordered:
            return
        if self.fault is not None:
            raise self.fault
        self._wake.set()
        if is_disk:
            self._flush_wake.set()
        await progress.reach(progress.ordered)

    # --- for metrics --------------------------------------------------------------------------

    @property
    def newest_lsn(self) -> int:
        """LSN of the newest record that has one."""
        return self._next_lsn - 1

    @property
    def segment_count(self) -> int:
        """Segments on disk that this or an earlier run wrote and nobody freed."""
        return len(self.living)

    @property
    def segment_bytes(self) -> int:
        """The size of a segment."""
        return self._segments.segment_bytes

    @property
    def poisoned_segments(self) -> int:
        """Segments given up after a failed write or flush."""
        return self._segments.poisoned_segments

    @property
    def unflushed_bytes(self) -> int:
        """Written and not on disk yet."""
        return self._segments.unflushed_bytes

    @property
    def fault(self) -> ServiceError | None:
        """Why the log cannot be written now; None when it can."""
        return self._write_fault or self._flush_fault

    # --- writing ------------------------------------------------------------------------------

    def end(self) -> None:
        """Lets `run` return once everything submitted is written."""
        self._ending.set()
        self._wake.set()
        self._flush_wake.set()

    async def run(self) -> None:
        """Writes and flushes groups until `end`."""
        with self._written.ending("its log stopped"), self._durable.ending("its log stopped"):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write_all())
                tasks.create_task(self._flush_all())

    async def _write_all(self) -> None:
        try:
            while self._pending or not self._ending.is_set():
                await self._wake.wait()
                self._wake.clear()
                while self._pending:
                    if not await self._write_one():
                        # At its end a service does not wait for a disk that refuses.
                        _log.error("log_records_lost", bytes=self.queue_bytes)
                        return
        finally:
            self._has_written_all = True
            self._flush_wake.set()

    async def _write_one(self) -> bool:
        """One group; False when the service ended before it could be written."""
        while self._segments.unflushed_bytes >= UNFLUSHED_BYTES_MAX:
            if self._has_flushed_all:
                return False
            self._flushed.clear()
            self._flush_wake.set()
            await self._flushed.wait()
        items = self._in_flight = list(self._taken())
        group = make_group(
            [item.record for item in items],
            first_lsn=self._next_lsn,
            durable_lsn=self._segments.durable_lsn,
        )
        while True:
            try:
                await self._in_thread(self._executor, lambda: self._segments.write(group))
                break
            except OSError as error:
                self._write_fault = self._told(error)
                if await self._ends_within(self._retry_s):
                    return False
        self._write_fault = None
        self._in_flight = []
        self._note_written(group, items)
        return True

    def _taken(self) -> Iterator[_Queued]:
        size, pending = 0, self._pending
        for _ in range(min(len(pending), GROUP_RECORDS_MAX)):
            if size > GROUP_BYTES_MAX:
                return
            item = pending.popleft()
            size += len(item.record)
            yield item

    def _note_written(self, group: Group, items: list[_Queued]) -> None:
        self._next_lsn = group.last_lsn + 1
        self.queue_bytes -= sum(len(item.record) for item in items)
        sequences = (run.sequence for run in group.runs for _ in range(run.count))
        next(sequences)
        living = self.living
        for item, sequence in zip(items, sequences, strict=True):
            if item.kind in _LOOKED_INTO:
                payload = memoryview(item.record)[HEADER_BYTES:]
                living.note(sequence, item.kind, item.log_id, payload)
            else:
                living.hold(sequence, item.log_id)
        self.counters.groups += 1
        self.counters.records += len(items)
        self.counters.bytes += len(group.data)
        if self._unflushed_since_s is None:
            self._unflushed_since_s = time.monotonic()
        self._written.advance(self._written.done + len(items))
        self._flush_wake.set()

    def _told(self, error: OSError) -> ServiceError:
        """The disk refused twice: says so to everybody who waits."""
        if self.fault is None:
            _log.error("log_not_writable", error=str(error))
        fault = _fault_of(error)
        self._written.refuse(fault)
        self._durable.refuse(fault)
        return fault

    async def _ends_within(self, wait_s: float) -> bool:
        try:
            async with asyncio.timeout(wait_s):
                await self._ending.wait()
        except TimeoutError:
            return False
        return True

    # --- flushing -----------------------------------------------------------------------------

    async def _flush_all(self) -> None:
        try:
            await self._prepare()
            while not (self._has_written_all and self._durable.done >= self._written.done):
                if not self._is_flush_due():
                    await self._flush_wanted()
                elif not await self._flush_one():
                    return
        finally:
            self._has_flushed_all = True
            self._flushed.set()

    def _is_flush_due(self) -> bool:
        segments = self._segments
        if self._durable.done >= self._written.done:
            return False
        target = self._durable.next_target
        if self._has_written_all or (target is not None and target <= self._written.done):
            return True
        if segments.is_poisoned or segments.unflushed_bytes >= UNFLUSHED_BYTES_MAX // 2:
            return True
        since_s = self._unflushed_since_s
        return since_s is not None and time.monotonic() - since_s >= IDLE_FLUSH_S

    async def _flush_wanted(self) -> None:
        """Returns when something was written or is waited for, or the oldest is old enough."""
        self._flush_wake.clear()
        since_s = self._unflushed_since_s
        left_s = None if since_s is None else max(since_s + IDLE_FLUSH_S - time.monotonic(), 0.0)
        try:
            async with asyncio.timeout(left_s):
                await self._flush_wake.wait()
        except TimeoutError:
            pass

    async def _flush_one(self) -> bool:
        """One flush; False when the service ended before the disk took it."""
        target, target_lsn = self._written.done, self._next_lsn - 1
        self._unflushed_since_s = None
        try:
            flush_s = await self._in_thread(self._flusher, self._segments.flush)
        except OSError as error:
            return await self._flush_failed(error)
        if self._segments.durable_lsn < target_lsn:
            # A write failed meanwhile: what it wrote again is flushed next.
            return await self._mend()
        self._failed_flushes, self._flush_fault = 0, None
        if flush_s is not None:
            self.counters.flushes += 1
            self.counters.flush_seconds += flush_s
            self._on_flush(flush_s)
        if self._written.done > target:
            self._unflushed_since_s = time.monotonic()
        self._durable.advance(target)
        self._flushed.set()
        await self._prepare()
        return True

    async def _flush_failed(self, error: OSError) -> bool:
        """Once is made good at once; a disk that fails again is given time. False at the end."""
        self._failed_flushes += 1
        if self._failed_flushes > 1:
            self._flush_fault = self._told(error)
            self._flushed.set()
            if await self._ends_within(self._retry_s):
                return False
        return await self._mend()

    async def _mend(self) -> bool:
        """What is not on disk is written again, and is due to be flushed; False at the end."""
        self._unflushed_since_s = time.monotonic() - IDLE_FLUSH_S
        try:
            await self._in_thread(self._executor, self._segments.rewrite)
        except OSError as error:
            self._flush_fault = self._told(error)
            self._flushed.set()
            return not await self._ends_within(self._retry_s)
        return True

    async def _prepare(self) -> None:
        """The next segment is made before it is needed; a full disk is asked now and then."""
        now_s = time.monotonic()
        if self._segments.has_spare or now_s < self._spare_due_s:
            return
        if not await self._in_thread(self._flusher, self._segments.prepare):
            self._spare_due_s = now_s + RETRY_S

    async def _in_thread(self, executor: Executor, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(executor, work)

    # --- retention ----------------------------------------------------------------------------

    def adopt(self, sequence: int, log_ids: Collection[bytes]) -> None:
        """At start, oldest first: an older segment holds records that these logs need."""
        self.living.begin(sequence)
        for log_id in log_ids:
            self.living.note(sequence, RecordType.OPEN, log_id, b"")

    def oldest_living(self) -> set[bytes]:
        """The logs and prefixes that keep the oldest segment, if it is not being written."""
        oldest = self.living.oldest()
        if oldest is None or oldest >= self._segments.sequence:
            return set()
        return self.living.holders(oldest)

    def free_end(self) -> int | None:
        """The segments before this one hold nothing living; None when there are none."""
        oldest, needed = self.living.oldest(), self.living.first_needed()
        current = self._segments.sequence
        end = current if needed is None else min(needed, current)
        return None if oldest is None or oldest >= end else end

    async def free_before(self, end: int) -> int:
        """Removes the segments before `end`, once they are free; returns how many.

        What replaced their records must be on disk: `free_end`, then `acked(AckLevel.DISK)`, then
        this.
        """
        self.living.remove_before(end)
        return await self._in_thread(self._flusher, lambda: self._segments.free_before(end))

    async def free_oldest(self) -> int:
        """Removes what is free now, when what replaced it is on disk; returns how many."""
        end = self.free_end()
        if end is None:
            return 0
        await self.acked(AckLevel.DISK)
        return await self.free_before(end)

    async def settled(self, log_id: bytes) -> None:
        """What a reader of the log may be told is acked at `os`: no record of it waits.

        While the log cannot be written, logs all of whose records stand are still read.
        """
        if any(item.log_id == log_id for item in (*self._in_flight, *self._pending)):
            await self.acked(AckLevel.OS)

    async def close(self) -> None:
        """After `run` ended: flushes and ends the segment; OSError when the disk refuses."""
        final_lsn = self._next_lsn
        self._next_lsn += 1
        try:
            await self._in_thread(self._executor, lambda: self._segments.close(final_lsn))
        finally:
            self._flusher.shutdown(wait=False)


def _fault_of(error: OSError) -> ServiceError:
    code = error.errno or errno.EIO
    remedy = "free space in the log directory" if code == errno.ENOSPC else "check the disk"
    return ServiceError(
        Reason.QUEUE_FULL,
        f"the kvstore's log cannot be written now ({os.strerror(code)}); {remedy}, or retry later",
        metadata={"cause": errno.errorcode.get(code, str(code))},
        retry_after_s=RETRY_S,
    )

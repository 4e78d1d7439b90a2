"""Group commit: records from the event loop to segments, acknowledged at their level.

Owns the queue, LSNs, and which segments hold records of which living logs (so that the oldest can
be freed). All blocking work is done by one named thread. A log directory that cannot be written
any more ends the service loudly: nothing is acknowledged that is not at its level.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from services.kvstore.log.format import STORE_LOG_ID, RecordAddress, RecordType
from services.kvstore.log.segments import GroupResult, Numbered, SegmentWriter
from services.kvstore.progress import Progress
from services.kvstore.state import AckLevel

_T = TypeVar("_T")

GROUP_RECORDS_MAX = 8192
IDLE_FLUSH_S = 1.0


@dataclass(slots=True)
class WriterCounters:
    """For metrics; totals since start."""

    groups: int = 0
    records: int = 0
    flushes: int = 0
    flush_seconds: float = 0.0


class LogWriter:
    """Takes records in order and makes them durable in groups.

    `on_flush(seconds)` is called on the loop for each fdatasync.
    """

    def __init__(
        self,
        segments: SegmentWriter,
        executor: Executor,
        *,
        next_lsn: int,
        on_flush: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._segments = segments
        self._executor = executor
        self._next_lsn = next_lsn
        self._on_flush = on_flush
        self._pending: list[tuple[RecordType, bytes, RecordAddress]] = []
        self._written = Progress()
        self._durable = Progress()
        self._wants_disk = False
        self._wake = asyncio.Event()
        self._living: dict[int, set[bytes]] = {}
        self.counters = WriterCounters()
        self._is_ending = False

    def end(self) -> None:
        """Lets `run` return once everything submitted is written."""
        self._is_ending = True
        self._wake.set()

    def submit(self, kind: RecordType, payload: bytes, address: RecordAddress) -> None:
        """Queues one encoded record body; wait with `acked`."""
        self._pending.append((kind, payload, address))
        self._written.ordered += 1
        self._durable.ordered += 1
        self._wake.set()

    @property
    def newest_lsn(self) -> int:
        """LSN of the newest written record."""
        return self._next_lsn - 1

    @property
    def segment_count(self) -> int:
        """Segments that hold records of living logs, and the one being written."""
        return len(self._living)

    async def acked(self, level: AckLevel) -> None:
        """Returns when everything submitted before has reached `level`."""
        if level is AckLevel.DISK:
            self._wants_disk = True
            self._wake.set()
            await self._durable.reach(self._durable.ordered)
        else:
            await self._written.reach(self._written.ordered)

    async def run(self) -> None:
        """Writes groups until `end`; a directory that cannot be written raises OSError."""
        with self._written.ending("its log stopped"), self._durable.ending("its log stopped"):
            while self._pending or not self._is_ending:
                try:
                    async with asyncio.timeout(IDLE_FLUSH_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
                await self._turn()

    async def _turn(self) -> None:
        while self._pending or self._wants_disk:
            await self._commit()
        if self._durable.done < self._written.done:
            await self._flush_idle()

    async def _commit(self) -> None:
        taken = self._pending[:GROUP_RECORDS_MAX]
        del self._pending[:GROUP_RECORDS_MAX]
        wants_disk, self._wants_disk = self._wants_disk, bool(self._pending) and self._wants_disk
        if not taken:
            await self._flush_idle()
            return
        # One LSN before the group's first is that of the FLUSH record which begins it.
        first = self._next_lsn + 1
        self._next_lsn = first + len(taken)
        group = [
            Numbered(lsn=lsn, kind=kind, payload=payload, address=address)
            for lsn, (kind, payload, address) in enumerate(taken, start=first)
        ]
        result = await self._run(lambda: self._segments.write_group(group, is_flushed=wants_disk))
        for item, sequence in zip(group, result.segments, strict=True):
            self._note_living(item, sequence)
        self.counters.groups += 1
        self.counters.records += len(group)
        self._written.advance(self._written.done + len(group))
        self._note_flush(result)

    async def _flush_idle(self) -> None:
        result = await self._run(self._segments.flush_idle)
        if result is not None:
            self._note_flush(result)
        elif self._durable.done < self._written.done:
            self._durable.advance(self._written.done)

    def _note_flush(self, result: GroupResult) -> None:
        if result.flush_s is None:
            return
        self.counters.flushes += 1
        self.counters.flush_seconds += result.flush_s
        self._on_flush(result.flush_s)
        self._durable.advance(self._written.done)

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    # --- retention --------------------------------------------------------------------------

    def _note_living(self, item: Numbered, sequence: int) -> None:
        """Which segments the record's log keeps: a SNAPSHOT replaces what was before it, a CLOSE
        all.
        """
        log_id = item.address.log_id
        self._living.setdefault(sequence, set()).add(log_id)
        if item.kind in (RecordType.SNAPSHOT, RecordType.CLOSE):
            is_closed = item.kind is RecordType.CLOSE
            for other, log_ids in self._living.items():
                if is_closed or other < sequence:
                    log_ids.discard(log_id)

    def adopt(self, sequence: int, log_ids: set[bytes]) -> None:
        """At start: an older segment holds records of these logs."""
        self._living[sequence] = set(log_ids)

    def oldest_living(self) -> set[bytes]:
        """The logs that keep the oldest segment, if it is not the one being written."""
        oldest = min(self._living, default=None)
        if oldest is None or oldest >= self._segments.sequence:
            return set()
        return self._living[oldest] - {STORE_LOG_ID}

    async def free_oldest(self) -> int:
        """Removes the oldest segments that hold nothing living; returns how many.

        What replaced their records must be on disk: await `acked(AckLevel.DISK)` before.
        """
        current = self._segments.sequence
        keep = current
        for sequence in sorted(self._living):
            if sequence >= current or self._living[sequence] - {STORE_LOG_ID}:
                keep = min(sequence, current)
                break
        doomed = [sequence for sequence in self._living if sequence < keep]
        if not doomed:
            return 0
        for sequence in doomed:
            del self._living[sequence]
        return await self._run(lambda: self._segments.free_before(keep))

    async def close(self) -> None:
        """After `run` ended: flushes and ends the segment."""
        final_lsn = self._next_lsn
        self._next_lsn += 1
        await self._run(lambda: self._segments.close(final_lsn))

"""The NVMe tier's threads: slots read straight into arena pages, pages written straight to slots.

Owns a few threads, three bounded lanes in front of them, and the measure of what the disk gives.
Adjacent slots are one call. Every content is compared with its record in the thread that touches
it: before it is written, so that damage is not copied, and after it is read, before anybody sees
it. Errors are values: a failed slot is a miss. Never decides what is copied where.

Lanes: reads come first, writes have one thread while reads wait and all but one otherwise, checks
have one thread while nothing else waits. A write is done when it is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Final, Protocol

import numpy as np
import structlog

from baton.clock import Clock
from baton.errors import ServiceError
from baton.faults import faults
from baton.kv.crc import ByteArray
from baton.kv.layout import KvGeometry, page_crc, slot_crcs
from services.kvstore.rows import PageRow
from services.kvstore.tiers.copies import Failure, Outcome, SlotCopy
from services.kvstore.tiers.disk_rate import DiskRate
from services.kvstore.tiers.nvme_file import BUFFERS_MAX, MEASURED_BYTES

THREADS: Final = 4
RUN_BYTES_MAX: Final = 4 << 20
LANE_BYTES_MAX: Final = 1 << 30
"""Bytes that may wait in one lane; a job alone may be larger."""

MEASURE_SINGLE_READS: Final = 4
MEASURE_S: Final = 30.0
"""A disk that takes longer is not waited for."""

STOP_S: Final = 10.0

_log = structlog.stdlib.get_logger("services.kvstore")


class SlotIo(Protocol):
    """Blocking reads and writes of runs of slots; `nvme_file.NvmeFile` is one."""

    slot_bytes: int
    slot_count: int

    def read_run(self, first_slot: int, buffers: Sequence[ByteArray], /) -> None:
        """Fills the buffers; OSError."""

    def write_run(self, first_slot: int, buffers: Sequence[ByteArray], /) -> None:
        """Writes the buffers; OSError."""

    def flush(self) -> None:
        """What was written is on disk; OSError."""


class Pages(Protocol):
    """The host's pages; `arena.Arena` is one."""

    geometry: KvGeometry

    def slot(self, page: int, /) -> ByteArray:
        """All bytes of a page slot, writable and page-aligned."""


@unique
class _Lane(Enum):
    READ = "read"
    WRITE = "write"
    CHECK = "check"


@dataclass(slots=True, eq=False)
class _Run:
    """Adjacent slots of one job: `copies[first:first + count]` in its order by slot."""

    job: CopyJob
    places: list[int]
    copies: list[SlotCopy]
    byte_count: int


class CopyJob:
    """Copies that were asked for together. Pages and slots are the caller's again when `done`."""

    def __init__(
        self, copies: Sequence[SlotCopy], lane: _Lane, deadline_s: float | None = None
    ) -> None:
        self.copies = tuple(copies)
        self.lane = lane
        self.deadline_s = deadline_s
        self.byte_count = 0
        self._outcomes: list[Outcome] = [None] * len(self.copies)
        self._runs_left = 0
        self._is_cancelled = False
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()

    @property
    def is_done(self) -> bool:
        """Whether no thread touches any of its pages and slots any more."""
        return self._done.done()

    async def done(self) -> tuple[Outcome, ...]:
        """One outcome per copy, in order, None for one that was made. A waiter that is cancelled
        does not cancel the job.
        """
        await asyncio.shield(self._done)
        return tuple(self._outcomes)

    def cancel(self) -> None:
        """Copies that have not begun become CANCELLED; `done` still tells when the rest is."""
        self._is_cancelled = True

    # --- for the queue, under its lock ------------------------------------------------------

    def begin(self, run_count: int) -> None:
        """So many runs are queued."""
        self._runs_left = run_count
        if run_count == 0:
            self._done.set_result(None)

    def refuse(self, failure: Failure) -> None:
        """Nothing of it is done."""
        self._outcomes = [failure] * len(self.copies)
        self._done.set_result(None)

    def verdict(self, now_s: float) -> Outcome:
        """Why a run of it is not to begin any more."""
        if self._is_cancelled:
            return Failure.CANCELLED
        if self.deadline_s is not None and now_s > self.deadline_s:
            return Failure.LATE
        return None

    def settle(self, places: Sequence[int], outcomes: Sequence[Outcome]) -> bool:
        """A run came to this; True when it was the last one."""
        for place, outcome in zip(places, outcomes, strict=True):
            self._outcomes[place] = outcome
        self._runs_left -= 1
        return self._runs_left == 0

    def fail_written(self) -> None:
        """What was written did not reach the disk for certain."""
        self._outcomes = [one or Failure.IO for one in self._outcomes]

    def finish(self) -> None:
        """From any thread: whoever waits goes on."""
        # Nobody waits on a loop that is closed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(None)


@dataclass(slots=True)
class _LaneState:
    """What waits in one lane, and how many threads are at work for it."""

    runs: deque[_Run] = field(default_factory=deque)
    queued_bytes: int = 0
    active: int = 0


class DiskQueue:
    """Reads, writes and checks of one NVMe file. Call it on the event loop; `start` it first."""

    def __init__(
        self,
        file: SlotIo,
        pages: Pages,
        clock: Clock,
        *,
        threads: int = THREADS,
        lane_bytes_max: int = LANE_BYTES_MAX,
    ) -> None:
        assert threads >= 2, threads
        self._file = file
        self._pages = pages
        self._clock = clock
        self._lane_bytes_max = lane_bytes_max
        self._slot_bytes = file.slot_bytes
        self._run_slots = max(1, min(BUFFERS_MAX, RUN_BYTES_MAX // file.slot_bytes))
        self._lanes = {lane: _LaneState() for lane in _Lane}
        self._wake = threading.Condition()
        self._is_ending = False
        self.reads = DiskRate(clock)
        self.writes = DiskRate(clock)
        self._fixed_s = 0.0
        self._threads = [
            threading.Thread(target=self._work, name=f"kvstore-nvme-{number}", daemon=True)
            for number in range(threads)
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> bool:
        """What has not begun is CANCELLED; False when a thread is still in a call of the disk
        after `STOP_S`: then neither file nor pages may be closed. Blocking.
        """
        with self._wake:
            self._is_ending = True
            runs = [run for lane in self._lanes.values() for run in lane.runs]
            for lane in self._lanes.values():
                lane.queued_bytes -= sum(run.byte_count for run in lane.runs)
                lane.runs.clear()
            self._wake.notify_all()
        for run in runs:
            self._settle(run, [Failure.CANCELLED] * len(run.copies))
        end_s = self._clock.monotonic_s() + STOP_S
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end_s - self._clock.monotonic_s()))
        return not any(thread.is_alive() for thread in self._threads)

    # --- work -------------------------------------------------------------------------------

    def read(self, copies: Sequence[SlotCopy], *, deadline_s: float | None = None) -> CopyJob:
        """Slots into pages that are nobody's until it is done. `deadline_s` (monotonic): what has
        not begun by then is LATE.
        """
        return self._submit(CopyJob(copies, _Lane.READ, deadline_s))

    def write(self, copies: Sequence[SlotCopy]) -> CopyJob:
        """Held pages into slots; done when it is on disk."""
        return self._submit(CopyJob(copies, _Lane.WRITE))

    def check(self, copies: Sequence[SlotCopy]) -> CopyJob:
        """Slots against their rows, into no page, when nothing else is to be done."""
        return self._submit(CopyJob(copies, _Lane.CHECK))

    @property
    def read_bytes_per_s(self) -> float | None:
        """What the disk gave lately; None before the first measure."""
        return self.reads.bytes_per_s

    @property
    def write_bytes_per_s(self) -> float | None:
        """What the disk took lately; None before the first write."""
        return self.writes.bytes_per_s

    @property
    def fixed_s(self) -> float:
        """What a read costs besides its bytes."""
        return self._fixed_s

    @property
    def queued_read_bytes(self) -> int:
        """Bytes of reads asked for and not done."""
        return self._lanes[_Lane.READ].queued_bytes

    @property
    def queued_write_bytes(self) -> int:
        """Bytes of writes asked for and not done."""
        return self._lanes[_Lane.WRITE].queued_bytes

    def load_s(self, byte_count: int) -> float | None:
        """How long a read of so many bytes would take now, behind what is queued; None before the
        first measure.
        """
        rate = self.reads.bytes_per_s
        if rate is None:
            return None
        return self._fixed_s + (self.queued_read_bytes + byte_count) / rate

    async def measure(self) -> None:
        """Reads the end of the file for `load_s`, whatever stands there: many slots, then single
        ones. Gives up after `MEASURE_S`.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MEASURE_S):
                await self._measure()

    async def _measure(self) -> None:
        count = self._file.slot_count
        wanted = max(1, min(count, MEASURED_BYTES // self._slot_bytes))
        await self._submit(_measuring(range(count - wanted, count))).done()
        took_s = []
        for number in range(min(MEASURE_SINGLE_READS, wanted)):
            begun_s = self._clock.monotonic_s()
            slot = count - 1 - number * wanted // MEASURE_SINGLE_READS
            await self._submit(_measuring([slot])).done()
            took_s.append(self._clock.monotonic_s() - begun_s)
        rate = self.reads.bytes_per_s
        if rate is not None:
            typical_s = sorted(took_s)[len(took_s) // 2]
            self._fixed_s = max(0.0, typical_s - self._slot_bytes / rate)

    # --- lanes ------------------------------------------------------------------------------

    def _submit(self, job: CopyJob) -> CopyJob:
        runs = list(self._runs_of(job))
        job.byte_count = sum(run.byte_count for run in runs)
        lane = self._lanes[job.lane]
        with self._wake:
            is_full = lane.queued_bytes and (
                lane.queued_bytes + job.byte_count > self._lane_bytes_max
            )
            if self._is_ending or is_full:
                job.refuse(Failure.CANCELLED if self._is_ending else Failure.FULL)
                return job
            job.begin(len(runs))
            lane.runs.extend(runs)
            lane.queued_bytes += job.byte_count
            self._wake.notify(len(runs))
        return job

    def _runs_of(self, job: CopyJob) -> Iterator[_Run]:
        """Adjacent slots together, up to `RUN_BYTES_MAX`."""
        copies = job.copies
        order = sorted(range(len(copies)), key=lambda place: copies[place].slot)
        places: list[int] = []
        for place in order:
            is_next = places and copies[place].slot == copies[places[-1]].slot + 1
            if places and (not is_next or len(places) == self._run_slots):
                yield self._run(job, places)
                places = []
            places.append(place)
        if places:
            yield self._run(job, places)

    def _run(self, job: CopyJob, places: list[int]) -> _Run:
        copies = [job.copies[place] for place in places]
        return _Run(job, places, copies, len(places) * self._slot_bytes)

    def _next(self) -> _Run | None:
        """The run a thread is to do now; None when the queue ends."""
        with self._wake:
            while not self._is_ending:
                lane = self._due()
                if lane is not None:
                    lane.active += 1
                    return lane.runs.popleft()
                self._wake.wait()
        return None

    def _due(self) -> _LaneState | None:
        reads, writes = self._lanes[_Lane.READ], self._lanes[_Lane.WRITE]
        checks = self._lanes[_Lane.CHECK]
        if writes.runs:
            # One while reads wait, but never the only thread there is for them.
            others = len(self._threads) - 1
            allowed = min(1, reads.active) if reads.runs else others
            if writes.active < allowed:
                return writes
        if reads.runs:
            return reads
        if checks.runs and not checks.active and not writes.runs:
            return checks
        return None

    # --- threads ----------------------------------------------------------------------------

    def _work(self) -> None:
        scratch = _Scratch(self._run_slots * self._slot_bytes)
        while (run := self._next()) is not None:
            outcomes: list[Outcome] = [Failure.IO] * len(run.copies)
            try:
                outcomes = self._done(run, scratch)
            finally:
                # Whatever happened here, nobody waits for it in vain.
                self._release(run)
                self._settle(run, outcomes)

    def _release(self, run: _Run) -> None:
        lane = self._lanes[run.job.lane]
        with self._wake:
            lane.active -= 1
            lane.queued_bytes -= run.byte_count
            # Another lane's limits may allow more now.
            self._wake.notify_all()

    def _done(self, run: _Run, scratch: _Scratch) -> list[Outcome]:
        verdict = run.job.verdict(self._clock.monotonic_s())
        if verdict is not None:
            return [verdict] * len(run.copies)
        return self._write(run) if run.job.lane is _Lane.WRITE else self._read(run, scratch)

    def _read(self, run: _Run, scratch: _Scratch) -> list[Outcome]:
        buffers = [
            scratch.slice(index, self._slot_bytes)
            if copy.page is None
            else self._pages.slot(copy.page)
            for index, copy in enumerate(run.copies)
        ]
        try:
            with self.reads.timing(run.byte_count):
                self._file.read_run(run.copies[0].slot, buffers)
                faults.reach_blocking("nvme.read")
        except (OSError, ServiceError) as error:
            return self._failed(run, error)
        for buffer in buffers:
            faults.damage("nvme.read", buffer.data[: self._pages.geometry.page_bytes])
        return self._compared(run.copies, buffers)

    def _write(self, run: _Run) -> list[Outcome]:
        buffers = [self._pages.slot(copy.page or 0) for copy in run.copies]
        outcomes = self._compared(run.copies, buffers)
        try:
            faults.reach_blocking("nvme.write")
            with self.writes.timing(run.byte_count):
                # Damaged ones as well: a run is one call, and nobody will refer to their slots.
                self._file.write_run(run.copies[0].slot, buffers)
        except (OSError, ServiceError) as error:
            return self._failed(run, error)
        return outcomes

    def _compared(self, copies: Sequence[SlotCopy], buffers: Sequence[ByteArray]) -> list[Outcome]:
        geometry = self._pages.geometry
        return [
            None if copy.row is None or matches(geometry, copy.row, buffer) else Failure.DAMAGED
            for copy, buffer in zip(copies, buffers, strict=True)
        ]

    def _failed(self, run: _Run, error: Exception) -> list[Outcome]:
        _log.error(
            "nvme_failed",
            lane=run.job.lane.value,
            slot=run.copies[0].slot,
            slots=len(run.copies),
            error=str(error),
        )
        return [Failure.IO] * len(run.copies)

    def _settle(self, run: _Run, outcomes: Sequence[Outcome]) -> None:
        with self._wake:
            is_last = run.job.settle(run.places, outcomes)
        if not is_last:
            return
        if run.job.lane is _Lane.WRITE:
            self._flush(run.job)
        run.job.finish()

    def _flush(self, job: CopyJob) -> None:
        try:
            self._file.flush()
        except OSError as error:
            _log.error("nvme_failed", lane="flush", error=str(error))
            job.fail_written()


class _Scratch:
    """A thread's own page-aligned bytes, made when they are needed."""

    def __init__(self, byte_count: int) -> None:
        self._byte_count = byte_count
        self._bytes: ByteArray | None = None

    def slice(self, index: int, size: int) -> ByteArray:
        """Bytes [index x size, (index + 1) x size)."""
        if self._bytes is None:
            self._bytes = np.frombuffer(mmap.mmap(-1, self._byte_count), dtype=np.uint8)
        return self._bytes[index * size : (index + 1) * size]


def _measuring(slots: Sequence[int]) -> CopyJob:
    copies = [SlotCopy(slot=slot, page=None, row=None) for slot in slots]
    return CopyJob(copies, _Lane.READ)


def matches(geometry: KvGeometry, row: PageRow, page: ByteArray) -> bool:
    """Whether a page's bytes are those of its row: by its page CRC, or slot by slot."""
    if row.crc is not None:
        return page_crc(geometry, page) == row.crc
    return list(slot_crcs(geometry, page, 0, row.tokens)) == row.slot_crcs

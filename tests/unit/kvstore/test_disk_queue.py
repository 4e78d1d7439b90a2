"""The NVMe tier's threads: right bytes or a named failure, in bounded lanes, reads first."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baton.clock import SystemClock
from baton.faults import Faults
from baton.kv.crc import ByteArray
from baton.kv.layout import KvDtype, KvGeometry, page_crc, slot_crcs
from baton.testing.clock import ManualClock
from services.kvstore.arena import Arena, ArenaSpec
from services.kvstore.rows import PageRow
from services.kvstore.slot_files import DATA_OFFSET
from services.kvstore.tiers import disk_queue
from services.kvstore.tiers.copies import Failure, SlotCopy
from services.kvstore.tiers.disk_queue import DiskQueue
from services.kvstore.tiers.disk_rate import SAMPLE_BYTES, DiskRate
from services.kvstore.tiers.nvme_file import NvmeFile, NvmeSpec

GEOMETRY = KvGeometry(
    layers=2, kv_heads=2, head_dim=4, head_dim_v=4, block_tokens=8, dtype=KvDtype.F32
)
SLOT = GEOMETRY.slot_bytes
PAGES = 16
WAIT_S = 30.0


class Site:
    """An arena, a file and a queue over both, with pages of known content."""

    def __init__(self, folder: Path) -> None:
        common = {"directory": folder, "node_id": "n0", "geometry": GEOMETRY}
        self.arena = Arena.open(
            ArenaSpec(**common, arena_bytes=PAGES * SLOT, kv_digest=bytes(16), arena_id=bytes(16))
        )
        self.file = NvmeFile.open(
            NvmeSpec(**common, nvme_bytes=PAGES * SLOT, kv_digest=bytes(16), file_id=bytes(16))
        )
        self.queue = DiskQueue(self.file, self.arena, SystemClock())
        self.queue.start()
        for page in range(PAGES):
            self.arena.page(page)[:] = np.random.default_rng(page).integers(
                0, 256, GEOMETRY.page_bytes, dtype=np.uint8
            )

    def row(self, page: int, tokens: int = 8) -> PageRow:
        """What the page's record says of it now."""
        data = self.arena.page(page)
        if tokens == 8:
            return PageRow(page=9, page_generation=1, tokens=8, crc=page_crc(GEOMETRY, data))
        crcs = list(slot_crcs(GEOMETRY, data, 0, tokens))
        return PageRow(page=9, page_generation=1, tokens=tokens, slot_crcs=crcs)

    def copies(self, pairs: Sequence[tuple[int, int]]) -> list[SlotCopy]:
        """(Slot, page) with the pages' content as it is."""
        return [SlotCopy(slot=slot, page=page, row=self.row(page)) for slot, page in pairs]

    def flip(self, slot: int, offset: int = 100) -> None:
        """One bit of a slot on disk."""
        place = DATA_OFFSET + slot * SLOT + offset
        with self.file.spec.path.open("r+b", buffering=0) as raw:
            (byte,) = os.pread(raw.fileno(), 1, place)
            os.pwrite(raw.fileno(), bytes([byte ^ 4]), place)
            os.fsync(raw.fileno())

    def close(self) -> None:
        """Ends the threads first."""
        assert self.queue.stop()
        self.file.remove()
        self.arena.remove()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """The real thing, small."""
    made = Site(tmp_path)
    yield made
    made.close()


async def test_pages_go_to_slots_and_come_back_into_other_pages(site: Site) -> None:
    """Bytes are the same; what stood in the target pages before is gone."""
    copies = site.copies([(3, 0), (4, 1), (9, 2), (5, 3)])
    assert await site.queue.write(copies).done() == (None,) * 4
    back = [replace(copy, page=8 + index) for index, copy in enumerate(copies)]
    assert await site.queue.read(back).done() == (None,) * 4
    for index in range(4):
        assert np.array_equal(site.arena.page(index), site.arena.page(8 + index))


async def test_adjacent_slots_are_one_call(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order in which they were named."""
    calls: list[tuple[int, int]] = []
    real = site.file.read_run

    def read_run(first_slot: int, buffers: Sequence[ByteArray]) -> None:
        calls.append((first_slot, len(buffers)))
        real(first_slot, buffers)

    monkeypatch.setattr(site.file, "read_run", read_run)
    await site.queue.read([SlotCopy(slot=s, page=s, row=None) for s in (7, 2, 3, 6, 11, 1)]).done()
    assert sorted(calls) == [(1, 3), (6, 2), (11, 1)]


async def test_damaged_page_is_not_copied_and_its_neighbours_are(site: Site) -> None:
    """The host's bytes are compared before they are written: damage stays where it is."""
    copies = site.copies([(0, 0), (1, 1), (2, 2)])
    site.arena.page(1)[7] ^= 1
    assert await site.queue.write(copies).done() == (None, Failure.DAMAGED, None)


@pytest.mark.parametrize("offset", [0, 100, GEOMETRY.page_bytes - 1])
async def test_flipped_bit_on_disk_is_found_before_anybody_sees_it(site: Site, offset: int) -> None:
    """A slot that is not what was written is a miss."""
    copies = site.copies([(0, 0), (1, 1)])
    await site.queue.write(copies).done()
    site.flip(1, offset)
    assert await site.queue.read(copies).done() == (None, Failure.DAMAGED)


async def test_partial_page_is_compared_slot_by_slot(site: Site) -> None:
    """Only its committed slots count, also where others changed meanwhile."""
    partial = SlotCopy(slot=2, page=0, row=site.row(0, tokens=3))
    assert await site.queue.write([partial]).done() == (None,)
    assert await site.queue.read([replace(partial, page=5)]).done() == (None,)
    row = replace_crc(site.row(0, tokens=3))
    assert await site.queue.read([replace(partial, row=row)]).done() == (Failure.DAMAGED,)


def replace_crc(row: PageRow) -> PageRow:
    """The same row with another CRC for its last slot."""
    return PageRow(
        page=row.page,
        page_generation=row.page_generation,
        tokens=row.tokens,
        slot_crcs=[*row.slot_crcs[:-1], row.slot_crcs[-1] ^ 1],
    )


async def test_check_compares_slots_without_pages(site: Site) -> None:
    """Scrub reads them into memory of its own; the arena is not touched."""
    copies = site.copies([(0, 0), (1, 1), (5, 2)])
    await site.queue.write(copies).done()
    site.flip(5)
    site.arena.page(0)[:] = 1
    looked = [replace(copy, page=None) for copy in copies]
    assert await site.queue.check(looked).done() == (None, None, Failure.DAMAGED)


async def test_file_that_lost_its_end_is_a_failed_read_of_those_slots(site: Site) -> None:
    """A short read is an error, not a page of zeros."""
    copies = site.copies([(2, 0), (14, 1)])
    await site.queue.write(copies).done()
    os.truncate(site.file.spec.path, DATA_OFFSET + 14 * SLOT + 512)
    assert await site.queue.read(copies).done() == (None, Failure.IO)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", ["write_run", "flush"])
async def test_write_that_fails_is_not_believed(
    site: Site, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    """Also one whose flush failed: PLACE must not follow."""
    monkeypatch.setattr(site.file, call, _failing(code))
    assert await site.queue.write(site.copies([(0, 0), (4, 1)])).done() == (Failure.IO,) * 2


def _failing(code: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("nvme.read:fail:EIO:once", Failure.IO),
        ("nvme.read:fail:once", Failure.IO),
        ("nvme.read:flip_byte:once", Failure.DAMAGED),
        ("nvme.read:short:10:once", Failure.DAMAGED),
        ("nvme.read:pause:0.01:once", None),
    ],
)
async def test_fault_points_act_on_reads(
    site: Site, monkeypatch: pytest.MonkeyPatch, fault: str, expected: Failure | None
) -> None:
    """What drills use; the next read is fine again."""
    copies = site.copies([(0, 0)])
    await site.queue.write(copies).done()
    made = Faults(is_enabled=True)
    monkeypatch.setattr(disk_queue, "faults", made)
    made.arm(fault)
    assert await site.queue.read(copies).done() == (expected,)
    assert await site.queue.read(copies).done() == (None,)


async def test_rate_is_measured_and_a_slow_disk_is_noticed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first measure nothing is promised; a slow read costs the rate."""
    assert site.queue.load_s(SLOT) is None
    await site.queue.measure()
    quick_s = site.queue.load_s(SLOT)
    assert quick_s is not None
    made = Faults(is_enabled=True)
    monkeypatch.setattr(disk_queue, "faults", made)
    made.arm("nvme.read:pause:0.2")
    await site.queue.read(site.copies([(0, 0)])).done()
    slow_s = site.queue.load_s(SLOT)
    assert slow_s is not None
    assert slow_s > 0.01
    assert slow_s > quick_s
    made.disarm()


# --- order and bounds, over a file that does what the test says -----------------------------------


class Gate:
    """A file whose calls wait until they are let go, and are remembered."""

    slot_bytes = SLOT
    slot_count = PAGES

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self._changed = threading.Condition()
        self._permits = 0
        self._is_open = False

    def let(self, count: int) -> None:
        """So many calls go on."""
        with self._changed:
            self._permits += count
            self._changed.notify_all()

    def open(self) -> None:
        """All of them do."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def reached(self, count: int) -> bool:
        """Waits until so many calls have begun."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.calls) >= count, WAIT_S)

    def read_run(self, slot: int, _buffers: Sequence[ByteArray]) -> None:
        """Waits."""
        self._call("read", slot)

    def write_run(self, slot: int, _buffers: Sequence[ByteArray]) -> None:
        """Waits."""
        self._call("write", slot)

    def flush(self) -> None:
        """Does not."""

    def _call(self, name: str, slot: int) -> None:
        with self._changed:
            self.calls.append((name, slot))
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._is_open or self._permits > 0, WAIT_S)
            self._permits -= not self._is_open


class Bytes:
    """Pages without an arena."""

    geometry = GEOMETRY

    def slot(self, _page: int) -> ByteArray:
        """Zeros."""
        return np.zeros(SLOT, dtype=np.uint8)


class Gated:
    """A queue of two threads over a gate."""

    def __init__(self, lane_bytes_max: int = 1 << 30) -> None:
        self.gate = Gate()
        self.clock = ManualClock()
        self.queue = DiskQueue(
            self.gate, Bytes(), self.clock, threads=2, lane_bytes_max=lane_bytes_max
        )
        self.queue.start()

    def slots(self, *slots: int) -> list[SlotCopy]:
        """Copies without rows."""
        return [SlotCopy(slot=slot, page=0, row=None) for slot in slots]

    async def reached(self, count: int) -> None:
        """So many calls have begun."""
        assert await asyncio.to_thread(self.gate.reached, count)


@pytest.fixture
async def gated() -> AsyncIterator[Gated]:
    """Nothing goes on before it is let."""
    made = Gated()
    yield made
    made.gate.open()
    assert made.queue.stop()


async def test_cancelled_job_ends_when_what_had_begun_has(gated: Gated) -> None:
    """Its pages are the caller's only then; what had not begun never touches them."""
    job = gated.queue.read(gated.slots(0, 2, 4, 6))
    await gated.reached(2)
    job.cancel()
    assert not job.is_done
    gated.gate.let(2)
    assert await job.done() == (None, None, Failure.CANCELLED, Failure.CANCELLED)
    assert len(gated.gate.calls) == 2


async def test_reads_that_have_not_begun_by_their_deadline_are_late(gated: Gated) -> None:
    """Those under way are let finish."""
    first = gated.queue.read(gated.slots(0, 2))
    late = gated.queue.read(gated.slots(4), deadline_s=gated.clock.monotonic_s() + 1.0)
    await gated.reached(2)
    gated.clock.advance(1.5)
    gated.gate.let(2)
    assert await first.done() == (None, None)
    assert await late.done() == (Failure.LATE,)


async def test_waiter_that_is_cancelled_leaves_the_job_alone(gated: Gated) -> None:
    """A request that gives up does not stop what the next one will want."""
    job = gated.queue.read(gated.slots(0))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await job.done()
    gated.gate.let(1)
    assert await job.done() == (None,)


async def test_lane_that_is_full_says_so_at_once() -> None:
    """Bytes that wait are bounded; the other lane is not concerned, nor a job alone."""
    gated = Gated(lane_bytes_max=2 * SLOT)
    large = gated.queue.read(gated.slots(0, 2, 4))
    full = gated.queue.read(gated.slots(6))
    assert await full.done() == (Failure.FULL,)
    other = gated.queue.write(gated.slots(8))
    assert gated.queue.queued_read_bytes == 3 * SLOT
    gated.gate.open()
    assert await large.done() == (None,) * 3
    assert await other.done() == (None,)
    assert gated.queue.queued_read_bytes == gated.queue.queued_write_bytes == 0
    assert gated.queue.stop()


async def test_reads_go_before_writes_that_came_first(gated: Gated) -> None:
    """A prompt waits for a read; nobody waits for a copy. Yet copies are not starved."""
    writes = gated.queue.write(gated.slots(0, 2, 4))
    await gated.reached(1)
    reads = gated.queue.read(gated.slots(6, 8, 10))
    await gated.reached(2)
    gated.gate.let(1)
    await gated.reached(3)
    assert [name for name, _ in gated.gate.calls[:2]] == ["write", "read"]
    gated.gate.open()
    assert await reads.done() == (None,) * 3
    assert await writes.done() == (None,) * 3


async def test_checks_wait_for_everything_else(gated: Gated) -> None:
    """Scrub is never in the way."""
    reads = gated.queue.read(gated.slots(0, 2))
    await gated.reached(2)
    checks = gated.queue.check([replace(copy, page=None) for copy in gated.slots(4, 6)])
    more = gated.queue.read(gated.slots(8))
    gated.gate.let(2)
    await gated.reached(4)
    assert ("read", 8) in gated.gate.calls[:4]
    gated.gate.open()
    assert await checks.done() == (None, None)
    assert await more.done() == (None,)
    assert await reads.done() == (None, None)


async def test_stop_cancels_what_waits_and_finishes_what_runs(gated: Gated) -> None:
    """Afterwards no thread touches a page; new work is refused."""
    job = gated.queue.read(gated.slots(0, 2, 4))
    await gated.reached(2)
    gated.gate.open()
    assert await asyncio.to_thread(gated.queue.stop)
    assert set(await job.done()) <= {None, Failure.CANCELLED}
    assert await gated.queue.read(gated.slots(0)).done() == (Failure.CANCELLED,)


async def test_job_of_nothing_is_done(gated: Gated) -> None:
    """No thread is asked."""
    assert await gated.queue.read(()).done() == ()


async def test_queued_bytes_count_in_what_a_load_would_take(gated: Gated) -> None:
    """Who comes behind others waits for them too."""
    gated.queue.reads.bytes_per_s = float(SLOT)
    job = gated.queue.read(gated.slots(0, 2, 4))
    assert gated.queue.load_s(SLOT) == pytest.approx(4.0)
    gated.gate.open()
    await job.done()


def test_rate_is_that_of_all_calls_together() -> None:
    """Two at once in a second are twice the rate; idle time does not count."""
    clock = ManualClock()
    rate = DiskRate(clock)
    with rate.timing(SAMPLE_BYTES), rate.timing(SAMPLE_BYTES):
        clock.advance(1.0)
    assert rate.bytes_per_s == pytest.approx(SAMPLE_BYTES)
    clock.advance(100.0)
    with rate.timing(4 * SAMPLE_BYTES):
        clock.advance(1.0)
    assert rate.bytes_per_s is not None
    assert SAMPLE_BYTES < rate.bytes_per_s < 4 * SAMPLE_BYTES


def test_call_that_fails_costs_time_and_brings_nothing() -> None:
    """A disk of which every second call hangs is a slow disk."""
    clock = ManualClock()
    rate = DiskRate(clock)
    with rate.timing(SAMPLE_BYTES):
        clock.advance(1.0)
    before = rate.bytes_per_s
    with pytest.raises(OSError, match="no"):
        _hang_and_fail(rate, clock)
    with rate.timing(SAMPLE_BYTES):
        clock.advance(1.0)
    assert before is not None
    assert rate.bytes_per_s is not None
    assert rate.bytes_per_s < before


def _hang_and_fail(rate: DiskRate, clock: ManualClock) -> None:
    with rate.timing(SAMPLE_BYTES):
        clock.advance(5.0)
        raise OSError(errno.EIO, "no")

"""The log writer over a disk that stalls, fills up, fails or writes short."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.errors import Reason, ServiceError
from services.kvstore.log import writer as writer_module
from services.kvstore.log.format import RecordAddress, RecordType
from services.kvstore.log.reader import scan_directory
from services.kvstore.log.segments import SegmentWriter, segment_paths
from services.kvstore.log.store_records import Close, CloseReason
from services.kvstore.log.writer import LogWriter
from services.kvstore.state import AckLevel

SEGMENT_BYTES = 1 << 16
PAYLOAD = Close(reason=CloseReason.EXPIRED).encode()


class Disk:
    """Stands before an os function: `faults` are raised one after the other, then it works.

    While `gate` is not set calls wait; `entered` says that one does.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self._real: Callable[..., Any] = getattr(os, name)
        self.faults: list[OSError] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.calls = 0
        monkeypatch.setattr(os, name, self)

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        self.entered.set()
        assert self.gate.wait(30)
        if self.faults:
            raise self.faults.pop(0)
        return self._real(*args)

    def fail(self, code: int, times: int = 1) -> None:
        self.faults += [OSError(code, os.strerror(code)) for _ in range(times)]


class Sender:
    """Submits records told apart by their position, which counts on."""

    def __init__(self) -> None:
        self.position = 0

    def __call__(self, writer: LogWriter, count: int = 1) -> None:
        for _ in range(count):
            self.position += 1
            address = RecordAddress(log_id=bytes(15) + b"1", generation=1, position=self.position)
            writer.submit(RecordType.CLOSE, PAYLOAD, address)


submit = Sender()


async def until(condition: Callable[[], bool]) -> None:
    """For states that nothing announces."""
    while not condition():  # noqa: ASYNC110 - the block around it has a deadline
        await asyncio.sleep(0)  # noqa: TID251 - a turn of the loop, no waiting


@asynccontextmanager
async def writing(directory: Path, **settings: Any) -> AsyncIterator[LogWriter]:
    """A running writer, ended and closed behind the block."""
    settings = {"segment_bytes": SEGMENT_BYTES, **settings}
    segments = SegmentWriter(directory, store_id=bytes(16), first_sequence=1, **settings)
    submit.position = 0
    with ThreadPoolExecutor(1) as executor:
        writer = LogWriter(segments, executor, next_lsn=1, retry_s=0.05)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(writer.run())
            yield writer
            writer.end()
        await writer.close()


def positions(directory: Path) -> list[int]:
    """What is read back, each LSN once, in order."""
    scan = scan_directory(directory)
    assert scan.damaged_from is None
    found: dict[int, int] = {}
    for segment in scan.segments:
        for item in segment.records:
            if item.header.type_code == RecordType.CLOSE:
                found[item.header.lsn] = item.header.position
    return [found[lsn] for lsn in sorted(found)]


async def waited_for(event: threading.Event) -> None:
    """Without stopping the loop."""
    assert await asyncio.get_running_loop().run_in_executor(None, event.wait, 30)


async def test_stalled_flush_delays_disk_acks_only(tmp_path, monkeypatch):
    """While the disk hangs, `os` acks go on, across a change of segments, and the loop runs."""
    flush = Disk(monkeypatch, "fdatasync")
    async with writing(tmp_path, segment_bytes=4096) as writer:
        flush.gate.clear()
        submit(writer)
        disk = asyncio.ensure_future(writer.acked(AckLevel.DISK))  # noqa: TID251 - awaited below
        await waited_for(flush.entered)
        for _ in range(40):
            submit(writer, 2)
            await writer.acked(AckLevel.OS)
        assert not disk.done()
        assert writer.unflushed_bytes > 8192
        flush.gate.set()
        await disk
        await writer.acked(AckLevel.DISK)
        assert writer.unflushed_bytes == 0
    assert positions(tmp_path) == list(range(1, 82))


async def test_a_reader_waits_for_the_records_of_its_log_only(tmp_path, monkeypatch):
    """Those of others that came meanwhile may stand in a group that is still to be written."""
    disk = Disk(monkeypatch, "pwrite")
    async with writing(tmp_path) as writer:
        submit(writer)
        await writer.acked(AckLevel.OS)
        disk.entered.clear()
        disk.gate.clear()
        submit(writer)
        reading = writer.settled(bytes(15) + b"1")
        own = asyncio.ensure_future(reading)  # noqa: TID251 - awaited below
        await waited_for(disk.entered)
        submit(writer)
        await writer.settled(bytes(16))
        assert not own.done()
        disk.gate.set()
        await own
        await writer.settled(bytes(15) + b"1")
    assert positions(tmp_path) == [1, 2, 3]


async def test_groups_collect_while_one_is_flushed(tmp_path, monkeypatch):
    """Eighty waiting appends share the next flush: group commit."""
    flush = Disk(monkeypatch, "fdatasync")
    async with writing(tmp_path) as writer:
        flush.gate.clear()
        submit(writer)
        acks = [asyncio.ensure_future(writer.acked(AckLevel.DISK))]  # noqa: TID251 - awaited below
        await waited_for(flush.entered)
        before = flush.calls
        for _ in range(80):
            submit(writer)
            acks.append(asyncio.ensure_future(writer.acked(AckLevel.DISK)))  # noqa: TID251 - below
        await writer.acked(AckLevel.OS)
        flush.gate.set()
        await asyncio.gather(*acks)
        assert flush.calls == before + 1


async def test_disk_ack_is_not_given_before_its_own_flush(tmp_path, monkeypatch):
    """A flush that began before a record was written says nothing about it."""
    flush = Disk(monkeypatch, "fdatasync")
    async with writing(tmp_path) as writer:
        flush.gate.clear()
        submit(writer)
        first = asyncio.ensure_future(writer.acked(AckLevel.DISK))  # noqa: TID251 - awaited below
        await waited_for(flush.entered)
        submit(writer)
        second = asyncio.ensure_future(writer.acked(AckLevel.DISK))  # noqa: TID251 - awaited below
        await writer.acked(AckLevel.OS)
        before = flush.calls
        flush.gate.set()
        await first
        await second
        assert flush.calls > before


async def test_full_disk_refuses_and_goes_on_when_there_is_space(tmp_path, monkeypatch):
    """New work is refused with a reason; what was submitted is kept, and written in the end."""
    allocate = Disk(monkeypatch, "posix_fallocate")
    allocate.fail(errno.ENOSPC, 6)
    async with writing(tmp_path) as writer:
        submit(writer, 3)
        with pytest.raises(ServiceError) as caught:
            await writer.acked(AckLevel.OS)
        assert caught.value.reason is Reason.QUEUE_FULL
        assert caught.value.metadata["cause"] == "ENOSPC"
        assert caught.value.retry_after_s
        with pytest.raises(ServiceError, match="No space left"):
            writer.require_room()
        await until(lambda: writer.fault is None)
        writer.require_room()
        await writer.acked(AckLevel.DISK)
        assert writer.poisoned_segments == 0
    assert positions(tmp_path) == [1, 2, 3]


async def test_full_disk_leaves_the_segment_before_it_whole(tmp_path, monkeypatch):
    """No room for the next segment: what stands in this one is flushed and acked all the same."""
    allocate = Disk(monkeypatch, "posix_fallocate")
    async with writing(tmp_path, segment_bytes=4096) as writer:
        submit(writer, 10)
        await writer.acked(AckLevel.DISK)
        allocate.fail(errno.ENOSPC, 8)
        for _ in range(40):
            submit(writer, 4)
            try:
                await writer.acked(AckLevel.OS)
            except ServiceError:
                break
        else:
            pytest.fail("the disk was never full")
        await until(lambda: writer.fault is None)
        await writer.acked(AckLevel.DISK)
        assert writer.poisoned_segments == 0
        last = submit.position
    assert positions(tmp_path) == list(range(1, last + 1))


@pytest.mark.parametrize("name", ["pwrite", "fdatasync", "fsync"])
async def test_one_failure_costs_no_ack(tmp_path, monkeypatch, name):
    """The segment is given up; all that was not on disk is in the next one."""
    disk = Disk(monkeypatch, name)
    async with writing(tmp_path) as writer:
        submit(writer, 5)
        await writer.acked(AckLevel.OS)
        disk.fail(errno.EIO)
        submit(writer, 5)
        await writer.acked(AckLevel.DISK)
        assert writer.fault is None
        # The first flush also flushes the directory: a failed fsync counts like a failed flush.
        assert writer.poisoned_segments == 1
    assert positions(tmp_path) == list(range(1, 11))


async def test_poisoned_segment_is_never_flushed_again(tmp_path, monkeypatch):
    """After a failed fsync the kernel calls the pages clean: a second one would lie."""
    flush = Disk(monkeypatch, "fdatasync")
    flushed: list[int] = []
    real = os.fdatasync

    def watched(descriptor: int) -> None:
        flushed.append(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", watched)
    async with writing(tmp_path) as writer:
        submit(writer, 5)
        flush.fail(errno.EIO)
        await writer.acked(AckLevel.DISK)
    assert flushed.count(flushed[0]) == 1
    assert len(set(flushed)) == 2
    # It held nothing that was on disk: what counts is in the next one, and it is gone.
    assert [path.stem[-1] for path in segment_paths(tmp_path)] == ["2"]
    assert positions(tmp_path) == list(range(1, 6))


async def test_disk_that_stays_broken_leaves_no_trail_of_segments(tmp_path, monkeypatch):
    """Every retry begins a segment; a failed one is removed, else a sick disk would be filled."""
    disk = Disk(monkeypatch, "pwrite")
    async with writing(tmp_path) as writer:
        submit(writer, 5)
        await writer.acked(AckLevel.OS)
        disk.fail(errno.EIO, 20)
        submit(writer, 5)
        with pytest.raises(ServiceError):
            await writer.acked(AckLevel.OS)
        await until(lambda: not disk.faults)
        await until(lambda: writer.fault is None)
        await writer.acked(AckLevel.DISK)
        assert len(segment_paths(tmp_path)) == 1
    assert positions(tmp_path) == list(range(1, 11))


async def test_disk_that_only_refuses_to_flush_is_given_time(tmp_path, monkeypatch):
    """Writes succeed and every flush fails: one retry at once, then one each `retry_s`."""
    flush = Disk(monkeypatch, "fdatasync")
    async with writing(tmp_path) as writer:
        submit(writer, 5)
        await writer.acked(AckLevel.OS)
        flush.fail(errno.EIO, 6)
        with pytest.raises(ServiceError):
            await writer.acked(AckLevel.DISK)
        assert flush.calls <= 3
        with pytest.raises(ServiceError):
            writer.require_room()
        await until(lambda: writer.fault is None)
        await writer.acked(AckLevel.DISK)
        assert len(segment_paths(tmp_path)) == 1
    assert positions(tmp_path) == list(range(1, 6))


async def test_short_writes_are_gone_on_with(tmp_path, monkeypatch):
    """The kernel may take fewer bytes than it was given."""
    real = os.pwrite

    def short(descriptor: int, data: Any, offset: int) -> int:
        return real(descriptor, data[: max(1, len(data) // 3)] if offset else data, offset)

    monkeypatch.setattr(os, "pwrite", short)
    async with writing(tmp_path) as writer:
        submit(writer, 30)
        await writer.acked(AckLevel.DISK)
    assert positions(tmp_path) == list(range(1, 31))


async def test_queue_over_its_bound_refuses(tmp_path, monkeypatch):
    """A disk that takes nothing for long is not answered with all the memory there is."""
    monkeypatch.setattr(writer_module, "QUEUE_BYTES_MAX", 1000)
    write = Disk(monkeypatch, "pwrite")
    async with writing(tmp_path) as writer:
        write.gate.clear()
        submit(writer, 6)
        writer.require_room()
        submit(writer, 2)
        with pytest.raises(ServiceError) as caught:
            writer.require_room()
        assert caught.value.reason is Reason.QUEUE_FULL
        write.gate.set()
        await writer.acked(AckLevel.OS)
        writer.require_room()
        assert writer.queue_bytes == 0


async def test_unflushed_bytes_are_bounded_while_the_disk_stalls(tmp_path, monkeypatch):
    """They are kept in memory for W3; at the bound writing waits for the flush."""
    monkeypatch.setattr(writer_module, "UNFLUSHED_BYTES_MAX", 2000)
    flush = Disk(monkeypatch, "fdatasync")
    async with writing(tmp_path) as writer:
        flush.gate.clear()
        for _ in range(20):
            submit(writer, 2)
            ack = asyncio.ensure_future(writer.acked(AckLevel.OS))  # noqa: TID251 - awaited below
            done, _ = await asyncio.wait([ack], timeout=0.5)
            if not done:
                break
        else:
            pytest.fail("nothing bounded what is kept")
        assert writer.unflushed_bytes < 3000
        flush.gate.set()
        await ack
        await writer.acked(AckLevel.DISK)


async def test_service_ends_while_the_disk_refuses_and_nothing_more_fits(tmp_path, monkeypatch):
    """Kept bytes are at their bound, flushes fail, the service is told to end: it does."""
    monkeypatch.setattr(writer_module, "UNFLUSHED_BYTES_MAX", 500)
    flush = Disk(monkeypatch, "fdatasync")
    flush.fail(errno.EIO, 10_000)

    async def lives() -> None:
        async with writing(tmp_path) as writer:
            for _ in range(4):
                submit(writer, 4)
                with contextlib.suppress(ServiceError):
                    await writer.acked(AckLevel.OS)
            await until(lambda: writer.fault is not None)

    with pytest.raises(OSError, match="Input/output"):
        await lives()
    monkeypatch.undo()
    assert positions(tmp_path) == list(range(1, len(positions(tmp_path)) + 1))


@pytest.mark.parametrize("seed", range(5))
async def test_any_mix_of_faults_loses_no_ack_and_no_order(tmp_path, monkeypatch, seed):
    """Writes, flushes and preallocations fail at random while three tasks append."""
    draw = random.Random(seed)
    for name, share in (("pwrite", 0.1), ("fdatasync", 0.2), ("posix_fallocate", 0.2)):
        real = getattr(os, name)

        def failing(*args: Any, real: Any = real, share: float = share) -> Any:
            if draw.random() < share:
                raise OSError(errno.EIO, "drawn")
            return real(*args)

        monkeypatch.setattr(os, name, failing)
    async with writing(tmp_path, segment_bytes=4096) as writer:

        async def append() -> None:
            for _ in range(40):
                submit(writer, draw.randint(1, 5))
                level = draw.choice((AckLevel.OS, AckLevel.DISK))
                try:
                    await writer.acked(level)
                except ServiceError:
                    await until(lambda: writer.fault is None)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(append())
        last = submit.position
        monkeypatch.undo()
        await until(lambda: writer.fault is None)
        await writer.acked(AckLevel.DISK)
    assert positions(tmp_path) == list(range(1, last + 1))

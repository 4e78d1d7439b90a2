"""Segments on disk: what is written is read back; torn tails, damage and failing disks apart."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.errors import Reason, ServiceError
from services.kvstore.log.format import SEGMENT_HEADER_BYTES, RecordAddress, RecordType
from services.kvstore.log.reader import LogScan, scan_directory
from services.kvstore.log.recovery import recover
from services.kvstore.log.segments import Numbered, SegmentWriter, segment_paths
from services.kvstore.log.store_records import Close, CloseReason, Flush
from services.kvstore.log.writer import LogWriter
from services.kvstore.state import AckLevel
from tests.unit.kvstore.cores import ListSink, build_store, open_log, take

SMALL = 4096
RECORD_BYTES = 128


def numbered(lsn: int, log: int = 1) -> Numbered:
    """A record that is told apart by its LSN."""
    address = RecordAddress(log_id=bytes([log]) * 16, generation=1, position=lsn)
    payload = Close(reason=CloseReason.EXPIRED).encode()
    return Numbered(lsn=lsn, kind=RecordType.CLOSE, payload=payload, address=address)


def group(first: int, count: int) -> list[Numbered]:
    """Records first.. in order; the LSN before them is that of their FLUSH."""
    return [numbered(lsn) for lsn in range(first, first + count)]


def new_writer(directory: Path, **changes: Any) -> SegmentWriter:
    """A writer of small segments that goes on after what is there."""
    scan = scan_directory(directory)
    writer = SegmentWriter(
        directory,
        store_id=bytes(16),
        first_sequence=scan.next_sequence,
        **{"segment_bytes": SMALL, **changes},
    )
    writer.durable_lsn = scan.newest_lsn
    return writer


def lsns(scan: LogScan) -> list[int]:
    """LSNs of everything but FLUSH, each once, in the order of reading."""
    seen: list[int] = []
    for segment in scan.segments:
        for item in segment.records:
            if not isinstance(item.record, Flush) and item.header.lsn not in seen:
                seen.append(item.header.lsn)
    return seen


def test_groups_are_read_back_in_order_across_segments(tmp_path: Path) -> None:
    """Rolling to the next segment loses and doubles nothing."""
    writer = new_writer(tmp_path)
    lsn = 1
    for _ in range(40):
        writer.write_group(group(lsn + 1, 3), is_flushed=False)
        lsn += 4
    writer.close()
    assert len(segment_paths(tmp_path)) > 3
    scan = scan_directory(tmp_path)
    expected = [first + 1 + index for first in range(1, 160, 4) for index in range(3)]
    assert lsns(scan) == expected
    assert scan.damaged_from is None
    assert all(path.stat().st_size <= SMALL for path in segment_paths(tmp_path))


def test_segment_is_preallocated_and_cut_to_its_size_at_a_clean_stop(tmp_path: Path) -> None:
    """A full disk is met when a segment begins, not in the middle of an ack."""
    writer = new_writer(tmp_path)
    writer.write_group(group(2, 1), is_flushed=True)
    (path,) = segment_paths(tmp_path)
    assert path.stat().st_size == SMALL
    writer.close()
    assert path.stat().st_size == SEGMENT_HEADER_BYTES + 2 * RECORD_BYTES


@pytest.mark.parametrize("cut", range(1, RECORD_BYTES, 13))
def test_torn_tail_is_cut_off_at_any_byte_and_stays_cut(tmp_path: Path, cut: int) -> None:
    """What was never flushed may be half there: the log is a prefix, now and at the next start."""
    writer = new_writer(tmp_path)
    writer.write_group(group(2, 2), is_flushed=True)
    writer.write_group(group(5, 1), is_flushed=False)
    (path,) = segment_paths(tmp_path)
    end = SEGMENT_HEADER_BYTES + 5 * RECORD_BYTES
    os.truncate(path, end - cut)
    scan = scan_directory(tmp_path)
    assert lsns(scan) == [2, 3]
    assert scan.damaged_from is None
    following = new_writer(tmp_path)
    following.write_group(group(scan.newest_lsn + 2, 2), is_flushed=True)
    following.close()
    again = scan_directory(tmp_path)
    assert again.damaged_from is None
    assert lsns(again) == [2, 3, scan.newest_lsn + 2, scan.newest_lsn + 3]


def test_bad_record_at_or_below_the_durable_lsn_is_damage(tmp_path: Path) -> None:
    """It had been flushed: that is not a torn tail, and what follows must not hide it."""
    writer = new_writer(tmp_path)
    writer.write_group(group(2, 2), is_flushed=True)
    writer.write_group(group(5, 2), is_flushed=True)
    writer.close()
    (path,) = segment_paths(tmp_path)
    with path.open("r+b") as file:
        file.seek(SEGMENT_HEADER_BYTES + 2 * RECORD_BYTES + 70)
        file.write(b"\xff")
    scan = scan_directory(tmp_path)
    assert scan.damaged_from == 3
    assert lsns(scan) == [2, 5, 6]


def test_bad_record_above_the_durable_lsn_is_a_tail_whatever_lies_behind_it(
    tmp_path: Path,
) -> None:
    """Sectors reach the disk in any order; valid records behind a lost one were never flushed."""
    writer = new_writer(tmp_path)
    writer.write_group(group(2, 1), is_flushed=True)
    writer.write_group(group(4, 3), is_flushed=False)
    (path,) = segment_paths(tmp_path)
    with path.open("r+b") as file:
        file.seek(SEGMENT_HEADER_BYTES + 3 * RECORD_BYTES)
        file.write(bytes(RECORD_BYTES))
    scan = scan_directory(tmp_path)
    assert scan.damaged_from is None
    assert lsns(scan) == [2]
    assert lsns(scan_directory(tmp_path)) == [2]


def test_lost_end_of_a_flushed_segment_is_damage(tmp_path: Path) -> None:
    """A later segment says that more had been on disk."""
    writer = new_writer(tmp_path)
    writer.write_group(group(2, 2), is_flushed=True)
    writer.write_group(group(5, 2), is_flushed=True)
    writer.close()
    following = new_writer(tmp_path)
    following.write_group(group(8, 1), is_flushed=True)
    following.close()
    first = segment_paths(tmp_path)[0]
    os.truncate(first, SEGMENT_HEADER_BYTES + 3 * RECORD_BYTES)
    assert scan_directory(tmp_path).damaged_from == 4


def test_segment_without_a_header_is_removed_once(tmp_path: Path) -> None:
    """The store died while it made the file; nothing was in it."""
    writer = new_writer(tmp_path)
    writer.write_group(group(2, 1), is_flushed=True)
    writer.close()
    (tmp_path / f"{2:016x}.blog").write_bytes(bytes(SMALL))
    assert lsns(scan_directory(tmp_path)) == [2]
    assert len(segment_paths(tmp_path)) == 1


class Failing:
    """Lets calls of an os function pass until told to fail once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.real: Callable[..., Any] = getattr(os, name)
        self.failures = 0
        monkeypatch.setattr(os, name, self)

    def __call__(self, *args: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise OSError(5, "Input/output error")
        return self.real(*args)


@pytest.mark.parametrize("name", ["fdatasync", "pwrite"])
def test_failed_write_or_flush_poisons_the_segment_and_moves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """After a failed fsync the kernel calls the pages clean: no retry there, all of it again."""
    writer = new_writer(tmp_path, segment_bytes=1 << 16)
    writer.write_group(group(2, 2), is_flushed=True)
    failing = Failing(monkeypatch, name)
    failing.failures = 1
    result = writer.write_group(group(5, 2), is_flushed=True)
    assert writer.poisoned_segments == 1
    assert set(result.segments) == {2}
    assert result.durable_lsn == 6
    writer.close()
    # The poisoned segment's pages may be gone with the power: what counts is in the new one.
    poisoned = segment_paths(tmp_path)[0]
    with poisoned.open("r+b") as file:
        file.seek(SEGMENT_HEADER_BYTES + 3 * RECORD_BYTES)
        file.write(b"\xee" * 3 * RECORD_BYTES)
    for _ in range(2):
        scan = scan_directory(tmp_path)
        assert lsns(scan) == [2, 3, 5, 6]
        assert scan.damaged_from is None


def test_second_failure_is_raised_and_nothing_is_called_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is gone ends the service; an ack would be a lie."""
    writer = new_writer(tmp_path, segment_bytes=1 << 16)
    failing = Failing(monkeypatch, "fdatasync")
    failing.failures = 9
    with pytest.raises(OSError, match="Input/output"):
        writer.write_group(group(2, 2), is_flushed=True)
    assert writer.durable_lsn == 0


def test_segments_are_freed_from_the_oldest_on_and_never_the_newest(tmp_path: Path) -> None:
    """The end of a log must not go before its beginning."""
    writer = new_writer(tmp_path)
    for first in range(2, 200, 4):
        writer.write_group(group(first, 3), is_flushed=False)
    newest = writer.sequence
    assert writer.free_before(3) == 2
    assert writer.free_before(10_000) == newest - 3
    assert len(segment_paths(tmp_path)) == 1
    writer.close()


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    """The log thread."""
    with ThreadPoolExecutor(1) as one:
        yield one


async def test_group_commit_acks_at_both_levels(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    """`os` when written, `disk` when flushed; many submissions share one group."""
    segments = new_writer(tmp_path, segment_bytes=1 << 20)
    flushed: list[float] = []
    writer = LogWriter(segments, executor, next_lsn=1, on_flush=flushed.append)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.run())
        for item in group(1, 100):
            writer.submit(item.kind, item.payload, item.address)
        await writer.acked(AckLevel.OS)
        assert writer.counters.groups == 1
        assert writer.counters.records == 100
        last = numbered(7)
        writer.submit(last.kind, last.payload, last.address)
        await writer.acked(AckLevel.DISK)
        assert flushed
        assert segments.durable_lsn == writer.newest_lsn
        writer.end()
    await writer.close()
    assert len(lsns(scan_directory(tmp_path))) == 101


async def test_waiters_are_told_when_the_log_cannot_be_written(
    tmp_path: Path, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for ever for an ack that never comes, and a service that ends does end."""
    writer = LogWriter(new_writer(tmp_path), executor, next_lsn=1)
    failing = Failing(monkeypatch, "pwrite")
    failing.failures = 99
    one = numbered(2)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.run())
        writer.submit(one.kind, one.payload, one.address)
        with pytest.raises(ServiceError) as caught:
            await writer.acked(AckLevel.OS)
        assert caught.value.reason is Reason.QUEUE_FULL
        assert caught.value.retry_after_s
        with pytest.raises(ServiceError, match="cannot be written"):
            writer.require_room()
        writer.end()
    await writer.close()
    with pytest.raises(ServiceError):
        await writer.acked(AckLevel.OS)


async def test_snapshot_lets_the_oldest_segments_go_and_the_log_is_still_there(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    """The log directory is bounded: what keeps the oldest segment is written again, whole."""
    sink = ListSink()
    store = build_store(sink=sink)
    worker = open_log(store, list(range(20)))
    worker.prefill(token=5)
    decode = take(store, worker.log_id, pages=20)
    writer = LogWriter(new_writer(tmp_path, segment_bytes=SMALL), executor, next_lsn=1)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.run())
        for token in range(100):
            decode.append(token)
        await _written(writer, sink)
        await writer.acked(AckLevel.DISK)
        assert len(segment_paths(tmp_path)) > 2
        assert writer.oldest_living() == {worker.log_id}
        assert await writer.free_oldest() == 0
        store.core.journal.snapshot(worker.log)
        await _written(writer, sink)
        await writer.acked(AckLevel.DISK)
        assert writer.oldest_living() == set()
        assert await writer.free_oldest() > 0
        decode.append(7)
        await _written(writer, sink)
        writer.end()
    await writer.close()
    assert len(segment_paths(tmp_path)) <= 2
    back = recover(scan_directory(tmp_path)).logs[worker.log_id]
    assert list(back.tokens) == list(worker.log.tokens)
    assert back.generation == worker.log.generation


async def _written(writer: LogWriter, sink: ListSink) -> None:
    """Hands what the journal made to the writer."""
    for kind, payload, address in sink.records:
        writer.submit(kind, payload, address)
    sink.records.clear()
    await writer.acked(AckLevel.OS)


def test_logs_alive_when_records_are_missing_are_given_up(tmp_path: Path) -> None:
    """A gap may have held a token of any of them; logs that begin behind it are whole (W2)."""
    sink = ListSink()
    store = build_store(sink=sink)
    before = open_log(store, [1, 2, 3])
    before.prefill()
    first_count = len(sink.records)
    after = open_log(store, [4, 5, 6])
    after.prefill()
    records = [
        Numbered(lsn=lsn, kind=kind, payload=payload, address=address)
        for lsn, (kind, payload, address) in enumerate(sink.records, start=2)
    ]
    writer = new_writer(tmp_path, segment_bytes=1 << 16)
    writer.write_group(records[:first_count], is_flushed=True)
    shifted = [replace(item, lsn=item.lsn + 1) for item in records[first_count:]]
    writer.write_group(shifted, is_flushed=True)
    writer.close(shifted[-1].lsn + 1)
    (path,) = segment_paths(tmp_path)
    scan = scan_directory(tmp_path)
    last = scan.segments[0].records[first_count]
    with path.open("r+b") as file:
        file.seek(last.offset + 8)
        file.write(b"\xff\xff")
    recovered = recover(scan_directory(tmp_path))
    assert recovered.damaged == {before.log_id}
    assert set(recovered.logs) == {after.log_id}
    assert list(recovered.logs[after.log_id].tokens) == list(after.log.tokens)

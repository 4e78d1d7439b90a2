"""Reading a log directory at start: what counts, what is cut off, what is damaged.

Owns the repair of a directory: a torn tail is cut off durably, a damaged segment keeps a copy
(`.broken`), what stays is made durable. Blocking. `judge` decides, this module does. Never applies
a record. Doing it twice changes nothing more.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from baton.errors import StartupError
from baton.kv.crc import ByteArray
from services.kvstore.log import native
from services.kvstore.log.judge import Hole, Verdict, judge
from services.kvstore.log.segment_scan import (
    BROKEN_SUFFIX,
    SegmentScan,
    list_others,
    list_segments,
    read_content,
    rescan,
    scan_segment,
)
from services.kvstore.log.segments import sync_directory

__all__ = ["Hole", "LogScan", "SegmentScan", "read_directory", "repair", "scan_directory"]

_log = structlog.stdlib.get_logger("services.kvstore.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRun:
    """Valid records of one segment and the bytes they stand in, with what is missing before them.

    `rows`: an array of `native.ROW`; `log_ids` as in `native.Scanned`.
    """

    sequence: int
    content: ByteArray
    scanned: native.Scanned
    holes: tuple[Hole, ...]


@dataclass(slots=True, kw_only=True)
class LogScan:
    """All segments of a directory and what they come to. `others`: files that are no segments."""

    segments: list[SegmentScan] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)
    others: list[Path] = field(default_factory=list)

    @property
    def newest_lsn(self) -> int:
        """No record has a higher LSN, nor had one that is missing."""
        return self.verdict.newest_lsn

    @property
    def durable_lsn(self) -> int:
        """The highest LSN that any valid FLUSH states to be on disk."""
        return self.verdict.durable_lsn

    @property
    def holes(self) -> list[Hole]:
        """Where records are missing that had been promised."""
        return self.verdict.holes

    @property
    def damaged_from(self) -> int | None:
        """The first LSN that is missing; None: nothing is."""
        return min((hole.first_lsn for hole in self.verdict.holes), default=None)

    @property
    def torn_bytes(self) -> int:
        """How much of torn tails is or was cut off."""
        return self.verdict.torn_bytes

    @property
    def store_id(self) -> bytes | None:
        """Of the store that wrote this log; None of an empty directory."""
        return self.verdict.store_id

    @property
    def next_sequence(self) -> int:
        """The number of the segment that writing goes on in."""
        return max((scan.sequence for scan in self.segments), default=0) + 1

    def runs(self) -> Iterator[RecordRun]:
        """Everything that counts, one segment's bytes at a time in memory."""
        for index, scan in enumerate(self.segments):
            pieces = self.verdict.kept.get(index)
            if pieces:
                content = read_content(scan.path).data
                for holes, piece in pieces:
                    yield RecordRun(
                        sequence=scan.sequence,
                        content=content,
                        scanned=rescan(content, piece),
                        holes=holes,
                    )


def read_directory(directory: Path) -> LogScan:
    """Reads every segment and decides; changes nothing."""
    segments = [scan_segment(path) for path in list_segments(directory)]
    verdict = judge(segments)
    for index, pieces in verdict.kept.items():
        segments[index].kept = [piece for _, piece in pieces]
    return LogScan(segments=segments, verdict=verdict, others=list_others(directory))


def scan_directory(directory: Path) -> LogScan:
    """Reads every segment, oldest first, and repairs the directory.

    StartupError when it cannot be listed or made durable, or a copy of a damaged segment cannot be
    kept: going on would promise what may be lost.
    """
    try:
        scan = read_directory(directory)
        report(scan)
        repair(directory, scan)
    except OSError as error:
        raise StartupError(
            f"the log in {directory} cannot be taken over: {error}",
            hint=f"see what is in it with `baton kv verify {directory}`, and whether its disk is "
            "full or failing",
        ) from error
    return scan


def report(scan: LogScan) -> None:
    """Says what was found, once per thing."""
    verdict = scan.verdict
    for index, why in verdict.foreign.items():
        _log.error("foreign_segment_left_alone", segment=scan.segments[index].path.name, why=why)
    for segment in scan.segments:
        if segment.is_unreadable and segment.problem is not None and segment.header is None:
            _log.error("segment_unreadable", segment=segment.path.name, why=segment.problem)
    for hole in verdict.holes:
        _log.error(
            "log_damaged",
            segment=hole.segment,
            offset=hole.offset,
            why=hole.why,
            first_lsn=hole.first_lsn,
            last_lsn=hole.last_lsn,
            log_id=None if hole.log_id is None else hole.log_id.hex(),
            durable_lsn=verdict.durable_lsn,
        )


def repair(directory: Path, scan: LogScan) -> None:
    """Copies what is damaged, cuts off what is torn, and makes durable what stays."""
    verdict = scan.verdict
    for index in sorted(verdict.broken):
        # What cannot be read cannot be copied, and nothing touches it.
        if scan.segments[index].problem is None:
            _keep_copy(scan.segments[index])
    has_changed = bool(verdict.broken)
    for index, size in sorted(verdict.cut.items()):
        _cut(scan.segments[index], size)
        has_changed = True
    for index, pieces in verdict.kept.items():
        if index not in verdict.cut and index not in verdict.broken:
            _free_room(scan.segments[index])
        if pieces[-1][1].last_lsn > verdict.durable_lsn and index not in verdict.cut:
            _sync(scan.segments[index].path)
            has_changed = True
    if has_changed:
        sync_directory(directory)


def _keep_copy(segment: SegmentScan) -> None:
    """Keeps a damaged segment's bytes as they are, under a name that nothing else uses."""
    path = segment.path
    copy = path.with_name(path.name + BROKEN_SUFFIX)
    if copy.exists():
        return
    partial = path.with_name(f"{path.name}{BROKEN_SUFFIX}.part")
    try:
        shutil.copyfile(path, partial)
        _sync(partial)
        partial.rename(copy)
    except OSError as error:
        partial.unlink(missing_ok=True)
        _log.error("broken_copy_failed", segment=path.name, error=str(error))
        if not segment.unreadable:
            raise
        return
    _log.error("broken_segment_kept", segment=path.name, copy=copy.name)


def _cut(segment: SegmentScan, size: int) -> None:
    """Cuts a torn tail off, durably; a segment that nothing counts of goes whole."""
    if size == 0:
        segment.path.unlink(missing_ok=True)
        _log.warning("torn_segment_removed", segment=segment.path.name)
        return
    descriptor = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    _log.warning(
        "torn_tail_cut",
        segment=segment.path.name,
        offset=size,
        field=segment.bads[0].field if segment.bads else None,
    )


def _free_room(segment: SegmentScan) -> None:
    """Gives back what a segment has preallocated: nobody goes on writing in it.

    Only zeros are cut, so that the file means the same before and after, whenever that is durable.
    """
    has_only_zeros_behind = not segment.bads and not segment.is_unreadable
    if has_only_zeros_behind and segment.end_offset < segment.size:
        os.truncate(segment.path, segment.end_offset)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Writing segments: groups in order, rolling, flushing, giving up what failed, freeing.

Owns one log directory's files while it is written. Blocking. `write` belongs to one thread,
`flush`, `prepare` and `free_before` to another, so that a group is written while the one before it
is flushed; a lock guards the few fields that both touch, and no call to the disk is made under it.

W3: a failed write or flush poisons the segment. It is never written, flushed or believed again; the
groups since the last good flush, which are kept, go with the same LSNs to a new segment. Freeing
goes oldest first, so that the end of a log never goes before its beginning.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final

import structlog

from services.kvstore.log import native
from services.kvstore.log.files import (
    SUFFIX,
    SegmentFile,
    Spare,
    begin_segment,
    create_spare,
    discard_spare,
    remove_spares,
    segment_path,
    segment_paths,
    sequence_of,
    sync_directory,
)
from services.kvstore.log.format import (
    SEGMENT_BYTES,
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
)
from services.kvstore.log.groups import Group, Numbered, Run, group_of, make_group

__all__ = [
    "SUFFIX",
    "Group",
    "GroupResult",
    "Numbered",
    "Run",
    "SegmentWriter",
    "segment_path",
    "segment_paths",
    "sequence_of",
    "sync_directory",
]

UNFLUSHED_BYTES_MAX: Final = 16 << 20

_log = structlog.stdlib.get_logger("services.kvstore.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """What a group commit did. `segments` has, per record, the sequence of its segment."""

    segments: tuple[int, ...]
    durable_lsn: int
    flush_s: float | None


class SegmentWriter:
    """Appends groups of records to the newest segment of a directory."""

    def __init__(
        self,
        directory: Path,
        *,
        store_id: bytes,
        first_sequence: int,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._directory = directory
        self._store_id = store_id
        self._segment_bytes = segment_bytes
        self._sequence = first_sequence - 1
        self._lock = Lock()
        self._current: SegmentFile | None = None
        self._rolled: list[SegmentFile] = []
        self._given_up: list[SegmentFile] = []
        self._poisoned: list[SegmentFile] = []
        self._begun_at = 0
        self._spare: Spare | None = None
        self._kept: deque[Group] = deque()
        self._must_rewrite = False
        self._is_rewriting = False
        self._written_lsn = 0
        self.durable_lsn = 0
        self.unflushed_bytes = 0
        self.poisoned_segments = 0
        remove_spares(directory)

    @property
    def sequence(self) -> int:
        """The segment that is written now."""
        return self._sequence

    @property
    def segment_bytes(self) -> int:
        """The size of a segment."""
        return self._segment_bytes

    @property
    def is_poisoned(self) -> bool:
        """Whether something waits to be written again."""
        return self._must_rewrite

    @property
    def has_spare(self) -> bool:
        """Whether the next segment is prepared."""
        return self._spare is not None

    # --- the writing thread -------------------------------------------------------------------

    def write(self, group: Group) -> list[Run]:
        """Writes a group; its bytes are the kernel's when this returns, where `Run`s say.

        A failed write is made good once, in a new segment. OSError: that failed too, or there is no
        room for a segment; nothing is lost, and calling again with the same group goes on.
        """
        if self._must_rewrite:
            group.restart()
            self.rewrite()
        elif self._begun_at != self.poisoned_segments:
            # The segment that holds its beginning was given up since, and is no copy of it.
            group.restart()
        self._begun_at = self.poisoned_segments
        try:
            self._append_or_poison(group)
        except _NoSegmentError:
            raise
        except OSError:
            self.rewrite()
            self._begun_at = self.poisoned_segments
            self._append_or_poison(group)
        with self._lock:
            self._kept.append(group)
            self.unflushed_bytes += len(group.data)
            self._written_lsn = group.last_lsn
        return group.runs

    def rewrite(self) -> None:
        """Writes all that is not on disk again, into a new segment, if anything was poisoned.

        OSError as `write`.
        """
        if not self._must_rewrite:
            return
        with self._lock:
            groups = list(self._kept)
        first_sequence = self._sequence + 1
        self._is_rewriting = True
        try:
            for group in groups:
                group.restart()
                self._append(group)
        except OSError as error:
            self._poison(error)
            failed = range(first_sequence, self._sequence + 1)
            self._remove(segment_path(self._directory, number) for number in failed)
            raise
        finally:
            self._is_rewriting = False
        with self._lock:
            self._must_rewrite = False
            copies = [item for item in self._poisoned if item.first_lsn > self.durable_lsn]
            self._poisoned = []
        self._remove(item.path for item in copies)
        _log.warning("log_written_again", sequence=self._sequence, groups=len(groups))

    def _append_or_poison(self, group: Group) -> None:
        try:
            self._append(group)
        except _NoSegmentError:
            raise
        except OSError as error:
            self._poison(error)
            group.restart()
            raise

    def _append(self, group: Group) -> None:
        while group.done < len(group.data):
            count = group.count_to(group.done)
            segment = self._current
            if segment is None:
                segment = self._roll(group.first_lsn + count)
            end = min(group.done + self._segment_bytes - segment.offset, len(group.data))
            fitting = group.count_to(end) - count
            if fitting == 0:
                assert segment.offset > SEGMENT_HEADER_BYTES, "a record larger than a segment"
                self._roll(group.first_lsn + count)
                continue
            end = group.ends[count + fitting - 1]
            is_whole = end - group.done == len(group.data)
            piece = group.data if is_whole else group.data[group.done : end]
            segment.chain_crc = native.seal(
                piece, first_lsn=group.first_lsn + count, chain_crc=segment.chain_crc
            )
            segment.put(piece)
            group.done = end
            group.runs.append(Run(sequence=segment.sequence, count=fitting))

    def _roll(self, first_lsn: int) -> SegmentFile:
        """Begins the next segment; what is in the one before is flushed by the other thread."""
        header = SegmentHeader(
            segment_id=secrets.token_bytes(16),
            store_id=self._store_id,
            sequence=self._sequence + 1,
            first_lsn=first_lsn,
            segment_bytes=self._segment_bytes,
        )
        with self._lock:
            spare, self._spare = self._spare, None
        try:
            if spare is None:
                spare = create_spare(self._directory, self._segment_bytes)
            segment = begin_segment(spare, self._directory, header)
        except OSError as error:
            raise _NoSegmentError(error.errno, f"no new segment: {error.strerror}") from error
        with self._lock:
            self._sequence = header.sequence
            is_poisoned = self._must_rewrite and not self._is_rewriting
            if not is_poisoned:
                if self._current is not None:
                    self._rolled.append(self._current)
                self._current = segment
        if is_poisoned:
            # A flush failed meanwhile: this group, too, begins again in a new segment.
            os.close(segment.descriptor)
            segment.path.unlink()
            raise OSError(errno.EIO, "a flush failed while the segment was rolled")
        return segment

    def _poison(self, error: OSError) -> None:
        with self._lock:
            self._must_rewrite = True
            segments = [*self._rolled, *([] if self._current is None else [self._current])]
            self._rolled, self._current = [], None
            # Closed by the flushing thread: it may be inside a call with one of them.
            self._given_up += segments
            self._poisoned += segments
            self.poisoned_segments += bool(segments)
        if segments:
            _log.error("segment_poisoned", sequence=segments[-1].sequence, error=str(error))

    def _remove(self, paths: Iterable[Path]) -> None:
        """Given-up segments nothing of which is durable, and whose records stand elsewhere.

        They must not pile up on a disk that goes on failing. The newest goes first: what a power
        cut leaves of them is a beginning, never an end.
        """
        with contextlib.suppress(OSError):
            for path in reversed(list(paths)):
                path.unlink(missing_ok=True)
            sync_directory(self._directory)

    # --- the flushing thread ------------------------------------------------------------------

    def flush(self) -> float | None:
        """Makes everything written durable; the seconds it took, None when there was nothing.

        OSError: the segments are poisoned; `rewrite`, in the writing thread, comes next.
        """
        with self._lock:
            given_up, self._given_up = self._given_up, []
            rolled, current = list(self._rolled), self._current
            target = self._written_lsn
            is_idle = self._must_rewrite or target <= self.durable_lsn or not self._kept
        for segment in given_up:
            os.close(segment.descriptor)
        if is_idle:
            return None
        segments = rolled if current is None else [*rolled, current]
        started_s = time.monotonic()
        try:
            for segment in segments:
                segment.sync()
            if not all(segment.is_named for segment in segments):
                sync_directory(self._directory)
        except OSError as error:
            with self._lock:
                is_known = any(segment in self._given_up for segment in segments)
            # A write that failed meanwhile has given them up already.
            if not is_known:
                self._poison(error)
            raise
        flush_s = time.monotonic() - started_s
        self._flushed(rolled, segments, target)
        return flush_s

    def _flushed(self, rolled: list[SegmentFile], segments: list[SegmentFile], target: int) -> None:
        with self._lock:
            if any(segment in self._given_up for segment in segments):
                # A write failed meanwhile. Its records go elsewhere and it may be gone already.
                raise OSError(errno.EIO, "the segment was given up while it was flushed")
            self.durable_lsn = max(self.durable_lsn, target)
            while self._kept and self._kept[0].last_lsn <= target:
                self.unflushed_bytes -= len(self._kept.popleft().data)
            for segment in segments:
                segment.is_named = True
            ended = [segment for segment in rolled if segment in self._rolled]
            self._rolled = [segment for segment in self._rolled if segment not in ended]
        for segment in ended:
            # Cutting it is tidiness: zeros behind the last record end a segment as well.
            with contextlib.suppress(OSError):
                segment.end()

    def prepare(self) -> bool:
        """Preallocates the next segment; False when there is no room for it."""
        try:
            spare = create_spare(self._directory, self._segment_bytes)
        except OSError as error:
            _log.warning("no_spare_segment", error=str(error))
            return False
        with self._lock:
            self._spare = spare
        return True

    def free_before(self, sequence: int) -> int:
        """Removes the segments older than `sequence`; returns how many."""
        freed = 0
        for path in segment_paths(self._directory):
            if sequence_of(path) < min(sequence, self._sequence):
                path.unlink()
                freed += 1
        if freed:
            sync_directory(self._directory)
        return freed

    # --- one thread for both --------------------------------------------------------------------

    def write_group(self, group: Sequence[Numbered], *, is_flushed: bool) -> GroupResult:
        """Writes records, and with `is_flushed` flushes them; the caller's thread does both.

        The LSN before the first one's belongs to the FLUSH record that begins the group. OSError as
        `write`.
        """
        written = group_of(group, durable_lsn=self.durable_lsn)
        self.write(written)
        flush_s = self.flush_surely() if is_flushed else None
        sequences = [run.sequence for run in written.runs for _ in range(run.count)]
        return GroupResult(
            segments=tuple(sequences[1:]), durable_lsn=self.durable_lsn, flush_s=flush_s
        )

    def flush_surely(self) -> float | None:
        """As `flush`; a failure is made good once, in a new segment."""
        try:
            return self.flush()
        except OSError:
            self.rewrite()
            return self.flush()

    def flush_idle(self) -> GroupResult | None:
        """Flushes what an earlier group left unflushed; None when nothing is."""
        flush_s = self.flush_surely()
        if flush_s is None:
            return None
        return GroupResult(segments=(), durable_lsn=self.durable_lsn, flush_s=flush_s)

    def close(self, final_lsn: int | None = None) -> None:
        """Flushes and cuts the last segment to its size: a clean stop leaves no torn tail.

        With `final_lsn` a last FLUSH states that everything is on disk, so that whatever is missing
        at the next start is damage.
        """
        if self._must_rewrite:
            self.rewrite()
        self.flush_surely()
        segment, self._current = self._current, None
        if segment is not None:
            self._end_cleanly(segment, final_lsn)
        spare, self._spare = self._spare, None
        if spare is not None:
            discard_spare(spare)
            sync_directory(self._directory)

    def _end_cleanly(self, segment: SegmentFile, final_lsn: int | None) -> None:
        try:
            if final_lsn is not None:
                last = make_group((), first_lsn=final_lsn, durable_lsn=self.durable_lsn)
                if segment.offset + len(last.data) <= self._segment_bytes:
                    native.seal(last.data, first_lsn=final_lsn, chain_crc=segment.chain_crc)
                    segment.put(last.data)
            os.ftruncate(segment.descriptor, segment.offset)
            os.fsync(segment.descriptor)
        finally:
            os.close(segment.descriptor)


class _NoSegmentError(OSError):
    """A new segment could not be begun; the ones before it are as good as they were."""

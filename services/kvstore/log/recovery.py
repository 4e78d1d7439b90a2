"""From a directory's records to the logs of a restarted kvstore.

Owns the order in which records are applied: by LSN, each once, one segment in memory at a time;
APPENDs, which are most of all records, in bulk per log, everything else one by one. `fold` owns
what a record means. Reads the files of the scan, changes none.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from baton.errors import ServiceError
from baton.kv.crc import ByteArray
from services.kvstore.log.fields import BodyReader, Logprobs
from services.kvstore.log.fold import Fold
from services.kvstore.log.fold_appends import (
    APPEND,
    APPEND_BYTES,
    HAS_LOGPROBS,
    AppendRun,
    Bodies,
    are_readable,
)
from services.kvstore.log.fold_grants import OpenGrant
from services.kvstore.log.folded import END_REASONS, END_WORDS, MovedTo, log_of_snapshot
from services.kvstore.log.format import (
    ALIGNMENT_BYTES,
    HEADER_BYTES,
    STORE_LOG_ID,
    ReadRecord,
    RecordAddress,
    RecordHeader,
    RecordType,
    decode_body,
)
from services.kvstore.log.judge import Hole
from services.kvstore.log.living import LivingSegments, bases_of
from services.kvstore.log.native import Rows
from services.kvstore.log.reader import LogScan, RecordRun
from services.kvstore.log.records import Append
from services.kvstore.log.recovered import Recovered

__all__ = [
    "END_REASONS",
    "END_WORDS",
    "MovedTo",
    "OpenGrant",
    "Recovered",
    "log_of_snapshot",
    "recover",
    "recover_records",
]


def recover(
    scan: LogScan, arena_id: bytes | None = None, nvme_id: bytes | None = None
) -> Recovered:
    """Applies every record of a scan, oldest first. `arena_id`, `nvme_id`: whose KV is asked
    for.
    """
    recovery = Recovery(arena_id, nvme_id)
    for segment in scan.segments:
        recovery.living.begin(segment.sequence)
    for run in scan.runs():
        recovery.apply_run(run)
    recovery.missing(scan.verdict.end_holes)
    return recovery.result()


def recover_records(
    items: Iterable[ReadRecord], arena_id: bytes | None = None, nvme_id: bytes | None = None
) -> Recovered:
    """As `recover`, from records that were read already, in the order of their LSN."""
    recovery = Recovery(arena_id, nvme_id)
    for item in items:
        recovery.apply_one(item)
    return recovery.result()


class Recovery:
    """Applies runs of records in order."""

    def __init__(self, arena_id: bytes | None, nvme_id: bytes | None = None) -> None:
        self._arena_id = arena_id
        self._fold = Fold(arena_id, nvme_id)
        self._applied_lsn = 0
        self._records = 0
        self._appends = 0
        self.living = LivingSegments()

    def missing(self, holes: Iterable[Hole]) -> None:
        """Records are missing behind what was applied."""
        for hole in holes:
            self._fold.missing(hole.log_id, hole.type_code)

    def apply_one(self, item: ReadRecord) -> None:
        """One decoded record, not of a segment."""
        self._fold.apply(item.header.address, item.record)
        self._records += 1

    def apply_run(self, run: RecordRun) -> None:
        """The records of a run that were not applied before."""
        self.missing(run.holes)
        rows = run.scanned.rows
        # What a failed write had written again was applied before.
        newest = np.maximum.accumulate(np.append(np.uint64(self._applied_lsn), rows["lsn"]))
        is_new = newest[1:] > newest[:-1]
        if not is_new.all():
            rows = rows[is_new]
        if not len(rows):
            return
        self._applied_lsn = int(rows["lsn"][-1])
        self._records += len(rows)
        _RunFold(self._fold, self.living, self._arena_id, run, rows).apply()
        self._appends += int((rows["type_code"] == RecordType.APPEND).sum())

    def result(self) -> Recovered:
        """What it came to."""
        recovered = self._fold.result()
        recovered.living = self.living
        recovered.records, recovered.appends = self._records, self._appends
        return recovered


_COLUMNS: Final = ("log", "type_code", "offset", "payload_bytes", "generation", "position")


class _Other(NamedTuple):
    """A record that is no APPEND: its place in the run, then `_COLUMNS` of `native.ROW`."""

    row: int
    log: int
    type_code: int
    offset: int
    payload_bytes: int
    generation: int
    position: int


class _RunFold:
    """One run: its APPENDs grouped by log, each group applied up to the record that reads it.

    APPENDs of different logs do not depend on each other. A record of a log needs that log's
    APPENDs before it, an OPEN those of the logs it began from; a GRANT needs none.
    """

    def __init__(
        self,
        fold: Fold,
        living: LivingSegments,
        arena_id: bytes | None,
        run: RecordRun,
        rows: Rows,
    ) -> None:
        self._fold = fold
        self._living = living
        self._arena_id = arena_id
        self._sequence = run.sequence
        self._content = run.content
        self._rows = rows
        self._log_ids = [row.tobytes() for row in run.scanned.log_ids]
        self._numbers = {log_id: number for number, log_id in enumerate(self._log_ids)}
        is_append = rows["type_code"] == RecordType.APPEND
        at = np.flatnonzero(is_append)
        bodies = _bodies_of(run.content, rows["offset"][at])
        is_good = are_readable(bodies, rows["payload_bytes"][at])
        if not is_good.all():
            # Each by itself, where it is found to be unreadable.
            at, bodies = at[is_good], bodies[is_good]
        logs = rows["log"][at]
        if len(self._log_ids) <= np.iinfo(np.uint16).max:
            # Sorting 16 bits takes a tenth of the time.
            logs = logs.astype(np.uint16)
        order = np.argsort(logs, kind="stable")
        self._at = at[order]
        self._bodies = bodies[order]
        self._position = rows["position"][self._at]
        self._generation = rows["generation"][self._at]
        logs = logs[order]
        count = len(self._log_ids)
        self._next = np.searchsorted(logs, np.arange(count), side="left").tolist()
        self._end = np.searchsorted(logs, np.arange(count), side="right").tolist()
        self._pending = {
            number for number in range(count) if self._next[number] < self._end[number]
        }
        is_other = np.ones(len(rows), dtype=bool)
        is_other[at] = False
        self._others = np.flatnonzero(is_other & (rows["type_code"] != RecordType.FLUSH))

    def apply(self) -> None:
        """All of it."""
        rows = self._rows[self._others]
        columns = (self._others, *(rows[name] for name in _COLUMNS))
        for values in zip(*(column.tolist() for column in columns), strict=True):
            other = _Other(*values)
            if other.type_code != RecordType.GRANT and other.log in self._pending:
                self._appends_before(other.log, other.row)
            self._apply_other(other)
        for number in list(self._pending):
            self._appends_before(number, len(self._rows))

    def _apply_other(self, other: _Other) -> None:
        start = other.offset + HEADER_BYTES
        payload = self._content[start : start + other.payload_bytes].tobytes()
        type_code, log_id = other.type_code, self._log_ids[other.log]
        self._living.note(self._sequence, type_code, log_id, payload)
        address = RecordAddress(log_id=log_id, generation=other.generation, position=other.position)
        if type_code == RecordType.OPEN:
            for base in bases_of(payload):
                if self._numbers.get(base) in self._pending:
                    self._appends_before(self._numbers[base], other.row)
        try:
            record = decode_body(_header_of(type_code), payload)
        except ServiceError:
            self._fold.unreadable(address, type_code)
            return
        is_proof = type_code == RecordType.GRANT and self._fold.has_holes
        if is_proof and other.log in self._pending:
            self._appends_before(other.log, other.row)
        self._fold.apply(address, record)

    def _appends_before(self, number: int, index: int) -> None:
        """Applies the log's APPENDs that stand before a record."""
        first, end = self._next[number], self._end[number]
        stop = first + int(np.searchsorted(self._at[first:end], index))
        if stop >= end:
            self._pending.discard(number)
        if stop == first:
            return
        self._next[number] = stop
        log_id = self._log_ids[number]
        self._living.hold(self._sequence, log_id)
        bodies = self._bodies[first:stop]
        self._fold.append(
            log_id,
            AppendRun.of(
                self._position[first:stop],
                self._generation[first:stop],
                bodies,
                self._arena_id,
                self._logprobs_of(first, bodies),
            ),
        )

    def _logprobs_of(self, first: int, bodies: Bodies) -> list[tuple[int, Logprobs]]:
        found: list[tuple[int, Logprobs]] = []
        for index in np.flatnonzero(bodies["flags"] & HAS_LOGPROBS).tolist():
            row = self._rows[self._at[first + index]]
            start = int(row["offset"]) + HEADER_BYTES
            payload = self._content[start : start + int(row["payload_bytes"])].tobytes()
            logprobs = Append.decode(BodyReader(payload)).logprobs
            assert logprobs is not None
            found.append((index, logprobs))
        return found


def _bodies_of(content: ByteArray, offsets: npt.NDArray[np.uint64]) -> Bodies:
    """The fixed structs of APPENDs, gathered."""
    lines = content[: content.size // ALIGNMENT_BYTES * ALIGNMENT_BYTES].reshape(
        -1, ALIGNMENT_BYTES
    )
    numbers = (offsets + HEADER_BYTES) // ALIGNMENT_BYTES
    # A body that is not there (an APPEND without payload at the end) is not read.
    numbers = np.minimum(numbers, max(len(lines) - 1, 0)).astype(np.intp)
    gathered: Bodies = np.take(lines, numbers, axis=0).view(APPEND)[:, 0]
    return gathered


@cache
def _header_of(type_code: int) -> RecordHeader:
    """A header of which only the type matters: the frame was checked."""
    return RecordHeader(
        type_code=type_code,
        flags=0,
        log_id=STORE_LOG_ID,
        lsn=0,
        generation=0,
        position=0,
        payload_bytes=0,
        payload_crc=0,
        chain_crc=0,
    )


assert APPEND_BYTES == ALIGNMENT_BYTES

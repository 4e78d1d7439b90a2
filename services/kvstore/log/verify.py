"""What a log directory holds and what a restart would do with it, in words and as data.

Owns the report of `baton kv verify`. Pure: it is given a scan and what recovery made of it, and
changes nothing.

States: `fine`, `torn` (a tail that was never promised would be cut off) and `damaged` (records that
had been promised are missing, or bytes are not what was written).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Any, Final

from services.kvstore.log.format import RecordType
from services.kvstore.log.judge import Hole
from services.kvstore.log.reader import LogScan
from services.kvstore.log.recovery import Recovered
from services.kvstore.log.segment_scan import BROKEN_SUFFIX, SegmentScan

LOGS_SHOWN: Final = 10

REASONS: Final = {
    "header": "the bytes end inside a record's header",
    "magic": "no record begins here",
    "header_crc": "the record's header does not match its checksum",
    "version": "the record is of an unknown version",
    "type": "the record is of an unknown type",
    "flags": "the record has unknown flags",
    "payload_bytes": "the record says it is longer than any may be",
    "chain_crc": "the record does not follow the one before it",
    "payload": "the record's end is missing",
    "payload_crc": "the record's content does not match its checksum",
    "padding": "the bytes behind the record's content are not zero",
    "segment_header": "the segment's header is missing",
    "segment_magic": "the file does not begin as a segment",
    "segment_crc": "the segment's header does not match its checksum",
    "segment_sequence": "the segment's header is another segment's",
    "segment_version": "the segment is of an unknown version",
}


@unique
class State(StrEnum):
    """What a directory is found to be."""

    FINE = "fine"
    TORN = "torn"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentReport:
    """One segment. `notes`: what is not as it should be. `outcome`: what becomes of it."""

    name: str
    size: int
    records: int
    first_lsn: int | None
    last_lsn: int | None
    notes: tuple[str, ...]
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All of a directory. `is_live`: a running kvstore writes it; None: that cannot be known."""

    directory: str
    state: State
    is_live: bool | None
    store_id: bytes | None
    newest_lsn: int
    durable_lsn: int
    segments: tuple[SegmentReport, ...]
    records: dict[str, int]
    holes: tuple[Hole, ...]
    torn_bytes: int
    logs: int
    tokens: int
    written_logs: int
    moved_logs: int
    ended_logs: int
    prefixes: int
    damaged: tuple[bytes, ...]
    others: tuple[str, ...]
    plan: tuple[str, ...]


def report_of(
    directory: str, scan: LogScan, recovered: Recovered, *, is_live: bool | None
) -> Report:
    """The report of a directory that was read and folded."""
    verdict = scan.verdict
    reports = tuple(_segment_report(scan, index) for index in range(len(scan.segments)))
    state = State.FINE
    if verdict.holes or verdict.broken or recovered.damaged or _has_unreadable(scan):
        state = State.DAMAGED
    elif verdict.cut and not _is_tail_being_written(scan, is_live=is_live):
        state = State.TORN
    return Report(
        directory=directory,
        state=state,
        is_live=is_live,
        store_id=scan.store_id,
        newest_lsn=scan.newest_lsn,
        durable_lsn=scan.durable_lsn,
        segments=reports,
        records=_types(scan.segments),
        holes=tuple(verdict.holes),
        torn_bytes=verdict.torn_bytes,
        logs=len(recovered.logs),
        tokens=sum(log.position for log in recovered.logs.values()),
        written_logs=len(recovered.writers),
        moved_logs=len(recovered.moved),
        ended_logs=len(set(recovered.dropped) - recovered.damaged),
        prefixes=len(recovered.prefixes),
        damaged=tuple(sorted(recovered.damaged)),
        others=tuple(path.name for path in scan.others),
        plan=tuple(_plan(scan, recovered)),
    )


def _has_unreadable(scan: LogScan) -> bool:
    own = (s for index, s in enumerate(scan.segments) if index not in scan.verdict.foreign)
    return any(segment.is_unreadable for segment in own)


def _is_tail_being_written(scan: LogScan, *, is_live: bool | None) -> bool:
    """The end of the newest segment, while a kvstore writes it, is not torn but on its way."""
    newest = len(scan.segments) - 1
    return bool(is_live) and set(scan.verdict.cut) <= {newest}


def _types(segments: Iterable[SegmentScan]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for segment in segments:
        for code, count in segment.types.items():
            known = code in set(RecordType)
            name = RecordType(code).name if known else f"type {code}"
            counts[name] = counts.get(name, 0) + count
    return dict(sorted(counts.items()))


def _segment_report(scan: LogScan, index: int) -> SegmentReport:
    segment, verdict = scan.segments[index], scan.verdict
    notes = list(_notes(segment))
    if index in verdict.foreign:
        outcome = f"left alone: {verdict.foreign[index]}"
    elif segment.problem is not None:
        outcome = "left as it is; what it held is missing"
    elif index in verdict.cut:
        size = verdict.cut[index]
        outcome = f"cut to {size} bytes" if size else "removed: nothing in it counts"
    else:
        outcome = "kept"
    if index in verdict.broken:
        outcome += f", a copy stays as {segment.path.name}{BROKEN_SUFFIX}"
    return SegmentReport(
        name=segment.path.name,
        size=segment.size,
        records=sum(piece.records for piece in segment.kept),
        first_lsn=min((piece.first_lsn for piece in segment.kept), default=None),
        last_lsn=max((piece.last_lsn for piece in segment.kept), default=None),
        notes=tuple(notes),
        outcome=outcome,
    )


def _notes(segment: SegmentScan) -> Iterable[str]:
    if segment.problem is not None and segment.header is None:
        yield f"it cannot be read: {segment.problem}"
        return
    for first, end in segment.unreadable:
        yield f"bytes {first} to {end} cannot be read"
    if segment.header_problem is not None:
        yield f"at byte 0: {reason_text(segment.header_problem)}"
    places = [bad for piece in segment.pieces for bad in piece.bads] + segment.bads
    for bad in places:
        yield f"at byte {bad.offset}: {reason_text(bad.field)}"


def reason_text(field: str) -> str:
    """A field of LOG_CORRUPT in words."""
    return REASONS.get(field, field)


def _plan(scan: LogScan, recovered: Recovered) -> Iterable[str]:
    """What a kvstore that starts on this directory does."""
    verdict = scan.verdict
    if not scan.segments:
        yield "begin a new store"
        return
    if verdict.torn_bytes:
        yield (
            f"cut {verdict.torn_bytes} bytes of torn tail off: they were never acknowledged at "
            "disk level"
        )
    if verdict.broken:
        yield f"keep a copy of {len(verdict.broken)} damaged segment(s) as *{BROKEN_SUFFIX}"
    if recovered.damaged:
        yield (
            f"give {len(recovered.damaged)} log(s) up, whose records are or may be missing; the "
            "gateways compute them again from the tokens they have"
        )
    if recovered.may_lack_grants:
        yield "take a new arena: who may still write the old one is not known for certain"
    yield (
        f"bring {len(recovered.logs)} log(s) back and go on in a new segment at LSN "
        f"{scan.newest_lsn + 1}"
    )


# --- for people and for programs ----------------------------------------------------------------


def lines_of(report: Report) -> list[str]:
    """The report as text."""
    lines = [f"{report.directory}: {_summary(report)}"]
    if report.is_live:
        lines.append("a running kvstore writes here: its newest records may not be complete yet")
    elif report.is_live is None:
        lines.append("whether a running kvstore writes here is not known")
    if report.store_id is not None:
        lines.append(f"store {report.store_id.hex()}")
    lines.append(f"newest LSN {report.newest_lsn}, on disk for certain {report.durable_lsn}")
    lines += ["", "segments"]
    for segment in report.segments:
        lsns = (
            "no records"
            if segment.first_lsn is None
            else f"{segment.records} records, LSN {segment.first_lsn} to {segment.last_lsn}"
        )
        lines.append(f"  {segment.name}  {segment.size} bytes, {lsns}: {segment.outcome}")
        lines += [f"      {note}" for note in segment.notes]
    if not report.segments:
        lines.append("  none")
    counts = ", ".join(f"{name} {count}" for name, count in report.records.items())
    lines += ["", f"records: {counts or 'none'}"]
    lines.append(
        f"logs: {report.logs} with {report.tokens} tokens, {report.written_logs} of them being "
        f"written, {report.moved_logs} moved away; {report.ended_logs} ended; "
        f"{report.prefixes} published prefixes"
    )
    lines += _damage_lines(report)
    if report.others:
        lines.append(f"other files, not looked into: {', '.join(report.others)}")
    lines += ["", "a kvstore that starts here would", *(f"  - {step}" for step in report.plan)]
    return lines


def _summary(report: Report) -> str:
    match report.state:
        case State.FINE:
            return "fine"
        case State.TORN:
            return f"torn tail of {report.torn_bytes} bytes, nothing promised is missing"
        case State.DAMAGED:
            return "damaged"


def _damage_lines(report: Report) -> list[str]:
    lines = []
    for hole in report.holes:
        where = "" if hole.segment is None else f" at {hole.segment}"
        where += "" if hole.offset is None else f" byte {hole.offset}"
        whose = "" if hole.log_id is None else f"; it was of log {hole.log_id.hex()}"
        lines.append(
            f"missing: LSN {hole.first_lsn} to {hole.last_lsn}{where}: "
            f"{reason_text(hole.why)}{whose}"
        )
    if report.damaged:
        shown = ", ".join(log_id.hex() for log_id in report.damaged[:LOGS_SHOWN])
        more = len(report.damaged) - LOGS_SHOWN
        lines.append(
            f"damaged logs: {len(report.damaged)}: {shown}" + (f" and {more} more" * (more > 0))
        )
    return lines


def data_of(report: Report) -> dict[str, Any]:
    """The report as JSON values; ids in hex."""
    return {
        "directory": report.directory,
        "state": report.state.value,
        "live": report.is_live,
        "store_id": None if report.store_id is None else report.store_id.hex(),
        "newest_lsn": report.newest_lsn,
        "durable_lsn": report.durable_lsn,
        "torn_bytes": report.torn_bytes,
        "segments": [
            {
                "name": segment.name,
                "bytes": segment.size,
                "records": segment.records,
                "first_lsn": segment.first_lsn,
                "last_lsn": segment.last_lsn,
                "notes": list(segment.notes),
                "outcome": segment.outcome,
            }
            for segment in report.segments
        ],
        "records": report.records,
        "missing": [_hole_data(hole) for hole in report.holes],
        "logs": {
            "alive": report.logs,
            "tokens": report.tokens,
            "written": report.written_logs,
            "moved": report.moved_logs,
            "ended": report.ended_logs,
            "damaged": _hex(report.damaged),
        },
        "prefixes": report.prefixes,
        "others": list(report.others),
        "plan": list(report.plan),
    }


def _hole_data(hole: Hole) -> dict[str, Any]:
    return {
        "first_lsn": hole.first_lsn,
        "last_lsn": hole.last_lsn,
        "segment": hole.segment,
        "offset": hole.offset,
        "why": reason_text(hole.why),
        "log_id": None if hole.log_id is None else hole.log_id.hex(),
    }


def _hex(ids: Sequence[bytes]) -> list[str]:
    return [one.hex() for one in ids]

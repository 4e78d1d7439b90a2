"""Torn tail or damage: what the bad places and gaps of a directory's segments mean.

Owns the decision, which is docs/formats.md 7.4. Pure: it marks the scans and lists what is missing.

The LSNs of valid records, in the order of the files, grow by one; within a run of valid records the
chain proves that nothing is missing, whatever the numbers. Between two runs a number may be skipped
only where records are missing: above the highest durable LSN that any valid FLUSH states this is a
torn tail (they were never promised, and nothing behind them counts, until a segment goes on with
the first missing LSN), at or below it damage. What the system could not read is never a torn tail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.kvstore.log.format import ALIGNMENT_BYTES, SEGMENT_HEADER_BYTES
from services.kvstore.log.segment_scan import UNKNOWN_LSNS, BadRecord, Piece, SegmentScan


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """Records that had been promised are missing: LSNs first_lsn to last_lsn.

    `log_id` and `type_code` where the one missing record's header could be read.
    """

    first_lsn: int
    last_lsn: int
    why: str
    segment: str | None = None
    offset: int | None = None
    log_id: bytes | None = None
    type_code: int | None = None


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What is to be read, and what becomes of the files.

    `kept`: per segment (by index), the pieces that count, each with the holes before it. `cut`: per
    segment, the size it is to be cut to (0: removed). `broken`: segments with damage. `foreign`:
    segments that are not this store's, and why. `end_holes`: what is missing behind all.
    """

    kept: dict[int, list[tuple[tuple[Hole, ...], Piece]]] = field(default_factory=dict)
    cut: dict[int, int] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)
    foreign: dict[int, str] = field(default_factory=dict)
    end_holes: tuple[Hole, ...] = ()
    holes: list[Hole] = field(default_factory=list)
    store_id: bytes | None = None
    durable_lsn: int = 0
    newest_lsn: int = 0
    torn_bytes: int = 0


def judge(segments: Sequence[SegmentScan]) -> Verdict:
    """Decides about the segments of one directory, oldest first."""
    verdict = Verdict()
    _find_foreign(segments, verdict)
    own = [index for index in range(len(segments)) if index not in verdict.foreign]
    verdict.durable_lsn = max((segments[index].durable_lsn for index in own), default=0)
    walk = _Walk(segments, own, verdict)
    for index in own:
        walk.segment(index)
    walk.end()
    for index in own:
        _settle(index, segments[index], verdict, is_kept_whole=index in walk.kept_whole)
    return verdict


def _find_foreign(segments: Sequence[SegmentScan], verdict: Verdict) -> None:
    """Segments of another store, or under a number that is not theirs, are left alone.

    The store is the one that most segments name; among equals the one of the newest. A segment
    whose records do not all follow from its header, or whose number is wrong although it has what
    no other has, is ours with a header that is not its own.
    """
    headed = [scan for scan in segments if scan.header is not None]
    votes = Counter(scan.header.store_id for scan in headed if scan.header is not None)
    newest = {scan.header.store_id: scan.sequence for scan in headed if scan.header is not None}
    if votes:
        verdict.store_id = max(votes, key=lambda store: (votes[store], newest[store]))
    for index, scan in enumerate(segments):
        if scan.header is None:
            continue
        is_strange = scan.header.store_id != verdict.store_id
        is_misnamed = scan.header.sequence != scan.sequence
        if not is_strange and not is_misnamed:
            continue
        others = [other for other in segments if other is not scan]
        is_whole = all(piece.chain_crc is not None for piece in scan.pieces)
        is_copy = not scan.bads and not _has_more(scan, others)
        if is_whole and (is_strange or is_copy):
            store = scan.header.store_id.hex()
            number = f"its header says that it is segment {scan.header.sequence}"
            verdict.foreign[index] = f"belongs to store {store}" if is_strange else number
        else:
            scan.header, scan.header_problem = None, "segment_sequence"
            if is_strange:
                # What follows from the strange header is the stranger's.
                own = (
                    number for number, piece in enumerate(scan.pieces) if piece.chain_crc is None
                )
                scan.pieces = scan.pieces[next(own, len(scan.pieces)) :]


def _has_more(scan: SegmentScan, others: Sequence[SegmentScan]) -> bool:
    """Whether a segment has records, or states what is on disk, beyond all others."""
    newest = max((piece.last_lsn for other in others for piece in other.pieces), default=0)
    durable = max((other.durable_lsn for other in others), default=0)
    own = max((piece.last_lsn for piece in scan.pieces), default=0)
    return own > newest or scan.durable_lsn > durable


class _Walk:
    """Goes through the runs of valid records in order."""

    def __init__(self, segments: Sequence[SegmentScan], own: Sequence[int], out: Verdict) -> None:
        self._segments = segments
        self._own = own
        self._out = out
        self._newest = 0
        # Whether it is known where the log begins: older segments may have been freed.
        self._has_begun = False
        # Its beginning is gone, which no power cut does to a log that goes on behind it.
        self._is_start_lost = False
        # The last piece that counts: its segment and where it ends.
        self._last: tuple[int, int] | None = None
        # An unreadable place since then: what is missing there is not a torn tail.
        self._unread: SegmentScan | None = None
        # Segments that are not cut: their end is damage, or they repeat what an earlier one has,
        # whose write had failed.
        self.kept_whole: set[int] = set()

    def segment(self, index: int) -> None:
        """The runs of one segment."""
        scan, end = self._segments[index], 0
        if index == self._own[0] and scan.header is not None:
            self._newest, self._has_begun = scan.header.first_lsn - 1, True
        if scan.problem is not None:
            self._unread = scan
        for piece in scan.pieces:
            self._look_for_unread(scan, end, piece.start)
            end = piece.end
            holes = self._holes_before(index, piece)
            if holes is None:
                continue
            self._out.kept.setdefault(index, []).append((holes, piece))
            self._newest = max(self._newest, piece.last_lsn)
            self._last, self._unread = (index, piece.end), None
            self._is_start_lost = False
        self._look_for_unread(scan, end, scan.size)

    def _look_for_unread(self, scan: SegmentScan, start: int, end: int) -> None:
        if any(first < end and last > start for first, last in scan.unreadable):
            self._unread = scan

    def _holes_before(self, index: int, piece: Piece) -> tuple[Hole, ...] | None:
        """What is missing before a piece; None: the piece does not count."""
        if self._is_of_another_log(index, piece):
            self.kept_whole.add(index)
            self._out.broken.add(index)
            return None
        self._begin(index, piece)
        expected, scan = self._newest + 1, self._segments[index]
        if piece.last_lsn < expected:
            self._old(index, piece)
            return None
        is_anchored = _is_anchored(scan, piece, expected)
        is_gap = piece.first_lsn > expected or not is_anchored
        lost = _known_losses(piece, expected, is_chained=self._is_next(index, piece))
        if not is_gap and not lost:
            is_begun = scan.header is not None or not scan.is_header_zero
            # A header that never reached the disk, and nothing behind it was promised either.
            is_real = is_begun or piece.first_lsn <= self._out.durable_lsn
            return () if is_real else None
        if self._is_written_again(index, expected) or not (
            is_anchored or self._is_in_order(index, piece)
        ):
            self.kept_whole.add(index)
            return None
        is_promised = expected <= self._out.durable_lsn or self._is_start_lost
        if not is_promised and self._unread is None:
            return None
        holes = [_hole_of(scan, bad) for bad in lost] or [self._gap(scan, piece)]
        return self._note(index, holes)

    def _is_of_another_log(self, index: int, piece: Piece) -> bool:
        """Records of unknown chain with an LSN that a record at this place cannot have: each takes
        64 bytes at least.
        """
        scan = self._segments[index]
        if piece.chain_crc is not None:
            return False
        if scan.header is not None:
            return piece.first_lsn > scan.header.first_lsn + piece.start // ALIGNMENT_BYTES
        if self._last is None:
            return False
        since = [self._segments[other] for other in self._own if self._last[0] <= other <= index]
        if len(since) <= scan.sequence - since[0].sequence:
            return False
        room = sum(other.size for other in since) // ALIGNMENT_BYTES
        return piece.first_lsn > self._newest + room

    def _begin(self, index: int, piece: Piece) -> None:
        """Where the log begins, if the oldest segment's header does not say it.

        With its own header the segment of the first piece says it. Else the lowest LSN in it does,
        and that one more is missing before, unless that is the first of all; so it is, too, behind
        a segment that may have held records.
        """
        if self._has_begun:
            return
        self._has_begun = True
        scan = self._segments[index]
        if scan.header is not None:
            before = [self._segments[other] for other in self._own if other < index]
            self._newest = max(scan.header.first_lsn - 1 - bool(before), 0)
            # One of zeros never reached the disk, if nothing did.
            is_blank = bool(before) and before[0].is_header_zero
            self._is_start_lost = bool(before) and not (is_blank and not self._out.durable_lsn)
            return
        self._is_start_lost = not scan.is_header_zero
        bads = [bad for one in scan.pieces for bad in one.bads] + scan.bads
        known = [bad.lsn for bad in bads if bad.lsn is not None]
        self._newest = max(min([one.first_lsn for one in scan.pieces] + known) - 2, 0)

    def _old(self, index: int, piece: Piece) -> None:
        """Records that were read before: written again after a failed write, or misplaced."""
        scan = self._segments[index]
        self.kept_whole.add(index)
        is_copy = scan.header is not None and piece.first_lsn >= scan.header.first_lsn
        if not is_copy or piece.chain_crc is None:
            self._out.broken.add(index)

    def _is_next(self, index: int, piece: Piece) -> bool:
        """Whether the chain goes on from the last piece that counts over all between to this."""
        if piece.chain_crc is None or self._last is None or self._last[0] != index:
            return False
        before = [other for other in self._segments[index].pieces if other.end <= piece.start]
        return before[-1].end == self._last[1]

    def _is_written_again(self, index: int, lsn: int) -> bool:
        """Whether a later segment has the LSN: then what stands here was given up for it."""
        return any(
            piece.first_lsn <= lsn <= piece.last_lsn
            for later in self._own
            if later > index
            for piece in self._segments[later].pieces
        )

    def _is_in_order(self, index: int, piece: Piece) -> bool:
        """Whether no later segment's own records come before these; else they are misplaced."""
        return not any(
            other.first_lsn <= piece.last_lsn
            for later in self._own
            if later > index and self._segments[later].header is not None
            for other in self._segments[later].pieces
            if other.chain_crc is not None
        )

    def _gap(self, scan: SegmentScan, piece: Piece) -> Hole:
        bad = piece.bads[0] if piece.bads else None
        first = min(self._newest + 1, piece.first_lsn)
        return Hole(
            first_lsn=first,
            last_lsn=max(piece.first_lsn - 1, first),
            why=self._why(scan, bad),
            segment=scan.path.name,
            offset=None if bad is None else bad.offset,
        )

    def _why(self, scan: SegmentScan, bad: BadRecord | None) -> str:
        if self._unread is not None:
            why = self._unread.problem or "input/output error"
            return f"{self._unread.path.name} cannot be read: {why}"
        if bad is not None:
            return bad.field
        if scan.header is None:
            return scan.header_problem or "segment_header"
        return "the end of the segment before it is gone, or a whole segment file"

    def _note(self, index: int, holes: Sequence[Hole]) -> tuple[Hole, ...]:
        """Remembers damage between the last piece that counts and the segment at `index`."""
        self._out.holes += holes
        first = self._own[0] if self._last is None else self._last[0]
        for between in self._own:
            scan = self._segments[between]
            if first <= between < index:
                self.kept_whole.add(between)
                self._out.broken.add(between)
            elif between == index and (scan.bads or scan.header is None or _has_bads(scan)):
                self._out.broken.add(between)
        return tuple(holes)

    def end(self) -> None:
        """What is missing behind the last record that counts."""
        out = self._out
        out.newest_lsn = max(self._newest, out.durable_lsn)
        if self._unread is not None:
            out.newest_lsn += UNKNOWN_LSNS
        elif self._newest >= out.durable_lsn:
            return
        last = self._segments[self._own[-1]]
        bad = last.bads[0] if last.bads else None
        hole = Hole(
            first_lsn=self._newest + 1,
            last_lsn=out.newest_lsn,
            why=self._why(last, bad),
            segment=last.path.name,
            offset=None if bad is None else bad.offset,
        )
        lost = [item for item in last.bads if item.lsn is not None]
        are_all = len(lost) == len(last.bads) == hole.last_lsn - hole.first_lsn + 1
        holes = [_hole_of(last, item) for item in lost] if are_all else [hole]
        out.end_holes = self._note(self._own[-1] + 1, holes)


def _is_anchored(scan: SegmentScan, piece: Piece, expected: int) -> bool:
    """Whether a run of records is certain to be this store's, in this place.

    The chain ties it to what is before it. Behind a bad place nothing does: it may be another
    log's, written here by mistake. Only a run from the very start of a segment whose header is bad
    is believed for going on with the very LSN that is next.
    """
    if piece.chain_crc is not None:
        return True
    is_start = scan.header is None and piece.start == SEGMENT_HEADER_BYTES
    return is_start and piece.first_lsn == expected


def _has_bads(scan: SegmentScan) -> bool:
    return any(piece.bads for piece in scan.pieces)


def _known_losses(piece: Piece, expected: int, *, is_chained: bool) -> list[BadRecord]:
    """The bad records before a piece, when their headers say which they were and they are all.

    They are when the chain goes on over them, or when the LSNs do.
    """
    lost = [bad for bad in piece.bads if bad.lsn is not None and bad.lsn >= expected]
    if len(lost) != len(piece.bads):
        return []
    return lost if is_chained or len(lost) == piece.first_lsn - expected else []


def _hole_of(scan: SegmentScan, bad: BadRecord) -> Hole:
    assert bad.lsn is not None
    return Hole(
        first_lsn=bad.lsn,
        last_lsn=bad.lsn,
        why=bad.field,
        segment=scan.path.name,
        offset=bad.offset,
        log_id=bad.log_id,
        type_code=bad.type_code,
    )


def _settle(index: int, scan: SegmentScan, out: Verdict, *, is_kept_whole: bool) -> None:
    """What becomes of one segment file."""
    if scan.problem is not None or scan.unreadable:
        return
    kept = out.kept.get(index, [])
    if scan.header is None and (kept or is_kept_whole):
        out.broken.add(index)
    if is_kept_whole:
        return
    # One that was begun and never written goes, too: its header may not be on disk, and as the
    # oldest it would look like a beginning that is lost.
    end = kept[-1][1].end if kept else 0
    behind = [piece for piece in scan.pieces if piece.start >= end]
    if out.holes and (behind or scan.bads):
        # What is torn may state what had been promised: as long as that is missing it stays. The
        # next segment has its LSNs again, so that it never counts.
        return
    if end == 0 or behind or scan.bads:
        out.cut[index] = end
        out.torn_bytes += scan.size - end


def lsns_missing(holes: Iterable[Hole]) -> int:
    """How many LSNs the holes cover."""
    return sum(hole.last_lsn - hole.first_lsn + 1 for hole in holes)

"""Groups of records: what one group commit writes, numbered and ready to be sealed.

Owns the FLUSH that begins each group. Pure; sealing (CRCs, chain) waits until the segment is known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from services.kvstore.log.format import (
    STORE_ADDRESS,
    RecordAddress,
    RecordType,
    unsealed_record,
)
from services.kvstore.log.store_records import Flush


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """An encoded body with its place in the store's order."""

    lsn: int
    kind: RecordType
    payload: bytes
    address: RecordAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive records of a group that stand in one segment."""

    sequence: int
    count: int


@dataclass(slots=True, kw_only=True)
class Group:
    """Records of consecutive LSNs, the first a FLUSH.

    `data`: the records, one after the other. `ends`: where each ends in it. `done`: the bytes of it
    that stand in segments; less than all only while it is being written, or after a failure.
    `runs`: in which segments they stand.
    """

    first_lsn: int
    data: bytearray
    ends: Sequence[int]
    done: int = 0
    runs: list[Run] = field(default_factory=list)

    def restart(self) -> None:
        """What was written of it counts no more."""
        self.done = 0
        self.runs = []

    @property
    def last_lsn(self) -> int:
        """LSN of the last record."""
        return self.first_lsn + len(self.ends) - 1

    def count_to(self, end: int) -> int:
        """How many records end at or before byte `end`."""
        return bisect_right(self.ends, end)


def make_group(records: Iterable[bytes], *, first_lsn: int, durable_lsn: int) -> Group:
    """A group of unsealed records; its FLUSH, which states `durable_lsn`, takes `first_lsn`."""
    flush = unsealed_record(
        RecordType.FLUSH, Flush(durable_lsn=durable_lsn).encode(), STORE_ADDRESS
    )
    pieces = [flush, *records]
    return Group(
        first_lsn=first_lsn,
        data=bytearray(b"".join(pieces)),
        ends=list(accumulate(map(len, pieces))),
    )


def group_of(items: Sequence[Numbered], *, durable_lsn: int) -> Group:
    """As `make_group`; the LSN before the first item's is the FLUSH's, and none is missing."""
    first_lsn = items[0].lsn - 1
    assert [item.lsn for item in items] == list(range(first_lsn + 1, first_lsn + 1 + len(items)))
    records = [unsealed_record(item.kind, item.payload, item.address) for item in items]
    return make_group(records, first_lsn=first_lsn, durable_lsn=durable_lsn)

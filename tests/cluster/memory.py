"""What outlives a simulated kvstore's process: the arena's bytes, slot locks, written records.

Owns the bytes of pages as everybody who maps them sees them, and who may still write. A KV slot
holds a number that follows from its token and from the number in the slot before it, as real KV
follows from all that stands before: one wrong slot makes everything behind it wrong.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from baton.arena.copying import checksum
from baton.kv.layout import KvDtype, KvGeometry
from services.kvstore.log.format import RecordAddress, RecordType
from services.kvstore.state import AckLevel
from tests.cluster.steps import Promise, Scheduler

BLOCK: Final = 8
PAGES: Final = 40
VOCABULARY: Final = 64
MARK: Final = 1 << 24
"""Numbers in slots are below it, so that a float32 holds them exactly."""

GEOMETRY: Final = KvGeometry(
    layers=1, kv_heads=1, head_dim=32, head_dim_v=32, block_tokens=BLOCK, dtype=KvDtype.F32
)
_ROW: Final = 32


def kv_of(token: int, before: int) -> int:
    """The KV number of a token behind a history whose last KV number is `before`."""
    return zlib.crc32(token.to_bytes(4, "little"), before) % MARK


def sampled_from(kv: int) -> int:
    """The token that follows."""
    return kv % VOCABULARY


def answer_to(history: list[int], tokens: int) -> list[int]:
    """The undisturbed answer."""
    kv = 0
    for token in history:
        kv = kv_of(token, kv)
    answer: list[int] = []
    for _ in range(tokens):
        answer.append(sampled_from(kv))
        kv = kv_of(answer[-1], kv)
    return answer


class ArenaMemory:
    """One node's arena file. Fits where the kvstore wants its `Arena`."""

    def __init__(self, arena_id: bytes) -> None:
        self.geometry = GEOMETRY
        self.page_count = PAGES
        self.page_bytes = self.slot_bytes = GEOMETRY.page_bytes
        self.spec = SimpleNamespace(arena_id=arena_id)
        self._bytes = np.zeros((PAGES, GEOMETRY.page_bytes), dtype=np.uint8)
        self._numbers = self._bytes.view("<f4")
        self.locked_slots: set[int] = set()

    def page(self, index: int) -> Any:
        """A writable page."""
        return self._bytes[index]

    def checksums(self, pages: Sequence[int]) -> list[int]:
        """The CRC-32C of each page."""
        return [checksum(self._bytes[page]) for page in pages]

    def zero(self, index: int) -> None:
        """Empties a page."""
        self._bytes[index] = 0

    def is_slot_locked(self, slot: int) -> bool:
        """Whether the worker slot's process lives."""
        return slot in self.locked_slots

    def put(self, page: int, slot: int, kv: int, position: int) -> None:
        """As a step writes KV."""
        self._numbers[page, slot * _ROW] = kv
        self._numbers[page, (BLOCK + slot) * _ROW] = position + 1

    def get(self, page: int, slot: int) -> tuple[int, int]:
        """(KV number, position + 1)."""
        row = self._numbers[page]
        return int(row[slot * _ROW]), int(row[(BLOCK + slot) * _ROW])

    def blank_from(self, page: int, first_slot: int) -> None:
        """Empties the slots from `first_slot` on."""
        self._numbers[page, first_slot * _ROW : BLOCK * _ROW] = 0
        self._numbers[page, (BLOCK + first_slot) * _ROW :] = 0

    def is_blank(self, page: int, first_slot: int) -> bool:
        """Nothing stands in the slots from `first_slot` on."""
        for start in (first_slot * _ROW, (BLOCK + first_slot) * _ROW):
            count = (BLOCK - first_slot) * _ROW
            if self._numbers[page, start : start + count].any():
                return False
        return True


Body = tuple[RecordType, bytes, RecordAddress]


class RecordDisk:
    """The records of one node. Fits where the kvstore wants its log writer.

    `acked` is how far an ack has gone out; what is behind it may be lost in a crash.
    """

    segment_count = 0

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.records: list[Body] = []
        self.acked_lsn = 0
        self.counters = SimpleNamespace(records=0, groups=0)

    @property
    def newest_lsn(self) -> int:
        """The newest record."""
        return len(self.records)

    def submit(self, kind: RecordType, payload: bytes, address: RecordAddress) -> None:
        """One more record."""
        self.records.append((kind, payload, address))

    async def acked(self, _level: AckLevel) -> None:
        """Returns when everything submitted so far is written."""
        lsn = self.newest_lsn
        pause = self._scheduler.random.choice((0.0005, 0.001, 0.004))
        await self._scheduler.pause(pause)
        self.acked_lsn = max(self.acked_lsn, lsn)

    async def settled(self, _log_id: bytes) -> None:
        """What a reader is told is acked."""
        await self.acked(AckLevel.OS)

    def require_room(self) -> None:
        """There always is some."""

    def free_end(self) -> int | None:
        """There is one segment only."""
        return None

    def adopt(self, _sequence: int, _log_ids: set[bytes]) -> None:
        """Segments are never freed here."""

    def has_free_segments(self) -> bool:
        """There is one segment only."""
        return False

    async def free_oldest(self) -> int:
        """Nothing to free."""
        return 0

    def lose_tail(self) -> None:
        """A crash: any part of what nobody was told of is gone."""
        kept = self._scheduler.random.randint(self.acked_lsn, self.newest_lsn)
        del self.records[kept:]
        self.acked_lsn = kept


def kept(value: Any = None) -> Promise[Any]:
    """A promise that is kept already."""
    promise: Promise[Any] = Promise()
    promise.keep(value)
    return promise

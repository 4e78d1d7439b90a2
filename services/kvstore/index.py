"""The prefix index: block key -> the page that holds the block.

Owns the map and its reverse. Pure. An entry is a hint to a page that some log holds; when the page
is freed the entry goes with it. Keys are keyed by the scope's secret, so that one tenant's lookup
cannot meet another's entry; a hit still compares the stored token ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.kvstore.state import PageRow


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """A full, immutable page: its row and the token ids (u32 little-endian) it holds the KV of."""

    row: PageRow
    ids: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexHit:
    """The longest run of blocks one numeric class has, from position 0."""

    numeric_class_id: int
    rows: tuple[PageRow, ...]


class BlockIndex:
    """Entries by (block key, numeric class id of the writer)."""

    __slots__ = ("_by_page", "_entries")

    def __init__(self) -> None:
        self._entries: dict[tuple[bytes, int], IndexEntry] = {}
        # A page may be known in several scopes: a published one and those of its users.
        self._by_page: dict[int, list[tuple[bytes, int]]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def offer(self, key: bytes, numeric_class_id: int, row: PageRow, ids: bytes) -> bool:
        """Adds a full page under its key; False when the key already has an entry."""
        assert row.crc is not None, "only full pages are indexed"
        name = (key, numeric_class_id)
        if name in self._entries:
            return False
        self._entries[name] = IndexEntry(row=row, ids=ids)
        self._by_page.setdefault(row.page, []).append(name)
        return True

    def forget_page(self, page: int) -> None:
        """The page was freed or found damaged: nothing finds it any more."""
        for name in self._by_page.pop(page, ()):
            del self._entries[name]

    def longest(
        self, keys: list[bytes], ids: list[bytes], class_ids: Iterable[int]
    ) -> IndexHit | None:
        """The longest run of `keys` (with the token ids of each block) in one of `class_ids`.

        Ties go to the class named first. None when not even the first block is there.
        """
        best: IndexHit | None = None
        for class_id in class_ids:
            rows: list[PageRow] = []
            for key, block_ids in zip(keys, ids, strict=True):
                entry = self._entries.get((key, class_id))
                if entry is None or entry.ids != block_ids:
                    break
                rows.append(entry.row)
            if rows and (best is None or len(rows) > len(best.rows)):
                best = IndexHit(numeric_class_id=class_id, rows=tuple(rows))
        return best

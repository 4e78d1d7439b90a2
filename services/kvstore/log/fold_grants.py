"""Which pages which writer may still write, and how often each page was used.

Owns the fold of grants. Pure. A page is granted by GRANT, or by a TAKE that copied a tail into it;
it is not granted any more when RELEASE names it, when it is full, when its writer ended the log by
name, or when it was granted again. A writer that was only fenced may be frozen and write on: its
pages stay granted here, and the lock byte of its slot tells whether it lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from services.kvstore.log.fields import Extent, PageRef
from services.kvstore.log.kv_rows import SlotRun
from services.kvstore.log.records import Grant
from services.kvstore.state import Writer

PAGES_MAX = 1 << 26
"""More pages than any arena has: an extent beyond is not believed."""


class Grantee(NamedTuple):
    """Who was granted pages: a writer of a log at a generation."""

    log_id: bytes
    generation: int
    writer: Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGrant:
    """Pages that a writer may still write: page -> page generation."""

    log_id: bytes
    generation: int
    writer: Writer
    pages: dict[int, int]


class GrantTable:
    """Grants of one arena; references to others are only counted in `arena_ids`."""

    def __init__(self, arena_id: bytes | None) -> None:
        self._arena_id = arena_id
        self._open: dict[int, tuple[int, Grantee]] = {}
        self._ended: set[tuple[bytes, int]] = set()
        self.newest: dict[int, int] = {}
        self.arena_ids: set[bytes] = set()

    @property
    def has_seen_arena(self) -> bool:
        """Whether any record referred to the arena asked for."""
        return self._arena_id in self.arena_ids

    def see(self, refs: Iterable[PageRef]) -> None:
        """Records refer to these uses of pages."""
        for ref in refs:
            self.arena_ids.add(ref.arena_id)
            if ref.arena_id == self._arena_id:
                self._use(ref.page, ref.page_generation)

    def see_pages(self, run: SlotRun) -> None:
        """As `see`, for the slots of APPENDs."""
        if self._arena_id is None or not len(run.page):
            return
        starts = np.append(0, np.flatnonzero(run.page[1:] != run.page[:-1]) + 1)
        for page, generation, is_ours in zip(
            run.page[starts].tolist(),
            run.page_generation[starts].tolist(),
            run.is_ours[starts].tolist(),
            strict=True,
        ):
            if is_ours:
                self._use(page, generation)

    def _use(self, page: int, page_generation: int) -> None:
        if page < PAGES_MAX and self.newest.get(page, 0) < page_generation:
            self.newest[page] = page_generation

    def grant(self, log_id: bytes, generation: int, record: Grant) -> None:
        """A GRANT, of its own or in a SNAPSHOT."""
        writer = Writer(
            worker_id=record.worker_id,
            slot=record.worker_slot,
            incarnation=record.worker_incarnation,
        )
        self.give(Grantee(log_id, generation, writer), record.extents)

    def give(self, grantee: Grantee, extents: Sequence[Extent]) -> None:
        """Pages that a writer may write from now on."""
        for page, page_generation in self._pages(extents):
            if self.newest.get(page, 0) <= page_generation:
                self._use(page, page_generation)
                self._open[page] = (page_generation, grantee)

    def release(self, log_id: bytes, generation: int, extents: Sequence[Extent]) -> None:
        """Pages that the log's writer at this generation does not write any more, by name.

        Naming pages of the log's table (evicted ones) lets go of no earlier writer.
        """
        for page, page_generation in self._pages(extents):
            known = self._open.get(page)
            if known is not None and known[1][:2] == (log_id, generation):
                self.fill(page, page_generation)

    def fill(self, page: int, page_generation: int) -> None:
        """A page is full, or came back."""
        known = self._open.get(page)
        if known is not None and known[0] == page_generation:
            del self._open[page]

    def end(self, log_id: bytes, generation: int) -> None:
        """The log's writer at this generation ended it by name and writes nothing more."""
        self._ended.add((log_id, generation))

    def open_grants(self) -> list[OpenGrant]:
        """What may still be written, by writer; a page stands in at most one."""
        grants: dict[Grantee, dict[int, int]] = {}
        for page, (page_generation, grantee) in sorted(self._open.items()):
            is_over = (grantee.log_id, grantee.generation) in self._ended
            if not is_over and self.newest.get(page) == page_generation:
                grants.setdefault(grantee, {})[page] = page_generation
        return [
            OpenGrant(
                log_id=grantee.log_id,
                generation=grantee.generation,
                writer=grantee.writer,
                pages=pages,
            )
            for grantee, pages in grants.items()
        ]

    def _pages(self, extents: Sequence[Extent]) -> Iterable[tuple[int, int]]:
        for extent in extents:
            self.arena_ids.add(extent.arena_id)
            end = extent.first_page + extent.page_count
            if extent.arena_id != self._arena_id or end > PAGES_MAX:
                continue
            for page in range(extent.first_page, end):
                yield page, extent.page_generation

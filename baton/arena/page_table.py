"""The writer's page table: which arena page holds a position, and where the next ones go.

Owns the order in which granted pages become rows. Pure: no bytes are touched here.

Invariant: row i holds positions i * block_tokens and up; a row once made never changes its page,
so an engine may keep the list of pages it was given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from baton.arena.replay import GrantedPage, LogView, PageRow
from baton.errors import Reason, ServiceError


class PageTable:
    """Rows of one log, growing. `granted` pages become rows in the order they were granted."""

    def __init__(
        self, rows: Sequence[PageRow], granted: Iterable[GrantedPage], block_tokens: int
    ) -> None:
        self._block_tokens = block_tokens
        self._rows = [GrantedPage(page=r.page, page_generation=r.page_generation) for r in rows]
        self._spare: deque[GrantedPage] = deque()
        self.grant(granted)

    @classmethod
    def of_view(cls, view: LogView, block_tokens: int) -> PageTable:
        """The table of a replayed log for its current writer.

        The last row, when partial, is the writer's own copy (or page) and goes on being written.
        """
        return cls(view.rows, view.head.granted_pages, block_tokens)

    @property
    def block_tokens(self) -> int:
        """Token slots of a page."""
        return self._block_tokens

    @property
    def row_count(self) -> int:
        """Pages that are rows."""
        return len(self._rows)

    @property
    def capacity(self) -> int:
        """Positions that rows and spare pages can hold."""
        return (len(self._rows) + len(self._spare)) * self._block_tokens

    def grant(self, pages: Iterable[GrantedPage]) -> None:
        """Add granted pages; one that the table already knows is ignored (a repeated answer)."""
        known = {row.page for row in (*self._rows, *self._spare)}
        for page in pages:
            if page.page not in known:
                known.add(page.page)
                self._spare.append(page)

    def reach(self, end_position: int) -> bool:
        """Make rows for every position below `end_position`; False if pages are missing."""
        if end_position > self.capacity:
            return False
        while len(self._rows) * self._block_tokens < end_position:
            self._rows.append(self._spare.popleft())
        return True

    def require(self, end_position: int) -> None:
        """As `reach`, raising ServiceError PAGES_EXHAUSTED."""
        if not self.reach(end_position):
            raise ServiceError(
                Reason.PAGES_EXHAUSTED,
                f"the log holds pages for {self.capacity} positions and needs {end_position}; "
                "retry when other sequences have ended",
                metadata={"capacity": str(self.capacity), "needed": str(end_position)},
                retry_after_s=1.0,
            )

    def pages(self, end_position: int) -> list[int]:
        """The arena pages of positions 0 to end_position - 1, in order."""
        count = -(-end_position // self._block_tokens)
        assert count <= len(self._rows), "reach() makes the rows first"
        return [row.page for row in self._rows[:count]]

    def row(self, index: int) -> GrantedPage:
        """The page of row `index`."""
        return self._rows[index]

    def slot(self, position: int) -> tuple[GrantedPage, int]:
        """The page that holds `position`, and the token slot inside it."""
        index, slot = divmod(position, self._block_tokens)
        return self._rows[index], slot

    def missing_pages(self, position: int, ahead_tokens: int) -> int:
        """How many pages to ask for so that `ahead_tokens` positions from `position` on fit."""
        needed = position + ahead_tokens - self.capacity
        return max(0, -(-needed // self._block_tokens))

    def spare_page(self) -> int:
        """The first granted page that is no row yet; PAGES_EXHAUSTED when there is none."""
        if not self._spare:
            self.require(self.capacity + 1)
        return self._spare[0].page

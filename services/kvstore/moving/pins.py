"""Pages that somebody reads for longer than a moment, a client or another kvstore: held meanwhile.

Owns the counting of those holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from services.kvstore.runtime import Runtime
from services.kvstore.state import PageRow


def frozen(row: PageRow) -> PageRow:
    """A row that later writes do not change."""
    return PageRow(
        page=row.page,
        page_generation=row.page_generation,
        tokens=row.tokens,
        crc=row.crc,
        slot_crcs=list(row.slot_crcs),
    )


@contextmanager
def pinned(runtime: Runtime, rows: Sequence[PageRow]) -> Iterator[None]:
    """The rows' pages stay what they are until the block ends."""
    core = runtime.core
    for row in rows:
        core.pool.hold(row.page)
        core.transfers[row.page] = core.transfers.get(row.page, 0) + 1
    try:
        yield
    finally:
        for row in rows:
            core.transfers[row.page] -= 1
            if not core.transfers[row.page]:
                del core.transfers[row.page]
            core.pool.drop(row.page)
        core.drain_freed()
        runtime.order_work()

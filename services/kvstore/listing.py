"""What operators see of the tables: logs in order, trees of forks, who has which pages.

Owns selection, order and counting. Pure and read-only. A walk over all logs comes in slices, so
that its caller can let others work between them.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from baton.ids import LOG_ID_BYTES
from services.kvstore.core import Core, invalid
from services.kvstore.pages import PagePool
from services.kvstore.rows import PageArray
from services.kvstore.state import LogState, Phase, Rows

SLICE_LOGS: Final = 256
"""Logs looked at in one go: a few milliseconds, also where each has thousands of pages."""

_PLACE: Final = struct.Struct("<d16s")

Place = tuple[float, bytes]
"""Where a log stands in the order of a list: when it was opened, its id."""


def place_of(log: LogState) -> Place:
    """The log's place."""
    return log.opened_wall_s, log.log_id


def page_token(place: Place) -> str:
    """Text that a list goes on behind."""
    return _PLACE.pack(*place).hex()


def parse_page_token(text: str) -> Place | None:
    """The place in a token; None for the empty one. INVALID_REQUEST for other text."""
    if not text:
        return None
    try:
        opened_s, log_id = _PLACE.unpack(bytes.fromhex(text))
    except (ValueError, struct.error):
        raise invalid("page_token", "is not one that a list ended with") from None
    return opened_s, log_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which logs are asked for; None: any."""

    tenant: str | None = None
    phase: Phase | None = None
    request_id: str | None = None
    id_prefix: str | None = None

    def is_met(self, log: LogState) -> bool:
        """Whether the log is one of them."""
        return (
            (self.tenant is None or log.tenant == self.tenant)
            and (self.phase is None or log.phase is self.phase)
            and (self.request_id is None or log.request_id.startswith(self.request_id))
            and (self.id_prefix is None or log.log_id.hex().startswith(self.id_prefix))
        )


class Listing:
    """One page of a list, gathered slice by slice; `add` each slice, then read."""

    def __init__(self, wanted: Wanted, after: Place | None, page_size: int) -> None:
        self._wanted = wanted
        self._after = after
        self._size = page_size
        self._first: list[Place] = []
        self.total = 0

    def add(self, logs: Sequence[LogState]) -> None:
        """Takes more logs into account, in any order."""
        found = [place_of(log) for log in logs if self._wanted.is_met(log)]
        self.total += len(found)
        if self._after is not None:
            after = self._after
            found = [place for place in found if place > after]
        if len(self._first) > self._size:
            last = self._first[-1]
            found = [place for place in found if place < last]
        if found:
            self._first = sorted([*self._first, *found])[: self._size + 1]

    def page(self) -> list[Place]:
        """The logs of the page, in order."""
        return self._first[: self._size]

    def next_token(self) -> str:
        """Where the next page begins; empty when there is none."""
        return page_token(self._first[self._size - 1]) if len(self._first) > self._size else ""


def slices(core: Core) -> Iterator[list[LogState]]:
    """All logs there are now, so many at a time; those that end meanwhile are left out."""
    ids = list(core.logs)
    for start in range(0, len(ids), SLICE_LOGS):
        found = (core.logs.get(log_id) for log_id in ids[start : start + SLICE_LOGS])
        yield [log for log in found if log is not None]


# --- lineage --------------------------------------------------------------------------------


class Lineage:
    """Who was forked off whom, gathered slice by slice."""

    def __init__(self) -> None:
        self._logs: dict[bytes, LogState] = {}
        self._children: dict[bytes, list[LogState]] = {}

    def add(self, logs: Sequence[LogState]) -> None:
        """Takes more logs into account."""
        for log in logs:
            self._logs[log.log_id] = log
            if log.parent_id is not None:
                self._children.setdefault(log.parent_id, []).append(log)

    def children(self, log_id: bytes) -> list[LogState]:
        """The logs forked off one, the oldest first."""
        return sorted(self._children.get(log_id, ()), key=place_of)

    def root_of(self, log_id: bytes) -> bytes:
        """The log that the tree of `log_id` grew from, be it gone."""
        seen = {log_id}
        log = self._logs.get(log_id)
        while log is not None and log.parent_id is not None and log.parent_id not in seen:
            log_id = log.parent_id
            seen.add(log_id)
            log = self._logs.get(log_id)
        return log_id

    def roots(self, tenant: str | None) -> list[bytes]:
        """The roots of all trees of more than one log, the oldest first."""
        parents = [p for p in self._children if self._is_root(p)]
        if tenant is not None:
            parents = [p for p in parents if self._children[p][0].tenant == tenant]
        return sorted(parents, key=lambda p: min(place_of(log) for log in self._children[p]))

    def _is_root(self, log_id: bytes) -> bool:
        """As `root_of(log_id) == log_id`, without the way there: chains of forks grow long."""
        log = self._logs.get(log_id)
        return log is None or log.parent_id is None

    def tree(self, root: bytes) -> Iterator[tuple[bytes, LogState | None, int]]:
        """(Id, log or None of one that is gone, depth), parents before children."""
        stack: list[tuple[bytes, int]] = [(root, 0)]
        seen: set[bytes] = set()
        while stack:
            log_id, depth = stack.pop()
            if log_id in seen:
                continue
            seen.add(log_id)
            yield log_id, self._logs.get(log_id), depth
            stack += [(log.log_id, depth + 1) for log in reversed(self.children(log_id))]


# --- pages ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TierShare:
    """What one log has in one tier: pages that it alone refers to, and others."""

    own_pages: int
    shared_pages: int
    tokens: int

    @property
    def pages(self) -> int:
        """All of them."""
        return self.own_pages + self.shared_pages


def share_of(rows: Rows, pool: PagePool, block_tokens: int) -> TierShare:
    """How many of a table's pages are its own. A transfer under way counts as another holder."""
    pages = rows.pages()
    shared = sum(pool.holders(int(page)) > 1 for page in pages)
    return TierShare(
        own_pages=len(pages) - shared,
        shared_pages=shared,
        tokens=covered_tokens(rows, block_tokens),
    )


def covered_tokens(rows: Rows, block_tokens: int) -> int:
    """Positions that a table covers."""
    last = rows.last
    return 0 if last is None else (len(rows) - 1) * block_tokens + last.tokens


class TenantPages:
    """Pages of a tier by tenant, where nobody keeps charges: each counts for whom it is first met
    with. `pages_of` gives the pages a log has in the tier.
    """

    def __init__(self, pool: PagePool, pages_of: Callable[[LogState], Sequence[PageArray]]) -> None:
        self._pages_of = pages_of
        self._is_counted = np.zeros(pool.page_count, dtype=np.bool_)
        self.pages: Counter[str] = Counter()

    def add(self, logs: Iterable[LogState]) -> None:
        """Takes more logs into account."""
        for log in logs:
            for pages in self._pages_of(log):
                self.count(log.tenant, pages)

    def count(self, tenant: str, pages: PageArray) -> None:
        """Takes distinct pages into account that `tenant` has."""
        fresh = int(np.count_nonzero(~self._is_counted[pages]))
        self._is_counted[pages] = True
        if fresh:
            self.pages[tenant] += fresh


def host_pages(log: LogState) -> Sequence[PageArray]:
    """What a log has in the host's memory: its table, and what its writer has not written yet."""
    return log.rows.pages(), np.fromiter(log.granted, dtype=np.uint32, count=len(log.granted))


def nvme_pages(log: LogState) -> Sequence[PageArray]:
    """What a log has on NVMe."""
    return (log.cold.pages(),)


def require_log_id_or_none(log_id: bytes) -> bytes | None:
    """The id, None for an empty one; INVALID_REQUEST for another size."""
    if log_id and len(log_id) != LOG_ID_BYTES:
        raise invalid("log_id", f"must be {LOG_ID_BYTES} bytes")
    return log_id or None

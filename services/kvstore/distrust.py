"""KV that must not be believed: everything that refers to it gives it up.

Owns the walk from pages to the logs and published prefixes that hold them. Pure; wall time is
passed in. Tokens stay: what is given up is computed again by whoever goes on with a log. It never
decides what is to be distrusted: a worker says so of what it wrote.

What it reaches is what refers to the pages themselves. KV that was copied out of them (the partial
last page of a fork, a portable blob, a log that moved to another kvstore) is not found by it. Nor
are pages that others share of a log that was dropped or cut since: its id leads to them no more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from services.kvstore.pages import PagePool
from services.kvstore.prefixes import Prefix
from services.kvstore.state import LogState, Phase, Rows, Writer
from services.kvstore.store import Store
from services.kvstore.tiers.slots import Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """What was given up: logs that were cut, prefixes withdrawn, pages.

    `fenced`: who wrote each of the logs that were being written, and under which generation.
    """

    logs: int = 0
    prefixes: int = 0
    pages: int = 0
    fenced: Mapping[bytes, tuple[Writer, int]] = field(default_factory=dict)


class Distrust:
    """Gives KV of one store up."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def logs(self, from_positions: Mapping[bytes, int], wall_s: float) -> GivenUp:
        """The KV of each log (by id) from its position on, and its copies on NVMe; unknown logs are
        left out.
        """
        core = self._store.core
        pages: set[int] = set()
        slots: set[int] = set()
        for log_id, position in from_positions.items():
            log = core.logs.get(log_id)
            if log is not None:
                block = position // core.block_tokens
                pages.update(log.rows.pages()[block:].tolist())
                slots.update(log.cold.pages()[block:].tolist())
        withdrawn = self._copies(pages, slots, wall_s)
        given_up = self.pages(pages, wall_s)
        return replace(given_up, prefixes=given_up.prefixes + withdrawn)

    def _copies(self, pages: set[int], slots: set[int], wall_s: float) -> int:
        """What is on NVMe of the pages, or was loaded from the slots, goes with them. Returns how
        many prefixes were withdrawn.
        """
        core = self._store.core
        if core.slots is None:
            return 0
        while self._spread(pages, slots, core.slots):
            pass
        prefixes = [p for p in core.prefixes.all() if not slots.isdisjoint(p.cold.pages().tolist())]
        for prefix in prefixes:
            self._store.prefix_keeper.revoke(prefix.prefix_id, None, wall_s)
        is_page, is_slot = _marks(core.pool, pages), _marks(core.slots.pool, slots)
        for log in core.logs.values():
            hits = np.flatnonzero(is_slot[log.cold.pages()]).tolist()
            # A partial block has a copy of its own for each log that has the page.
            hits += np.flatnonzero(is_page[log.rows.pages()]).tolist()
            if hits:
                self._store.placement.cut_copies(log, min(hits) * core.block_tokens)
        return len(prefixes)

    def _spread(self, pages: set[int], slots: set[int], tier: Slots) -> bool:
        """Adds the pages and slots that have the same content as one of these; False: none."""
        core, before = self._store.core, len(pages) + len(slots)
        for page in pages:
            slot = tier.copy_of(page, core.pool.generation(page))
            slots.update(() if slot is None else (slot,))
        for slot in slots:
            place = tier.page_of(slot)
            if place is not None and core.pool.is_held(*place):
                pages.add(place[0])
        is_page, is_slot = _marks(core.pool, pages), _marks(tier.pool, slots)
        owners: list[LogState | Prefix] = [*core.logs.values(), *core.prefixes.all()]
        for owner in owners:
            if owner.rows and owner.cold:
                rows = owner.rows if isinstance(owner.rows, Rows) else Rows(owner.rows)
                both = min(len(rows), len(owner.cold))
                ours, copies = rows.pages()[:both], owner.cold.pages()[:both]
                is_hit = is_page[ours] | is_slot[copies]
                pages.update(ours[is_hit].tolist())
                slots.update(copies[is_hit].tolist())
        return len(pages) + len(slots) > before

    def pages(self, pages: Collection[int], wall_s: float) -> GivenUp:
        """These pages serve nobody any more. A log with one of them loses its KV from there on.

        One that is being written is fenced first: its writer may have read the pages. A moved log
        keeps its pages until its new home has them; nothing finds them any more.
        """
        if not pages:
            return GivenUp()
        core = self._store.core
        for page in pages:
            core.disbelieve(page)
        distrusted = _marks(core.pool, pages)
        fenced: dict[bytes, tuple[Writer, int]] = {}
        cut = 0
        for log in list(core.logs.values()):
            hits = np.flatnonzero(distrusted[log.rows.pages()])
            if hits.size and log.phase is not Phase.MOVED:
                cut += 1
                self._give_up(log, int(hits[0]), fenced, wall_s)
        prefixes = [
            prefix
            for prefix in core.prefixes.all()
            if any(distrusted[row.page] for row in prefix.rows)
        ]
        for prefix in prefixes:
            self._store.prefix_keeper.revoke(prefix.prefix_id, None, wall_s)
        return GivenUp(logs=cut, prefixes=len(prefixes), pages=len(pages), fenced=fenced)

    def _give_up(
        self, log: LogState, block: int, fenced: dict[bytes, tuple[Writer, int]], wall_s: float
    ) -> None:
        if log.writer is not None:
            fenced[log.log_id] = (log.writer, log.generation)
            self._store.keeper.raise_generation(log)
            log.expires_wall_s = wall_s + log.ttl_s
        self._store.home.give_up_kv(log, block)


def _marks(pool: PagePool, numbers: Collection[int]) -> npt.NDArray[np.bool_]:
    """Which of a pool's pages (or slots) these are."""
    marks = np.zeros(pool.page_count, dtype=np.bool_)
    marks[list(numbers)] = True
    return marks

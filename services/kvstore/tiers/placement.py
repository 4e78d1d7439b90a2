"""Which KV stands on which tier: copies on NVMe of what is in the host, and back.

Owns the steps between the tiers, each of them in two halves around the disk: `begin_copy` and
`finish_copy`, `begin_load` and `finish_load`. Pure: no I/O, no clock. What a half finds changed
meanwhile it leaves alone.

Invariants: a copy is of a block whose bytes hashed to its record when it was written, and counts
once it is on disk; nobody sees a loaded page before it hashed to its copy's record; a slot is
reused only when no cold row and no read holds it; a block of a log that somebody writes is never
loaded under its writer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from baton.errors import ServiceError
from services.kvstore.chains import ScopeChains
from services.kvstore.core import Core
from services.kvstore.prefixes import Prefix
from services.kvstore.rows import PageRow
from services.kvstore.state import LogState, Phase
from services.kvstore.tiers.cold_room import ColdRoom
from services.kvstore.tiers.copies import Failure, Outcome, SlotCopy
from services.kvstore.tiers.owners import (
    CopyOrder,
    LoadOrder,
    Owner,
    copy_of,
    frozen,
    host_tokens,
    is_same_content,
    is_same_place,
    known_rows,
    moved_row,
    tenant_of,
)
from services.kvstore.tiers.slots import Slots

DAMAGING: Final = (Failure.IO, Failure.DAMAGED)
"""What a slot that failed so while it was read is not asked for again."""


class Placement:
    """The tiers of one store. `require_room(pages, tenant)` makes room in the host."""

    def __init__(
        self,
        core: Core,
        chains: ScopeChains,
        require_room: Callable[[int, str], None],
        give_up_kv: Callable[[LogState, int], None],
    ) -> None:
        self._core = core
        self._chains = chains
        self._require_room = require_room
        self._give_up_kv = give_up_kv
        self.room = ColdRoom(core)
        # Slots that are being read: whoever wants one of them too waits for it.
        self._loading: set[int] = set()
        self.copied_pages = 0
        self.shared_pages = 0
        self.loaded_pages = 0
        self.rejoined_pages = 0
        self.damaged_slots = 0
        self.damaged_pages = 0

    # --- copies -----------------------------------------------------------------------------

    def cut_copies(self, owner: Owner, tokens: int) -> None:
        """Gives up the copies of all positions from `tokens` on, and records it."""
        if self._core.cut_copies(owner, tokens):
            self._core.journal.placed(owner, len(owner.cold))
            self._ranked(owner)

    def share_copies(self, child: LogState, parent: LogState, tokens: int) -> None:
        """A fork begins with its parent's copies of the first `tokens` positions."""
        core = self._core
        kept = min(tokens, parent.cold.tokens)
        if core.slots is None or kept == 0:
            return
        child.cold = parent.cold.head(kept, core.block_tokens)
        core.slots.hold(child.cold.pages())
        core.journal.placed(child, 0)
        self._ranked(child)
        self._offer_copies(child)

    def slot_damaged(self, slot: int) -> list[Owner]:
        """The slot's bytes are not to be believed: whoever has it keeps the copies before it, and
        it is not used again. Returns whom that concerned.
        """
        core, slots = self._core, self._core.slots
        assert slots is not None
        self.damaged_slots += 1
        slots.retire(slot)
        owners: list[Owner] = []
        everybody: list[Owner] = [*core.logs.values(), *core.prefixes.all()]
        for owner in everybody:
            places = owner.cold.pages().tolist()
            if slot in places:
                self.cut_copies(owner, places.index(slot) * core.block_tokens)
                owners.append(owner)
        return owners

    def adopt(self) -> None:
        """After a restart: the copies that the log of records told of count."""
        core = self._core
        for log in core.logs.values():
            self._compare(log)
            if log.committed % core.block_tokens:
                # Nothing is loaded behind a page that is not full.
                self.cut_copies(log, log.committed)
            self.room.note(log)
        for prefix in core.prefixes.all():
            self._compare(prefix)

    def _compare(self, owner: Owner) -> None:
        """Copies of other bytes than the host has go: KV was computed again while there was no
        NVMe tier, or the record that they went is lost. Of the others is known what they copy.
        """
        slots = self._core.slots
        for index in range(min(len(owner.rows), len(owner.cold))):
            row, copy = owner.rows[index], owner.cold[index]
            if not is_same_content(row, copy, self._core.block_tokens):
                self.cut_copies(owner, index * self._core.block_tokens)
                return
            if slots is not None and row.crc is not None and row.crc == copy.crc:
                slots.note_copy(row.page, row.page_generation, copy.page)

    # --- host to NVMe -----------------------------------------------------------------------

    def begin_copy(self, owner: Owner, blocks_max: int) -> CopyOrder | None:
        """The next blocks that have no copy, at most `blocks_max`; None where there are none, or
        no slot for the first of them. Their pages are held until `finish_copy`.
        """
        core, slots = self._core, self._core.slots
        if slots is None or not self._may_be_copied(owner):
            return None
        first = owner.cold.tokens // core.block_tokens
        end = min(known_rows(owner), first + blocks_max)
        if end <= first or host_tokens(owner, core.block_tokens) <= owner.cold.tokens:
            return None
        rows = [frozen(row) for row in owner.rows[first:end]]
        found = [copy_of(slots, row) for row in rows]
        missing = sum(slot is None for slot in found)
        shared = [slot for slot in found if slot is not None]
        # Before room is made, which may take copies of others.
        slots.hold(shared)
        spare = iter(slots.pool.grant(self.room.make(missing, owner), tenant_of(owner)))
        places: list[int] = []
        fresh: list[int] = []
        for index, slot in enumerate(found):
            place = next(spare, None) if slot is None else slot
            if place is None:
                slots.drop([slot for slot in found[index:] if slot is not None])
                break
            if slot is None:
                fresh.append(index)
            places.append(place)
        if not places:
            return None
        rows = rows[: len(places)]
        core.placing.update(places[index] for index in fresh)
        core.hold_for_transfer(row.page for row in rows)
        return CopyOrder(
            owner=owner,
            first_block=first,
            rows=tuple(rows),
            slots=tuple(places),
            fresh=tuple(fresh),
            copies=tuple(
                SlotCopy(slot=places[index], page=rows[index].page, row=rows[index])
                for index in fresh
            ),
        )

    def _may_be_copied(self, owner: Owner) -> bool:
        if isinstance(owner, Prefix):
            return self._is_there(owner)
        is_idle = owner.writer is None and owner.is_sealed and owner.phase is not Phase.MOVED
        return self._is_there(owner) and is_idle

    def _is_there(self, owner: Owner) -> bool:
        if isinstance(owner, Prefix):
            return self._core.prefixes.get(owner.prefix_id) is owner
        return self._core.logs.get(owner.log_id) is owner

    def finish_copy(self, order: CopyOrder, outcomes: Sequence[Outcome]) -> int:
        """The writes ended, one outcome for each of `order.copies`; returns how many blocks have
        copies now that had none. A host page that turned out damaged is given up.
        """
        core, slots, owner = self._core, self._core.slots, order.owner
        assert slots is not None
        failed = {
            index: outcome
            for index, outcome in zip(order.fresh, outcomes, strict=True)
            if outcome is not None
        }
        self._settle_written(order, failed, slots)
        good = min(failed, default=len(order.rows))
        if not self._still_stands(order):
            good = 0
        drop = [slot for i, slot in enumerate(order.slots) if i >= good and i not in failed]
        if good:
            core.cut_copies(owner, order.first_block * core.block_tokens)
            for row, slot in zip(order.rows[:good], order.slots, strict=False):
                owner.cold.append(moved_row(row, slot, slots.pool))
            core.journal.placed(owner, order.first_block)
            self.copied_pages += sum(index < good for index in order.fresh)
            self.shared_pages += good - sum(index < good for index in order.fresh)
            self._ranked(owner)
            self._offer_copies(owner, order.first_block)
        slots.drop(drop)
        core.end_transfer(row.page for row in order.rows)
        core.drain_freed()
        for index, outcome in failed.items():
            if outcome is Failure.DAMAGED:
                self._page_damaged(order, index)
        return good

    def _settle_written(self, order: CopyOrder, failed: dict[int, Failure], slots: Slots) -> None:
        """Granted slots are held or free again; what they are a copy of is remembered."""
        for index in order.fresh:
            slot, row = order.slots[index], order.rows[index]
            self._core.placing.discard(slot)
            if index not in failed:
                slots.written([slot])
                if row.crc is not None and self._core.pool.is_held(row.page, row.page_generation):
                    slots.note_copy(row.page, row.page_generation, slot)
            elif failed[index] is Failure.IO:
                slots.retire(slot)
            else:
                slots.give_back([slot])

    def _still_stands(self, order: CopyOrder) -> bool:
        """Whether the owner's blocks are those that were copied, and its copies those before."""
        owner, first = order.owner, order.first_block
        if not self._is_there(owner) or owner.cold.tokens // self._core.block_tokens != first:
            return False
        rows = owner.rows[first : first + len(order.rows)]
        if len(rows) < len(order.rows):
            return False
        return all(
            is_same_place(now, then) and now.tokens >= then.tokens
            for now, then in zip(rows, order.rows, strict=True)
        )

    def _page_damaged(self, order: CopyOrder, index: int) -> None:
        """A host page does not hash to its record: nothing finds it, its owner gives it up."""
        core, owner, row = self._core, order.owner, order.rows[index]
        self.damaged_pages += 1
        core.disbelieve(row.page)
        block = order.first_block + index
        if isinstance(owner, Prefix) or not self._is_there(owner) or owner.writer is not None:
            return
        if block < len(owner.rows) and owner.rows[block].page == row.page:
            self._give_up_kv(owner, block)

    # --- NVMe to host -----------------------------------------------------------------------

    def missing_tokens(self, owner: Owner, tokens: int) -> int:
        """How many of the first `tokens` positions could be loaded and are not in the host."""
        if self._core.slots is None or not owner.cold or not self._may_be_loaded(owner):
            return 0
        hot = host_tokens(owner, self._core.block_tokens)
        return max(min(tokens, owner.cold.tokens) - hot, 0)

    def loaded_tokens(self, owner: Owner, tokens: int) -> int:
        """How many of the first `tokens` positions are in the host; 0 of an owner that is gone."""
        is_there = self._is_there(owner)
        return min(host_tokens(owner, self._core.block_tokens), tokens) if is_there else 0

    def pages_to_read(self, owner: Owner, tokens: int) -> int:
        """How many of the blocks that are missing stand on no host page."""
        if not self.missing_tokens(owner, tokens):
            return 0
        first, end = self._missing_blocks(owner, tokens)
        return sum(self._page_of(owner.cold[index]) is None for index in range(first, end))

    def _missing_blocks(self, owner: Owner, tokens: int) -> tuple[int, int]:
        tokens = min(tokens, owner.cold.tokens)
        return len(owner.rows), -(-tokens // self._core.block_tokens)

    def _may_be_loaded(self, owner: Owner) -> bool:
        """Its table ends at a block's end, and nobody writes on from there."""
        if not self._is_there(owner):
            return False
        if isinstance(owner, Prefix):
            return True
        is_idle = owner.writer is None and owner.is_sealed and owner.phase is not Phase.MOVED
        return is_idle and owner.committed % self._core.block_tokens == 0

    def begin_load(
        self, owner: Owner, tokens: int, first_block: int, blocks_max: int
    ) -> LoadOrder | None:
        """Blocks from `first_block` on (the owner's first missing one, or where an order that is
        under way ends) towards its first `tokens` positions, at most `blocks_max`. None where there
        are none, or the first of them is being read for somebody else. PAGES_EXHAUSTED or
        QUOTA_EXCEEDED where the host has no room.
        """
        core, slots = self._core, self._core.slots
        if slots is None or not self.missing_tokens(owner, tokens):
            return None
        _, last = self._missing_blocks(owner, tokens)
        rows: list[PageRow] = []
        found: list[int | None] = []
        for index in range(first_block, min(last, first_block + blocks_max)):
            row = owner.cold[index]
            if row.page in self._loading:
                break
            rows.append(row)
            found.append(self._page_of(row))
        if not rows:
            return None
        shared = [page for page in found if page is not None]
        core.hold_for_transfer(shared)
        missing = len(found) - len(shared)
        try:
            self._require_room(missing, tenant_of(owner))
        except ServiceError:
            core.end_transfer(shared)
            core.drain_freed()
            raise
        spare = iter(core.pool.grant(missing, tenant_of(owner)))
        pages = [next(spare) if page is None else page for page in found]
        fresh = [index for index, page in enumerate(found) if page is None]
        core.importing.update(pages[index] for index in fresh)
        self._hold_slots([rows[index].page for index in fresh], slots)
        return LoadOrder(
            owner=owner,
            first_block=first_block,
            rows=tuple(frozen(row) for row in rows),
            pages=tuple(pages),
            fresh=tuple(fresh),
            copies=tuple(
                SlotCopy(slot=rows[index].page, page=pages[index], row=frozen(rows[index]))
                for index in fresh
            ),
        )

    def _page_of(self, row: PageRow) -> int | None:
        """A host page that has the content of a cold row's slot already."""
        assert self._core.slots is not None
        if row.crc is None:
            return None
        use = self._core.slots.page_of(row.page)
        return use[0] if use is not None and self._core.pool.is_held(*use) else None

    def _hold_slots(self, places: Sequence[int], slots: Slots) -> None:
        slots.hold(places)
        self._loading.update(places)
        for slot in places:
            self._core.slot_readers[slot] = self._core.slot_readers.get(slot, 0) + 1

    def _drop_slots(self, places: Sequence[int], slots: Slots) -> None:
        self._loading.difference_update(places)
        for slot in places:
            self._core.slot_readers[slot] -= 1
            if not self._core.slot_readers[slot]:
                del self._core.slot_readers[slot]
        slots.drop(places)

    def finish_load(self, order: LoadOrder, outcomes: Sequence[Outcome], now_s: float) -> int:
        """The reads ended, one outcome for each of `order.copies`; returns how many blocks stand in
        the owner's rows now that did not. A slot that failed is given up by all who have it.
        """
        core, slots = self._core, self._core.slots
        assert slots is not None
        failed = {
            index: outcome
            for index, outcome in zip(order.fresh, outcomes, strict=True)
            if outcome is not None
        }
        fresh = set(order.fresh)
        # Host pages that were found damaged meanwhile stand for no slot any more.
        lost = (
            index
            for index, row in enumerate(order.rows)
            if index not in fresh and self._page_of(row) != order.pages[index]
        )
        good = min((*failed, *lost), default=len(order.rows))
        if not self._is_wanted_still(order):
            good = 0
        loaded = [index for index in order.fresh if index < good]
        core.importing.difference_update(order.pages[index] for index in order.fresh)
        core.pool.commit_many([order.pages[index] for index in loaded])
        for index in order.fresh:
            if index >= good:
                core.pool.give_back(order.pages[index])
        twins = [page for index, page in enumerate(order.pages) if index not in fresh]
        core.pool.hold_many([p for i, p in enumerate(order.pages) if i not in fresh and i < good])
        core.end_transfer(twins)
        if good:
            self._extend(order, good, now_s)
            for index in loaded:
                if order.rows[index].crc is not None:
                    page = order.pages[index]
                    slots.note_copy(page, core.pool.generation(page), order.rows[index].page)
            self.loaded_pages += len(loaded)
            self.rejoined_pages += good - len(loaded)
        self._drop_slots([copy.slot for copy in order.copies], slots)
        core.drain_freed()
        for index, outcome in failed.items():
            slot = order.rows[index].page
            is_same = slots.is_current(slot, order.rows[index].page_generation)
            if outcome in DAMAGING and is_same:
                self.slot_damaged(slot)
        return good

    def _is_wanted_still(self, order: LoadOrder) -> bool:
        """Whether these blocks are still what comes next of the owner, and its copies the same."""
        owner, first = order.owner, order.first_block
        if not self._may_be_loaded(owner) or len(owner.rows) != first:
            return False
        if host_tokens(owner, self._core.block_tokens) != first * self._core.block_tokens:
            return False
        cold = owner.cold[first : first + len(order.rows)]
        return len(cold) == len(order.rows) and all(
            is_same_place(now, then) and now.tokens == then.tokens
            for now, then in zip(cold, order.rows, strict=True)
        )

    def _extend(self, order: LoadOrder, good: int, now_s: float) -> None:
        """The first `good` blocks of the order become the owner's rows."""
        core, owner = self._core, order.owner
        rows = [
            moved_row(row, page, core.pool)
            for row, page in zip(order.rows[:good], order.pages[:good], strict=True)
        ]
        if isinstance(owner, Prefix):
            owner.rows = (*owner.rows, *rows)
            core.journal.promoted(owner, order.first_block)
            self._chains.offer_prefix(owner)
            return
        for row in rows:
            owner.rows.append(row)
        owner.committed = owner.rows.tokens
        owner.last_used_s = max(owner.last_used_s, now_s)
        core.journal.promoted(owner, order.first_block)
        self._chains.offer(owner)
        core.idle(owner)

    # --- shared -----------------------------------------------------------------------------

    def _ranked(self, owner: Owner) -> None:
        """Whether its KV may go without loss has changed: it ranks elsewhere now."""
        if isinstance(owner, LogState):
            self.room.note(owner)
            if owner.writer is None and owner.log_id in self._core.logs:
                self._core.logs.add(owner)

    def _offer_copies(self, owner: Owner, first_block: int = 0) -> None:
        """Lookups find what is on NVMe."""
        if isinstance(owner, Prefix):
            self._chains.offer_prefix_cold(owner)
        elif owner.is_sealed:
            self._chains.offer_cold(owner, first_block)

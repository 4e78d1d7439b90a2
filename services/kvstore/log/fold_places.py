"""Where KV stands besides the host arena, as PLACE records tell it.

Owns the fold of PLACE: copies on the NVMe tier (`Folded.cold`), and KV that was brought back into
the host. Pure. A slot belongs to who named it last (its highest slot generation); a table ends
before the first slot that was used again since.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.kvstore.log.fields import LogIdentity, PageEntry
from services.kvstore.log.fold_grants import PAGES_MAX
from services.kvstore.log.fold_prefixes import PrefixFold
from services.kvstore.log.folded import Folded
from services.kvstore.log.format import RecordAddress
from services.kvstore.log.kv_rows import KvRows
from services.kvstore.log.store_records import Place, Tier
from services.kvstore.rows import PageRow, Rows


class PlaceFold:
    """`nvme_id`: the NVMe file whose slots are asked for; None: none."""

    def __init__(self, nvme_id: bytes | None) -> None:
        self.nvme_id = nvme_id
        self.newest: dict[int, int] = {}

    def apply(
        self, at: RecordAddress, record: Place, folded: Folded | None, prefixes: PrefixFold
    ) -> None:
        """A PLACE of a log as the fold has it, or of a prefix; of anything else nothing is known.

        A record that does not fit the log places nothing: what it named is computed again.
        """
        if record.tier is Tier.NVME:
            self._see(record.entries)
        table: KvRows | None
        if record.prefix_id is not None:
            table = prefixes.table(record.prefix_id, record.tier)
        elif folded is None or not _fits(folded, at, record):
            return
        else:
            table = folded.kv if record.tier is Tier.HOST else folded.cold
        if table is not None and record.tier is not Tier.DEVICE:
            table.place(record.from_position, record.to_position, record.entries)

    def none_of(self, identity: LogIdentity) -> KvRows:
        """The table of a log without copies."""
        return KvRows(identity.block_tokens, self.nvme_id)

    def current(self, table: KvRows) -> Rows:
        """The slots before the first that was used again since."""
        rows: list[PageRow] = []
        for row in table.found():
            if self.newest.get(row.page, 0) > row.page_generation:
                break
            rows.append(row)
        return Rows(rows)

    def _see(self, entries: Sequence[PageEntry]) -> None:
        for entry in entries:
            ref = entry.ref
            if ref.arena_id == self.nvme_id and ref.page < PAGES_MAX:
                self.newest[ref.page] = max(self.newest.get(ref.page, 0), ref.page_generation)


def _fits(folded: Folded, at: RecordAddress, record: Place) -> bool:
    state = folded.state
    return at.generation == state.generation and record.to_position <= state.position

"""What must hold after every step of an ownership run, whatever was lost, frozen or killed.

Owns the checks of O1 to O7 and what they are compared with: who was told which generation, who
wrote which slot of which page, which tokens were acked. Never changes anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from baton.capability import DEV_KEY, CapabilitySigner, Claims, Right
from baton.wire.label import label_to_proto
from services.kvstore.core import Core
from services.kvstore.pages import PageState
from services.kvstore.state import LogState, Phase
from tests.cluster.homes import LABEL, LEASE_S, SimHome, StepClock
from tests.cluster.memory import BLOCK, GEOMETRY, kv_of
from tests.cluster.steps import Scheduler

if TYPE_CHECKING:
    from tests.cluster.writers import Held, SimWorker

CONTENT_EVERY: Final = 64
"""Steps between two readings of everything; reading after each would take most of a run."""

STUCK_BOUND_S: Final = 2 * LEASE_S + 1.5
"""A new run's first renewal counts as progress: it may have one lease more."""

_TENANT_RIGHTS: Final = frozenset(Right) - {Right.ADMIN, Right.ATTACH, Right.HEARTBEAT}


class Oracle:
    """Knows what a run has promised to whom."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._signer = CapabilitySigner(DEV_KEY, StepClock(scheduler))
        self.label = label_to_proto(LABEL, GEOMETRY, "sim")
        self.homes: dict[str, SimHome] = {}
        self.workers: dict[str, SimWorker] = {}
        self.stuck_since: dict[int, float] = {}
        self.told: dict[bytes, int] = {}
        self.acked: dict[bytes, list[int]] = {}
        self._page_writer: dict[tuple[bytes, int, int], tuple[bytes, int]] = {}
        self._slots: set[tuple[bytes, int, int, int]] = set()
        self.writes = self.late_writes = 0

    # --- capabilities -----------------------------------------------------------------------

    def capability(self, log_id: bytes | None, tenant: str = "acme") -> str:
        """What a gateway mints for one log."""
        return self._sign(_TENANT_RIGHTS, tenant, log_id)

    def worker_capability(self, name: str) -> str:
        """A worker's own."""
        return self._sign(frozenset({Right.ATTACH}), None, None, name)

    def _sign(
        self, rights: frozenset[Right], tenant: str | None, log_id: bytes | None, name: str = "r"
    ) -> str:
        claims = Claims(
            tenant=tenant,
            scope=None if tenant is None else "",
            rights=rights,
            expiry_wall_s=self._signer.expiry_after(1e6),
            request_id=name,
            log_id=log_id,
        )
        return self._signer.sign(claims)

    # --- what happened ----------------------------------------------------------------------

    def tell(self, log_id: bytes, generation: int) -> None:
        """Somebody was told that this is the log's generation."""
        self.told[log_id] = max(generation, self.told.get(log_id, 0))

    def accepted(self, log_id: bytes, generation: int) -> None:
        """O1: a write was taken; nobody may have been told of a newer generation."""
        assert generation >= self.told.get(log_id, 0), "O1: an old generation wrote"

    def granted(self, worker: SimWorker, held: Held, pages: list[tuple[int, int]]) -> None:
        """S7, O7: what a writer gets is blank, or has what belongs there.

        The store copies the end of a base into the writer's first page. When it dies before a
        record names that page's row, the page comes back as one that the writer may write, and is
        not zeroed under it: the copied slots are of this very history.
        """
        arena = worker.arena
        for index, (page, _) in enumerate(pages, start=len(held.table) - len(pages)):
            is_own = arena.is_blank(page, 0) or self._is_own(arena, page, held, index * BLOCK)
            assert is_own, "O7: a granted page holds foreign bytes"

    def _is_own(self, arena: Any, page: int, held: Held, first: int) -> bool:
        """Whether each slot that is not blank has the KV of the log's own token there."""
        kv, history = 0, held.tokens[: first + BLOCK]
        for position, token in enumerate(history):
            kv = kv_of(token, kv)
            slot = position - first
            if slot >= 0 and arena.get(page, slot) not in ((0, 0), (kv, position + 1)):
                return False
        return arena.is_blank(page, max(len(history) - first, 0))

    def replayed(self, worker: SimWorker, held: Held) -> None:
        """O7: behind the committed slots of its tail page a new writer finds nothing."""
        arena = worker.arena
        if held.committed % BLOCK:
            page, _ = held.table[held.committed // BLOCK]
            assert arena.is_blank(page, held.committed % BLOCK), "O7: a tail page is not fresh"

    def wrote(
        self, worker: SimWorker, held: Held, page: int, page_generation: int, position: int
    ) -> None:
        """O4, O7: a slot is being written by a worker, perhaps a late one."""
        self.writes += 1
        self._check_place(worker, held, page, page_generation)
        arena_id = worker.arena.spec.arena_id
        name = (arena_id, page, page_generation)
        writer = self._page_writer.setdefault(name, (held.log_id, held.generation))
        self.late_writes += held.is_lost
        assert writer == (held.log_id, held.generation), "O7: two generations wrote one page"
        spot = (*name, position % BLOCK)
        assert spot not in self._slots, "O7: a slot was written twice"
        self._slots.add(spot)

    def _check_place(self, worker: SimWorker, held: Held, page: int, page_generation: int) -> None:
        """O4: the page is this writer's, or kept from everybody until the writer is done."""
        runtime = worker.home.runtime
        if runtime is None or worker.home.arena is not worker.arena:
            return
        core = runtime.core
        assert core.pool.generation(page) == page_generation, "O4: the page was granted again"
        log = core.logs.get(held.log_id)
        if log is not None and log.generation == held.generation and log.writer is not None:
            is_own = log.writer.slot == worker.slot
            if is_own and (page in log.granted or any(row.page == page for row in log.rows)):
                return
        assert core.pool.state(page) is not PageState.FREE, "O4: a page under a writer is free"
        fence = core.pool.fence_of(page)
        assert fence is not None, "O4: nothing keeps the page from others"
        assert fence.worker_slot == worker.slot, "O4: the page waits for somebody else"

    # --- after each step --------------------------------------------------------------------

    def check(self) -> None:
        """Everything that holds at every moment."""
        is_touched = False
        for home in self.homes.values():
            if home.runtime is not None and home.is_touched():
                is_touched = True
                self._check_home(home.runtime.core)
        if is_touched:
            self._check_one_home()
            self._check_late_writers()
        if self._scheduler.steps % CONTENT_EVERY == 0:
            self.check_content()

    def _check_late_writers(self) -> None:
        """O4: pages that a step under way will still write are kept for it."""
        for worker in self.workers.values():
            if not worker.process.is_dead:
                for held in worker.held.values():
                    for page, page_generation, _ in held.pending:
                        self._check_place(worker, held, page, page_generation)

    def _check_home(self, core: Core) -> None:
        core.check_invariants()
        indexed = core.tree.pages()
        for log in core.logs.values():
            if not log.is_sealed:
                _check_unsealed(core, log, indexed)
            assert not self._is_overdue(log), "O3: a lease was renewed by a timer alone"

    def _is_overdue(self, log: LogState) -> bool:
        """Its writer stands still, and has neither taken nor written it for over a lease."""
        if log.writer is None:
            return False
        since_s = self.stuck_since.get(log.writer.incarnation)
        if since_s is None:
            return False
        return self._scheduler.now_s - max(since_s, log.last_used_s) > STUCK_BOUND_S

    def _check_one_home(self) -> None:
        seen: set[bytes] = set()
        for home in self.homes.values():
            if home.runtime is None:
                continue
            for log_id, log in home.runtime.core.logs.items():
                if log.phase is not Phase.MOVED:
                    assert log_id not in seen, "O1: a log with two homes"
                    seen.add(log_id)

    def check_content(self) -> None:
        """Every committed slot reads as its writer wrote it; nothing acked is missing."""
        for home in self.homes.values():
            runtime = home.runtime
            if runtime is None or home.has_page_work:
                continue
            for log in runtime.core.logs.values():
                self._check_log(home, log)

    def _check_log(self, home: SimHome, log: LogState) -> None:
        kv = 0
        for position in range(log.committed):
            kv = kv_of(log.tokens[position], kv)
            row = log.rows[position // BLOCK]
            found = home.arena.get(row.page, position % BLOCK)
            assert found == (kv, position + 1), ("O7: foreign KV in a log", position)
        if log.phase is Phase.MOVED:
            return
        acked = self.acked.get(log.log_id, [])
        assert list(log.tokens[: len(acked)]) == acked, "W1: an acked token is missing"


def _check_unsealed(core: Core, log: LogState, indexed: Any) -> None:
    """O2: what an unsealed log has committed serves nobody."""
    for row in log.rows[log.cached_tokens // BLOCK :]:
        assert core.pool.holders(row.page) == 1, "O2: an unsealed page is shared"
        if row.tokens == BLOCK and log.cached_tokens % BLOCK == 0:
            assert row.page not in indexed, "O2: an unsealed page is found by lookups"

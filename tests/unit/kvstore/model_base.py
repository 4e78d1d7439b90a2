"""What the model tests know of the stores, and what must hold after each step.

Owns the lists, the ghosts and the comparison. Never acts.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant

from baton.errors import Reason, ServiceError
from services.kvstore.state import LogState, Phase
from tests.cluster.memory import BLOCK, PAGES, kv_of
from tests.unit.kvstore.cores import NOW
from tests.unit.kvstore.model_draws import WORKERS
from tests.unit.kvstore.model_sites import BytesSite, Ghost, Hand

EXPECTED: Final = {
    Reason.PAGES_EXHAUSTED,
    Reason.INVALID_REQUEST,
    Reason.PROMPT_TOO_LONG,
    Reason.STALE_GENERATION,
    Reason.LOG_NOT_FOUND,
    Reason.BLOCK_NOT_FOUND,
}


def require_expected(error: ServiceError) -> None:
    """A refusal that the rules allow; anything else is a finding."""
    if error.reason not in EXPECTED:
        raise AssertionError(f"unexpected: {error}") from error


class ModelOfLives(RuleBasedStateMachine):
    """Two stores and the lists they must equal."""

    def __init__(self) -> None:
        super().__init__()
        self.sites = [BytesSite("a"), BytesSite("b")]
        self.tokens: dict[bytes, list[int]] = {}
        self.hands: dict[bytes, Hand] = {}
        self.ghosts: list[tuple[BytesSite, Ghost]] = []
        self.now = NOW
        self.ids = 0
        self.done: Counter[str] = Counter()

    def new_id(self) -> bytes:
        """The same ids in the same order in every run."""
        self.ids += 1
        return self.ids.to_bytes(16, "big")

    # --- where things are -------------------------------------------------------------------

    def site(self, log_id: bytes) -> BytesSite | None:
        """The log's home; where it moved away from is none."""
        for site in self.sites:
            log = site.store.core.logs.get(log_id)
            if log is not None and log.phase is not Phase.MOVED:
                return site
        return None

    def found(self, log_id: bytes) -> tuple[BytesSite, LogState] | None:
        """Home and log."""
        site = self.site(log_id)
        return None if site is None else (site, site.store.core.logs[log_id])

    def hand(self, log_id: bytes) -> Hand | None:
        """The log's current writer."""
        hand = self.hands.get(log_id)
        return hand if hand is not None and hand.is_current() else None

    def fenced(self, log_id: bytes) -> None:
        """The log's writer will not notice that it is over."""
        hand = self.hand(log_id)
        if hand is not None:
            self.ghosts.append((hand.site, hand.ghost()))

    # --- what holds -------------------------------------------------------------------------

    def assert_stale(self, site: BytesSite, log_id: bytes, generation: int) -> None:
        """The old generation is refused and changes nothing."""
        before = site.store.core.pool.counts()
        with pytest.raises(ServiceError) as refused:
            site.store.home.grant(log_id, generation, "w0", 1)
        assert refused.value.reason is Reason.STALE_GENERATION
        assert site.store.core.pool.counts() == before

    @invariant()
    def stores_agree_with_the_lists(self) -> None:
        """Tokens, bytes and pages."""
        homes: dict[bytes, int] = {}
        for site in self.sites:
            core = site.store.core
            core.check_invariants()
            for log_id, log in core.logs.items():
                if log.phase is not Phase.MOVED:
                    homes[log_id] = homes.get(log_id, 0) + 1
                    assert list(log.tokens) == self.tokens[log_id]
                self._check_bytes(site, log.rows, list(log.tokens), log.committed)
            for prefix in core.prefixes.all():
                self._check_bytes(site, prefix.rows, list(prefix.token_ids), prefix.position)
            assert site.damaged == 0, "what was written is not what was recorded"
        assert all(count == 1 for count in homes.values()), "O1: a log with two homes"

    def _check_bytes(self, site: BytesSite, rows: Any, tokens: list[int], committed: int) -> None:
        kv = 0
        for position in range(committed):
            kv = kv_of(tokens[position], kv)
            found = site.arena.get(rows[position // BLOCK].page, position % BLOCK)
            assert found == (kv, position + 1), f"foreign KV at position {position}"

    def teardown(self) -> None:
        """All times over, all workers dead, nothing published: every page is free."""
        for site in self.sites:
            keeper = site.store.keeper
            for prefix in site.store.core.prefixes.all():
                site.store.prefix_keeper.revoke(prefix.prefix_id, None, self.now.wall_s)
            keeper.expire_leases(self.now.monotonic_s + 1e6, self.now.wall_s)
            keeper.expire_logs(self.now.wall_s)
            keeper.expire_logs(self.now.wall_s + 1e9)
            for writer in WORKERS:
                keeper.worker_gone(writer.slot, self.now.wall_s)
            for arrival in site.arrivals.all():
                site.arrivals.abandon(arrival.log_id)
            site.work()
            site.store.core.check_invariants()
            assert site.store.core.pool.counts().free == PAGES

"""Bugs planted into the kvstore's cores, at least one for each of O1 to O7; the ownership
simulation has to find every one of them.

Owns the list. Each plants itself through pytest's monkeypatch, which takes it out again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from services.kvstore.core import Core
from services.kvstore.home import Home
from services.kvstore.keeper import Keeper
from services.kvstore.lease import LeaseTable
from services.kvstore.moving.departure import Departures
from services.kvstore.pages import PagePool
from services.kvstore.restart import _Restart
from services.kvstore.runtime import Runtime
from services.kvstore.state import LogState, Phase
from services.kvstore.store import Store
from services.kvstore.tree import BlockTree
from services.kvstore.writes import Writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A planted bug and the promise it breaks."""

    promise: str
    plant: Callable[[pytest.MonkeyPatch], None]
    # Of the runs that show it.
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For test ids."""
        return f"{self.promise}-{self.plant.__name__}"


def old_generation_may_write(patch: pytest.MonkeyPatch) -> None:
    """The fence is not looked at."""
    patch.setattr(Core, "current", lambda self, log_id, _generation: self.find(log_id))
    patch.setattr(
        Writes, "writing_or_ended", lambda self, item, _worker: self._core.find(item.log_id)
    )


def old_home_keeps_what_it_gave_away(patch: pytest.MonkeyPatch) -> None:
    """A log that moved is still written and granted where it was."""
    move = Departures.move

    def kept(self: Departures, *given: Any) -> LogState:
        log = move(self, *given)
        answer = self.answer(log)
        patch.setattr(Departures, "answer", lambda _self, _log: answer)
        log.phase, log.moved_to = Phase.DECODE, None
        return log

    patch.setattr(Departures, "move", kept)


def unsealed_chunks_are_found(patch: pytest.MonkeyPatch) -> None:
    """What prefill has committed is offered to lookups before the seal."""
    checkpoint = Store.__init__

    def offering(self: Store, core: Core, secret_of: Any) -> None:
        checkpoint(self, core, secret_of)
        commit = self.writes.checkpoint

        def eager(log_id: bytes, *rest: Any) -> int:
            end = commit(log_id, *rest)
            self.chains.offer(core.logs[log_id])
            return end

        writes: Any = self.writes
        writes.checkpoint = eager

    patch.setattr(Store, "__init__", offering)


def lease_is_renewed_by_a_timer(patch: pytest.MonkeyPatch) -> None:
    """A loop that stands still keeps its logs, as long as it says so."""
    patch.setattr(LeaseTable, "has_progressed", lambda *_args: True)


def pages_are_let_go_before_the_fence(patch: pytest.MonkeyPatch) -> None:
    """The lease ends, pins go, the generation stays."""
    fence = Home.fence

    def late(self: Home, log: LogState) -> None:
        generation = log.generation
        fence(self, log)
        if log.generation % 3 == 0:
            log.generation = generation

    patch.setattr(Home, "fence", late)


def time_alone_frees(patch: pytest.MonkeyPatch) -> None:
    """A lease that ended is taken for a writer that ended."""
    expire = Keeper.expire_leases

    def freeing(self: Keeper, now_s: float, wall_s: float) -> list[bytes]:
        expired = expire(self, now_s, wall_s)
        for one in self._core.pool.fences():
            if one.log_id in expired:
                self._core.pool.lift(one)
        self._core.drain_freed()
        return expired

    patch.setattr(Keeper, "expire_leases", freeing)


def cancel_frees(patch: pytest.MonkeyPatch) -> None:
    """An abort gives the pages to the next request while the last step still writes them."""
    cancel = Keeper.cancel

    def freeing(self: Keeper, log_id: bytes, wall_s: float) -> int:
        generation = cancel(self, log_id, wall_s)
        for one in self._core.pool.fences():
            if one.log_id == log_id:
                self._core.pool.lift(one)
        self._core.drain_freed()
        return generation

    patch.setattr(Keeper, "cancel", freeing)


def nothing_is_ever_let_go(patch: pytest.MonkeyPatch) -> None:
    """A dead worker's pages wait for ever."""
    patch.setattr(Keeper, "worker_gone", lambda _self, _slot, _wall_s: [])


def restart_frees_what_is_written(patch: pytest.MonkeyPatch) -> None:
    """A kvstore that comes back takes a dead lease for a dead writer."""
    patch.setattr(_Restart, "_open_grants", lambda _self: [])


def page_generations_begin_anew(patch: pytest.MonkeyPatch) -> None:
    """After a restart a page generation comes that a frozen writer still knows."""
    build = PagePool.__init__

    def from_zero(self: PagePool, page_count: int, _floor: int = 0) -> None:
        build(self, page_count)

    patch.setattr(PagePool, "__init__", from_zero)


def finish_leaks_grants(patch: pytest.MonkeyPatch) -> None:
    """What an ended writer had left is forgotten, not freed."""
    patch.setattr(PagePool, "give_back", lambda _self, _page: None)


def page_is_unpinned_twice(patch: pytest.MonkeyPatch) -> None:
    """A shared page loses two holders where one went."""
    drop = PagePool.drop

    def twice(self: PagePool, page: int) -> None:
        drop(self, page)
        if self.holders(page) > 1:
            drop(self, page)

    patch.setattr(PagePool, "drop", twice)


def tree_is_believed(patch: pytest.MonkeyPatch) -> None:
    """A freed page stays findable: the hint is taken for the truth."""
    patch.setattr(BlockTree, "forget_page", lambda _self, _page: None)
    patch.setattr(BlockTree, "_is_current", lambda _self, _row: True)


def tail_page_is_written_by_two(patch: pytest.MonkeyPatch) -> None:
    """A new generation goes on in the old one's page."""
    patch.setattr(Home, "_copy_tail", lambda _self, _log: None)


def pages_are_not_zeroed(patch: pytest.MonkeyPatch) -> None:
    """What is freed keeps what it held."""

    def forgetting(self: Core) -> None:
        for page in self.pool.take_freed():
            self.tree.forget_page(page)

    patch.setattr(Core, "drain_freed", forgetting)


def ack_before_the_record(patch: pytest.MonkeyPatch) -> None:
    """A token leaves before its record is written."""

    async def at_once(self: Runtime, *_args: Any) -> None:
        self.order_work()
        await self.pages.settled()

    patch.setattr(Runtime, "acked", at_once)
    patch.setattr(Runtime, "ready", at_once)


MUTANTS: Final = (
    Mutant(promise="O1", plant=old_generation_may_write),
    Mutant(promise="O1", plant=old_home_keeps_what_it_gave_away),
    Mutant(promise="O2", plant=unsealed_chunks_are_found),
    Mutant(
        promise="O3",
        plant=lease_is_renewed_by_a_timer,
        options={"only": "_stick", "faults": 8},
    ),
    Mutant(promise="O3", plant=pages_are_let_go_before_the_fence),
    Mutant(promise="O4", plant=time_alone_frees),
    Mutant(promise="O4", plant=cancel_frees),
    Mutant(promise="O4", plant=nothing_is_ever_let_go),
    Mutant(promise="O4", plant=restart_frees_what_is_written),
    Mutant(promise="O7", plant=page_generations_begin_anew),
    Mutant(promise="O5", plant=finish_leaks_grants),
    Mutant(promise="O5", plant=page_is_unpinned_twice),
    Mutant(promise="O6", plant=tree_is_believed),
    Mutant(promise="O7", plant=tail_page_is_written_by_two),
    Mutant(promise="O7", plant=pages_are_not_zeroed),
    Mutant(promise="W1", plant=ack_before_the_record),
)

"""Bugs planted into the code, each one that a promise forbids; a simulation has to find them.

Owns the list. Each plants itself through pytest's monkeypatch, which takes it out again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from baton.worker.held_logs import HeldLogs
from services.gateway.cleanup import Cleanup
from services.gateway.legs import Leg
from services.gateway.sequence import Sequence
from services.kvstore.core import Core
from services.kvstore.home import Home
from services.kvstore.keeper import Keeper
from services.kvstore.state import LogState
from services.kvstore.writes import Writes

Plant = Callable[[pytest.MonkeyPatch], None]


def old_generation_may_write(patch: pytest.MonkeyPatch) -> None:
    """O1: the fence is not looked at."""

    def current(self: Core, log_id: bytes, _generation: int) -> LogState:
        return self.find(log_id)

    def writing(self: Writes, item: Any, _worker_id: str) -> LogState:
        return self._core.find(item.log_id)

    patch.setattr(Core, "current", current)
    patch.setattr(Writes, "writing_or_ended", writing)


def tail_page_is_written_by_two(patch: pytest.MonkeyPatch) -> None:
    """O7: a new generation goes on in the old one's page."""
    patch.setattr(Home, "_copy_tail", lambda _self, _log: None)


def dead_worker_keeps_its_pages(patch: pytest.MonkeyPatch) -> None:
    """The kernel says that a mapping is gone, and nobody listens."""
    patch.setattr(Keeper, "worker_gone", lambda _self, _slot, _wall_s: [])


def worker_never_lets_go(patch: pytest.MonkeyPatch) -> None:
    """What is named in a renewal is being written: for ever."""
    patch.setattr(HeldLogs, "discard", lambda _self, _log: None)


def cancel_fences_nothing(patch: pytest.MonkeyPatch) -> None:
    """A client that leaves is forgotten, not cancelled."""

    async def abandon(_self: Cleanup, _leg: Leg) -> None:
        return

    patch.setattr(Cleanup, "_abandon", abandon)


def resume_skips_a_token(patch: pytest.MonkeyPatch) -> None:
    """The next token wanted is one too far."""
    start = Sequence._start

    def late(self: Sequence, leg: Leg, next_index: int) -> object:
        return start(self, leg, next_index + (next_index > 1))

    patch.setattr(Sequence, "_start", late)


def resume_sends_a_token_again(patch: pytest.MonkeyPatch) -> None:
    """One that the client has comes once more, and nobody drops it."""
    start = Sequence._start

    def early(self: Sequence, leg: Leg, next_index: int) -> object:
        return start(self, leg, next_index - (next_index > 1))

    async def deliver(self: Sequence, _leg: Leg, delta: Any) -> None:
        self._progress.delivered = delta.index + 1
        await self._emit(delta)

    patch.setattr(Sequence, "_start", early)
    patch.setattr(Sequence, "_deliver", deliver)


MUTANTS: Final[tuple[Plant, ...]] = (
    old_generation_may_write,
    tail_page_is_written_by_two,
    dead_worker_keeps_its_pages,
    worker_never_lets_go,
    cancel_fences_nothing,
    resume_skips_a_token,
    resume_sends_a_token_again,
)

QUIET: Final[dict[Plant, dict[str, Any]]] = {
    cancel_fences_nothing: {"loss": 0.0, "faults": 0, "leaving": 1.0, "rest_s": 1.0},
}
"""Runs that show a bug which a lease would hide in the end."""

"""The old home's half of a move: the log is fenced and given away, then only read, then dropped.

Owns what MOVED means here. Pure: time is passed in. Once `move` returned, this store accepts no
write and no grant for the log; forks go on until `done` drops its pages. Every step may be
repeated.

Invariants: a log moves to one home only, whatever is asked later; its record must be on disk before
the answer leaves (a power cut must not bring the old home back to life); pages are dropped only for
the generation that moved, so that a late `done` cannot hit a log that has come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.kvstore.core import Core, invalid, stale
from services.kvstore.home import Event, Home, require_allowed
from services.kvstore.keeper import Keeper
from services.kvstore.log.journal import page_list_digest
from services.kvstore.log.state import Snapshot
from services.kvstore.log.store_records import CloseReason
from services.kvstore.state import LogState, Phase

ASK_AFTER_S = 5.0
"""How long a moved log waits for the new home's word before it is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Departed:
    """What the new home needs: its generation, all state, and the digest (32 bytes) of the page
    table in it.
    """

    generation: int
    snapshot: Snapshot
    digest: bytes


class Departures:
    """Moves logs away from one store. `describe` makes a log's SNAPSHOT."""

    def __init__(
        self, core: Core, home: Home, keeper: Keeper, describe: Callable[[LogState], Snapshot]
    ) -> None:
        self._core = core
        self._home = home
        self._keeper = keeper
        self._describe = describe
        self._ask_at_s: dict[bytes, float] = {}
        self.moved_away = 0

    def move(self, log_id: bytes, generation: int, to_home: str, now_s: float) -> LogState:
        """MOVED(to, generation + 1), or the log as it moved before to the same home.

        Nobody writes it here from now on. STALE_GENERATION for an old generation, or when the log
        went to another home; INVALID_REQUEST before its seal.
        """
        log = self._core.logs.get(log_id)
        if log is not None and log.phase is Phase.MOVED:
            if log.moved_to == to_home and generation in (log.generation - 1, log.generation):
                return log
            self._core.stale_refused += 1
            raise stale(log_id, generation, log.generation)
        log = self._core.current(log_id, generation)
        require_allowed(log, Event.MOVE)
        previous = log.generation
        self._home.fence(log)
        log.phase, log.moved_to, log.last_used_s = Phase.MOVED, to_home, now_s
        self._core.idle(log)
        self._core.journal.moved(log, previous, self._digest(log))
        self._ask_at_s[log_id] = now_s + ASK_AFTER_S
        self.moved_away += 1
        return log

    def answer(self, log: LogState) -> Departed:
        """What the new home is told; the log's pages must have been filled (`PageWorker.ready`)."""
        assert log.phase is Phase.MOVED, log.phase
        return Departed(
            generation=log.generation, snapshot=self._describe(log), digest=self._digest(log)
        )

    def done(self, log_id: bytes, generation: int) -> bool:
        """The new home has the log at `generation`: the pages here are dropped (CLOSE).

        False, and nothing changed, when that is over: dropped before, or the log has come back.
        """
        log = self._core.logs.get(log_id)
        if log is None:
            return False
        if log.phase is not Phase.MOVED:
            if generation < log.generation:
                return False
            raise invalid("generation", "the log did not move away at this generation")
        if generation != log.generation:
            raise stale(log_id, generation, log.generation)
        self._ask_at_s.pop(log_id, None)
        log.moved_to = None
        self._keeper.drop(log, CloseReason.MOVED_AWAY)
        return True

    def adopt(self, moved: Iterable[tuple[bytes, str]], now_s: float) -> None:
        """After a restart: these logs (id, new home) had moved away; they are only read here."""
        for log_id, to_home in moved:
            log = self._core.logs.get(log_id)
            if log is not None:
                log.phase, log.moved_to = Phase.MOVED, to_home
                self._ask_at_s[log_id] = now_s + ASK_AFTER_S

    def to_ask(self, now_s: float) -> list[LogState]:
        """Moved logs whose new home has said nothing for a while: ask it, then call `asked`."""
        due = [log_id for log_id, at_s in self._ask_at_s.items() if at_s <= now_s]
        logs = []
        for log_id in due:
            log = self._core.logs.get(log_id)
            if log is None or log.phase is not Phase.MOVED:
                del self._ask_at_s[log_id]
                continue
            self._ask_at_s[log_id] = now_s + ASK_AFTER_S
            logs.append(log)
        return logs

    @property
    def waiting(self) -> int:
        """Logs that moved away and whose new home has not confirmed yet."""
        return sum(log.phase is Phase.MOVED for log in self._core.logs.values())

    def _digest(self, log: LogState) -> bytes:
        return page_list_digest(self._core.limits, log.rows)

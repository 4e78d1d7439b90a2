"""Several clients of one log, at several ack levels, until something ends them; and the check.

Owns what the crash tests write: logs that only grow, whose tokens number the records of this life,
so that what is found says by itself which records it came from.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Final

from baton.errors import ServiceError
from services.kvstore.state import AckLevel
from tests.durability.engine import Found, Life, first_error
from tests.durability.workload import LostAckError, Script, State

LOGS: Final = 4
SNAPSHOT_SHARE: Final = 0.02

OnAck = Callable[[int, AckLevel], None]


class Clients:
    """Writes through one life; `on_ack(count, level)` once the first `count` tokens are acked.

    `is_refused`: the log said that it could not be written.
    """

    def __init__(
        self,
        life: Life,
        seed: int,
        records_max: int,
        on_ack: OnAck,
        *,
        snapshot_share: float = SNAPSHOT_SHARE,
    ) -> None:
        self._life = life
        self._rng = random.Random(seed)
        self._records_max = records_max
        self._on_ack = on_ack
        self._snapshot_share = snapshot_share
        self.is_refused = False
        self._script = Script(state=dict(life.found.state), logs_ever=len(life.found.state))

    async def run(self) -> OSError | None:
        """Writes until enough is written or the log has failed; then ends the writer."""
        failure: OSError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._life.writer.run())
                async with asyncio.TaskGroup() as writing:
                    for number in range(LOGS):
                        level = AckLevel.DISK if number % 2 else AckLevel.OS
                        writing.create_task(self._write(number, level))
                self._life.writer.end()
        except* OSError as errors:
            failure = first_error(errors)
        return failure

    async def _write(self, number: int, level: AckLevel) -> None:
        log_ids = sorted(self._script.state)
        log_id = log_ids[number] if number < len(log_ids) else None
        while self._script.tokens < self._records_max:
            if log_id is None:
                log_id = self._script.open((self._script.tokens,))
            elif not self._script.state[log_id].is_sealed:
                self._script.seal(log_id)
            else:
                self._script.append(log_id)
            count = self._script.tokens
            self._life.submit(self._script.steps[-1])
            if not await self._life.acked(level):
                self.is_refused = True
                return
            self._on_ack(count, level)
            if self._rng.random() < self._snapshot_share:
                await self._compact()

    async def _compact(self) -> None:
        """Snapshots of all logs, on disk, so that the oldest segments can go."""
        for log_id in sorted(self._script.state):
            self._script.snapshot(log_id)
            self._life.submit(self._script.steps[-1])
        if await self._life.acked(AckLevel.DISK):
            try:
                await self._life.writer.free_oldest()
            except (OSError, ServiceError):
                return


def check(found: Found, base: State, at_least: int) -> int:
    """The tokens of the last life that are there; raises where they are no prefix of what it wrote
    on `base`, or fewer than `at_least`.
    """
    assert not found.is_damage_reported, "a crash was taken for damage"
    for log_id, seen in base.items():
        now = found.state.get(log_id)
        assert now is not None, "a log of an earlier life is gone"
        assert now.tokens[: len(seen.tokens)] == seen.tokens, "an earlier life's tokens changed"
    tokens = []
    for log_id, seen in found.state.items():
        first = len(base[log_id].tokens) if log_id in base else 0
        new = seen.tokens[first:]
        assert list(new) == sorted(new), "tokens of a log are out of order"
        tokens += new
    tokens.sort()
    assert tokens == list(range(len(tokens))), "a record in the middle is missing, or counts twice"
    if len(tokens) < at_least:
        raise LostAckError(f"{at_least} records were acked, {len(tokens)} are there")
    return len(tokens)

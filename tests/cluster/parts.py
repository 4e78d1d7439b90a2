"""The small parts of the simulated cluster: what stands in for threads, files and text.

Owns no wiring and no faults; those are `simulation`'s.
"""

from __future__ import annotations

import itertools
import random
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from baton.errors import ServiceError
from baton.worker.engine import WorkerParts
from services.decode.runner import Runner
from services.gateway.events import Completed
from services.gateway.registry import WorkerRecord
from services.kvstore.state import AckLevel, LogState
from services.kvstore.store import Store
from services.kvstore.writes import AppendItem
from tests.cluster.loop import LoopClock
from tests.cluster.network import Node


class Inline(Executor):
    """Does the page work where it is given; the loop has no threads."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class MemoryLog:
    """A log writer whose records are acked after a moment and kept nowhere."""

    segment_count = 0
    newest_lsn = 0

    def __init__(self, clock: LoopClock, random_: random.Random) -> None:
        self._clock, self._random = clock, random_
        self.counters = SimpleNamespace(records=0, groups=0)

    def submit(self, *_record: Any) -> None:
        self.newest_lsn += 1

    async def acked(self, _level: AckLevel) -> None:
        await self._clock.pass_(self._random.choice((0.0005, 0.004)))

    async def settled(self, _log_id: bytes) -> None:
        await self.acked(AckLevel.OS)

    def require_room(self) -> None:
        pass

    async def free_oldest(self) -> int:
        return 0


class Tokenizer:
    """Tokens spelt as numbers."""

    def decode_bytes(self, token_id: int) -> bytes:
        return f"{token_id} ".encode()

    def is_special(self, _token_id: int) -> bool:
        return False


@dataclass(slots=True)
class Asked:
    """One request and what its client got."""

    number: int
    prompt: tuple[int, ...]
    tokens: int
    starts_s: float
    leaves_s: float | None
    is_dropped: bool
    got: list[int] = field(default_factory=list)
    completed: Completed | None = None
    error: ServiceError | None = None
    is_over: bool = False


@dataclass(slots=True)
class Worker:
    """A worker process of the simulation."""

    node: Node
    record: WorkerRecord
    parts: WorkerParts
    runner: Runner | None
    slot: int
    beats: itertools.count[int] = field(default_factory=itertools.count)


@dataclass(slots=True, kw_only=True)
class Report:
    """What a run did, for tests that want to see that faults happened at all."""

    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    resumed: int = 0
    recomputed: int = 0
    stale_refused: int = 0
    cuts: int = 0
    crashes: int = 0
    freezes: int = 0


def watch_generations(store: Store) -> None:
    """Every write that is taken was made at the generation its log has at that moment."""
    append, checkpoint, seal = store.writes.append, store.writes.checkpoint, store.writes.seal

    def newest(log_id: bytes, generation: int) -> None:
        assert generation == store.core.logs[log_id].generation, "an old generation wrote"

    def appended(item: AppendItem, worker_id: str, now_s: float) -> LogState:
        log = append(item, worker_id, now_s)
        newest(item.log_id, item.generation)
        return log

    def checkpointed(log_id: bytes, generation: int, *rest: Any) -> int:
        end = checkpoint(log_id, generation, *rest)
        newest(log_id, generation)
        return end

    def sealed(log_id: bytes, generation: int, *rest: Any) -> int:
        position = seal(log_id, generation, *rest)
        newest(log_id, generation)
        return position

    writes: Any = store.writes
    writes.append, writes.checkpoint, writes.seal = appended, checkpointed, sealed

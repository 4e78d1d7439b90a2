"""Two kvstores, their workers and clients, broken by seed; O1 to O7 are checked after each step.

Owns the wiring and the faults. The cores, servicers and the log's records are the real ones; the
workers are written against the contract alone, so that they also do what no good worker would.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from baton.metrics import Metrics
from services.kvstore.measures import StoreMeasures
from services.kvstore.store import Store
from tests.cluster.conversations import Conversation, Tally
from tests.cluster.homes import LEASE_S, TTL_S, SimHome
from tests.cluster.oracle import Oracle
from tests.cluster.steps import Process, Promise, Scheduler
from tests.cluster.wires import Wires
from tests.cluster.writers import SimWorker

LOSSES: Final = (0.0, 0.0, 0.02, 0.08)
END_S: Final = 60.0
MEASURES: Final = StoreMeasures(Metrics("kvstore"))


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What happened in a run, for tests that want to see that faults met something."""

    steps: int
    tally: Tally
    writes: int
    late_writes: int
    refused: int
    cuts: int
    doubled: int
    kills: int
    freezes: int
    stuck: int
    store_crashes: int


@dataclass(slots=True)
class Ownership:
    """One run of one seed."""

    seed: int
    faults: int = 4
    clients: int = 4
    # Of the faults' names, those that happen; None: all.
    only: str | None = None
    scheduler: Scheduler = field(init=False)
    oracle: Oracle = field(init=False)
    wires: Wires = field(init=False)
    workers: list[SimWorker] = field(init=False)
    kills: int = 0
    freezes: int = 0
    stuck: int = 0
    store_crashes: int = 0

    def run(self) -> Outcome:
        """AssertionError says what did not hold; the seed is in it."""
        try:
            return self._run()
        except AssertionError as error:
            raise AssertionError(f"seed {self.seed}: {error}") from error
        finally:
            for process in self.scheduler.processes:
                process.die()

    def _run(self) -> Outcome:
        draw = random.Random(self.seed)
        self.scheduler = scheduler = Scheduler(draw, lambda: self.oracle.check())
        self.oracle = oracle = Oracle(scheduler)
        loss = LOSSES[self.seed % len(LOSSES)]
        self.wires = wires = Wires(scheduler=scheduler, loss=loss, doubling=loss)
        for name in ("kv-a", "kv-b"):
            oracle.homes[name] = SimHome(name, scheduler, MEASURES)
            self._watch(oracle.homes[name])
            oracle.homes[name].wires, oracle.homes[name].peers = wires, oracle.homes
        self.workers = [
            SimWorker(f"{home.name}-w{number}", home, scheduler, wires, oracle)
            for home in oracle.homes.values()
            for number in range(2)
        ]
        tally = Tally()
        talks = [
            Conversation(number, scheduler, wires, oracle, self.workers, tally)
            for number in range(self.clients)
        ]
        for talk in talks:
            talk.start()
        breaker = Process("breaker")
        scheduler.spawn(breaker, self._break_things(), Promise())
        start_s = scheduler.now_s
        while not all(talk.is_over for talk in talks):
            assert scheduler.now_s - start_s < 20 * END_S, "a client waits for ever"
            scheduler.run(scheduler.now_s + 5.0)
            for talk in talks:
                _reraise(talk.done)
        self._rest()
        return Outcome(
            steps=scheduler.steps,
            tally=tally,
            writes=oracle.writes,
            late_writes=oracle.late_writes,
            refused=wires.refused,
            cuts=wires.cuts,
            doubled=wires.doubled,
            kills=self.kills,
            freezes=self.freezes,
            stuck=self.stuck,
            store_crashes=self.store_crashes,
        )

    # --- faults -----------------------------------------------------------------------------

    async def _break_things(self) -> None:
        draw = self.scheduler.random
        kinds: list[Callable[[], Any]] = [self._kill, self._freeze, self._stick, self._crash_store]
        kinds = [kind for kind in kinds if self.only in (None, kind.__name__)]
        for _ in range(self.faults):
            await self.scheduler.pause(draw.uniform(0.0, 1.5))
            await draw.choice(kinds)()

    async def _kill(self) -> None:
        worker = self.scheduler.random.choice(self.workers)
        self.kills += 1
        worker.process.thaw()
        worker.die()
        await self.scheduler.pause(self.scheduler.random.uniform(0.05, 1.0))
        worker.restart()

    async def _freeze(self) -> None:
        worker = self.scheduler.random.choice(self.workers)
        self.freezes += 1
        process = worker.process
        process.freeze()
        seconds = self.scheduler.random.uniform(0.1, 2.5 * LEASE_S)
        self.scheduler.later(seconds, process.thaw)

    async def _stick(self) -> None:
        """Its loop stands still, and its timer goes on renewing."""
        worker = self.scheduler.random.choice(self.workers)
        self.stuck += 1
        incarnation = worker.incarnation
        worker.is_stuck = True
        self.oracle.stuck_since[incarnation] = self.scheduler.now_s

        def free() -> None:
            if worker.incarnation == incarnation:
                worker.is_stuck = False
            self.oracle.stuck_since.pop(incarnation, None)

        self.scheduler.later(self.scheduler.random.uniform(0.5, 4 * LEASE_S), free)

    async def _crash_store(self) -> None:
        home = self.scheduler.random.choice(list(self.oracle.homes.values()))
        self.store_crashes += 1
        home.crash()
        await self.scheduler.pause(self.scheduler.random.uniform(0.05, 2.0))
        home.start()
        self._watch(home)

    # --- what is watched --------------------------------------------------------------------

    def _watch(self, home: SimHome) -> None:
        """Every write that a store takes is told to the oracle."""
        assert home.runtime is not None
        _watch_writes(home.runtime.store, self.oracle)

    def _rest(self) -> None:
        """Everything heals; a few leases later nothing is held, and what is kept can be freed."""
        self.wires.loss = self.wires.doubling = 0.0
        for worker in self.workers:
            worker.process.thaw()
            worker.is_stuck = False
        self.oracle.stuck_since.clear()
        # Those of one node are there to name what they let go of, those of the other are gone.
        for worker in self.workers:
            if worker.home.name == "kv-a":
                worker.die()
        self.scheduler.run(self.scheduler.now_s + 4 * LEASE_S)
        self.oracle.check_content()
        for worker in self.workers:
            assert worker.process.is_dead or not worker.held, f"{worker.name} never let go"
        for home in self.oracle.homes.values():
            assert home.runtime is not None
            counts = home.runtime.core.pool.counts()
            assert counts.granted == 0, (home.name, counts)
            assert counts.quarantined == 0, (home.name, counts)
            assert len(home.runtime.core.leases) == 0
        for worker in self.workers:
            worker.die()
        self.scheduler.run(self.scheduler.now_s + 2 * TTL_S)
        self._check_all_is_free()

    def _check_all_is_free(self) -> None:
        for home in self.oracle.homes.values():
            assert home.runtime is not None
            core = home.runtime.core
            assert not core.logs, "logs outlive their time"
            held = {row.page for prefix in core.prefixes.all() for row in prefix.rows}
            assert core.pool.counts().free == core.pool.page_count - len(held)


def _reraise(done: Promise[Any]) -> None:
    if done.is_kept:
        _, error = done.outcome()
        if error is not None:
            raise AssertionError(f"a client met {error}") from error


def _watch_writes(store: Store, oracle: Oracle) -> None:
    writes: Any = store.writes
    append, checkpoint, seal = writes.append, writes.checkpoint, writes.seal

    def appended(item: Any, worker_id: str, now_s: float) -> Any:
        log = append(item, worker_id, now_s)
        oracle.accepted(item.log_id, item.generation)
        return log

    def checkpointed(log_id: bytes, generation: int, *rest: Any) -> Any:
        end = checkpoint(log_id, generation, *rest)
        oracle.accepted(log_id, generation)
        return end

    def sealed(log_id: bytes, generation: int, *rest: Any) -> Any:
        position = seal(log_id, generation, *rest)
        oracle.accepted(log_id, generation)
        return position

    writes.append, writes.checkpoint, writes.seal = appended, checkpointed, sealed

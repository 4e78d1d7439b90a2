"""One simulated kvstore: the real cores and servicers over an arena and a log that outlive it.

Owns its wiring, its death and its coming back. What is not real: transport, threads, files. Each
call is a task that stands still where the real one waits for the log or for page work.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final

from baton.capability import DEV_KEY, CapabilityVerifier, Claims
from baton.kv.blocks import scope_secret
from baton.kv.label import PairLabel
from baton.kv.layout import KvDtype
from baton.kv.numeric import TORCH_F32
from services.kvstore.access import Access
from services.kvstore.append_rpc import AppendCalls
from services.kvstore.core import Core, Limits
from services.kvstore.identity import Identity
from services.kvstore.lease import LeaseTable
from services.kvstore.log.journal import LogJournal
from services.kvstore.log_rpc import LogCalls
from services.kvstore.measures import StoreMeasures
from services.kvstore.page_worker import PageWorker
from services.kvstore.pages import PagePool, PageState
from services.kvstore.prefix_rpc import PrefixCalls
from services.kvstore.restart import Standing, index_some, restore
from services.kvstore.runtime import SWEEP_INTERVAL_S, Runtime
from services.kvstore.store import Store
from services.kvstore.worker_rpc import WorkerCalls
from services.kvstore.workers import AttachedWorker
from tests.cluster.memory import BLOCK, GEOMETRY, PAGES, VOCABULARY, ArenaMemory, RecordDisk
from tests.cluster.moves import SimMoves
from tests.cluster.steps import Process, Promise, Scheduler
from tests.unit.kvstore.cores import recovered_from

LEASE_S: Final = 2.0
TTL_S: Final = 10.0
SAME_ARENA_SHARE: Final = 0.8
"""Of restarts; in the others the arena is lost, as after the host's own."""

GENERATION_BITS: Final = 20
WALL_OFFSET_S: Final = 1_700_000_000.0
LABEL: Final = PairLabel(
    model=bytes(16),
    rope=bytes(16),
    dtype=KvDtype.F32,
    block_tokens=BLOCK,
    tokenizer=bytes(8),
    numeric_class=TORCH_F32,
)
LIMITS: Final = Limits(
    block_tokens=BLOCK,
    kv_digest=LABEL.kv_digest(),
    tokenizer_hash=LABEL.tokenizer,
    vocabulary_size=VOCABULARY,
    ttl_default_s=TTL_S,
)


class StepClock:
    """The scheduler's time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def monotonic_s(self) -> float:
        """Simulated seconds."""
        return self._scheduler.now_s

    def wall_s(self) -> float:
        """The same as a date."""
        return WALL_OFFSET_S + self._scheduler.now_s


class _Verifier(CapabilityVerifier):
    """Looks at each token's signature once: a run shows the same ones a thousand times."""

    def __init__(self, key: bytes, clock: StepClock) -> None:
        super().__init__(key, clock)
        self._known: dict[str | None, Claims] = {}

    def _authentic(self, token: str | None) -> Claims:
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = super()._authentic(token)
        return known


class StepPages(PageWorker):
    """Page work that is done a moment after it was ordered, in order; lost in a crash."""

    def __init__(self, arena: Any, scheduler: Scheduler, on_damaged: Any) -> None:
        nobody: Any = None
        super().__init__(arena, nobody, on_damaged)
        self._scheduler = scheduler

    @property
    def has_work(self) -> bool:
        """Something is queued."""
        return bool(self._queue)

    def do_all(self) -> None:
        """Everything queued."""
        while self._queue:
            work = list(self._queue)
            self._queue.clear()
            self._finish(self._work(work))
            self._progress.advance(self._progress.done + len(work))

    async def ready(self, pages: Any) -> None:
        """After a moment all of it is done."""
        if self._dirty:
            self._clean(pages)
        if not self.is_ready(pages):
            await self._scheduler.pause(self._scheduler.random.choice((0.0002, 0.002)))
            self.do_all()

    async def settled(self) -> None:
        """A part of what is soiled is zeroed, as when nothing else is to be done."""
        self._clean_some()
        if self._queue:
            await self._scheduler.pause(0.0005)
            self.do_all()


class _Desk:
    """Tickets; the descriptor is handed over when one is shown."""

    path = "memory"

    def __init__(self) -> None:
        self.tickets: dict[str, AttachedWorker] = {}
        self._numbers = itertools.count()

    def issue(self, worker: AttachedWorker) -> str:
        """A ticket."""
        ticket = f"t{next(self._numbers)}"
        self.tickets[ticket] = worker
        return ticket


class SimHome:
    """A kvstore of one node. `runtime` is the running one's; None while it is down."""

    def __init__(self, name: str, scheduler: Scheduler, measures: StoreMeasures) -> None:
        self.name = name
        self._scheduler = scheduler
        self._measures = measures
        self.disk = RecordDisk(scheduler)
        self.arena = ArenaMemory(scheduler.random.randbytes(16))
        self.process = Process(name)
        self.starts = 0
        # Set by the run: how this home reaches the others.
        self.wires: Any = None
        self.peers: dict[str, SimHome] = {}
        self._seen: Any = None
        self.runtime: Runtime | None = None
        self.start()

    # --- life -------------------------------------------------------------------------------

    def start(self) -> None:
        """From what the log holds."""
        self.starts += 1
        self.process = Process(self.name)
        scheduler = self._scheduler
        is_same_arena = self.starts > 1 and scheduler.random.random() < SAME_ARENA_SHARE
        if not is_same_arena:
            self.arena = ArenaMemory(scheduler.random.randbytes(16))
        arena = self.arena
        any_arena: Any = arena
        any_disk: Any = self.disk
        journal = LogJournal(any_disk, LIMITS, arena.spec.arena_id, LEASE_S)
        core = Core(
            limits=LIMITS,
            pool=PagePool(PAGES, self.starts << GENERATION_BITS),
            leases=LeaseTable(LEASE_S),
            journal=journal,
        )
        store = Store(core, lambda scope: scope_secret(bytes(32), 1, scope))
        pages = StepPages(any_arena, scheduler, self._damaged)
        clock = StepClock(scheduler)
        runtime = Runtime(
            store=store,
            journal=journal,
            writer=any_disk,
            arena=any_arena,
            pages=pages,
            clock=clock,
            segments_max=16,
        )
        recovered = recovered_from(self.disk.records, arena.spec.arena_id)
        assert not recovered.damaged, "a crash is no damage"
        standing = Standing(
            is_same_arena=is_same_arena,
            locked_slots=frozenset(arena.locked_slots),
            model="sim",
            class_text=lambda _class_id: TORCH_F32.text,
        )
        restored = restore(store, recovered, standing, runtime.now())
        index_some(store, restored.unindexed, 1 << 30)
        runtime.former.update(restored.former)
        runtime.workers.restore(restored.slot_owners, arena.locked_slots)
        runtime.pages.soil(restored.dirty, lambda page: core.pool.state(page) is PageState.FREE)
        self.desk = _Desk()
        access = Access(_Verifier(DEV_KEY, clock), core)
        identity = Identity(label=LABEL, geometry=GEOMETRY, model="sim", node_id=self.name)
        any_desk: Any = self.desk
        self.logs = LogCalls(runtime, access, identity)
        self.appends = AppendCalls(runtime, access, self._measures)
        self.prefixes = PrefixCalls(runtime, access, identity)
        self.workers = WorkerCalls(runtime, access, identity, any_desk)
        self.runtime, self._pages = runtime, pages
        self.moves = SimMoves(self, store, journal)
        self.moves.adopt_moved(recovered)
        scheduler.spawn(self.process, self._sweep(runtime), Promise())

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """A task of this process."""
        self._scheduler.spawn(self.process, work, Promise())

    async def pause(self, seconds: float) -> None:
        """Nothing but time."""
        await self._scheduler.pause(seconds)

    def crash(self) -> None:
        """SIGKILL: what was not acked may be lost, page work under way is."""
        self.process.die()
        self.runtime = None
        self.disk.lose_tail()

    def _damaged(self, work: Any) -> None:
        """A copy's source did not verify."""
        assert self.runtime is not None
        self.runtime.damaged(work)

    async def _sweep(self, runtime: Runtime) -> None:
        while True:
            await self._scheduler.pause(SWEEP_INTERVAL_S)
            await runtime.sweep()
            self.moves.sweep()
            await runtime.pages.settled()

    # --- what the oracle asks ---------------------------------------------------------------

    def is_touched(self) -> bool:
        """Whether anything may have changed since the last time this was asked: whatever changes
        rows makes a record, whatever changes pages changes their counts.
        """
        if self.runtime is None:
            return False
        pool = self.runtime.core.pool
        was = self._seen
        self._seen = (self.starts, self.disk.newest_lsn, pool.counts(), len(pool.fences()))
        return was != self._seen

    @property
    def has_page_work(self) -> bool:
        """Copies or zeroing under way."""
        return self._pages.has_work

    # --- calls ------------------------------------------------------------------------------

    def serve(self, method: str, request: Any) -> Promise[Any]:
        """Runs a call here; the promise is never kept if this process dies first."""
        answer: Promise[Any] = Promise()
        self._scheduler.spawn(self.process, self._call(method, request), answer)
        return answer

    async def _call(self, method: str, request: Any) -> Any:
        match method:
            case "AdoptLog":
                return await self.moves.adopt(request)
            case "Move":
                return await self.moves.give_away(request)
            case "MoveDone":
                return await self.moves.done(request)
            case "DescribeMove":
                return self.moves.arrivals.has_opened(request.log_id, request.generation)
            case "Append":
                async for response in self.appends.append(_one(request)):
                    return response
                raise AssertionError("no answer")
            case "Attach":
                return await self.workers.attach(request)
            case "RenewLeases":
                return self.workers.renew(request)
            case "DescribeLog":
                return self.logs.describe(request)
            case "Publish":
                return await self.prefixes.publish(request)
            case "Revoke":
                return await self.prefixes.revoke(request)
        return await getattr(self.logs, _METHODS[method])(request)

    def hand_over(self, ticket: str) -> AttachedWorker:
        """The descriptor goes to who shows the ticket: its slot is locked from now on."""
        assert self.runtime is not None, "ask first whether it lives"
        worker = self.desk.tickets.pop(ticket)
        self.arena.locked_slots.add(worker.writer.slot)
        self.runtime.workers.attach(worker)
        return worker


_METHODS: Final = {
    "Open": "open",
    "Grant": "grant",
    "CommitCheckpoint": "checkpoint",
    "Seal": "seal",
    "Take": "take",
    "Truncate": "truncate",
    "Fork": "fork",
    "Cancel": "cancel",
    "Close": "close",
    "ReplayLog": "replay",
}


async def _one(request: Any) -> AsyncIterator[Any]:
    yield request

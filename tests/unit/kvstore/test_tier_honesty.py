"""Tier honesty: KV is loaded only where that beats computing it; nobody pays for a slow disk.

The disk is simulated on a manual clock: what a request takes is counted, not measured.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from baton.kv.numeric import TORCH_F32
from services.kvstore.log.state import Parent
from services.kvstore.store import ForkOrder
from services.kvstore.tiers.copies import Outcome, SlotCopy
from services.kvstore.tiers.honesty import ALLOWANCE, WAIT_MAX_S, Patience, is_worth_loading
from services.kvstore.tiers.promotion import Abandoned, Asked, Promoter, Want
from services.kvstore.tiers.slots import Slots
from tests.unit.kvstore.cores import (
    BLOCK,
    NOW,
    SCOPE,
    build_store,
    fill_work,
    new_id,
    open_log,
)

SLOT_BYTES = 1000
BLOCKS = 40
TOKENS = BLOCKS * BLOCK


def test_loading_is_worth_it_only_where_it_is_faster() -> None:
    """And where nobody knows how fast the asker is."""
    assert is_worth_loading(0.9, 100, 100.0)
    assert not is_worth_loading(1.0, 100, 100.0)
    assert is_worth_loading(1e9, 1, None)


def test_waiting_is_earned_by_what_has_come() -> None:
    """Nothing yet: the allowance; half of it: half of what computing takes, and the allowance."""
    patience = Patience(prompt_tokens=1000, tokens_per_s=1000.0)
    assert patience.left_s(0.0, 0) == pytest.approx(ALLOWANCE)
    assert patience.left_s(0.5, 500) == pytest.approx(ALLOWANCE)
    assert patience.left_s(0.6, 500) < 0
    assert Patience(prompt_tokens=9, tokens_per_s=None).left_s(0.0, 0) == WAIT_MAX_S


class Time:
    """A clock that moves on when everybody waits: to the next thing that is due."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.now_s = 0.0
        self._tasks = tasks
        self._due: list[tuple[float, int, asyncio.Event]] = []
        self._serial = itertools.count()

    def monotonic_s(self) -> float:
        """Now."""
        return self.now_s

    def wall_s(self) -> float:
        """Now."""
        return self.now_s

    def at(self, when_s: float) -> asyncio.Event:
        """Set once that time has come."""
        event = asyncio.Event()
        heapq.heappush(self._due, (when_s, next(self._serial), event))
        return event

    async def wait(self, event: asyncio.Event, timeout_s: float) -> bool:
        """True when `event` was set first."""
        over = self.at(self.now_s + timeout_s)
        waits = [self._tasks.create_task(one.wait()) for one in (event, over)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return event.is_set()
        finally:
            for one in waits:
                one.cancel()

    async def run(self, work: asyncio.Task[Any]) -> None:
        """Lets everybody come to a wait, then moves on, until `work` is done."""
        while not work.done():
            for _ in range(50):
                await _breath()
            if not work.done():
                assert self._due, "everybody waits for nothing"
                self.now_s, _, event = heapq.heappop(self._due)
                event.set()


async def _breath() -> None:
    """One turn of the loop for everybody else."""
    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(turn.set_result, None)
    await turn


class SlowDisk:
    """Reads one slot after another at a rate; says of itself that it has another one."""

    def __init__(self, time: Time, *, slot_s: float, said_s: float) -> None:
        self._time = time
        self.slot_s, self.said_s = slot_s, said_s
        self._free_s = 0.0
        self.reads = 0

    def load_s(self, byte_count: int) -> float:
        """What it would say."""
        return byte_count / SLOT_BYTES * self.said_s

    def read(self, copies: Sequence[SlotCopy]) -> _Job:
        """Begins."""
        self.reads += len(copies)
        self._free_s = max(self._free_s, self._time.now_s) + self.slot_s * len(copies)
        return _Job(len(copies), self._time.at(self._free_s))


class _Job:
    def __init__(self, count: int, event: asyncio.Event) -> None:
        self._count, self._event = count, event

    async def done(self) -> Sequence[Outcome]:
        """All of them."""
        await self._event.wait()
        return (None,) * self._count


async def _ready(_pages: object) -> None:
    return


class Scene:
    """A store with one cold log, and a promoter over a disk of some speed."""

    def __init__(self, tasks: asyncio.TaskGroup, *, slot_s: float, said_s: float) -> None:
        self.store = build_store(pages=3 * BLOCKS)
        self.store.core.slots = Slots(2 * BLOCKS)
        model = open_log(self.store, [1 + n % 7 for n in range(TOKENS)])
        model.prefill(finish="stop")
        self.log = model.log
        self.copy()
        self.store.home.give_up_kv(self.log, 0)
        fill_work(self.store)
        self.time = Time(tasks)
        self.disk = SlowDisk(self.time, slot_s=slot_s, said_s=said_s)
        self.tasks = tasks
        self._loads: list[asyncio.Task[None]] = []
        self.promoter = Promoter(
            self.store.placement,
            self.disk,
            self.time,
            SLOT_BYTES,
            ready=_ready,
            order_work=lambda: fill_work(self.store),
            spawn=self._spawn,
        )

    def copy(self) -> None:
        """All of the log gets copies."""
        placement = self.store.placement
        while (order := placement.begin_copy(self.log, 16)) is not None:
            placement.finish_copy(order, (None,) * len(order.copies))
        assert self.log.is_copied

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._loads.append(self.tasks.create_task(work, name=name))

    async def request(self, rate: float) -> float:
        """Seconds one request takes: its wait, and the time to compute what did not come."""
        want = Want(owner=self.log, tokens=TOKENS)
        asked = Asked(prompt_tokens=TOKENS, tokens_per_s=rate)
        began_s = self.time.now_s
        work = self.tasks.create_task(self.promoter.prepare([want], asked))
        await self.time.run(work)
        self.store.core.check_invariants()
        return self.time.now_s - began_s + (TOKENS - self.log.committed) / rate

    async def end(self) -> None:
        """What is under way ends."""
        for task in self._loads:
            await self.time.run(task)
        self.store.core.check_invariants()
        assert self.promoter.open_loads == 0


RATE = 1000.0
RECOMPUTE_S = TOKENS / RATE
EVEN_S = BLOCK / RATE
"""A slot read in this time is as slow as computing its block."""


@pytest.mark.parametrize("slowness", [0.01, 0.2, 0.9, 1.0, 1.04, 1.2, 2.0, 10.0, 1e4])
async def test_no_request_is_slower_than_recompute_and_five_percent(slowness: float) -> None:
    """Whatever the disk does, although it says of itself that it is fast."""
    async with asyncio.TaskGroup() as tasks:
        scene = Scene(tasks, slot_s=EVEN_S * slowness, said_s=EVEN_S * 0.01)
        took_s = await scene.request(RATE)
        assert took_s <= RECOMPUTE_S * (1 + ALLOWANCE) * 1.0001
        if slowness < 0.9:
            assert scene.log.committed == TOKENS
            assert took_s < RECOMPUTE_S * slowness * 1.1
        if slowness > 1.5:
            assert scene.promoter.counters.abandoned == {Abandoned.LATE: 1}
        await scene.end()
        # What nobody waits for any more is there for the next one.
        assert scene.log.committed == TOKENS
        assert await scene.request(RATE) == 0.0


async def test_a_disk_that_says_it_is_slow_is_not_asked() -> None:
    """Nothing is read, nothing is waited for."""
    async with asyncio.TaskGroup() as tasks:
        scene = Scene(tasks, slot_s=EVEN_S, said_s=EVEN_S * 1.01)
        assert await scene.request(RATE) == RECOMPUTE_S
        assert scene.disk.reads == 0
        assert scene.promoter.counters.abandoned == {Abandoned.SLOWER: 1}


async def test_two_requests_for_the_same_kv_load_it_once() -> None:
    """The second waits for the first one's reads."""
    async with asyncio.TaskGroup() as tasks:
        scene = Scene(tasks, slot_s=EVEN_S / 10, said_s=EVEN_S / 10)
        want = Want(owner=scene.log, tokens=TOKENS)
        asked = Asked(prompt_tokens=TOKENS, tokens_per_s=RATE)
        works = [tasks.create_task(scene.promoter.prepare([want], asked)) for _ in range(3)]
        for work in works:
            await scene.time.run(work)
        assert [work.result() for work in works] == [TOKENS] * 3
        assert scene.disk.reads == BLOCKS
        await scene.end()


async def test_logs_that_share_slots_load_them_once() -> None:
    """A cold fork and its parent: the second finds the first one's pages."""
    async with asyncio.TaskGroup() as tasks:
        scene = Scene(tasks, slot_s=EVEN_S / 10, said_s=EVEN_S / 10)
        fork_order = ForkOrder(log_id=new_id(), request_id="f", scope=SCOPE, sampling=None)
        base = Parent(log_id=scene.log.log_id, generation=0, position=TOKENS)
        fork = scene.store.fork(base, fork_order, None, NOW)
        assert fork.cold.tokens == TOKENS - 1
        assert fork.numeric_class_id == TORCH_F32.id
        asked = Asked(prompt_tokens=TOKENS, tokens_per_s=RATE)
        works = [
            tasks.create_task(scene.promoter.prepare([Want(owner=owner, tokens=TOKENS)], asked))
            for owner in (scene.log, fork)
        ]
        for work in works:
            await scene.time.run(work)
        await scene.end()
        assert scene.disk.reads == BLOCKS
        assert (scene.log.committed, fork.committed) == (TOKENS, TOKENS - 1)
        assert fork.rows.pages().tolist() == scene.log.rows.pages().tolist()
        assert not scene.promoter.counters.abandoned

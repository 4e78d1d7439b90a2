"""Computing batches: the asyncio side of `scheduler`.

Owns who waits and who computes. Every prompt's own task asks for its chunks; of those that are
chosen together the first one's task has the compute thread run the pass for all of them. Cancelling
any of them takes nothing from the others, and none goes on before no thread writes its pages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import structlog

from baton.engine.transformer import ComputeCancelled
from baton.errors import ServiceError
from baton.scheduling.claims import Claim
from baton.worker.chunk_compute import ChunkWork, ComputedChunk, Logits
from baton.worker.engine import Engine
from baton.worker.threads import WorkThread
from services.prefill.scheduler import PromptScheduler

_log = structlog.stdlib.get_logger("baton.prefill")

RATE_WEIGHT: Final = 0.3
"""How much the newest batch counts in the measured token rate."""

GATHER_TURNS: Final = 3
"""Turns of the loop between the wish for a batch and its beginning: prompts that ask at the same
time, as those of one batch do when it is over, go together."""

Outcome = Logits | Exception | None


@dataclass(slots=True, eq=False)
class _Waiter:
    """A chunk to compute; `turn` is done when its task leads a batch, or has an outcome."""

    work: ChunkWork
    asked_s: float
    turn: asyncio.Future[None]
    batch: _Batch | None = None


@dataclass(slots=True, eq=False)
class _Batch:
    """Chunks of one pass, the leader's first. `outcomes` is empty until it was computed."""

    members: tuple[_Waiter, ...]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    outcomes: Sequence[Outcome] = ()
    times_s: tuple[float, float] = (0.0, 0.0)


class Turns:
    """Hands the compute thread from batch to batch. `token_rate`: what is known of its speed."""

    def __init__(self, scheduler: PromptScheduler, token_rate: float = 0.0) -> None:
        self.scheduler = scheduler
        self.token_rate = token_rate
        self._waiting: dict[str, _Waiter] = {}
        self._is_arranged = False
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def entered(self, claim: Claim) -> Iterator[None]:
        """The prompt is in for the block; QUEUE_FULL when there is no room."""
        self.scheduler.enter(claim, token_rate=self.token_rate)
        self._empty.clear()
        try:
            yield
        finally:
            self.scheduler.leave(claim.request_id)
            self._arrange()
            if not len(self.scheduler):
                self._empty.set()

    def refuse(self, request_id: str, error: ServiceError) -> None:
        """End the prompt's wait for a batch, if it waits, with `error`."""
        waiter = self._waiting.get(request_id)
        if waiter is not None and waiter.batch is None and not waiter.turn.done():
            waiter.turn.set_exception(error)

    async def wait_empty(self, timeout_s: float) -> bool:
        """True once no prompt is in; False if that took longer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def compute(
        self, request_id: str, work: ChunkWork, thread: WorkThread, engine: Engine
    ) -> ComputedChunk:
        """The chunk's outcome, once it was in a batch. ServiceError of `refuse`."""
        asked_s = time.monotonic()
        while True:
            turn = asyncio.get_running_loop().create_future()
            waiter = _Waiter(work, asked_s, turn)
            self._waiting[request_id] = waiter
            self.scheduler.ask(request_id, len(work.chunk.tokens))
            self._arrange()
            try:
                await waiter.turn
                batch = waiter.batch
                assert batch is not None
                if batch.members[0] is waiter and not batch.over.is_set():
                    await self._lead(batch, thread, engine)
            except (asyncio.CancelledError, ServiceError):
                await self._give_up(request_id, waiter)
                raise
            finally:
                del self._waiting[request_id]
            # A leader that went before it began leaves its batch without outcomes.
            if batch.outcomes:
                return _outcome(batch, waiter)

    async def _lead(self, batch: _Batch, thread: WorkThread, engine: Engine) -> None:
        works = [member.work for member in batch.members]
        began_s = time.monotonic()

        def job() -> None:
            batch.outcomes = _computed(works, engine)
            batch.times_s = (began_s, time.monotonic())

        try:
            await thread.run(job, on_cancel=works[0].stop)
            self._measure(batch)
        finally:
            self._end(batch)

    async def _give_up(self, request_id: str, waiter: _Waiter) -> None:
        """The task goes: its chunk is no longer wanted, and not computed when this returns."""
        batch = waiter.batch
        if batch is None:
            self.scheduler.withdraw(request_id)
        elif batch.members[0] is waiter:
            # It was to lead and never began: nobody else would.
            self._end(batch)
        else:
            waiter.work.stop()
            while not batch.over.is_set():
                try:
                    await batch.over.wait()
                except asyncio.CancelledError:
                    continue

    def _end(self, batch: _Batch) -> None:
        """Tell the members, and begin the next batch once they had a chance to ask again."""
        if batch.over.is_set():
            return
        batch.over.set()
        self.scheduler.end_batch()
        for member in batch.members[1:]:
            if not member.turn.done():
                member.turn.set_result(None)
        self._arrange()

    def _measure(self, batch: _Batch) -> None:
        seconds = batch.times_s[1] - batch.times_s[0]
        if seconds > 0.0 and not any(isinstance(one, Exception) for one in batch.outcomes):
            rate = sum(len(one.work.chunk.tokens) for one in batch.members) / seconds
            old = self.token_rate or rate
            self.token_rate = old + RATE_WEIGHT * (rate - old)

    def _arrange(self) -> None:
        """Begin a batch soon, if none is computed then."""
        if not self._is_arranged:
            self._is_arranged = True
            asyncio.get_running_loop().call_soon(self._gather, GATHER_TURNS)

    def _gather(self, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._gather, turns - 1)
            return
        self._is_arranged = False
        self._begin()

    def _begin(self) -> None:
        """Begin the next batch, if there is none: wake the task that leads it."""
        for request_id, waiter in self._waiting.items():
            if waiter.batch is None and waiter.turn.done():
                # Refused or cancelled; its task has not run yet.
                self.scheduler.withdraw(request_id)
        chosen = self.scheduler.next_batch()
        if chosen:
            batch = _Batch(tuple(self._waiting[request_id] for request_id in chosen))
            for member in batch.members:
                member.batch = batch
            batch.members[0].turn.set_result(None)


class PromptTurns:
    """One prompt's `ChunkComputer`."""

    def __init__(self, turns: Turns, request_id: str, thread: WorkThread, engine: Engine) -> None:
        self._turns = turns
        self._request_id = request_id
        self._thread = thread
        self._engine = engine

    async def compute(self, work: ChunkWork) -> ComputedChunk:
        """See `Turns.compute`."""
        return await self._turns.compute(self._request_id, work, self._thread, self._engine)


def _computed(works: Sequence[ChunkWork], engine: Engine) -> Sequence[Outcome]:
    """In the compute thread: what came of each chunk, one pass for all of them.

    What a pass refuses is computed chunk by chunk, so that it is refused to whom it concerns.
    """
    for work in works:
        work.begin()
    try:
        return engine.prefill_batch([work.chunk for work in works])
    except (ComputeCancelled, ServiceError, RuntimeError) as error:
        if isinstance(error, ComputeCancelled) or len(works) == 1:
            return [error] * len(works)
        _log.warning("batch_refused", chunks=len(works), error=str(error))
    return [_alone(work, engine) for work in works]


def _alone(work: ChunkWork, engine: Engine) -> Outcome:
    try:
        return engine.prefill_batch([work.chunk])[0]
    except (ComputeCancelled, ServiceError, RuntimeError) as error:
        return error


def _outcome(batch: _Batch, waiter: _Waiter) -> ComputedChunk:
    outcome = batch.outcomes[batch.members.index(waiter)]
    if isinstance(outcome, Exception):
        raise outcome
    began_s, ended_s = batch.times_s
    return ComputedChunk(logits=outcome, asked_s=waiter.asked_s, began_s=began_s, ended_s=ended_s)

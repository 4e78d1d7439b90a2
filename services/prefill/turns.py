"""Waiting for a turn: the asyncio side of `scheduler`.

Owns the waiters. Every prompt's own task computes its chunks; this only says when.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from baton.errors import ServiceError
from services.prefill.scheduler import PromptScheduler


class Turns:
    """Hands the compute thread from prompt to prompt."""

    def __init__(self, scheduler: PromptScheduler) -> None:
        self.scheduler = scheduler
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def entered(self, request_id: str, *, token_rate: float) -> Iterator[PromptTurns]:
        """The prompt is in for the block; QUEUE_FULL when there is no room."""
        self.scheduler.enter(request_id, token_rate=token_rate)
        self._empty.clear()
        try:
            yield PromptTurns(self, request_id)
        finally:
            self.scheduler.leave(request_id)
            self._pass_on()
            if not len(self.scheduler):
                self._empty.set()

    @asynccontextmanager
    async def turn(self, request_id: str) -> AsyncIterator[None]:
        """The right to compute one chunk, for the block."""
        await self._granted(request_id)
        try:
            yield
        finally:
            self.scheduler.end_turn(request_id)
            self._pass_on()

    def refuse(self, request_id: str, error: ServiceError) -> None:
        """End the prompt's wait for a turn, if it waits, with `error`."""
        waiter = self._waiting.get(request_id)
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    async def wait_empty(self, timeout_s: float) -> bool:
        """True once no prompt is in; False if that took longer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def _granted(self, request_id: str) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = waiter
        self.scheduler.ask(request_id)
        self._pass_on()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                # Granted and cancelled in the same turn of the loop: nobody would end the turn.
                self.scheduler.end_turn(request_id)
                self._pass_on()
            else:
                self.scheduler.withdraw(request_id)
            raise
        except ServiceError:
            self.scheduler.withdraw(request_id)
            raise
        finally:
            del self._waiting[request_id]

    def _pass_on(self) -> None:
        """Wake the next prompt; one whose wait has ended meanwhile gives the turn up again."""
        chosen = self.scheduler.next_turn()
        while chosen is not None:
            waiter = self._waiting.get(chosen)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
                return
            self.scheduler.end_turn(chosen)
            chosen = self.scheduler.next_turn()


class PromptTurns:
    """One prompt's `ChunkTurns`."""

    def __init__(self, turns: Turns, request_id: str) -> None:
        self._turns = turns
        self._request_id = request_id

    def turn(self) -> AbstractAsyncContextManager[None]:
        """See `Turns.turn`."""
        return self._turns.turn(self._request_id)

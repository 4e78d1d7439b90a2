"""Several sequences as one answer: run side by side, read as one stream of events.

Owns the tasks of a request and the bounded queue between them and whoever writes to the client.
When the reader stops, for whatever reason, every sequence is cancelled before the block is left.
Parallel samples of one prompt wait for the first one's seal, so that they share its KV.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from baton.errors import Reason, ServiceError
from services.gateway.events import Completed, Event, FirstToken
from services.gateway.limits import RateState
from services.gateway.request import SequenceRequest

QUEUE_MAX: Final = 64


class Runner(Protocol):
    """Runs one sequence; `services.gateway.sequence.Sequence` is one."""

    async def run(self) -> None:
        """To the end of the answer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexed:
    """An event of the index-th sequence."""

    index: int
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One sequence of an answer. `after`: the member whose seal it waits for, if any."""

    request: SequenceRequest
    after: int | None = None


class Events:
    """What a reader of an answer iterates over; raises the first failure of any sequence."""

    def __init__(self, count: int) -> None:
        self._queue: asyncio.Queue[Indexed | ServiceError] = asyncio.Queue(QUEUE_MAX)
        self._open = count
        self.rate: RateState | None = None
        """What is left of the tenant's limit; None: it has none."""

        self._cancelled = asyncio.Event()

    def cancel(self) -> None:
        """End the answer from outside: the reader gets CANCELLED next."""
        self._cancelled.set()
        # Room is made for the refusal: what waits unread is of no use any more.
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(ServiceError(Reason.CANCELLED, "the request was cancelled"))

    async def put(self, item: Indexed | ServiceError) -> None:
        """Waits while the reader is behind; nothing is added after a cancel."""
        if self._cancelled.is_set():
            return
        await self._queue.put(item)

    def __aiter__(self) -> AsyncIterator[Indexed]:
        return self

    async def __anext__(self) -> Indexed:
        if self._open == 0:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, ServiceError):
            raise item
        if isinstance(item.event, Completed):
            self._open -= 1
        return item


Emit = Callable[[Event], Awaitable[None]]
MakeRunner = Callable[[SequenceRequest, Emit], Runner]


@asynccontextmanager
async def running(members: Sequence[Member], make: MakeRunner) -> AsyncIterator[Events]:
    """Run the members; the block reads their events. Leaving it ends what still runs."""
    events = Events(len(members))
    sealed = [asyncio.Event() for _ in members]
    failure: Exception | None = None
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_one(index, member, make, events, sealed))
            for index, member in enumerate(members)
        ]
        try:
            yield events
        except Exception as error:  # noqa: BLE001  # raised below: the group would wrap it
            failure = error
        finally:
            for task in tasks:
                task.cancel()
    if failure is not None:
        raise failure


async def _one(
    index: int,
    member: Member,
    make: MakeRunner,
    events: Events,
    sealed: Sequence[asyncio.Event],
) -> None:
    async def emit(event: Event) -> None:
        if isinstance(event, FirstToken):
            sealed[index].set()
        await events.put(Indexed(index=index, event=event))

    try:
        if member.after is not None:
            await sealed[member.after].wait()
        await make(member.request, emit).run()
    except ServiceError as error:
        await events.put(error)

"""Named threads for work that must not run in the event loop, and the worker's progress counter.

Owns one thread per kind of work (compute, packing). A job that was started is always waited for,
also when its waiter is cancelled: it may still be writing pages, and pages must not be given back
before it is done. Never kills a thread; a job looks at its own stop flag.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TypeVar

Result = TypeVar("Result")


class WorkThread:
    """One named thread; jobs run one after the other in the order they were given."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._running = 0

    @property
    def running(self) -> int:
        """Jobs given and not yet done."""
        return self._running

    async def run(
        self, job: Callable[[], Result], *, on_cancel: Callable[[], None] | None = None
    ) -> Result:
        """The result of `job`, run in the thread.

        When the caller is cancelled, `on_cancel` asks the job to end early, the job is waited for,
        and only then the cancellation goes on.
        """
        self._running += 1
        try:
            future = asyncio.get_running_loop().run_in_executor(self._executor, job)
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                if on_cancel is not None:
                    on_cancel()
                await _settled(future)
                raise
        finally:
            self._running -= 1

    def close(self) -> None:
        """Let the thread end after the jobs it has."""
        self._executor.shutdown(wait=False)


async def _settled(future: asyncio.Future[Result]) -> None:
    """Wait until the job is over, through further cancellations; its result is dropped."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()


class Progress:
    """Grows with every unit of real work and with every idle turn; a stuck worker stops it.

    `worked` may be called from any thread that computes, `idled` from the loop. Taking the next
    number of a count is one step of the interpreter, so that none is lost without a lock; what is
    shown may be a moment old, never less than what was shown before.
    """

    __slots__ = ("_count", "_idled", "_shown", "_worked")

    def __init__(self) -> None:
        self._count = count(2)
        self._worked = 1
        self._idled = 0
        self._shown = 1

    def worked(self) -> None:
        """A layer, a chunk or a step was done."""
        self._worked = next(self._count)

    def idled(self) -> None:
        """The loop came round with nothing in the compute thread."""
        self._idled += 1

    @property
    def value(self) -> int:
        """The counter that heartbeats and lease renewals carry."""
        # Of two threads the one that counted first may write last.
        self._shown = max(self._shown, self._worked + self._idled)
        return self._shown

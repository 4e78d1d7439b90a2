"""Waiting for a counter to reach a number: how handlers wait for the log and for page work.

Owns the waiters. Single event loop only. When the one who advances ends, everybody who waits, now
or later, gets an error instead of waiting for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from baton.errors import Reason, ServiceError


class Progress:
    """`ordered` counts what was asked for, `done` what is finished, in the same order."""

    __slots__ = ("_fault", "_waiters", "done", "ordered")

    def __init__(self) -> None:
        self.ordered = 0
        self.done = 0
        self._fault: str | None = None
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def reach(self, target: int) -> None:
        """Returns when `done` is at least `target`; WORKER_LOST when it never will be."""
        if self.done >= target:
            return
        if self._fault is not None:
            raise self._lost()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((target, future))
        await future

    def advance(self, done: int) -> None:
        """`done` has grown; wakes whom it satisfies."""
        self.done = done
        still: deque[tuple[int, asyncio.Future[None]]] = deque()
        for target, future in self._waiters:
            if future.done():
                continue
            if target <= done:
                future.set_result(None)
            else:
                still.append((target, future))
        self._waiters = still

    @property
    def next_target(self) -> int | None:
        """The smallest number that somebody waits for; orders only grow."""
        for target, future in self._waiters:
            if not future.done():
                return target
        return None

    def refuse(self, error: ServiceError) -> None:
        """Whoever waits now gets `error`; later ones wait as ever."""
        for _, future in self._waiters:
            if not future.done():
                future.set_exception(error)
                # Nobody may be left to look at it.
                future.exception()
        self._waiters.clear()

    @contextmanager
    def ending(self, fault: str) -> Iterator[None]:
        """When the block ends, for whatever reason, all waiters are told `fault`."""
        try:
            yield
        finally:
            self._fault = fault
            for _, future in self._waiters:
                if not future.done():
                    future.set_exception(self._lost())
                    # Nobody may be left to look at it.
                    future.exception()
            self._waiters.clear()

    def _lost(self) -> ServiceError:
        return ServiceError(
            Reason.WORKER_LOST, f"the kvstore is going down: {self._fault}", retry_after_s=1.0
        )

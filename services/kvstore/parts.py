"""The parts of a kvstore's life: threads, loops and clockwork, started and stopped in order.

Owns how each kind of part ends. Fits `baton.lifecycle`; knows nothing of what it runs.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from baton.clock import WaitingClock
from baton.errors import StartupError
from baton.lifecycle import Service, every
from services.kvstore.runtime import Runtime
from services.kvstore.servicer import drain

DRAIN_S: Final = 8.0
LOCK_FILE: Final = "lock"


async def nothing() -> None:
    """For a loop that has nothing to close."""


class Part:
    """A part that needs nothing until it is stopped."""

    async def start(self) -> None:
        return

    async def drain(self) -> None:
        return

    async def stop(self) -> None:
        return


class Threads(Part):
    """The named threads; they end after everything that uses them."""

    def __init__(self, *threads: ThreadPoolExecutor) -> None:
        self._threads = threads

    async def stop(self) -> None:
        for thread in self._threads:
            thread.shutdown(wait=False)


class Closing(Part):
    """Closes something at the end."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close

    async def stop(self) -> None:
        self._close()


class Repeating(Part):
    """Work that the clock calls for again and again, until the part is stopped."""

    def __init__(
        self,
        service: Service,
        name: str,
        work: Callable[[], Awaitable[None]],
        clock: WaitingClock,
        *,
        interval_s: float,
    ) -> None:
        self._service = service
        self._name = name
        self._act = work
        self._clock = clock
        self._interval_s = interval_s
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()

    async def start(self) -> None:
        self._service.spawn(self._name, self._work())

    async def stop(self) -> None:
        self._stopping.set()
        await self._ended.wait()

    async def _work(self) -> None:
        try:
            await every(self._interval_s, self._act, clock=self._clock, stopping=self._stopping)
        finally:
            self._ended.set()


class Draining(Part):
    """Refuses new logs, then waits a while for the written ones."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def drain(self) -> None:
        await drain(self._runtime, DRAIN_S)


class DirectoryLock(Part):
    """One kvstore per log directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor: int | None = None

    async def start(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._directory / LOCK_FILE
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise StartupError(
                f"a running kvstore writes its log in {self._directory}",
                hint="stop it, or give this one another --log-dir",
            ) from error
        self._descriptor = descriptor

    async def stop(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Loop(Part):
    """A loop that is asked to end and waited for, and what is closed behind it."""

    def __init__(
        self,
        service: Service,
        name: str,
        run: Callable[[], Coroutine[Any, Any, None]],
        end: Callable[[], None],
        close: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._service = service
        self._name = name
        self._run = run
        self._end = end
        self._close = close
        self._ended = asyncio.Event()
        self._has_failed = False

    async def start(self) -> None:
        self._service.spawn(self._name, self._work())

    async def stop(self) -> None:
        self._end()
        await self._ended.wait()
        if not self._has_failed:
            await self._close()

    async def _work(self) -> None:
        self._has_failed = True
        try:
            await self._run()
            self._has_failed = False
        finally:
            self._ended.set()

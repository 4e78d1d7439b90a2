"""A real redis-server for each test, that can be killed, frozen, wiped and started again."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from baton.clock import SystemClock
from services.gateway.redis_measures import RedisMeasures
from services.gateway.registry_store import RedisLink

SERVER = shutil.which("redis-server")
WAIT_S = 20.0


class RedisServer:
    """One redis-server on a unix socket, without a disk."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "redis.sock"
        self._process: asyncio.subprocess.Process | None = None
        self.url = f"unix://{self._socket}"

    async def start(self) -> None:
        """Returns once it takes connections."""
        assert SERVER is not None
        self._socket.unlink(missing_ok=True)
        self._process = await asyncio.create_subprocess_exec(
            SERVER,
            *("--port", "0", "--unixsocket", str(self._socket)),
            *("--save", "", "--appendonly", "no", "--daemonize", "no"),
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            while b"accept connections" not in await self._process.stdout.readline():
                assert self._process.returncode is None

    async def kill(self) -> None:
        """kill -9, as by the kernel when memory is short."""
        if self._process is not None:
            self._process.kill()
            await self._process.communicate()
            self._process = None

    def freeze(self) -> None:
        """Connections stay, nothing is answered: a network that swallows, or a host that swaps."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Answers again."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Redis]:
        """Somebody else who can write to it."""
        other: Redis = Redis.from_url(self.url, protocol=2)
        try:
            yield other
        finally:
            await other.aclose()


@pytest.fixture
async def redis_server() -> AsyncIterator[RedisServer]:
    """A running server; without the program the test is skipped, and says so."""
    if SERVER is None:
        pytest.skip("redis-server is not installed: NOTHING about Redis was tested")
    with tempfile.TemporaryDirectory(prefix="baton-redis-") as folder:
        server = RedisServer(Path(folder))
        await server.start()
        yield server
        await server.kill()


@pytest.fixture
async def link(redis_server: RedisServer) -> AsyncIterator[RedisLink]:
    """A connected link."""
    async with running_link(redis_server.url) as running:
        yield running


@asynccontextmanager
async def running_link(url: str, measures: RedisMeasures | None = None) -> AsyncIterator[RedisLink]:
    """A link as a gateway has one; connected."""
    async with asyncio.TaskGroup() as group:

        def spawn(name: str, work: Coroutine[Any, Any, None]) -> None:
            group.create_task(work, name=name)

        link = RedisLink(url, SystemClock(), spawn, measures)
        found = up(link)
        await link.start()
        await within(found)
        try:
            yield link
        finally:
            await link.stop()


def up(link: RedisLink) -> asyncio.Event:
    """Set at the next connection."""
    found = asyncio.Event()
    link.on_up(found.set)
    return found


async def within(event: asyncio.Event) -> None:
    """Waits for an event, not for ever."""
    async with asyncio.timeout(WAIT_S):
        await event.wait()


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that happens beside the test's own task."""
    clock, never = SystemClock(), asyncio.Event()
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await clock.wait(never, 0.01)

"""Redis as a shared store: one connection, and a gateway that never waits for it long.

Owns the connection, its loss and return, and the queue in front of it. The only file that imports
redis (the extra `[redis]`). Requests hand commands to one task, which alone touches the connection:
a request that is cancelled cannot leave its answer for the next one (redis-py#2624). Every step has
a deadline, the queue a bound, and after any fault the connection is closed, not repaired. Never
raises to a request and never logs the URL, which may hold a password.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from baton.clock import WaitingClock
from baton.errors import StartupError
from baton.metrics import Metrics
from services.gateway.redis_measures import ANSWERED, AWAY, LATE, RedisMeasures
from services.gateway.shared_store import ASK_WITHIN_S, Command, Replies

CONNECT_TIMEOUT_S: Final = 2.0
BATCH_TIMEOUT_S: Final = 1.0
"""A connection that owes an answer this long is lost; requests go on after ASK_WITHIN_S."""

QUEUE_MAX: Final = 1024
BATCH_MAX: Final = 64
IDLE_PING_S: Final = 5.0
BACKOFF_S: Final = 0.1
BACKOFF_MAX_S: Final = 5.0
STEADY_S: Final = 10.0
"""A connection that lived this long was a good one: the next attempt comes soon again."""

PING: Final[tuple[Command, ...]] = (("PING",),)

_log = structlog.stdlib.get_logger("baton.redis")

Spawn = Callable[[str, Coroutine[Any, Any, None]], None]


@dataclass(slots=True)
class _Order:
    """Commands on their way; `answer` is None for those that nobody waits for."""

    commands: tuple[Command, ...]
    answer: asyncio.Future[Replies | None] | None

    @property
    def is_abandoned(self) -> bool:
        return self.answer is not None and self.answer.done()

    def resolve(self, replies: Replies | None) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(replies)


class RedisLink:
    """A `SharedStore`. Fits `baton.lifecycle` as a part; its start waits for nothing."""

    def __init__(
        self, url: str, clock: WaitingClock, spawn: Spawn, measures: RedisMeasures | None = None
    ) -> None:
        self._pool = _pool(url)
        self._measures = measures or RedisMeasures(Metrics("gateway"))
        self._clock = clock
        self._spawn = spawn
        self._orders: deque[_Order] = deque()
        self._queued = asyncio.Event()
        self._stopping = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._is_up = False
        self._was_up: bool | None = None
        self._has_refused = False
        self._sent_s: float | None = None

    @property
    def is_up(self) -> bool:
        """Connected, and not in debt of an answer for longer than a request may wait."""
        is_prompt = self._sent_s is None or (
            self._clock.monotonic_s() - self._sent_s <= ASK_WITHIN_S
        )
        return self._is_up and is_prompt

    def on_up(self, listener: Callable[[], None]) -> None:
        """Call `listener` at each connection made."""
        self._listeners.append(listener)

    async def ask(
        self, commands: Sequence[Command], within_s: float = ASK_WITHIN_S
    ) -> Replies | None:
        """Replies, one a command; None when there was no time, no room or no Redis."""
        began_s = self._clock.monotonic_s()
        replies, outcome = await self._asked(commands, within_s)
        self._measures.asked(outcome, self._clock.monotonic_s() - began_s)
        return replies

    async def _asked(
        self, commands: Sequence[Command], within_s: float
    ) -> tuple[Replies | None, str]:
        """The replies, and what to call how it went."""
        if not self.is_up:
            return None, AWAY
        answer: asyncio.Future[Replies | None] = asyncio.get_running_loop().create_future()
        if not self._put(_Order(tuple(commands), answer)):
            return None, AWAY
        try:
            async with asyncio.timeout(within_s):
                return await answer, ANSWERED
        except TimeoutError:
            return None, LATE

    def post(self, commands: Sequence[Command]) -> bool:
        """Send without waiting; False when Redis is away or the queue is full."""
        is_taken = self._is_up and self._put(_Order(tuple(commands), None))
        if not is_taken:
            self._measures.dropped()
        return is_taken

    def _put(self, order: _Order) -> bool:
        if len(self._orders) >= QUEUE_MAX:
            return False
        self._orders.append(order)
        self._queued.set()
        return True

    async def start(self) -> None:
        """Begins to connect; what needs Redis does without until then."""
        self._spawn("redis", self._run())

    async def drain(self) -> None:
        """Nothing: answers that end give their places back until the stop."""

    async def stop(self) -> None:
        """Lets go of the connection."""
        self._stopping.set()
        self._queued.set()

    async def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            began_s = self._clock.monotonic_s()
            fault = await self._session()
            self._went_down(fault)
            is_steady = self._clock.monotonic_s() - began_s >= STEADY_S
            failures = 1 if is_steady else failures + 1
            await self._clock.wait(self._stopping, backoff_s(failures))

    async def _session(self) -> str:
        """One connection from its begin to its end; returns why it ended."""
        connection: AbstractConnection = self._pool.connection_class(**self._pool.connection_kwargs)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                # redis leaves this one method without types.
                await connection.connect()  # type: ignore[no-untyped-call]
                await self._exchange(connection, [_Order(PING, None)])
            self._came_up()
            while not self._stopping.is_set():
                await self._exchange(connection, await self._next_batch())
        except Exception as error:  # noqa: BLE001  # whatever a store sends, the gateway goes on
            return _kind(error)
        finally:
            self._is_up, self._sent_s = False, None
            while self._orders:
                self._orders.popleft().resolve(None)
            await connection.disconnect(nowait=True)
        return "stopping"

    async def _next_batch(self) -> list[_Order]:
        """What waits, in order, without what nobody waits for any more; a ping after a lull."""
        if not self._orders:
            self._queued.clear()
            await self._clock.wait(self._queued, IDLE_PING_S)
        if not self._orders:
            return [_Order(PING, None)]
        taken = [self._orders.popleft() for _ in range(min(BATCH_MAX, len(self._orders)))]
        return [order for order in taken if not order.is_abandoned]

    async def _exchange(self, connection: AbstractConnection, batch: list[_Order]) -> None:
        """Send a batch and give each order its replies; raises when the connection is lost."""
        commands = [
            command for order in batch for command in (("MULTI",), *order.commands, ("EXEC",))
        ]
        self._sent_s = self._clock.monotonic_s()
        try:
            async with asyncio.timeout(BATCH_TIMEOUT_S):
                packed = connection.pack_commands(commands)
                await connection.send_packed_command(packed, check_health=False)
                for order in batch:
                    order.resolve(await self._replies(connection, len(order.commands)))
        finally:
            self._sent_s = None
            for order in batch:
                order.resolve(None)

    async def _replies(self, connection: AbstractConnection, commands: int) -> Replies | None:
        """The replies of one transaction; None when Redis refused it."""
        for _ in range(1 + commands):
            await self._read(connection)
        replies = await self._read(connection)
        if not isinstance(replies, list) or len(replies) != commands:
            return None
        return replies

    async def _read(self, connection: AbstractConnection) -> object:
        try:
            reply: object = await connection.read_response(disable_decoding=True)
        except ResponseError as error:
            self._refused(error)
            return error
        return reply

    def _refused(self, error: ResponseError) -> None:
        """One line a connection: a Redis that is full or read-only refuses every command."""
        self._measures.refused()
        if not self._has_refused:
            self._has_refused = True
            _log.warning("redis_refused", reason=type(error).__name__)

    def _came_up(self) -> None:
        if self._was_up is not True:
            _log.info("redis_connected" if self._was_up is None else "redis_back")
        self._is_up = self._was_up = True
        self._measures.came_up()
        self._has_refused = False
        for listener in self._listeners:
            listener()

    def _went_down(self, fault: str) -> None:
        if self._was_up is not False and not self._stopping.is_set():
            _log.warning("redis_lost", reason=fault, remedy="limits are this gateway's own now")
        self._measures.went_down(was_up=self._was_up is True and not self._stopping.is_set())
        self._was_up = False


def _kind(error: BaseException) -> str:
    """The kind of the first cause: redis wraps a refused password into a lost connection. Texts are
    left out, they are the other side's.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    return type(error).__name__


def backoff_s(failures: int) -> float:
    """A wait before the next attempt, at random up to a bound that doubles with each failure."""
    bound_s = min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(failures, 16))
    return random.uniform(bound_s / 2.0, bound_s)


def _pool(url: str) -> ConnectionPool:
    """A maker of connections; the URL is not repeated in the fault, it may hold a password."""
    try:
        return ConnectionPool.from_url(
            url,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=BATCH_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
        )
    except (ValueError, TypeError) as error:
        raise StartupError(
            "redis_url is not the address of a Redis",
            hint="write redis://[user:password@]host:port/0, rediss://... or unix:///path",
            exit_code=2,
        ) from error

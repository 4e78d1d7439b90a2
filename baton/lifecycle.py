"""How a service starts, runs its background work, drains and stops.

Owns the order (parts start one after the other and stop the other way round), the service's tasks,
its readiness and the signals. The first SIGTERM or SIGINT drains and then stops, the second stops
at once. Every step has a deadline and nothing polls. Never knows what a part does.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final, Protocol

import structlog

from baton.clock import SystemClock, WaitingClock
from baton.errors import ServiceError, StartupError

_log = structlog.stdlib.get_logger("baton.lifecycle")

START_TIMEOUT_S: Final = 300.0
DRAIN_TIMEOUT_S: Final = 10.0
STOP_TIMEOUT_S: Final = 5.0


class Part(Protocol):
    """Something a service consists of. `start` returns when it works; `drain` when nothing is left
    to finish; `stop` when it holds nothing any more.
    """

    async def start(self) -> None:
        """Begins to work."""
        ...

    async def drain(self) -> None:
        """Takes no new work and finishes what runs; cut short at the service's drain deadline."""
        ...

    async def stop(self) -> None:
        """Lets go of everything."""
        ...


class Service:
    """One running service: its parts, tasks and readiness.

    Pass `wire` to `run`: an async function that builds the service with `start`, `spawn` and
    `on_ready_changed`. When it returns, the service is ready.
    """

    def __init__(
        self,
        name: str,
        *,
        clock: WaitingClock | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        drain_timeout_s: float = DRAIN_TIMEOUT_S,
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> None:
        self.name = name
        self.clock = clock or SystemClock()
        self.stopping = asyncio.Event()
        """Set when the service should drain and stop: long-running tasks end on it."""
        self._start_timeout_s = start_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._forced = asyncio.Event()
        self._ready = asyncio.Event()
        self._parts: list[tuple[str, Part]] = []
        self._listeners: list[Callable[[bool], Awaitable[None]]] = []
        self._tasks: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._fault: Exception | None = None

    @property
    def is_ready(self) -> bool:
        """True from the end of `wire` to the begin of the drain."""
        return self._ready.is_set()

    async def wait_ready(self, timeout_s: float) -> bool:
        """True once ready; False if that took longer."""
        return await self.clock.wait(self._ready, timeout_s)

    def on_ready_changed(self, listener: Callable[[bool], Awaitable[None]]) -> None:
        """Calls `listener(is_ready)` at each change; `rpc.server.set_ready` is one."""
        self._listeners.append(listener)

    async def start(self, name: str, part: Part) -> None:
        """Starts a part now and takes care of its drain and stop."""
        self._parts.append((name, part))
        await part.start()
        _log.debug("part_started", part=name)

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` until it ends or the service stops; if it fails, the service stops.

        The task belongs to no request: it starts in an empty context, without ids or deadline.
        """
        assert self._tasks is not None, "spawn inside run()"
        task = self._tasks.create_task(
            self._watched(name, work), name=name, context=contextvars.Context()
        )
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def request_stop(self) -> None:
        """Begins the drain; a second call skips what is left of it."""
        if self.stopping.is_set():
            self._forced.set()
        self.stopping.set()

    async def run(
        self, wire: Callable[[Service], Awaitable[None]], *, has_signals: bool = True
    ) -> None:
        """Runs the service from wiring to the last stop.

        Raises what made it stop if that was a fault; returns if it was asked to.
        """
        with self._signals() if has_signals else nullcontext():
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    await self._serve(wire)
                finally:
                    await self._stop_parts()
                    for task in tuple(self._running):
                        task.cancel()
        if self._fault is not None:
            raise self._fault

    async def _serve(self, wire: Callable[[Service], Awaitable[None]]) -> None:
        """Wires, is ready, waits for the stop, drains."""
        try:
            is_wired = await self._until(self.stopping, wire(self), self._start_timeout_s)
        except Exception as error:  # noqa: BLE001  # kept, and raised when all parts have stopped
            self._fault = error
            return
        if not is_wired:
            if not self.stopping.is_set():
                self._fault = StartupError(
                    f"{self.name} did not start within {self._start_timeout_s:g} s"
                )
            return
        await self._set_ready(is_ready=True)
        _log.info("service_ready", service=self.name)
        await self.stopping.wait()
        await self._set_ready(is_ready=False)
        _log.info("service_draining", service=self.name, timeout_s=self._drain_timeout_s)
        if not await self._until(self._forced, self._drain_parts(), self._drain_timeout_s):
            _log.warning("drain_cut_short", service=self.name)

    async def _until(self, event: asyncio.Event, work: Awaitable[None], timeout_s: float) -> bool:
        """True if `work` ended before the event and the timeout; else it is cancelled."""
        failures: list[Exception] = []

        async def run() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001  # raised below, outside the group
                failures.append(error)

        async with asyncio.TaskGroup() as group:
            working = group.create_task(run())
            watching = group.create_task(event.wait())
            await asyncio.wait(
                (working, watching), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            is_done = working.done()
            working.cancel()
            watching.cancel()
        if failures:
            raise failures[0]
        return is_done

    async def _set_ready(self, *, is_ready: bool) -> None:
        if is_ready:
            self._ready.set()
        else:
            self._ready.clear()
        for listener in self._listeners:
            await listener(is_ready)

    async def _drain_parts(self) -> None:
        """All parts at once: what one finishes may need another."""
        async with asyncio.TaskGroup() as draining:
            for name, part in self._parts:
                draining.create_task(_logged(name, "part_drain_failed", part.drain()))

    async def _stop_parts(self) -> None:
        """The last started stops first; none can keep the others from stopping."""
        self.stopping.set()
        while self._parts:
            name, part = self._parts.pop()
            try:
                async with asyncio.timeout(self._stop_timeout_s):
                    await _logged(name, "part_stop_failed", part.stop())
            except TimeoutError:
                _log.error("part_stop_timed_out", part=name, timeout_s=self._stop_timeout_s)

    async def _watched(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  # any crash stops the service, loudly
            _log.error("task_crashed", service=self.name, task=name, exc_info=error)
            self._fault = self._fault or error
            self.stopping.set()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


async def _logged(name: str, event: str, work: Awaitable[None]) -> None:
    """Awaits `work`; a failure is logged, because the rest must still be stopped."""
    try:
        await work
    except Exception as error:  # noqa: BLE001  # see above
        _log.error(event, part=name, exc_info=error)


async def every(
    interval_s: float,
    action: Callable[[], Awaitable[None]],
    *,
    clock: WaitingClock,
    stopping: asyncio.Event,
) -> None:
    """Calls `action` now and then each `interval_s` seconds until `stopping` is set.

    The next call is due one interval after the last was due; calls missed by a slow action are
    skipped. What `action` raises ends it.
    """
    assert interval_s > 0.0, interval_s
    due_s = clock.monotonic_s()
    while not stopping.is_set():
        await action()
        due_s = max(due_s + interval_s, clock.monotonic_s())
        if await clock.wait(stopping, due_s - clock.monotonic_s()):
            return


def run_service(
    name: str,
    wire: Callable[[Service], Awaitable[None]],
    *,
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
) -> int:
    """Runs a service on a fresh event loop to its end; returns the process's exit code.

    0: stopped as asked. 1: could not start, or crashed. 2: a fault of configuration.
    """

    async def run() -> None:
        await Service(name, drain_timeout_s=drain_timeout_s).run(wire)

    try:
        asyncio.run(run())
    except (StartupError, ServiceError) as error:
        return _report(name, error)
    except Exception as error:  # noqa: BLE001  # the last place that can say anything
        _log.error("service_failed", service=name, exc_info=error)
        return 1
    return 0


def _report(name: str, error: StartupError | ServiceError) -> int:
    """Tells a person what is wrong and what to do, without a traceback."""
    hint = error.hint if isinstance(error, StartupError) else None
    lines = [f"baton-{name}: {error.args[0]}", *([f"  hint: {hint}"] if hint else [])]
    sys.stderr.write("\n".join(lines) + "\n")
    return error.exit_code if isinstance(error, StartupError) else 1

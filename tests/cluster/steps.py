"""Coroutines driven by a queue of events: the small scheduler under the ownership simulation.

Owns simulated time, processes (alive, frozen, dead) and the tasks in them. Nothing here is asyncio:
a task stands still at a `Promise` and goes on in the event that keeps it, so that one event is one
step and what must hold can be checked after each.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from baton.errors import ServiceError

Value = TypeVar("Value")


class Promise(Generic[Value]):
    """A value or a refusal that comes later; kept once."""

    __slots__ = ("_error", "_then", "_value", "is_kept")

    def __init__(self) -> None:
        self.is_kept = False
        self._value: Any = None
        self._error: ServiceError | None = None
        self._then: Callable[[], None] | None = None

    def keep(self, value: Any = None, error: ServiceError | None = None) -> None:
        """Wakes who waits; a second time is ignored, as a late answer is."""
        if self.is_kept:
            return
        self.is_kept, self._value, self._error = True, value, error
        if self._then is not None:
            self._then()

    def then(self, go_on: Callable[[], None]) -> None:
        """Called once it is kept."""
        if self.is_kept:
            go_on()
        else:
            self._then = go_on

    def outcome(self) -> tuple[Value | None, ServiceError | None]:
        """What it was kept with."""
        assert self.is_kept
        return self._value, self._error

    def __await__(self) -> Generator[Any, None, Value]:
        if not self.is_kept:
            yield self
        if self._error is not None:
            raise self._error
        kept: Value = self._value
        return kept


class Process:
    """What lives, stands still and dies as one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.steps = 0
        self._is_frozen = False
        self._stopped: list[Callable[[], None]] = []
        self._running: dict[int, Coroutine[Any, Any, Any]] = {}

    @property
    def is_frozen(self) -> bool:
        """As after SIGSTOP."""
        return self._is_frozen

    def freeze(self) -> None:
        """SIGSTOP."""
        self._is_frozen = True

    def thaw(self) -> None:
        """SIGCONT: everything goes on where it stood."""
        self._is_frozen = False
        stopped, self._stopped = self._stopped, []
        for go_on in stopped:
            go_on()

    def die(self) -> None:
        """SIGKILL: nothing it had begun is finished."""
        self.is_dead = True
        self._stopped.clear()
        running, self._running = self._running, {}
        for work in running.values():
            work.close()

    def hold(self, go_on: Callable[[], None]) -> None:
        """Until it thaws."""
        self._stopped.append(go_on)

    def add(self, work: Coroutine[Any, Any, Any]) -> None:
        """It is closed when the process dies."""
        self._running[id(work)] = work

    def discard(self, work: Coroutine[Any, Any, Any]) -> None:
        """It is over."""
        self._running.pop(id(work), None)


class Scheduler:
    """Events in order of time. `after_step` is called after each."""

    def __init__(self, random_: random.Random, after_step: Callable[[], None]) -> None:
        self.random = random_
        self.now_s = 1_000.0
        self.steps = 0
        self._after_step = after_step
        self._order = itertools.count()
        self.processes: dict[Process, None] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Does `action` after a while."""
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._order), action))

    def pause(self, delay_s: float) -> Promise[None]:
        """Nothing but time."""
        promise: Promise[None] = Promise()
        self.later(delay_s, promise.keep)
        return promise

    def run(self, until_s: float) -> None:
        """Every event up to then."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._events)
            self.steps += 1
            action()
            self._after_step()
        self.now_s = until_s

    def spawn(
        self, process: Process, work: Coroutine[Any, Any, Value], result: Promise[Value]
    ) -> None:
        """Runs `work` in `process` to its end, from a coming event on."""
        if process.is_dead:
            work.close()
            return
        self.processes[process] = None
        process.add(work)
        self.later(0.0, lambda: self._step(process, work, result))

    def _step(
        self, process: Process, work: Coroutine[Any, Any, Value], result: Promise[Value]
    ) -> None:
        if process.is_dead:
            return
        if process.is_frozen:
            process.hold(lambda: self._step(process, work, result))
            return
        process.steps += 1
        try:
            promise: Promise[Any] = work.send(None)
        except StopIteration as end:
            process.discard(work)
            result.keep(end.value)
        except ServiceError as error:
            process.discard(work)
            result.keep(error=error)
        else:
            promise.then(lambda: self.later(0.0, lambda: self._step(process, work, result)))

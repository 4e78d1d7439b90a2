"""What happens at a fault point: the armed faults of one process, and who waits at them.

Owns arming, pauses, counts and the rule that nothing acts unless it was enabled at start. Never
parses and never decides where points stand. While off every method returns at its first line; while
on it is safe from any thread.
"""

from __future__ import annotations

import asyncio
import collections
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import structlog

from baton.clock import SystemClock, WaitingClock
from baton.errors import Reason, ServiceError, StartupError
from baton.faults.points import FLOW, POINTS, Action
from baton.faults.spec import Fault, parse_faults

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

SPEC_VARIABLE: Final = "FAULT"
ENABLED_VARIABLE: Final = "BATON_FAULTS_ENABLED"
FIRED_DIR_VARIABLE: Final = "BATON_FAULTS_FIRED_DIR"
EXIT_CODE: Final = 70

_log = structlog.stdlib.get_logger("baton.faults")
_Data = TypeVar("_Data", bytes, memoryview)
_Item = TypeVar("_Item")
_Wake = Callable[[], object]


class Faults:
    """See the module. `fired_dir`: where a `once` fault that fired leaves a mark, so that a process
    restarted with the same FAULT does not fire it again.
    """

    def __init__(
        self,
        *,
        is_enabled: bool = False,
        clock: WaitingClock | None = None,
        fired_dir: Path | None = None,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._is_enabled = is_enabled
        self._clock = clock or SystemClock()
        self._fired_dir = fired_dir
        self._exit_process = exit_process
        self._lock = threading.Lock()
        self._armed: list[Fault] = []
        self._hits: collections.Counter[str] = collections.Counter()
        self._fired: collections.Counter[str] = collections.Counter()
        self._paused: list[tuple[str, _Wake]] = []
        self._watching: list[_Wake] = []

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Faults:
        """As the environment says, off by default; see `start_from` for the errors."""
        made = cls()
        made.start_from(environ)
        return made

    def start_from(self, environ: Mapping[str, str]) -> None:
        """Turns this on and arms FAULT if BATON_FAULTS_ENABLED=1.

        StartupError (exit code 2) if FAULT is set without it, or cannot be read.
        """
        spec, flag = environ.get(SPEC_VARIABLE, ""), environ.get(ENABLED_VARIABLE, "")
        if flag not in ("", "0", "1"):
            raise StartupError(
                f"{ENABLED_VARIABLE} is {flag!r}: 1 allows fault points, 0 does not", exit_code=2
            )
        if spec and flag != "1":
            raise StartupError(
                f"{SPEC_VARIABLE} is set, but fault points are off: {ENABLED_VARIABLE} is not 1",
                hint=f"unset {SPEC_VARIABLE}, or set {ENABLED_VARIABLE}=1 where faults are wanted",
                exit_code=2,
            )
        if flag == "1":
            self._is_enabled = True
            fired_dir = environ.get(FIRED_DIR_VARIABLE)
            self._fired_dir = Path(fired_dir) if fired_dir else None
            _log.warning("fault_points_enabled")
            if spec:
                self.arm(spec)

    @property
    def is_enabled(self) -> bool:
        """True in a process where points may act."""
        return self._is_enabled

    @property
    def armed(self) -> tuple[Fault, ...]:
        """The faults armed now."""
        with self._lock:
            return tuple(self._armed)

    @property
    def hits(self) -> Mapping[str, int]:
        """How often each point was reached since this was enabled, armed or not."""
        with self._lock:
            return dict(self._hits)

    @property
    def fired(self) -> Mapping[str, int]:
        """How often a fault acted at each point."""
        with self._lock:
            return dict(self._fired)

    def arm(self, spec: str) -> tuple[Fault, ...]:
        """Adds the faults of a specification and returns them.

        A fault of the same point and action takes the older one's place. StartupError lists what
        cannot be read; PERMISSION_DENIED where fault points are off.
        """
        if not self._is_enabled:
            raise ServiceError(
                Reason.PERMISSION_DENIED,
                f"fault points are off; start the process with {ENABLED_VARIABLE}=1",
            )
        added = parse_faults(spec)
        replaced = {(fault.point, fault.action) for fault in added}
        with self._lock:
            kept = [one for one in self._armed if (one.point, one.action) not in replaced]
            self._armed = [*kept, *added]
        _log.warning("faults_armed", spec=spec)
        return added

    def disarm(self, point: str | None = None) -> None:
        """Removes the faults of a point, or all, and lets go whoever is paused there."""
        with self._lock:
            self._armed = [one for one in self._armed if point not in (None, one.point)]
        self.release(point)

    def release(self, point: str | None = None) -> int:
        """Lets go whoever is paused at the point, or anywhere, now; returns how many."""
        with self._lock:
            woken = [wake for place, wake in self._paused if point in (None, place)]
            # Under the lock: who leaves a pause unregisters first, so no loop here is closed yet.
            for wake in woken:
                wake()
        return len(woken)

    async def until_reached(self, point: str, *, count: int = 1, timeout_s: float) -> None:
        """Returns once the point was reached `count` times; TimeoutError after `timeout_s`."""
        assert point in POINTS, point
        await self._until(lambda: self._hits[point] >= count, timeout_s)

    async def until_paused(self, point: str, *, count: int = 1, timeout_s: float) -> None:
        """Returns once `count` are paused at the point, so that `release` will meet them."""
        assert point in POINTS, point

        def is_met() -> bool:
            return sum(place == point for place, _wake in self._paused) >= count

        await self._until(is_met, timeout_s)

    async def _until(self, is_met: Callable[[], bool], timeout_s: float) -> None:
        """Looks, under the lock, whenever a point is reached or a pause begins."""
        assert self._is_enabled, "fault points are off"
        changed = asyncio.Event()
        async with asyncio.timeout(timeout_s):
            with self._listed(self._watching, _waker(changed)):
                while not self._reads(is_met):
                    await changed.wait()
                    changed.clear()

    def _reads(self, is_met: Callable[[], bool]) -> bool:
        with self._lock:
            return is_met()

    async def reach(self, point: str) -> None:
        """The code is at the point: pauses, raises or ends the process if so armed."""
        if not self._is_enabled:
            return
        for fault in self._due(point):
            if fault.action is Action.PAUSE:
                released = asyncio.Event()
                with self._pausing(point, _waker(released)):
                    await self._clock.wait(released, fault.seconds or 0.0)
            else:
                self._end(fault)

    def reach_blocking(self, point: str) -> None:
        """As `reach`, for executor threads: a pause holds the calling thread."""
        if not self._is_enabled:
            return
        for fault in self._due(point):
            if fault.action is Action.PAUSE:
                released = threading.Event()
                with self._pausing(point, released.set):
                    released.wait(fault.seconds)
            else:
                self._end(fault)

    def shorten(self, point: str, data: _Data) -> _Data:
        """The data, or only its first bytes if armed `short`."""
        if not self._is_enabled:
            return data
        for fault in self._claimed(point, Action.SHORT):
            data = data[: fault.size_bytes]
        return data

    def flip(self, point: str, buffer: WriteableBuffer) -> None:
        """Inverts one byte of a writable, contiguous buffer in place if armed `flip_byte`."""
        if not self._is_enabled:
            return
        for fault in self._claimed(point, Action.FLIP_BYTE):
            view = memoryview(buffer).cast("B")
            if view.nbytes:
                offset = view.nbytes // 2 if fault.size_bytes is None else fault.size_bytes
                view[offset % view.nbytes] ^= 0xFF

    def flipped(self, point: str, data: bytes) -> bytes:
        """The data, or a copy with one byte inverted if armed `flip_byte`."""
        if not self._is_enabled:
            return data
        copy = bytearray(data)
        self.flip(point, copy)
        return bytes(copy)

    def damage(self, point: str, buffer: memoryview) -> None:
        """In place, what a transfer that went wrong leaves: zeros behind `short`, or a flipped
        byte.
        """
        if not self._is_enabled:
            return
        kept = self.shorten(point, buffer).nbytes
        buffer[kept:] = bytes(buffer.nbytes - kept)
        self.flip(point, buffer)

    def is_absent(self, point: str) -> bool:
        """True if armed `absent`: act as if what is asked for were not there."""
        return self._is_enabled and bool(self._claimed(point, Action.ABSENT))

    def _due(self, point: str) -> list[Fault]:
        """Counts the arrival; the flow faults that act on it."""
        with self._lock:
            self._hits[point] += 1
            self._announce()
        return self._claimed(point, *FLOW)

    def _claimed(self, point: str, *actions: Action) -> list[Fault]:
        """The armed faults of these actions that act now; one armed `once` is taken out."""
        assert point in POINTS, f"{point} is not in baton.faults.points"
        assert POINTS[point].actions.issuperset(actions), f"{point} does not offer {actions}"
        with self._lock:
            found = [one for one in self._armed if one.point == point and one.action in actions]
            self._armed = [one for one in self._armed if not (one.is_once and one in found)]
            acting = [one for one in found if not one.is_once or self._is_first(one)]
            self._fired[point] += len(acting)
        for fault in acting:
            _log.warning("fault_fired", point=point, action=fault.action.value)
        return acting

    def _is_first(self, fault: Fault) -> bool:
        """False if an earlier process already fired this `once` fault."""
        if self._fired_dir is None:
            return True
        self._fired_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark = re.sub(r"[^a-z_.]", "_", f"{fault.point}.{fault.action}")
        try:
            (self._fired_dir / mark).touch(mode=0o600, exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _end(self, fault: Fault) -> None:
        if fault.action is Action.EXIT:
            self._exit_process(EXIT_CODE)
        else:
            raise fault.error()

    def _announce(self) -> None:
        """Wakes who waits for a point; the lock is held."""
        for wake in self._watching:
            wake()

    @contextmanager
    def _pausing(self, point: str, wake: _Wake) -> Iterator[None]:
        with self._listed(self._paused, (point, wake)):
            with self._lock:
                self._announce()
            yield

    @contextmanager
    def _listed(self, where: list[_Item], item: _Item) -> Iterator[None]:
        with self._lock:
            where.append(item)
        try:
            yield
        finally:
            with self._lock:
                where.remove(item)


def _waker(event: asyncio.Event) -> _Wake:
    """Sets the event from any thread."""
    loop = asyncio.get_running_loop()
    return lambda: loop.call_soon_threadsafe(event.set)

"""The golden check while a worker serves: every few minutes, a slice at a time between its steps.

Owns the rhythm and what follows from a failure. A step kernel that fails is left for the torch
path, if that passes: the worker attaches again under torch's numeric class and says that it is
degraded. A worker whose torch path fails ends; the check of its next start decides whether it
serves again. Either way the KV that it wrote since its last pass is given up in the store first,
and what runs goes on from tokens. Tokens that left meanwhile stay.

Never checks a page that holds somebody's KV: the pages are its own, weights, buffers, threads and
code are the live ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import structlog

from baton.clock import WaitingClock
from baton.engine.golden_check import GoldenCheck, GoldenResult
from baton.errors import Reason, ServiceError, StartupError
from baton.faults import faults
from baton.metrics import Metrics
from baton.metrics_table import counter, gauge
from baton.worker.attachment import Attachment, Waiting, attach_when_there
from baton.worker.engine import WorkerParts

PAUSE_MIN_S: Final = 0.02
SHARE: Final = 0.2
"""The most of the compute thread's time that a check under way takes."""
LOOK_S: Final = 5.0
QUIET_LOOK_S: Final = 0.25
LAST_WORD_S: Final = 10.0
NATIVE: Final = "native"
DISTRUSTED_MAX: Final = 4096
"""Logs of one call: a store takes no list of any length, and serves others between two calls."""

_log = structlog.stdlib.get_logger("baton.worker")


class GoldenMeasures:
    """What a worker shows of its checks."""

    def __init__(self, metrics: Metrics, parts: WorkerParts) -> None:
        self._checks = counter(metrics, "baton_worker_golden_checks")
        self._distance = gauge(metrics, "baton_worker_golden_distance")
        gauge(metrics, "baton_worker_degraded").follow(lambda: float(parts.is_degraded))

    def checked(self, path: str, result: GoldenResult) -> None:
        """A check came to its end."""
        self._checks.add(path=path, outcome="passed" if result.is_passed else "failed")
        self._distance.set(max(result.relative_l2, result.drift or 0.0), path=path)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchTools:
    """What the watch works with."""

    parts: WorkerParts
    attachment: Attachment
    kvstore: str
    clock: WaitingClock
    measures: GoldenMeasures
    interval_s: float


class GoldenWatch:
    """Repeats the checks of one worker's engine."""

    def __init__(self, tools: WatchTools) -> None:
        self._parts = tools.parts
        self._attachment = tools.attachment
        self._kvstore = tools.kvstore
        self._clock = tools.clock
        self._measures = tools.measures
        self._interval_s = tools.interval_s

    async def run(self, stopping: asyncio.Event) -> None:
        """Check until `stopping` is set. StartupError when the worker must not go on."""
        while not await self._is_over(stopping):
            await self._round(stopping)

    async def _is_over(self, stopping: asyncio.Event) -> bool:
        """Waits until a check is due; True when the worker stops before."""
        due_s = self._clock.monotonic_s() + self._interval_s
        while not self._parts.unvouched.is_full:
            left_s = due_s - self._clock.monotonic_s()
            if left_s <= 0.0:
                break
            if await self._clock.wait(stopping, min(left_s, LOOK_S)):
                return True
        return stopping.is_set()

    async def _round(self, stopping: asyncio.Event) -> None:
        """All checks of the engine, one after the other."""
        await self._parts.compute.run(self._parts.unvouched.begin)
        for check in self._parts.engine.checks:
            is_slow = check.path.name != self._parts.engine.steps_by
            if is_slow and await self._is_stopped_before_quiet(stopping):
                return
            result = await self._checked(check, stopping)
            if result is None:
                return
            self._note(check, result)
            if not result.is_passed:
                await self._changed(stopping)
                return
        await self._parts.compute.run(self._parts.unvouched.passed)
        self._damage()

    async def _changed(self, stopping: asyncio.Event) -> None:
        """Whatever keeps this worker from being another one, the store hears of its doubtful KV."""
        try:
            await self._attachment.renew(stopping, lambda: self._give_up(stopping))
        except ServiceError:
            # Something did not stop writing, say: its logs are fenced by this, and it ends with us.
            # The compute thread is not asked: it may be what hangs.
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):
                    await self._distrusted(self._parts.unvouched.told(), stopping)
            raise

    async def _is_stopped_before_quiet(self, stopping: asyncio.Event) -> bool:
        """Waits until nothing runs here, one interval at most; True when the worker stops before.

        A step of torch takes as long as many of the kernel's: no stream should have to wait for it.
        """
        due_s = self._clock.monotonic_s() + self._interval_s
        while len(self._parts.held) and (left_s := due_s - self._clock.monotonic_s()) > 0.0:
            if await self._clock.wait(stopping, min(left_s, QUIET_LOOK_S)):
                return True
        return stopping.is_set()

    async def _checked(self, check: GoldenCheck, stopping: asyncio.Event) -> GoldenResult | None:
        """One check in slices, with pauses that leave the thread to the steps; None at a stop."""
        while True:
            began_s = self._clock.monotonic_s()
            result = await self._parts.compute.run(check.advance)
            self._parts.progress.worked()
            if result is not None:
                return result
            took_s = self._clock.monotonic_s() - began_s
            if await self._clock.wait(stopping, max(PAUSE_MIN_S, took_s / SHARE)):
                return None

    def _note(self, check: GoldenCheck, result: GoldenResult) -> None:
        self._measures.checked(check.path.name, result)
        say = _log.info if result.is_passed else _log.error
        say(
            "golden_check_passed" if result.is_passed else "golden_check_failed",
            path=check.path.name,
            numeric_class=result.numeric_class,
            relative_l2=result.relative_l2,
            bound=result.bound,
            drift=result.drift,
            drift_bound=result.drift_bound,
        )

    async def _give_up(self, stopping: asyncio.Event) -> None:
        """Nothing of this worker steps or writes now: its doubtful KV goes, then the torch path is
        tried. Raises StartupError when that fails, too.
        """
        parts = self._parts
        doubtful = await parts.compute.run(parts.unvouched.all)
        pages = await self._distrusted(doubtful, stopping)
        result = await parts.compute.run(self._torch_result)
        if result is None or not result.is_passed:
            raise StartupError(
                "the golden check failed while serving, and the torch path does not pass it: the "
                "memory of this machine or this process is damaged",
                hint="a new start checks again before it serves; see docs/step_kernel.md",
            )
        was_native = parts.engine.steps_by == NATIVE
        numeric_class = await parts.compute.run(parts.engine.fall_back)
        label = replace(parts.identity.label, numeric_class=numeric_class)
        parts.identity = replace(parts.identity, label=label)
        parts.is_degraded = parts.is_degraded or was_native
        _log.error(
            "worker_degraded", serving="torch", numeric_class=str(numeric_class), pages=pages
        )

    def _torch_result(self) -> GoldenResult | None:
        """In the compute thread: the torch path's own check, at once."""
        self._parts.unvouched.forget()
        checks = self._parts.engine.checks
        if not checks:
            return None
        result = checks[-1].run()
        self._note(checks[-1], result)
        return result

    async def _distrusted(self, doubtful: Mapping[bytes, int], stopping: asyncio.Event) -> int:
        """The store gives up each log from its position on; the pages that were."""
        positions = list(doubtful.items())
        waiting = Waiting(self._kvstore, self._clock, stopping)
        pages = 0
        for start in range(0, max(len(positions), 1), DISTRUSTED_MAX):
            some = dict(positions[start : start + DISTRUSTED_MAX])
            pages += await self._distrust(some, waiting)
        return pages

    async def _distrust(self, positions: Mapping[bytes, int], waiting: Waiting) -> int:
        """One call, made again until the store has answered it."""
        parts = self._parts
        while True:
            try:
                return await parts.store.distrust(parts.identity.incarnation, positions)
            except ServiceError as error:
                if error.reason is Reason.NO_WORKER:
                    # The store came back in this moment: it has to know us first. Nothing is named
                    # as held, so that nothing is believed before it was given up.
                    await attach_when_there(parts.store, parts.identity, waiting)
                else:
                    await waiting.pause(error)

    def _damage(self) -> None:
        """Between two checks, where a test says so: what a broken memory cell does."""
        for check in self._parts.engine.checks if faults.is_enabled else ():
            faults.flip(f"worker.{check.path.name}_weights", check.path.weights_view())

"""Services start in order, stop in reverse, and never stop silently."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from baton.errors import Reason, ServiceError, StartupError
from baton.lifecycle import Service, every, run_service
from baton.rpc.deadline import deadline_scope, remaining_s
from baton.testing.clock import ManualClock
from baton.tracing import current_request_id, new_trace, request_scope


class Recorded:
    """A part that notes what is asked of it; may block or fail at one step."""

    def __init__(self, name: str, events: list[str], *, blocks: str = "", fails: str = "") -> None:
        self._name, self._events, self._blocks, self._fails = name, events, blocks, fails

    async def _step(self, step: str) -> None:
        self._events.append(f"{self._name}.{step}")
        if step == self._fails:
            raise RuntimeError(f"{self._name} fails to {step}")
        if step == self._blocks:
            await asyncio.Event().wait()

    async def start(self) -> None:
        await self._step("start")

    async def drain(self) -> None:
        await self._step("drain")

    async def stop(self) -> None:
        await self._step("stop")


@asynccontextmanager
async def _running(service: Service, *parts: Recorded) -> AsyncIterator[None]:
    """The service with these parts, ready; stopped and awaited at the end."""

    async def wire(service: Service) -> None:
        for number, part in enumerate(parts):
            await service.start(f"p{number}", part)

    async with asyncio.TaskGroup() as group, asyncio.timeout(10.0):
        running = group.create_task(service.run(wire, has_signals=False))
        assert await service.wait_ready(5.0)
        yield
        service.request_stop()
        await running


async def test_parts_start_in_order_and_stop_in_reverse() -> None:
    """What was started last may use what was started first, to the very end."""
    events: list[str] = []
    async with _running(Service("s"), Recorded("a", events), Recorded("b", events)):
        assert events == ["a.start", "b.start"]
    assert sorted(events[2:4]) == ["a.drain", "b.drain"]
    assert events[4:] == ["b.stop", "a.stop"]


async def test_readiness_spans_from_wired_to_drain() -> None:
    """Health must say no before the first part stops working."""
    changes: list[tuple[bool, list[str]]] = []
    events: list[str] = []
    service = Service("s")

    async def note(is_ready: bool) -> None:
        changes.append((is_ready, list(events)))

    service.on_ready_changed(note)
    seen = []
    async with _running(service, Recorded("a", events)):
        seen.append(service.is_ready)
    seen.append(service.is_ready)
    assert seen == [True, False]
    assert changes == [(True, ["a.start"]), (False, ["a.start"])]


async def test_a_failed_start_stops_what_was_started_and_says_why() -> None:
    """Half a service must not linger."""
    events: list[str] = []

    async def wire(service: Service) -> None:
        await service.start("a", Recorded("a", events))
        await service.start("b", Recorded("b", events, fails="start"))

    with pytest.raises(RuntimeError, match="b fails to start"):
        await Service("s").run(wire, has_signals=False)
    assert events == ["a.start", "b.start", "b.stop", "a.stop"]


async def test_a_start_that_hangs_is_given_up() -> None:
    """Every wait has a deadline, the first one too."""

    async def wire(service: Service) -> None:
        await asyncio.Event().wait()

    with pytest.raises(StartupError, match="did not start within"):
        await Service("s", start_timeout_s=0.05).run(wire, has_signals=False)


async def test_a_crashed_task_stops_the_service_with_its_error() -> None:
    """A background task that nobody awaits would die in silence."""
    events: list[str] = []

    async def crash() -> None:
        raise ValueError("boom")

    async def wire(service: Service) -> None:
        await service.start("a", Recorded("a", events))
        service.spawn("worker", crash())

    with capture_logs() as logs, pytest.raises(ValueError, match="boom"):
        await Service("s").run(wire, has_signals=False)
    assert events[-1] == "a.stop"
    assert [entry["task"] for entry in logs if entry["event"] == "task_crashed"] == ["worker"]


async def test_tasks_end_with_the_service() -> None:
    """The service returns only when nothing of it runs any more."""
    ended = asyncio.Event()
    service = Service("s")

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with _running(service):
        service.spawn("worker", work())
        # The task must run once to be cancelled inside its try.
        await service.clock.wait(ended, 0.01)
    assert ended.is_set()


async def test_tasks_inherit_no_request() -> None:
    """A task outlives the call that started it: its deadline and ids must not stick."""
    seen: list[tuple[str | None, float | None]] = []
    done = asyncio.Event()
    service = Service("s")

    async def look() -> None:
        seen.append((current_request_id(), remaining_s()))
        done.set()

    async with _running(service):
        with request_scope("r", new_trace()), deadline_scope(0.5):
            service.spawn("worker", look())
        await done.wait()
    assert seen == [(None, None)]


async def test_a_drain_ends_at_its_deadline() -> None:
    """A stuck request cannot keep a process from being replaced."""
    events: list[str] = []
    service = Service("s", drain_timeout_s=0.05)
    with capture_logs() as logs:
        async with _running(service, Recorded("a", events, blocks="drain")):
            pass
    assert events == ["a.start", "a.drain", "a.stop"]
    assert "drain_cut_short" in [entry["event"] for entry in logs]


async def test_a_second_request_to_stop_skips_the_drain() -> None:
    """Ctrl-C twice means now."""
    events: list[str] = []
    service = Service("s", drain_timeout_s=3600.0)
    async with _running(service, Recorded("a", events, blocks="drain")):
        service.request_stop()
        service.request_stop()
    assert events[-1] == "a.stop"


async def test_a_part_that_fails_or_hangs_in_stop_does_not_keep_the_others() -> None:
    """Each part gets its chance to let go."""
    events: list[str] = []
    service = Service("s", stop_timeout_s=0.05)
    with capture_logs() as logs:
        async with _running(
            service,
            Recorded("a", events),
            Recorded("b", events, blocks="stop"),
            Recorded("c", events, fails="stop"),
        ):
            pass
    assert events[-3:] == ["c.stop", "b.stop", "a.stop"]
    names = [entry["event"] for entry in logs]
    assert "part_stop_failed" in names
    assert "part_stop_timed_out" in names


async def test_every_keeps_its_rhythm_and_skips_what_it_missed() -> None:
    """A heartbeat neither drifts nor bursts after a pause."""
    clock, stopping, called = ManualClock(), asyncio.Event(), asyncio.Event()
    calls: list[float] = []
    start_s = clock.monotonic_s()

    async def action() -> None:
        calls.append(round(clock.monotonic_s() - start_s, 3))
        if len(calls) == 3:
            clock.advance(2.2)
        called.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(every(0.5, action, clock=clock, stopping=stopping))
        for _ in range(4):
            await called.wait()
            called.clear()
            await clock.until_waiting()
            clock.advance(0.5)
        await called.wait()
        stopping.set()
    assert calls == [0.0, 0.5, 1.0, 3.2, 3.7, 4.2]


def test_signals_drain_and_the_exit_code_is_clean() -> None:
    """SIGTERM is how orchestrators say goodbye."""
    events: list[str] = []

    async def wire(service: Service) -> None:
        await service.start("a", Recorded("a", events))

        async def signalled(is_ready: bool) -> None:
            if is_ready:
                os.kill(os.getpid(), signal.SIGTERM)

        service.on_ready_changed(signalled)

    assert run_service("test", wire) == 0
    assert events == ["a.start", "a.drain", "a.stop"]


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (StartupError("port 1 is taken", hint="choose another"), 1, "hint: choose another"),
        (StartupError("bad key", exit_code=2), 2, "baton-test: bad key"),
        (ServiceError(Reason.COMPAT_MISMATCH, "wrong model"), 1, "wrong model"),
    ],
)
def test_start_up_faults_become_one_clear_line(
    error: Exception, code: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A person reads this, not a traceback."""

    async def wire(service: Service) -> None:
        raise error

    assert run_service("test", wire) == code
    out = capsys.readouterr().err
    assert shown in out
    assert "Traceback" not in out


def test_a_bug_at_start_is_logged_with_its_traceback() -> None:
    """What nobody foresaw must be findable."""

    async def wire(service: Service) -> None:
        raise KeyError("surprise")

    with capture_logs() as logs:
        assert run_service("test", wire) == 1
    (entry,) = [entry for entry in logs if entry["event"] == "service_failed"]
    assert isinstance(entry["exc_info"], KeyError)

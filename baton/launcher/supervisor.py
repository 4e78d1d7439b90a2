"""Starts children, waits until they serve, restarts the ones that die, stops them all.

Owns the processes and their log files (`<run dir>/<name>.log`, `<name>.pid`). Never reads what a
child serves beyond its health. A child that fails before it is ready ends the start, reported once
with its cause, a hint and its log; one that dies later is started again, and given up only when it
dies again and again before it has served for a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import grpc
import httpx

from baton.launcher.plan import ChildSpec
from baton.process_files import write_private
from baton.rpc.health import is_serving

RESTARTS_MAX: Final = 5
RESTART_WINDOW_S: Final = 60.0
STEADY_S: Final = 2.0
"""A child that served so long and died was killed, or met something: it is always started again."""
RESTART_PAUSE_S: Final = 0.5
FIRST_RESTART_PAUSE_S: Final = 0.05
PROBE_INTERVAL_S: Final = 0.1
PROBE_TIMEOUT_S: Final = 2.0
STOP_TIMEOUT_S: Final = 20.0
"""A service drains for up to 10 s after SIGTERM and then lets go of its parts: not cut short."""
KILL_TIMEOUT_S: Final = 5.0
CAUSE_PREFIXES: Final = ("baton-", "error")
HINT_PREFIX: Final = "hint:"
LOG_TAIL_BYTES: Final = 16_384


class ChildState(StrEnum):
    """Where a child stands."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class ClusterFailed(Exception):
    """A child could not be kept running; the message has cause, hint and log file."""


@dataclass(slots=True, kw_only=True)
class Child:
    """One supervised process."""

    spec: ChildSpec
    log_path: Path
    pid_path: Path
    state: ChildState = ChildState.STARTING
    process: asyncio.subprocess.Process | None = None
    started_s: float = 0.0
    ready_after_s: float | None = None
    restarts: int = 0
    ready_s: float | None = None

    def has_served_steadily(self, now_s: float) -> bool:
        """Whether this run of it was ready for a while."""
        return self.ready_s is not None and now_s - self.ready_s >= STEADY_S


class Supervisor:
    """Runs a plan. Use as `async with Supervisor(...) as cluster`, then `await cluster.wait()`."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        run_dir: Path,
        *,
        on_change: Callable[[Child], None] = lambda child: None,
        ready_timeout_s: float = 120.0,
    ) -> None:
        self._on_change = on_change
        self._ready_timeout_s = ready_timeout_s
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.children = [
            Child(
                spec=spec,
                log_path=run_dir / f"{spec.name}.log",
                pid_path=run_dir / f"{spec.name}.pid",
            )
            for spec in specs
        ]

    async def __aenter__(self) -> Supervisor:
        """Start every child and wait until all serve; on failure all are stopped again."""
        is_up = False
        try:
            await self._start_all()
            is_up = True
        finally:
            if not is_up:
                await self.stop()
        return self

    async def _start_all(self) -> None:
        try:
            async with asyncio.timeout(self._ready_timeout_s), asyncio.TaskGroup() as group:
                for child in self.children:
                    await self._spawn(child)
                    group.create_task(self._become_ready(child))
        except* ClusterFailed as failures:
            raise failures.exceptions[0] from None
        except* TimeoutError:
            raise self._too_slow() from None

    async def __aexit__(self, *_exc: object) -> None:
        await self.stop()

    def child(self, name: str) -> Child:
        """The child called `name`."""
        return next(child for child in self.children if child.spec.name == name)

    async def wait(self) -> None:
        """Watch the children until `stop`; raises ClusterFailed for one that keeps dying."""
        try:
            async with asyncio.TaskGroup() as group:
                for child in self.children:
                    group.create_task(self._keep(child))
        except* ClusterFailed as failures:
            raise failures.exceptions[0] from None

    async def stop(self) -> None:
        """Stop everything: the doors first, the store last; each gets a grace, then is killed."""
        self._stopping.set()
        order = ("gateway", "decode", "prefill", "merger", "kvstore")
        for service in order:
            group = [c for c in self.children if c.spec.name.rpartition("-")[0] == service]
            await asyncio.gather(*(self._stop_child(child) for child in group))

    def _too_slow(self) -> ClusterFailed:
        late = next(c for c in self.children if c.ready_after_s is None)
        return ClusterFailed(
            f"{late.spec.name} was not ready within {self._ready_timeout_s:g} s; "
            f"last line: {last_words(late.log_path) or 'none'}; log: {late.log_path}"
        )

    async def _spawn(self, child: Child) -> None:
        argv = (sys.executable, "-m", "baton.launcher.child", str(os.getpid()), child.spec.module)
        child.log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with child.log_path.open("ab") as log:
            child.process = await asyncio.create_subprocess_exec(
                *argv,
                *child.spec.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **child.spec.environment},
                # Ctrl-C in a terminal goes to the whole group; the order of the end is ours.
                start_new_session=True,
            )
        # Whole or not at all: whoever reads it sends signals to what it says.
        write_private(child.pid_path, f"{child.process.pid}\n".encode("ascii"))
        child.started_s, child.ready_s = time.monotonic(), None
        self._change(child, ChildState.STARTING)

    async def _become_ready(self, child: Child) -> None:
        """Return when the child serves; raises ClusterFailed when it exits first."""
        assert child.process is not None
        async with asyncio.TaskGroup() as group:
            exited = group.create_task(child.process.wait())
            served = group.create_task(self._probe_until_ready(child))
            await asyncio.wait((exited, served), return_when=asyncio.FIRST_COMPLETED)
            exited.cancel()
            served.cancel()
        # Outside the group, so that the caller sees one error and no exception group.
        if child.process.returncode is not None:
            self._change(child, ChildState.FAILED)
            raise ClusterFailed(_cause(child, child.process.returncode))
        if self._stopping.is_set():
            raise ClusterFailed(f"{child.spec.name} was stopped before it was ready")
        child.ready_s = time.monotonic()
        child.ready_after_s = child.ready_s - child.started_s
        self._change(child, ChildState.READY)

    async def _probe_until_ready(self, child: Child) -> None:
        async with grpc.aio.insecure_channel(child.spec.grpc_address) as channel:
            while not self._stopping.is_set() and not await is_serving(channel, PROBE_TIMEOUT_S):
                await self._pause(PROBE_INTERVAL_S)
        if child.spec.ready_url is not None:
            async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False) as client:
                while not self._stopping.is_set() and not await _answers_ok(
                    client, child.spec.ready_url
                ):
                    await self._pause(PROBE_INTERVAL_S)

    async def _keep(self, child: Child) -> None:
        """Restart the child whenever it dies; only so often in a window when it never serves."""
        deaths: list[float] = []
        while not self._stopping.is_set():
            assert child.process is not None
            code = await child.process.wait()
            if self._stopping.is_set():
                return
            now = time.monotonic()
            if child.has_served_steadily(now):
                deaths.clear()
            deaths = [at for at in deaths if now - at < RESTART_WINDOW_S] + [now]
            if len(deaths) > RESTARTS_MAX:
                self._change(child, ChildState.FAILED)
                raise ClusterFailed(f"{_cause(child, code)}; it died {len(deaths)} times in a row")
            self._change(child, ChildState.RESTARTING)
            # Streams wait for it; one that dies again and again is given a rest.
            await self._pause(RESTART_PAUSE_S if len(deaths) > 1 else FIRST_RESTART_PAUSE_S)
            if self._stopping.is_set():
                return
            child.restarts += 1
            await self._spawn(child)
            await self._become_ready_or_die(child)

    async def _become_ready_or_die(self, child: Child) -> None:
        """A restarted child either serves or is dead, so that `_keep` counts it."""
        assert child.process is not None
        with contextlib.suppress(ClusterFailed, TimeoutError):
            async with asyncio.timeout(self._ready_timeout_s):
                await self._become_ready(child)
                return
        if child.process.returncode is None:
            child.process.kill()

    async def _pause(self, seconds: float) -> None:
        """Wait between two probes, or until the end."""
        # Not wait_for: it swallows a cancel that arrives when the event is set already.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _stop_child(self, child: Child) -> None:
        process = child.process
        if process is None or child.state is ChildState.STOPPED:
            return
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await asyncio.wait_for(process.wait(), KILL_TIMEOUT_S)
        child.pid_path.unlink(missing_ok=True)
        if child.state is not ChildState.FAILED:
            self._change(child, ChildState.STOPPED)

    def _change(self, child: Child, state: ChildState) -> None:
        child.state = state
        self._on_change(child)


async def _answers_ok(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def last_words(path: Path) -> str | None:
    """Why a process ended, from the end of its log; None for an empty log.

    Services end with `<program>: <cause>` and perhaps a hint under it; without such lines it is the
    last line.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as log:
            log.seek(max(0, size - LOG_TAIL_BYTES))
            lines = log.read(LOG_TAIL_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    told = [line.strip() for line in lines if line.strip()]
    for index in range(len(told) - 1, -1, -1):
        if told[index].startswith(CAUSE_PREFIXES):
            hint = told[index + 1] if index + 1 < len(told) else ""
            return f"{told[index]}; {hint}" if hint.startswith(HINT_PREFIX) else told[index]
    return told[-1] if told else None


def _cause(child: Child, code: int) -> str:
    how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    line = last_words(child.log_path) or "it wrote nothing"
    return f"{child.spec.name} {how}: {line}\n  log: {child.log_path}"

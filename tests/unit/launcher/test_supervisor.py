"""Supervision: readiness, a child that dies before and after it, the order of the end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path

import pytest

from baton.launcher import supervisor as supervision
from baton.launcher.plan import ChildSpec
from baton.launcher.ports import PortReservation
from baton.launcher.rundir import RunDir, RunDirBusy, running_pid
from baton.launcher.supervisor import (
    Child,
    ChildState,
    ClusterFailed,
    Supervisor,
    last_words,
)

FAILING = """
import sys
sys.stderr.write('{"event": "started"}\\n')
sys.exit("baton-failing: the arena does not fit\\n  hint: give a smaller one")
"""

SERVING = """
import asyncio, signal, sys
from baton.rpc.server import ServerOptions, build_server

async def main():
    server = build_server(ServerOptions(bind=sys.argv[1]))
    await server.start()
    await server.set_ready(True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await asyncio.wait_for(stop.wait(), 60)
    await server.stop()

asyncio.run(main())
"""


WAITING = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
signal.sigtimedwait({signal.SIGTERM}, 60)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Child modules that a test can start by name."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "failing_child.py").write_text(FAILING)
    (folder / "serving_child.py").write_text(SERVING)
    (folder / "waiting_child.py").write_text(WAITING)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def spec(name: str, module: str) -> ChildSpec:
    """A child on a free port."""
    ports = PortReservation("127.0.0.1")
    address = f"127.0.0.1:{ports.next_port()}"
    ports.release()
    return ChildSpec(name=name, module=module, arguments=(address,), grpc_address=address)


async def test_a_child_that_fails_at_the_start_is_reported_once(
    modules: Path, tmp_path: Path
) -> None:
    """Cause, hint and log in one message; the others are stopped again."""
    specs = [spec("kvstore-0", "failing_child"), spec("decode-0", "serving_child")]
    cluster = Supervisor(specs, tmp_path / "run", ready_timeout_s=60)
    with pytest.raises(ClusterFailed) as failed:
        async with cluster:
            pytest.fail("it must not become ready")
    assert "kvstore-0 exited with code 1: baton-failing: the arena does not fit" in str(
        failed.value
    )
    assert "hint: give a smaller one" in str(failed.value)
    assert "kvstore-0.log" in str(failed.value)
    process = cluster.child("decode-0").process
    assert process is not None
    assert process.returncode is not None


async def test_a_child_that_dies_is_started_again(modules: Path, tmp_path: Path) -> None:
    """A worker's death is a pause: the supervisor brings it back under the same address."""
    seen: list[ChildState] = []
    is_back = asyncio.Event()

    def note(child: Child) -> None:
        seen.append(child.state)
        if child.state is ChildState.READY and child.restarts == 1:
            is_back.set()

    specs = [spec("decode-0", "serving_child")]
    supervisor = Supervisor(specs, tmp_path / "run", on_change=note, ready_timeout_s=60)
    async with supervisor as cluster, asyncio.TaskGroup() as group:
        watching = group.create_task(cluster.wait())
        process = cluster.child("decode-0").process
        assert process is not None
        process.kill()
        await asyncio.wait_for(is_back.wait(), 60)
        await cluster.stop()
        await watching
    assert ChildState.RESTARTING in seen
    assert seen[-1] is ChildState.STOPPED


@pytest.mark.parametrize(("steady_s", "deaths"), [(60.0, 2), (0.0, 4)])
async def test_only_a_child_that_never_serves_for_long_is_given_up(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steady_s: float, deaths: int
) -> None:
    """Killed as soon as it serves, it is given up after a while; one that served is not."""
    monkeypatch.setattr(supervision, "STEADY_S", steady_s)
    monkeypatch.setattr(supervision, "RESTARTS_MAX", 1)

    def kill_when_ready(child: Child) -> None:
        if child.state is ChildState.READY and child.restarts < deaths:
            assert child.process is not None
            child.process.kill()
        elif child.restarts == deaths:
            is_enough.set()

    is_enough = asyncio.Event()
    specs = [spec("decode-0", "serving_child")]
    supervisor = Supervisor(specs, tmp_path / "run", on_change=kill_when_ready)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group, supervisor as cluster:
        watching = group.create_task(_failure_of(cluster.wait()))
        if steady_s:
            assert "died 2 times" in str(await watching)
        else:
            await is_enough.wait()
            await cluster.stop()
            assert await watching is None


async def test_a_stop_during_the_start_ends_it(modules: Path, tmp_path: Path) -> None:
    """A child that never serves is waited for no longer once somebody stops the cluster."""
    is_started = asyncio.Event()
    cluster = Supervisor(
        [spec("decode-0", "waiting_child")],
        tmp_path / "run",
        on_change=lambda child: is_started.set(),
        ready_timeout_s=60,
    )

    async def start() -> None:
        async with cluster:
            pytest.fail("it must not become ready")

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        starting = group.create_task(_failure_of(start()))
        await is_started.wait()
        await cluster.stop()
        assert isinstance(await starting, ClusterFailed)


async def _failure_of(work: Coroutine[None, None, None]) -> Exception | None:
    try:
        await work
    except ClusterFailed as failure:
        return failure
    return None


async def test_nothing_is_left_after_the_end(modules: Path, tmp_path: Path) -> None:
    """Processes and pid files are gone; logs stay."""
    async with Supervisor(
        [spec("decode-0", "serving_child")], tmp_path / "run", ready_timeout_s=60
    ) as cluster:
        child = cluster.child("decode-0")
        assert child.pid_path.read_text().strip().isdigit()
    assert child.process is not None
    assert child.process.returncode == 0
    assert not child.pid_path.exists()
    assert child.log_path.exists()


def test_last_words_prefer_the_cause_over_the_last_line(tmp_path: Path) -> None:
    """A process may log more after it said why it ends."""
    log = tmp_path / "x.log"
    log.write_text('{"a": 1}\nbaton-kvstore: no room\n  hint: free some\n{"event": "bye"}\n')
    assert last_words(log) == "baton-kvstore: no room; hint: free some"
    log.write_text("Traceback\nValueError: x\n")
    assert last_words(log) == "ValueError: x"
    log.write_text("")
    assert last_words(log) is None
    assert last_words(tmp_path / "missing.log") is None


def test_one_cluster_per_run_directory(tmp_path: Path) -> None:
    """The second is told who holds it; afterwards it is free again."""
    with RunDir(tmp_path) as held:
        assert len(held.key()) == 32
        assert (held.key_file().stat().st_mode & 0o777) == 0o600
        assert running_pid(tmp_path) == os.getpid()
        with pytest.raises(RunDirBusy, match="already runs"), RunDir(tmp_path):
            pytest.fail("two clusters in one directory")
    assert running_pid(tmp_path) is None
    with RunDir(tmp_path) as again:
        assert again.key() == held.key()

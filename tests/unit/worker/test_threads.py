"""The compute thread: results, order, and a cancel that waits for the job it cannot stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from baton.worker.threads import Progress, WorkThread


async def test_jobs_run_in_one_named_thread_in_order() -> None:
    """Torch is used from one thread at a time."""
    thread = WorkThread("engine")
    names: list[tuple[int, str]] = []

    def job(index: int) -> Callable[[], None]:
        return lambda: names.append((index, threading.current_thread().name))

    async with asyncio.TaskGroup() as group:
        for index in range(3):
            group.create_task(thread.run(job(index)))
    thread.close()
    assert [index for index, _ in names] == [0, 1, 2]
    assert len({name for _, name in names}) == 1
    assert names[0][1].startswith("engine")
    assert thread.running == 0


async def test_a_job_s_error_is_the_caller_s() -> None:
    """And the thread goes on."""
    thread = WorkThread("engine")

    def fails() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await thread.run(fails)
    assert await thread.run(lambda: 5) == 5
    thread.close()


async def test_a_cancelled_caller_waits_until_the_job_has_ended() -> None:
    """The job writes pages: they must not be given back while it runs, however often it is
    cancelled.
    """
    thread = WorkThread("engine")
    started, stop = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    ended: list[str] = []

    def job() -> None:
        loop.call_soon_threadsafe(started.set)
        assert stop.wait(5.0)
        ended.append("job")

    asked = asyncio.Event()

    async def caller() -> None:
        try:
            await thread.run(job, on_cancel=asked.set)
        finally:
            ended.append("caller")

    async with asyncio.TaskGroup() as group:
        task = group.create_task(caller())
        await started.wait()
        task.cancel()
        await asked.wait()
        task.cancel()
        assert ended == []
        assert thread.running == 1
        stop.set()
    assert ended == ["job", "caller"]
    assert task.cancelled()
    thread.close()


def test_progress_grows_by_work_and_by_idling() -> None:
    """Both count; a stuck worker does neither."""
    progress = Progress()
    before = progress.value
    progress.worked()
    progress.idled()
    assert progress.value == before + 2

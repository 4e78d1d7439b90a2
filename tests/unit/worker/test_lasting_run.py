"""A prompt's run over lost stores: parked, come back at the next generation, gone on with."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from baton.arena.replay import HeldLog
from baton.errors import Reason, ServiceError
from baton.worker.held_logs import HeldLogs
from baton.worker.lasting_run import LastingRun, RunSteps

LOG_ID = b"l" * 16
LOST = ServiceError(Reason.WORKER_LOST, "the connection broke")


def log_at(generation: int) -> HeldLog:
    """The log under a generation."""
    return HeldLog(log_id=LOG_ID, generation=generation)


def view_at(generation: int, *, is_sealed: bool = False) -> Any:
    """A replay of it."""
    head = SimpleNamespace(generation=generation, held=log_at(generation), is_sealed=is_sealed)
    return SimpleNamespace(head=head)


class Run:
    """Stands for a `PromptRun`; ends when it is let or stopped."""

    def __init__(self, view: Any) -> None:
        self.generation = view.head.generation
        self.missing_tokens = 0
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def stop(self, because: ServiceError) -> None:
        """As a run between two layers."""
        if not self.ended.done():
            self.ended.set_exception(because)


class Stage:
    """A run's surroundings: what was begun, what replays say."""

    def __init__(self) -> None:
        self.held = HeldLogs()
        self.runs: list[Run] = []
        self.replays: list[Any] = []
        self.lost: list[Reason] = []
        parts: Any = SimpleNamespace(held=self.held, store_patience_s=5.0)
        steps: RunSteps[str] = RunSteps(
            begin=self._begin,
            work=self._work,
            sealed=lambda view: f"sealed at {view.head.generation}",
            replay=self._replay,
            on_lost=self._lost,
        )
        self.lasting: LastingRun[str] = LastingRun(parts, view_at(1), steps)

    def _begin(self, view: Any) -> Any:
        self.runs.append(Run(view))
        return self.runs[-1]

    async def _work(self, run: Any, _view: Any) -> str:
        return f"{await run.ended} at {run.generation}"

    async def _replay(self, log: HeldLog) -> Any:
        found = self.replays.pop(0)
        if isinstance(found, ServiceError):
            raise found
        assert found.head.generation == log.generation
        return found

    def _lost(self, error: ServiceError) -> None:
        self.lost.append(error.reason)
        self.lasting.stop(error)

    async def parked(self) -> None:
        """Until its log waits for the store."""
        assert await self.held.wait_none_writing(5.0)
        assert self.held.parked() == self.held.logs() != []


async def test_run_goes_on_under_the_next_generation() -> None:
    """Its store told of the loss, or its calls failed: it makes no difference."""
    stage = Stage()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(stage.lasting.run())
        await asyncio.to_thread(int)
        stage.held.lose_store()
        await stage.parked()
        stage.replays.append(view_at(2))
        stage.held.return_kept([log_at(2)])
        while len(stage.runs) < 2:
            await asyncio.to_thread(int)
        stage.runs[1].ended.set_exception(LOST)
        await stage.parked()
        stage.replays.append(view_at(4))
        stage.held.return_kept([log_at(4)])
        while len(stage.runs) < 3:
            await asyncio.to_thread(int)
        stage.runs[2].ended.set_result("done")
    assert running.result().result == "done at 4"
    assert stage.held.logs() == [log_at(4)], "held until its owner lets go"


async def test_store_that_dies_again_during_the_replay_is_waited_for_again() -> None:
    """The log is still parked under the generation that came last."""
    stage = Stage()
    stage.replays += [LOST, view_at(3)]
    async with asyncio.TaskGroup() as group:
        running = group.create_task(stage.lasting.run())
        stage.runs[0].stop(LOST)
        await stage_parked(stage)
        stage.held.return_kept([log_at(2)])
        while stage.held.logs() != [log_at(2)] or not stage.held.parked():
            await asyncio.to_thread(int)
        stage.held.return_kept([log_at(3)])
        while len(stage.runs) < 2:
            await asyncio.to_thread(int)
        stage.runs[1].ended.set_result("done")
    assert running.result().result == "done at 3"


async def stage_parked(stage: Stage) -> None:
    """Until the log that is held is parked."""
    async with asyncio.timeout(5.0):
        while not stage.held.parked():
            await asyncio.to_thread(int)


async def test_seal_that_reached_the_log_is_not_made_twice() -> None:
    """The ack was lost with the store; the log says that the prompt is complete."""
    stage = Stage()
    stage.replays.append(view_at(2, is_sealed=True))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(stage.lasting.run())
        stage.runs[0].stop(LOST)
        await stage_parked(stage)
        stage.held.return_kept([log_at(2)])
    assert running.result().result == "sealed at 2"
    assert len(stage.runs) == 1


async def test_cancel_while_it_waits_ends_it_at_once() -> None:
    """Nothing of it is begun again, and the log is let go."""
    stage = Stage()
    cancelled = ServiceError(Reason.CANCELLED, "the request was cancelled")
    async with asyncio.TaskGroup() as group:
        running = group.create_task(failure_of(stage))
        stage.runs[0].stop(LOST)
        await stage_parked(stage)
        stage.lasting.stop(cancelled)
    assert running.result() is Reason.CANCELLED
    assert stage.held.logs() == []


async def test_log_that_is_anothers_by_now_is_not_taken_back() -> None:
    """The store said so at the attach."""
    stage = Stage()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(failure_of(stage))
        stage.runs[0].stop(LOST)
        await stage_parked(stage)
        stage.held.return_kept([])
    assert running.result() is Reason.STALE_GENERATION
    assert stage.held.logs() == []


async def test_refusal_is_no_lost_store() -> None:
    """It fails with what the store said."""
    stage = Stage()
    stage.runs[0].stop(ServiceError(Reason.PAGES_EXHAUSTED, "no page"))
    assert await failure_of(stage) is Reason.PAGES_EXHAUSTED
    assert stage.held.logs() == []


async def failure_of(stage: Stage) -> Reason:
    """Why the run failed."""
    with pytest.raises(ServiceError) as failed:
        await stage.lasting.run()
    return failed.value.reason

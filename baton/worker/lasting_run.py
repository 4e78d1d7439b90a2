"""A prompt's run that outlives the kvstore it writes to: what was committed stays.

Owns the order: a run whose store is gone stops between two layers, its log is parked, and once this
worker is attached again a new run goes on where the log's KV ends, under the log's new generation.
Never takes a log that is another's by now: that run fails with what the store said.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from baton.arena.replay import HeldLog, LogView
from baton.errors import ServiceError
from baton.worker.engine import WorkerParts
from baton.worker.held_logs import STORE_GONE, OnLost, store_lost
from baton.worker.prompt_run import PromptRun

Result = TypeVar("Result")

_log = structlog.stdlib.get_logger("baton.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSteps(Generic[Result]):
    """What a run is made of. `begin` makes the run that goes on from a view, `work` does all of it;
    `sealed` is the result of a run whose seal had reached the log although its ack did not come.
    `on_lost` is told when the log is another's by now, and has to `stop` the run.
    """

    begin: Callable[[LogView], PromptRun]
    work: Callable[[PromptRun, LogView], Awaitable[Result]]
    sealed: Callable[[LogView], Result]
    replay: Callable[[HeldLog], Awaitable[LogView]]
    on_lost: OnLost


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun(Generic[Result]):
    """How it ended: the newest view and run. The log is still held."""

    view: LogView
    run: PromptRun
    result: Result


class LastingRun(Generic[Result]):
    """One log's run, over as many stores as it takes. `view` is its replay at the start."""

    def __init__(self, parts: WorkerParts, view: LogView, steps: RunSteps[Result]) -> None:
        self._parts = parts
        self._steps = steps
        self._view = view
        self._log = view.head.held
        self._run = steps.begin(view)
        self._is_store_lost = False
        self._stopped_by: ServiceError | None = None

    @property
    def missing_tokens(self) -> int:
        """Positions whose KV was not committed when the newest run began."""
        return self._run.missing_tokens

    def stop(self, because: ServiceError) -> None:
        """End between two layers, or at once when it waits for the store. The first cause stays."""
        if self._stopped_by is None:
            self._stopped_by = because
            self._run.stop(because)
            self._parts.held.refuse(self._log, because)

    async def run(self) -> EndedRun[Result]:
        """The run's end. The log is held when it returns, and let go when it raises."""
        self._parts.held.add(self._log, self._steps.on_lost, self._lose_store)
        is_ended = False
        try:
            ended = await self._until_done()
            is_ended = True
            return ended
        finally:
            if not is_ended:
                self._parts.held.discard(self._log)

    async def _until_done(self) -> EndedRun[Result]:
        while True:
            try:
                result = await self._attempt()
                return EndedRun(view=self._view, run=self._run, result=result)
            except ServiceError as error:
                self._require_passing(error)
                await self._wait_for_store(error)

    async def _attempt(self) -> Result:
        if self._view.head.generation != self._log.generation:
            self._view = await self._steps.replay(self._log)
            self._is_store_lost = False
            if not self._view.head.is_sealed:
                self._run = self._steps.begin(self._view)
                if self._stopped_by is not None:
                    raise self._stopped_by
        if self._view.head.is_sealed:
            return self._steps.sealed(self._view)
        return await self._steps.work(self._run, self._view)

    def _require_passing(self, error: ServiceError) -> None:
        """Only the loss of the store is waited out."""
        if self._stopped_by is not None:
            raise self._stopped_by
        if not self._is_store_lost and error.reason not in STORE_GONE:
            raise error

    async def _wait_for_store(self, error: ServiceError) -> None:
        _log.info("run_parked", reason=error.reason.value)
        # A store that is lost once more while the log is replayed finds it parked again.
        self._log = await self._parts.held.back(self._log, self._parts.store_patience_s)
        _log.info("run_goes_on", generation=self._log.generation)

    def _lose_store(self) -> None:
        self._is_store_lost = True
        self._run.stop(store_lost())

"""The loop over all sequences: who leaves it without ever having stepped."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.arena.replay import HeldLog
from baton.clock import SystemClock
from baton.errors import Reason, ServiceError
from baton.metrics import Metrics
from baton.scheduling.claims import Claim
from services.decode.events import Failed, StartOrder
from services.decode.joining import Joiner
from services.decode.measures import DecodeMeasures
from services.decode.outbox import Outbox
from services.decode.runner import Runner, RunnerTools
from services.decode.scheduler import SlotScheduler

ORDER = StartOrder(
    claim=Claim(request_id="r"),
    log=HeldLog(log_id=bytes(16), generation=1),
    capability="",
    next_index=1,
    is_local_prefill=False,
)


class EndlessJoiner:
    """A joiner whose store never answers; it counts the joins that really began."""

    def __init__(self) -> None:
        self.began = 0
        self._answer = asyncio.Event()

    async def join(self, order: StartOrder, holder: object) -> object:
        """Waits until it is cancelled."""
        self.began += 1
        await self._answer.wait()
        raise AssertionError("nothing answers")

    def stepped(self, seconds: float, sequences: int) -> None:
        """Nothing to learn."""

    def idled(self) -> None:
        """Nothing to learn."""


def runner_with(joiner: EndlessJoiner) -> Runner:
    """A loop with one slot, whose other parts are never reached."""
    return Runner(
        RunnerTools(
            parts=cast(Any, SimpleNamespace(worker_id="decode-0", context_max=64)),
            slots=SlotScheduler(1),
            appends=cast(Any, SimpleNamespace(close=lambda: None)),
            joiner=cast(Joiner, joiner),
            measures=DecodeMeasures(Metrics("decode")),
            clock=SystemClock(),
        )
    )


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_join_that_is_cancelled_leaves_nothing_behind(is_begun: bool) -> None:
    """A task cancelled before its first step runs none of its own clean-up: the loop does it."""
    joiner, stopping, outbox = EndlessJoiner(), asyncio.Event(), Outbox("g")
    runner = runner_with(joiner)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(runner.run(stopping))
        await one_turn()
        runner.start(ORDER, outbox)
        while is_begun and not joiner.began:
            await one_turn()
        assert runner.active == 1
        assert runner.cancel(ORDER.request_id)
        events = await outbox.take()
        stopping.set()
    assert joiner.began == is_begun
    failures = [event.what for event in events]
    assert [reason_of(one) for one in failures] == [Reason.CANCELLED]
    assert runner.active == 0


def reason_of(what: object) -> Reason:
    """Why a sequence failed."""
    assert isinstance(what, Failed)
    assert isinstance(what.error, ServiceError)
    return what.error.reason


async def one_turn() -> None:
    """Let every other task run once."""
    await asyncio.sleep(0)  # noqa: TID251 - yields, waits for nothing

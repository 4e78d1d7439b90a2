"""Batches from the side of the tasks that wait for them: merged, isolated, and safe to cancel."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from baton.engine.prompt_chunk import PromptChunk
from baton.engine.transformer import ComputeCancelled
from baton.errors import Reason, ServiceError
from baton.scheduling.claims import Claim
from baton.worker.chunk_compute import ChunkWork, ComputedChunk
from baton.worker.threads import WorkThread
from services.prefill.scheduler import PromptScheduler
from services.prefill.turns import PromptTurns, Turns

TIMEOUT_S = 30.0


class Engine:
    """Answers with a chunk's first token; waits at `gate` and refuses the token 666."""

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def prefill_batch(self, chunks: Sequence[PromptChunk]) -> list[Any]:
        self._begin([chunk.tokens[0] for chunk in chunks])
        if all(chunk.should_cancel is not None and chunk.should_cancel() for chunk in chunks):
            raise ComputeCancelled
        return [np.array([chunk.tokens[0]], dtype=np.float32) for chunk in chunks]

    def _begin(self, first_tokens: list[int]) -> None:
        self.passes.append(first_tokens)
        assert self.gate.wait(TIMEOUT_S)
        if 666 in first_tokens:
            raise ServiceError(Reason.INVALID_REQUEST, "this token is not computed")


class Bench:
    """Turns over a scripted engine in a real thread."""

    def __init__(self, interleave: int = 8, batch: int = 512) -> None:
        self.engine = Engine()
        self.thread = WorkThread("test-compute")
        self.turns = Turns(
            PromptScheduler(queue_depth_max=8, interleave_max=interleave, batch_tokens=batch)
        )
        self.stopped: set[int] = set()
        self.begun: list[int] = []
        self.has_begun = threading.Event()

    def work(self, token: int, tokens: int = 1) -> ChunkWork:
        """A chunk whose first token is `token`."""

        def begin() -> None:
            self.begun.append(token)
            self.has_begun.set()

        return ChunkWork(
            chunk=PromptChunk(
                tokens=[token] * tokens,
                first_position=0,
                page_table=[0],
                wants_logits=True,
                should_cancel=lambda: token in self.stopped,
            ),
            begin=begin,
            stop=lambda: self.stopped.add(token),
        )

    async def compute(self, token: int, tokens: int = 1) -> ComputedChunk:
        """One prompt of one chunk."""
        engine: Any = self.engine
        with self.turns.entered(Claim(request_id=str(token))):
            mine = PromptTurns(self.turns, str(token), self.thread, engine)
            return await mine.compute(self.work(token, tokens))

    async def is_under_way(self) -> None:
        """Returns once a pass has begun."""
        assert await asyncio.to_thread(self.has_begun.wait, TIMEOUT_S)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.engine.gate.set()
    made.thread.close()


async def gathered(*waits: Any) -> list[Any]:
    """All outcomes, exceptions included."""
    return await asyncio.gather(*waits, return_exceptions=True)


async def test_prompts_that_ask_together_are_computed_together(bench: Bench) -> None:
    """One pass, and to each its own logits."""
    found = await gathered(bench.compute(1), bench.compute(2), bench.compute(3))
    assert [one.logits[0] for one in found] == [1, 2, 3]
    assert bench.engine.passes == [[1, 2, 3]]
    assert len({one.began_s for one in found}) == 1
    assert await bench.turns.wait_empty(TIMEOUT_S)


async def test_a_batch_stays_together_chunk_after_chunk(bench: Bench) -> None:
    """Whoever is first to ask again waits for the others' wish."""
    engine: Any = bench.engine

    async def prompt(token: int, chunks: int) -> None:
        with bench.turns.entered(Claim(request_id=str(token))):
            mine = PromptTurns(bench.turns, str(token), bench.thread, engine)
            for _ in range(chunks):
                await mine.compute(bench.work(token))

    await asyncio.gather(prompt(1, 3), prompt(2, 2))
    assert bench.engine.passes == [[1, 2], [1, 2], [1]]


async def test_what_is_refused_is_refused_to_whom_it_concerns(bench: Bench) -> None:
    """The others of its pass get their logits, from passes of their own."""
    good, bad = await gathered(bench.compute(1), bench.compute(666))
    assert good.logits[0] == 1
    assert isinstance(bad, ServiceError)
    assert bad.reason is Reason.INVALID_REQUEST


async def test_a_waiting_prompt_can_be_refused(bench: Bench) -> None:
    """Cancel reaches prompts that wait, not only those that compute."""
    bench.engine.gate.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(bench.compute(1))
        await bench.is_under_way()
        waiting = group.create_task(gathered(bench.compute(2)))
        await until(lambda: len(bench.turns.scheduler) == 2)
        bench.turns.refuse("2", ServiceError(Reason.CANCELLED, "enough"))
        refused = (await waiting)[0]
        bench.engine.gate.set()
    assert isinstance(refused, ServiceError)
    assert bench.begun == [1]


@pytest.mark.parametrize("leaves", [1, 2])
async def test_one_that_leaves_a_pass_waits_for_its_end_and_costs_the_other_nothing(
    bench: Bench, leaves: int
) -> None:
    """Its pages are given back after it: nothing may still write them. Leader or not."""
    bench.engine.gate.clear()
    async with asyncio.TaskGroup() as group:
        tasks = {token: group.create_task(bench.compute(token)) for token in (1, 2)}
        await bench.is_under_way()
        tasks[leaves].cancel()
        await until(lambda: leaves in bench.stopped)
        assert not tasks[leaves].done()
        bench.engine.gate.set()
    stayed = tasks[3 - leaves].result()
    assert stayed.logits is not None
    assert stayed.logits[0] == 3 - leaves
    assert tasks[leaves].cancelled()
    assert bench.engine.passes == [[1, 2]]
    assert await bench.turns.wait_empty(TIMEOUT_S)


async def test_a_leader_cancelled_before_it_began_leaves_the_pass_to_the_others(
    bench: Bench,
) -> None:
    """Chosen and cancelled in the same moment."""
    async with asyncio.TaskGroup() as group:
        first = group.create_task(bench.compute(1))
        second = group.create_task(bench.compute(2))
        await until(lambda: bool(bench.turns.scheduler.batch))
        first.cancel()
    assert second.result().logits is not None
    assert first.cancelled()
    assert await bench.turns.wait_empty(TIMEOUT_S)


async def test_a_measured_rate_is_that_of_whole_passes(bench: Bench) -> None:
    """Heartbeats divide pending tokens by it: prompts together are not slower than one."""
    await gathered(bench.compute(1, 100), bench.compute(2, 50))
    assert bench.turns.token_rate > 0.0


async def test_waiting_for_an_empty_worker_has_a_deadline(bench: Bench) -> None:
    """Drain reports what was left instead of waiting for ever."""
    with bench.turns.entered(Claim(request_id="a")):
        assert not await bench.turns.wait_empty(0.001)


async def until(condition: Callable[[], bool]) -> None:
    """Lets the other tasks run until it is so."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0)  # noqa: TID251 - yields, waits for nothing

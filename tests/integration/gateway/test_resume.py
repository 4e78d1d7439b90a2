"""An answer goes on: over any number of lost workers, over a cut connection, off a worker that
drains; and a request that kills its workers does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from baton.clock import SystemClock
from baton.testing.fault_proxy import FaultProxy
from services.gateway.recovery import LOSSES_IN_A_ROW_MAX
from tests.integration.gateway.conftest import RunningGateway

CHAT = "/v1/chat/completions"
BEAT_S = 0.1


def chat(tokens: int) -> dict[str, Any]:
    """A request for so many tokens."""
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "count"}],
        "max_tokens": tokens,
    }


@asynccontextmanager
async def beating(gateway: RunningGateway) -> AsyncIterator[None]:
    """Workers are heard all the time: a doubt about one ends soon after its stream broke."""
    is_over = asyncio.Event()
    clock = SystemClock()

    async def beat() -> None:
        while not await clock.wait(is_over, BEAT_S):
            await gateway.beat()

    async with asyncio.TaskGroup() as group:
        group.create_task(beat())
        try:
            yield
        finally:
            is_over.set()


def text_of(answer: httpx.Response) -> str:
    """What the answer says."""
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.more
async def test_an_answer_outlives_as_many_losses_as_there_are_tokens_between(
    gateway: RunningGateway,
) -> None:
    """Both workers lost at each of seven tokens, which the third try brings: none is missing, none
    comes twice.
    """
    for decode in gateway.workers.decodes:
        decode.breaks = [2, 3, 4, 5, 6, 7, 8]
    async with beating(gateway):
        answer = await gateway.post(CHAT, chat(10))
    assert text_of(answer) == "one two three four five six seven eight nine ten"
    assert answer.json()["baton"]["resumed"] == 7
    assert answer.json()["usage"]["completion_tokens"] == 10


async def test_a_request_that_kills_whoever_computes_its_next_token_ends(
    gateway: RunningGateway,
) -> None:
    """It loses a bounded number of workers in a row, and then it is the one that is given up."""
    for decode in gateway.workers.decodes:
        decode.break_always_at = 2
    async with beating(gateway):
        answer = await gateway.post(CHAT, chat(6))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "worker_lost"
    starts = sum(len(decode.starts) for decode in gateway.workers.decodes)
    assert starts <= LOSSES_IN_A_ROW_MAX + 1


async def test_a_cut_connection_is_opened_again_before_another_worker_takes_the_log(
    gateway: RunningGateway,
) -> None:
    """The worker is well and has the sequence: it is asked for what is missing, from its index."""
    first, second = gateway.workers.decodes
    record = gateway.workers.records["decode-0"]
    host, _, port = record.address.rpartition(":")
    gateway.workers.records["decode-1"].ready = False
    async with FaultProxy((host, int(port))) as proxy:
        record.address, record.incarnation = proxy.address, record.incarnation + 1
        await gateway.beat()
        first.pause_at = 3
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(gateway.post(CHAT, chat(6)))
            async with asyncio.timeout(10.0):
                while not (first.starts and _tokens(gateway) == 3):
                    await asyncio.wait((asking,), timeout=0.02)
            gateway.workers.records["decode-1"].ready = True
            await gateway.beat()
            assert proxy.reset_connections() >= 1
            first.pause_at = None
        answer = asking.result()
    assert text_of(answer) == "one two three four five six"
    assert answer.json()["baton"]["resumed"] == 0
    assert [start.next_index for start in first.starts] == [1, 3]
    assert not second.starts


def _tokens(gateway: RunningGateway) -> int:
    return max((log.tokens for log in gateway.workers.store.logs.values()), default=0)


async def test_an_answer_moves_off_a_worker_that_drains(gateway: RunningGateway) -> None:
    """At once, with nothing lost first; the old one is told to stop."""
    first, second = gateway.workers.decodes
    gateway.workers.records["decode-1"].ready = False
    await gateway.beat()
    first.pause_at = 3
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(gateway.post(CHAT, chat(6)))
        async with asyncio.timeout(10.0):
            while _tokens(gateway) < 3:
                await asyncio.wait((asking,), timeout=0.02)
        gateway.workers.records["decode-1"].ready = True
        gateway.workers.records["decode-0"].draining = True
        async with beating(gateway):
            answer = await asking
    assert text_of(answer) == "one two three four five six"
    assert answer.json()["baton"]["resumed"] == 1
    assert [start.next_index for start in second.starts] == [3]
    await gateway.workers.until(lambda: first.stopped)


async def test_an_answer_stays_at_a_worker_that_drains_alone(gateway: RunningGateway) -> None:
    """Nobody else could go on with it: it ends where it is."""
    first, second = gateway.workers.decodes
    gateway.workers.records["decode-1"].ready = False
    await gateway.beat()
    first.pause_at = 3
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(gateway.post(CHAT, chat(6)))
        async with asyncio.timeout(10.0):
            while _tokens(gateway) < 3:
                await asyncio.wait((asking,), timeout=0.02)
        gateway.workers.records["decode-0"].draining = True
        await gateway.beat()
        await gateway.beat()
        first.resumed.set()
    answer = asking.result()
    assert text_of(answer) == "one two three four five six"
    assert answer.json()["baton"]["resumed"] == 0
    assert not second.starts

"""A crowd of sequences on one decode worker, each with a script of its own.

Owns one stream that is read for all of them, and waiting for what one of them is told.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from baton.api.kvstore.v1 import kvstore_pb2
from baton.errors import Reason, ServiceError
from baton.sampling_parameters import SamplingParameters
from tests.integration.workers.harness import (
    Answer,
    DecodeStream,
    Gateway,
    OpenedLog,
)

WAIT_S = 540.0
"""Bounds a whole test, not a step of it."""

Shapes = list[tuple[int, int, str, str | None]]


class Crowd:
    """Many sequences over one stream."""

    def __init__(self, gateway: Gateway, stream: DecodeStream) -> None:
        self.gateway = gateway
        self.stream = stream
        self._news = asyncio.Event()
        self._writing = asyncio.Lock()

    async def read(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.stream._read()
            news, self._news = self._news, asyncio.Event()
            news.set()

    async def until(self, answer: Answer, is_there: Callable[[Answer], bool]) -> Answer:
        """What one sequence is told, once it is so far or over."""
        while not (answer.is_over or is_there(answer)):
            await self._news.wait()
        return answer

    async def open(
        self, prompt: Sequence[int], sampling: SamplingParameters, writer: str, **fields: Any
    ) -> OpenedLog:
        """A log, as soon as the store has pages for its prompt."""
        while True:
            try:
                return await self.gateway.open(prompt, sampling, writer, **fields)
            except ServiceError as error:
                if error.reason is not Reason.PAGES_EXHAUSTED:
                    raise
            await self._news.wait()

    async def start(self, log: OpenedLog, **fields: Any) -> Answer:
        """Hand it over; a second time it is told on from where it stood."""
        async with self._writing:
            await self.stream.start(log, **fields)
        return self.stream.answers[log.request_id]

    async def stop(self, log: OpenedLog) -> None:
        """Cancel it."""
        async with self._writing:
            await self.stream.stop(log)

    async def generation(self, log: OpenedLog) -> int:
        """The newest one of a log."""
        answer = await self.gateway.store.DescribeLog(
            kvstore_pb2.DescribeLogRequest(log_id=log.log_id, capability=log.capability),
            timeout=10.0,
        )
        return answer.head.generation


@asynccontextmanager
async def crowd_on(gateway: Gateway) -> AsyncIterator[Crowd]:
    """A stream that is read in the background."""
    async with asyncio.timeout(WAIT_S), gateway.stream(timeout_s=WAIT_S) as stream:
        crowd = Crowd(gateway, stream)
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(crowd.read())
            yield crowd
            reading.cancel()


def told(*answers: Answer) -> Shapes:
    """The tokens of several stretches of one sequence, one after the other."""
    return [shape for answer in answers for shape in answer.shapes()]


def preempted(run_dir: Path) -> list[tuple[str, str]]:
    """(request id, cause) of every preemption that the decode worker logged."""
    found = []
    for line in (run_dir / "decode-0.log").read_text("utf-8").splitlines():
        if '"sequence_preempted"' in line:
            event = json.loads(line)
            found.append((event["request_id"], event["cause"]))
    return found

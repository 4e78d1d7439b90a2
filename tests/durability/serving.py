"""Writers of a real kvstore, each at one ack level, until it stops answering.

Owns what they got acked, and the check after a restart. A life opens logs of its own; those of the
lives before must stay as they were found.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from baton.api.common.v1 import common_pb2
from baton.arena.client import KVStoreClient
from baton.errors import ServiceError
from baton.rpc.channel import open_channel
from tests.durability.workload import LostAckError
from tests.integration.kvstore.harness import (
    BLOCK,
    FakeLog,
    FakeWorker,
    Site,
    StoreProcess,
    capability,
    connected,
)

LEVELS: Final = {"os": common_pb2.ACK_LEVEL_OS, "disk": common_pb2.ACK_LEVEL_DISK}
LOGS_OF_EACH: Final = 2
PROMPT_TOKENS: Final = 5
TOKENS_MAX: Final = 200


@dataclass(slots=True)
class Written:
    """One log as its writer knows it: what was acked, and at which level."""

    level: str
    acked: list[int]


@dataclass(slots=True)
class Ledger:
    """All logs of a kvstore over its lives."""

    logs: dict[bytes, Written] = field(default_factory=dict)
    settled: dict[bytes, list[int]] = field(default_factory=dict)
    acked: int = 0

    async def write(self, store: StoreProcess, delay_s: float, end: Callable[[], None]) -> None:
        """One life: two writers append; after a while `end` stops the kvstore or its disk."""
        async with connected(store) as site, asyncio.TaskGroup() as tasks:
            self.logs = {}
            for level in LEVELS:
                worker = await site.attach(f"w-{level}")
                logs = [await self._open(site, worker, level) for _ in range(LOGS_OF_EACH)]
                tasks.create_task(self._append(worker, logs))
            await _after(delay_s, end)

    async def _open(self, site: Site, worker: FakeWorker, level: str) -> FakeLog:
        prompt = [4 + index for index in range(PROMPT_TOKENS)]
        log = await site.open(worker, prompt, ack_level=LEVELS[level])
        await worker.prefill(log)
        self.logs[log.log_id] = Written(level, list(log.tokens))
        return log

    async def _append(self, worker: FakeWorker, logs: list[FakeLog]) -> None:
        rng = random.Random(len(self.settled))
        while len(logs[0].tokens) < TOKENS_MAX:
            tokens = [rng.randrange(4, 200) for _ in logs]
            entries = [worker.entry(log, token) for log, token in zip(logs, tokens, strict=True)]
            try:
                outcomes = await worker.send(entries)
            except ServiceError:
                return
            for log, token, outcome in zip(logs, tokens, outcomes, strict=True):
                if outcome.error is not None:
                    return
                log.table.grant(outcome.pages)
                log.tokens.append(token)
                log.committed += 1
                self.logs[log.log_id].acked.append(token)

    async def check(self, store: StoreProcess, levels: frozenset[str]) -> None:
        """After a restart: everything acked at these levels is there, nothing else got in."""
        async with open_channel(store.address) as channel:
            client = KVStoreClient(channel, "reader")
            for log_id, tokens in self.settled.items():
                assert await _tokens(client, log_id) == tokens, "a log of an earlier life changed"
            for log_id, written in self.logs.items():
                must_be_there = written.level in levels
                found = await _tokens(client, log_id, may_be_missing=not must_be_there)
                _compare(found, written.acked, must_be_there=must_be_there)
                self.acked += len(written.acked) if must_be_there else 0
                if found is not None:
                    self.settled[log_id] = found

    def forget(self) -> None:
        """Logs of long ago are looked at no more."""
        self.settled = {}


async def _tokens(
    client: KVStoreClient, log_id: bytes, *, may_be_missing: bool = False
) -> list[int] | None:
    try:
        view = await client.replay(log_id, capability(log_id), BLOCK)
    except ServiceError as error:
        if may_be_missing:
            return None
        raise LostAckError(f"a log with acked tokens is gone: {error}") from error
    return list(view.token_ids)


def _compare(found: list[int] | None, acked: list[int], *, must_be_there: bool) -> None:
    if found is None:
        return
    both = min(len(found), len(acked))
    assert found[:both] == acked[:both], "tokens are not those that were acked"
    assert len(found) <= len(acked) + 1, "more is there than was ever sent"
    if must_be_there and len(found) < len(acked):
        raise LostAckError(f"{len(acked)} tokens were acked, {len(found)} are there")


async def _after(delay_s: float, stop: Callable[[], None]) -> None:
    """Calls `stop` when the time is over: a deadline that passes, nothing to wait for."""
    try:
        async with asyncio.timeout(delay_s):
            await asyncio.Event().wait()
    except TimeoutError:
        stop()

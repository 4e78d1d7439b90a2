"""What the namespace tests do and check: a log at one store, its move to the other, the balance.

Owns the requests and the assertions that hold after every move, whatever happened to it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

from baton.api.kvstore.v1 import kvstore_pb2
from baton.arena.replay import HeldLog
from baton.clock import SystemClock
from baton.errors import Reason, ServiceError
from baton.ids import new_request_id
from tests.integration.kvstore.harness import BLOCK, FakeLog, FakeWorker, Site, kv_value
from tests.netns.lab import NodeStore

CLOCK: Final = SystemClock()
FIRST_TOKEN: Final = 5
SETTLE_S: Final = 30.0
CHUNK_TOKENS: Final = 256
_NOT_HERE: Final = frozenset({Reason.LOG_NOT_FOUND, Reason.STALE_GENERATION})


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    """A prompt of plain byte tokens."""
    return [4 + (index * 7 + seed) % 200 for index in range(tokens)]


async def prefill(worker: FakeWorker, log: FakeLog, chunk_s: float = 0.0) -> None:
    """Commits a prompt chunk by chunk, each as if it took `chunk_s` to compute; seals it."""
    while log.committed < log.prompt_tokens:
        if chunk_s:
            await CLOCK.wait(asyncio.Event(), chunk_s)
        await worker.commit(log, min(log.committed + CHUNK_TOKENS, log.prompt_tokens))
    await worker.seal(log, FIRST_TOKEN)


def adopt_request(
    old: NodeStore, log: FakeLog, timeout_s: float, request_id: str | None = None
) -> kvstore_pb2.AdoptLogRequest:
    """What a gateway asks of the new home."""
    request = kvstore_pb2.AdoptLogRequest(
        log_id=log.log_id,
        generation=log.generation,
        from_kvstore_address=old.peer_address,
        capability=log.capability,
        request_id=request_id or new_request_id(),
    )
    request.timeout.FromMilliseconds(round(timeout_s * 1000))
    return request


async def expect(old: NodeStore, new: Site, log: FakeLog) -> None:
    """Lets the coming home follow."""
    await new.stub.ExpectLog(
        kvstore_pb2.ExpectLogRequest(
            log_id=log.log_id,
            from_kvstore_address=old.peer_address,
            capability=log.capability,
            request_id=new_request_id(),
        )
    )


async def outcome(call: Any) -> Any:
    """The answer, or the ServiceError."""
    try:
        return await call
    except ServiceError as error:
        return error


async def head(site: Site, log: FakeLog) -> kvstore_pb2.DescribeLogResponse | None:
    """The log at a store; None where it is not known."""
    request = kvstore_pb2.DescribeLogRequest(log_id=log.log_id, capability=log.capability)
    try:
        answer: kvstore_pb2.DescribeLogResponse = await site.stub.DescribeLog(request)
    except ServiceError as error:
        if error.reason not in _NOT_HERE:
            raise
        return None
    return answer


async def take(worker: FakeWorker, log: FakeLog, generation: int) -> FakeLog:
    """The worker becomes the log's writer."""
    taken = await worker.store.take(
        HeldLog(log_id=log.log_id, generation=generation),
        log.capability,
        pages=1,
        request_id=new_request_id(),
    )
    return await worker.follow(log.log_id, taken.generation, log.capability)


async def is_taker_refused(worker: FakeWorker, log: FakeLog, generation: int) -> bool:
    """Whether this store gives the log to nobody."""
    try:
        await take(worker, log, generation)
    except ServiceError as error:
        if error.reason not in _NOT_HERE:
            raise
        return True
    return False


async def check_kv(worker: FakeWorker, log: FakeLog, tokens: Sequence[int]) -> int:
    """Every committed position reads as it was written; how many there are."""
    view = await worker.view(log)
    assert list(view.token_ids) == list(tokens)
    committed = view.head.committed_position
    for position in range(0, committed, max(1, BLOCK // 3)):
        assert worker.read(view, position) == kv_value(tokens[position], position), position
    return committed


async def until_empty(site: Site, what: str) -> None:
    """The store holds no page of any log; its pages add up at each look."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        counts = await site.counts()
        held = counts.pages_live + counts.pages_shared + counts.pages_granted
        if held + counts.pages_quarantined == 0:
            return
        assert time.monotonic() < deadline_s, f"{what}: {counts}"
        await CLOCK.wait(asyncio.Event(), 0.1)

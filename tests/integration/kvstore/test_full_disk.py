"""A kvstore whose log cannot grow: it refuses writes with a reason, serves reads, and recovers.

The disk's end is the file size limit of the process, set from outside while it runs.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.clock import SystemClock
from baton.errors import Reason, ServiceError
from tests.integration.kvstore.harness import (
    FakeLog,
    FakeWorker,
    Model,
    StoreProcess,
    connected,
    running_store,
)

LIMIT_BYTES = 16 << 10
APPENDS = 200
PATIENCE_S = 15.0


def limit_files(process_id: int, limit_bytes: int) -> None:
    """What the process may still write."""
    _, hard = resource.prlimit(process_id, resource.RLIMIT_FSIZE)
    resource.prlimit(process_id, resource.RLIMIT_FSIZE, (limit_bytes, hard))


async def append_until_refused(worker: FakeWorker, log: FakeLog) -> ServiceError:
    """Tokens, until the log takes no more."""
    for token in range(APPENDS):
        try:
            await worker.append(log, token)
        except ServiceError as error:
            return error
    pytest.fail("the log was never full")


@pytest.fixture
def own_store(model: Model, tmp_path: Path) -> Iterator[StoreProcess]:
    """A kvstore for this test alone."""
    with running_store(model, tmp_path) as store:
        yield store


async def test_full_log_refuses_writes_serves_reads_and_recovers(own_store: StoreProcess) -> None:
    """Nothing that was acked is lost, and nothing has to be restarted."""
    store = own_store
    async with connected(store) as site:
        worker = await site.attach()
        log = await site.open(worker, [1, 2, 3], output_pages=APPENDS // 16 + 2)
        await worker.prefill(log)
        quiet = await site.open(worker, [4, 5, 6], output_pages=1)
        await worker.prefill(quiet, finish="stop")
        assert store.process is not None
        limit_files(store.process.pid, LIMIT_BYTES)
        refused = await append_until_refused(worker, log)
        assert refused.reason is Reason.QUEUE_FULL
        assert refused.metadata["cause"] == "EFBIG"
        assert refused.retry_after_s
        # Another write is refused before it changes anything; what stands is read.
        with pytest.raises(ServiceError) as caught:
            await site.open(worker, [7, 8, 9])
        assert caught.value.reason is Reason.QUEUE_FULL
        view = await worker.view(quiet)
        assert list(view.token_ids) == quiet.tokens
        limit_files(store.process.pid, resource.RLIM_INFINITY)
        worker.leave_stream()
        await _append_when_it_can(worker, log)
        expected = list(log.tokens)
    store.kill()
    await asyncio.to_thread(store.start)
    async with connected(store) as site:
        worker = await site.attach("w1")
        view = await worker.view(log)
        assert list(view.token_ids) == expected


async def _append_when_it_can(worker: FakeWorker, log: FakeLog) -> None:
    """The refused token again: it stands already or is next, the store knows; each try waits."""
    deadline_s = SystemClock().monotonic_s() + PATIENCE_S
    while SystemClock().monotonic_s() < deadline_s:
        try:
            await worker.append(log, len(log.tokens) - 4)
            return
        except ServiceError as error:
            if error.reason is not Reason.QUEUE_FULL:
                raise
            worker.leave_stream()
    pytest.fail("the log never took a token again")

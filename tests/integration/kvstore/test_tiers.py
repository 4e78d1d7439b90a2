"""The NVMe tier of a running kvstore: what is copied there serves the next turn, also after a
restart, also when the arena is lost; what a disk damaged is computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2, operators_pb2, operators_pb2_grpc
from baton.capability import Right
from baton.clock import SystemClock
from baton.ids import new_log_id, new_request_id
from tests.integration.kvstore.harness import (
    BLOCK,
    FakeLog,
    FakeWorker,
    Model,
    Site,
    StoreProcess,
    capability,
    connected,
    kv_value,
    running_store,
)

PROMPT = [3 + index % 90 for index in range(5 * BLOCK + 3)]
NVME_BYTES = 4 << 20
# Everything that nobody writes is copied at once.
FLAGS = (
    *("--nvme-bytes", str(NVME_BYTES), "--demote-below", "1", "--demote-until", "1"),
    *("--lease-s", "60"),
)
WAIT_S = 30.0


def operator_capability() -> str:
    """Signed when it is used: one signed at import has expired late in a long run."""
    return capability(tenant=None, rights=frozenset({Right.ADMIN}))


@pytest.fixture
def own_store(model: Model, tmp_path: Path) -> Iterator[StoreProcess]:
    """A store of its own: it is killed."""
    with running_store(model, tmp_path, *FLAGS) as store:
        yield store


@pytest.fixture
async def site(own_store: StoreProcess) -> AsyncIterator[Site]:
    """Connections of one test."""
    async with connected(own_store) as one:
        yield one


def operators(site: Site) -> Any:
    """The stub."""
    return operators_pb2_grpc.OperatorServiceStub(site.channel)


async def summary(site: Site, log: FakeLog) -> operators_pb2.LogSummary:
    """The log as an operator sees it."""
    request = operators_pb2.InspectLogRequest(capability=operator_capability(), log_id=log.log_id)
    return (await operators(site).InspectLog(request)).log


async def copied(site: Site, log: FakeLog) -> None:
    """Asks until all of the log's KV is on NVMe; each answer takes a round trip."""
    deadline_s = SystemClock().monotonic_s() + WAIT_S
    while (found := await summary(site, log)).cold_tokens < found.committed_tokens:
        assert SystemClock().monotonic_s() < deadline_s, found


async def evict(site: Site, log: FakeLog) -> None:
    """Its host pages go."""
    request = operators_pb2.EvictLogRequest(capability=operator_capability(), log_id=log.log_id)
    answer = await operators(site).EvictLog(request)
    assert answer.cold_tokens
    assert (await summary(site, log)).host_pages == 0


async def turn(site: Site, worker: FakeWorker) -> FakeLog:
    """A finished turn of a conversation, kept."""
    log = await site.open(worker, PROMPT)
    await worker.prefill(log, token=7)
    for token in (8, 9, 10):
        await worker.append(log, token)
    await worker.append(log, 2, "stop")
    await site.close(log)
    return log


async def next_turn(site: Site, worker: FakeWorker, log: FakeLog, **fields: Any) -> int:
    """The next prompt of the conversation begins with all of it; cached tokens, whose KV is what
    was written then.
    """
    request = site.open_request(worker, [*log.tokens, 4, 5, 6], **fields)
    answer = await site.stub.Open(request)
    opened = await worker.follow(request.log_id, answer.generation, request.capability)
    view = await worker.view(opened)
    assert view.head.committed_position == answer.cached_tokens
    for position in range(answer.cached_tokens):
        assert worker.read(view, position) == kv_value(opened.tokens[position], position)
    await worker.prefill(opened, 9, "stop")
    await site.close(opened, drop=True)
    return int(answer.cached_tokens)


async def test_the_next_turn_is_served_from_nvme(site: Site) -> None:
    """Every position that has KV, the partial last page included; and twice, once loaded once."""
    worker = await site.attach()
    log = await turn(site, worker)
    await copied(site, log)
    await evict(site, log)
    assert await next_turn(site, worker, log) == len(log.tokens) - 1
    assert (await summary(site, log)).host_pages == -(-(len(log.tokens) - 1) // BLOCK)
    assert await next_turn(site, worker, log) == len(log.tokens) - 1


@pytest.mark.more
@pytest.mark.parametrize("is_arena_lost", [False, True])
async def test_copies_outlive_the_process_and_the_arena(site: Site, is_arena_lost: bool) -> None:
    """kill -9; with its arena gone too (a reboot) the log's tokens and its KV are still there."""
    worker = await site.attach()
    log = await turn(site, worker)
    await copied(site, log)
    await evict(site, log)
    worker.leave()
    site.workers.clear()
    if is_arena_lost:
        for path in site.store.arena_dir.glob("arena-*.kv"):
            path.unlink()
    await site.restart()
    again = await site.attach("w1")
    assert (await summary(site, log)).cold_tokens == len(log.tokens) - 1
    assert await next_turn(site, again, log) == len(log.tokens) - 1


@pytest.mark.more
async def test_an_asker_that_computes_faster_than_the_disk_reads_computes(site: Site) -> None:
    """Tier honesty: the hit is not used, and what is said of it is true."""
    worker = await site.attach()
    log = await turn(site, worker)
    await copied(site, log)
    await evict(site, log)
    assert await next_turn(site, worker, log, compute_tokens_per_s=1e12) == 0
    assert (await summary(site, log)).host_pages == 0


@pytest.mark.more
async def test_a_damaged_slot_is_computed_again(site: Site) -> None:
    """A flipped byte on disk costs the blocks from there on, and no wrong KV."""
    worker = await site.attach()
    log = await turn(site, worker)
    await copied(site, log)
    await evict(site, log)
    worker.leave()
    site.workers.clear()
    site.store.kill()
    (path,) = (site.store.directory / "log").glob("nvme-*.kv")
    size = site.model.geometry.slot_bytes
    data = bytearray(path.read_bytes())
    # Of slots in use only one: the log's third block.
    used = [at for at in range(4096, len(data), size) if any(data[at : at + size])]
    assert len(used) >= 6
    data[used[2]] ^= 1
    path.write_bytes(data)
    await asyncio.to_thread(site.store.start)
    again = await site.attach("w1")
    cached = await next_turn(site, again, log)
    assert cached % BLOCK == 0
    assert cached < len(log.tokens) - 1
    assert (await summary(site, log)).cold_tokens == cached


@pytest.mark.more
async def test_a_taken_log_has_its_kv_again(site: Site) -> None:
    """A log that was parked without its KV in the host goes on from NVMe."""
    worker = await site.attach()
    log = await site.open(worker, PROMPT)
    await worker.prefill(log, token=7)
    for token in (8, 9, 10):
        await worker.append(log, token)
    worker.leave()
    site.workers.clear()
    await copied(site, log)
    await evict(site, log)
    other = await site.attach("w1")
    log.generation = (await summary(site, log)).generation
    taken = await other.take(log)
    assert taken.committed == len(log.tokens) - 1
    view = await other.view(taken)
    for position in range(taken.committed):
        assert other.read(view, position) == kv_value(log.tokens[position], position)
    await other.append(taken, 11)
    await site.close(taken, drop=True)


@pytest.fixture
def second_store(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    """Another node, without an NVMe tier."""
    with running_store(model, tmp_path_factory.mktemp("new"), node_id="n1") as store:
        yield store


@pytest.mark.more
async def test_a_cold_log_moves_with_its_kv(site: Site, second_store: StoreProcess) -> None:
    """It is loaded before it is given away; no slot of this home means anything at the next."""
    worker = await site.attach()
    log = await site.open(worker, PROMPT)
    await worker.prefill(log, token=7)
    worker.leave()
    site.workers.clear()
    await copied(site, log)
    await evict(site, log)
    async with connected(second_store) as new:
        reader = await new.attach("w2")
        moved = await new.stub.AdoptLog(
            kvstore_pb2.AdoptLogRequest(
                log_id=log.log_id,
                generation=(await summary(site, log)).generation,
                from_kvstore_address=site.store.address,
                capability=log.capability,
                request_id=new_request_id(),
            )
        )
        assert moved.committed_position == len(PROMPT)
        log.generation = moved.generation
        taken = await reader.take(log)
        view = await reader.view(taken)
        for position, token in enumerate(PROMPT):
            assert reader.read(view, position) == kv_value(token, position)


@pytest.mark.more
async def test_a_repetition_that_overtakes_the_wait_for_the_disk_gets_the_same_answer(
    site: Site,
) -> None:
    """Fork and Take of a cold log, twice at once: loaded once, done once, answered twice."""
    worker = await site.attach()
    log = await turn(site, worker)
    await copied(site, log)
    await evict(site, log)
    position = len(log.tokens)
    child_id, fork_id = new_log_id(), new_log_id()
    parent = common_pb2.LogPosition(log_id=log.log_id, position=position)
    # Nobody writes it: its KV stays where it is.
    child = kvstore_pb2.ForkRequest(
        parent=parent,
        log_id=child_id,
        capability=capability(child_id),
        request_id=new_request_id(),
    )
    forked = await site.stub.Fork(child)
    assert forked.cached_tokens == 0
    fork = kvstore_pb2.ForkRequest(
        parent=parent,
        log_id=fork_id,
        capability=capability(fork_id),
        writer_worker_id=worker.worker_id,
        request_id=new_request_id(),
    )
    answers = await asyncio.gather(*(site.stub.Fork(fork) for _ in range(4)))
    assert {answer.cached_tokens for answer in answers} == {position - 1}
    assert len({answer.generation for answer in answers}) == 1
    await evict(site, log)
    take = kvstore_pb2.TakeRequest(
        log_id=child_id,
        generation=forked.generation,
        worker_id=worker.worker_id,
        capability=child.capability,
        pages=1,
        request_id=new_request_id(),
    )
    taken = await asyncio.gather(*(site.stub.Take(take) for _ in range(4)))
    assert {answer.generation for answer in taken} == {forked.generation + 1}
    assert (await summary(site, log)).host_pages == 0

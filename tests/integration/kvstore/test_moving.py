"""Two real kvstores: a log moves from one to the other, bytes and all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.api.kvstore.v1 import kvstore_pb2
from baton.arena.replay import HeldLog
from baton.capability import Right
from baton.errors import Reason, ServiceError
from baton.ids import new_log_id, new_request_id
from baton.testing.tiny_models import TinyModel
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
    tiny_model,
)

LONG_TOKENS = 280_000
PROMPT = [4 + index % 100 for index in range(5 * BLOCK + 5)]


@pytest.fixture(scope="module")
def pair(
    model: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[StoreProcess, StoreProcess]]:
    """Two nodes."""
    first, second = (tmp_path_factory.mktemp(name) for name in ("old", "new"))
    with (
        running_store(model, first) as old,
        running_store(model, second, node_id="n1") as new,
    ):
        yield old, new


@pytest.fixture
async def sites(pair: tuple[StoreProcess, StoreProcess]) -> AsyncIterator[tuple[Site, Site]]:
    """Connections to both."""
    async with connected(pair[0]) as old, connected(pair[1]) as new:
        yield old, new


def adopt_request(old: Site, log: FakeLog, **fields: Any) -> kvstore_pb2.AdoptLogRequest:
    """What a gateway asks of the new home."""
    values: dict[str, Any] = {
        "log_id": log.log_id,
        "generation": log.generation,
        "from_kvstore_address": old.store.address,
        "capability": log.capability,
        "request_id": new_request_id(),
        **fields,
    }
    return kvstore_pb2.AdoptLogRequest(**values)


async def adopted(old: Site, new: Site, log: FakeLog) -> kvstore_pb2.AdoptLogResponse:
    """A whole move."""
    answer: kvstore_pb2.AdoptLogResponse = await new.stub.AdoptLog(adopt_request(old, log))
    return answer


async def taken(worker: FakeWorker, log: FakeLog, generation: int) -> FakeLog:
    """The new home's worker goes on."""
    answer = await worker.store.take(
        HeldLog(log_id=log.log_id, generation=generation),
        log.capability,
        pages=1,
        request_id=new_request_id(),
    )
    return await worker.follow(log.log_id, answer.generation, log.capability)


async def refused(call: Any) -> Reason:
    """The reason."""
    with pytest.raises(ServiceError) as caught:
        await call
    return caught.value.reason


async def test_a_sealed_log_moves_with_its_bytes_and_goes_on_there(
    sites: tuple[Site, Site],
) -> None:
    """Every position's KV reads at the new home as it was written; appends go on; the old home has
    nothing left of it.
    """
    old, new = sites
    writer, reader = await old.attach(), await new.attach()
    log = await old.open(writer, PROMPT)
    await writer.prefill(log)
    answer = await adopted(old, new, log)
    assert (answer.generation, answer.position) == (2, len(PROMPT) + 1)
    assert answer.committed_position == len(PROMPT)
    assert answer.transfer_bytes > 0
    assert answer.transport == "stream"
    here = await taken(reader, log, answer.generation)
    view = await reader.view(here)
    assert list(view.token_ids) == [*PROMPT, 5]
    for position, token in enumerate(PROMPT):
        assert reader.read(view, position) == kv_value(token, position)
    for token in range(2 * BLOCK):
        await reader.append(here, token)
    writer.leave()
    old.workers.clear()
    await old.until("nothing is left", pages_live=0, pages_shared=0, pages_quarantined=0)
    await new.close(here, drop=True)
    await new.until("nothing is left", pages_live=0, pages_granted=0)


async def test_committed_pages_are_copied_while_the_prompt_is_computed(
    sites: tuple[Site, Site],
) -> None:
    """What was committed before the move is hidden; only the rest is fetched with it."""
    old, new = sites
    writer = await old.attach()
    log = await old.open(writer, PROMPT)
    await new.stub.ExpectLog(
        kvstore_pb2.ExpectLogRequest(
            log_id=log.log_id,
            from_kvstore_address=old.store.address,
            capability=log.capability,
            request_id=new_request_id(),
        )
    )
    await writer.commit(log, 4 * BLOCK)
    await new.until("the replica has the committed pages", pages_granted=4)
    await writer.commit(log, len(PROMPT))
    await writer.seal(log, 5)
    answer = await adopted(old, new, log)
    assert 0.6 < answer.hidden_transfer_share < 1.0
    assert answer.hidden_bytes < answer.transfer_bytes
    await new.close(log, drop=True)
    await new.until("nothing is left", pages_live=0, pages_granted=0)


async def test_a_replica_goes_when_the_log_ends_at_its_home(sites: tuple[Site, Site]) -> None:
    """Nobody has to tell the coming home that the log will not come."""
    old, new = sites
    writer = await old.attach()
    log = await old.open(writer, PROMPT)
    await writer.commit(log, 3 * BLOCK)
    request = kvstore_pb2.ExpectLogRequest(
        log_id=log.log_id,
        from_kvstore_address=old.store.address,
        capability=log.capability,
        request_id=new_request_id(),
    )
    await new.stub.ExpectLog(request)
    await new.until("the replica is there", pages_granted=3)
    await old.stub.Cancel(kvstore_pb2.CancelRequest(log_id=log.log_id, capability=log.capability))
    await new.until("the replica is gone", pages_granted=0)


async def test_a_repeated_adoption_gets_the_same_answer(sites: tuple[Site, Site]) -> None:
    """The same request id: word for word; another one: where the log stands."""
    old, new = sites
    writer = await old.attach()
    log = await old.open(writer, PROMPT)
    await writer.prefill(log)
    request = adopt_request(old, log)
    first = await new.stub.AdoptLog(request)
    assert await new.stub.AdoptLog(request) == first
    again = await new.stub.AdoptLog(adopt_request(old, log))
    assert (again.generation, again.position) == (first.generation, first.position)
    await new.close(log, drop=True)


async def test_adoptions_at_once_make_one_move(sites: tuple[Site, Site]) -> None:
    """A gateway that asks twice at the same time gets one home and two answers."""
    old, new = sites
    writer = await old.attach()
    log = await old.open(writer, PROMPT)
    await writer.prefill(log)
    calls = (new.stub.AdoptLog(adopt_request(old, log)) for _ in range(3))
    answers = await asyncio.gather(*(_awaited(call) for call in calls))
    assert {answer.generation for answer in answers} == {2}
    await new.close(log, drop=True)


async def _awaited(call: Any) -> Any:
    return await call


async def test_the_old_homes_writer_is_refused_after_the_move(sites: tuple[Site, Site]) -> None:
    """STALE_GENERATION, and nothing changes."""
    old, new = sites
    writer = await old.attach()
    log = await old.open(writer, PROMPT)
    await writer.prefill(log)
    here = await writer.take(log)
    answer = await new.stub.AdoptLog(adopt_request(old, here))
    assert answer.generation == here.generation + 1
    assert await refused(writer.append(here, 7)) is Reason.STALE_GENERATION
    await new.close(log, drop=True)


async def test_a_log_comes_back(sites: tuple[Site, Site]) -> None:
    """There and back again: each time one home, one generation on."""
    old, new = sites
    writer, other = await old.attach(), await new.attach()
    log = await old.open(writer, PROMPT)
    await writer.prefill(log)
    there = await adopted(old, new, log)
    here = await taken(other, log, there.generation)
    await other.append(here, 9)
    back = await old.stub.AdoptLog(adopt_request(new, here))
    assert back.generation == here.generation + 1
    again = await taken(writer, log, back.generation)
    view = await writer.view(again)
    assert list(view.token_ids) == [*PROMPT, 5, 9]
    assert writer.read(view, len(PROMPT)) == kv_value(5, len(PROMPT))
    await old.close(log, drop=True)


async def test_a_move_needs_the_right_to_it(sites: tuple[Site, Site]) -> None:
    """No capability, another log's, another tenant's, without MOVE: refused, nothing happened."""
    old, new = sites
    writer = await old.attach()
    log = await old.open(writer, PROMPT)
    await writer.prefill(log)
    for text in (
        "",
        capability(new_log_id()),
        capability(log.log_id, rights=frozenset({Right.TAKE, Right.READ})),
    ):
        reason = await refused(new.stub.AdoptLog(adopt_request(old, log, capability=text)))
        assert reason in (Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED)
    stranger = capability(log.log_id, tenant="other")
    reason = await refused(new.stub.AdoptLog(adopt_request(old, log, capability=stranger)))
    assert reason is Reason.LOG_NOT_FOUND
    for call in (
        old.stub.MoveDone(
            kvstore_pb2.MoveDoneRequest(log_id=log.log_id, generation=2, capability=log.capability)
        ),
        old.stub.DescribeMove(
            kvstore_pb2.DescribeMoveRequest(
                log_id=log.log_id, generation=2, capability=log.capability
            )
        ),
    ):
        assert await refused(call) is Reason.PERMISSION_DENIED
    view = await writer.view(log)
    assert view.head.generation == 1
    await old.close(log, drop=True)


async def test_an_unreachable_home_costs_the_deadline_and_says_so(
    sites: tuple[Site, Site], tmp_path: Path
) -> None:
    """Never a hang."""
    old, new = sites
    writer = await old.attach()
    log = await old.open(writer, PROMPT)
    await writer.prefill(log)
    request = adopt_request(old, log, from_kvstore_address="127.0.0.1:9")
    request.timeout.FromMilliseconds(700)
    reason = await refused(new.stub.AdoptLog(request, timeout=5.0))
    assert reason in (Reason.TRANSFER_TIMEOUT, Reason.WORKER_LOST)
    await old.close(log, drop=True)


async def test_a_replica_goes_when_nobody_wants_the_log_any_more(sites: tuple[Site, Site]) -> None:
    """A gateway that gives a move up cancels the log at the coming home too."""
    old, new = sites
    writer = await old.attach()
    log = await old.open(writer, PROMPT)
    await writer.commit(log, 3 * BLOCK)
    request = kvstore_pb2.ExpectLogRequest(
        log_id=log.log_id,
        from_kvstore_address=old.store.address,
        capability=log.capability,
        request_id=new_request_id(),
    )
    await new.stub.ExpectLog(request)
    await new.until("the replica is there", pages_granted=3)
    stranger = capability(log.log_id, tenant="other")
    cancel = kvstore_pb2.CancelRequest(log_id=log.log_id, capability=stranger)
    assert await refused(new.stub.Cancel(cancel)) is Reason.LOG_NOT_FOUND
    await new.until("the replica is still there", pages_granted=3)
    await new.stub.Cancel(kvstore_pb2.CancelRequest(log_id=log.log_id, capability=log.capability))
    await new.until("the replica is gone", pages_granted=0)
    await old.close(log, drop=True)


@pytest.fixture(scope="module")
def long_pair(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[StoreProcess, StoreProcess]]:
    """Two nodes whose model takes long histories, with little KV per token."""
    shape = TinyModel(layers=1, hidden=32, heads=1, kv_heads=1, max_context=1 << 19)
    model = tiny_model(tmp_path_factory.mktemp("long") / "tiny", shape)
    folders = [tmp_path_factory.mktemp(name) for name in ("long-old", "long-new")]
    size = (LONG_TOKENS // BLOCK + 64) * model.geometry.slot_bytes
    with (
        running_store(model, folders[0], arena_bytes=size) as old,
        running_store(model, folders[1], node_id="n1", arena_bytes=size) as new,
    ):
        yield old, new


async def test_a_long_logs_state_comes_in_pieces(
    long_pair: tuple[StoreProcess, StoreProcess],
) -> None:
    """Over 1 MiB of state does not fit the answer of Move; every token arrives."""
    tokens = [4 + index % 200 for index in range(LONG_TOKENS)]
    async with connected(long_pair[0]) as old, connected(long_pair[1]) as new:
        writer, reader = await old.attach(), await new.attach()
        request = old.open_request(writer, tokens, forced_output_tokens=2)
        opened = await old.stub.Open(request, timeout=30.0)
        answer = await new.stub.AdoptLog(
            kvstore_pb2.AdoptLogRequest(
                log_id=request.log_id,
                generation=opened.generation,
                from_kvstore_address=old.store.address,
                capability=request.capability,
                request_id=new_request_id(),
            ),
            timeout=30.0,
        )
        assert answer.position == LONG_TOKENS
        view = await reader.store.replay(request.log_id, request.capability, BLOCK)
        assert list(view.token_ids) == tokens
        assert view.head.prompt_tokens == LONG_TOKENS - 2
        assert view.head.is_sealed


async def test_kv_that_is_damaged_where_it_comes_from_is_left_out(
    sites: tuple[Site, Site],
) -> None:
    """The tokens are all there; who takes the log computes the KV again from the damage on."""
    old, new = sites
    writer, reader = await old.attach("w-old"), await new.attach("w-new")
    log = await old.open(writer, PROMPT, cache_mode=2)
    await writer.prefill(log)
    # A writer that does not keep to its pages, or memory that does not keep its bits.
    granted, _ = log.table.slot(2 * BLOCK)
    writer.attached.arena.page(granted.page)[7] ^= 1
    answer = await adopted(old, new, log)
    assert (answer.position, answer.committed_position) == (len(PROMPT) + 1, 2 * BLOCK)
    here = await taken(reader, log, answer.generation)
    view = await reader.view(here)
    assert list(view.token_ids) == [*PROMPT, 5]
    for position in range(2 * BLOCK):
        assert reader.read(view, position) == kv_value(PROMPT[position], position)
    await new.close(here, drop=True)


def test_bytes_that_the_wire_damaged_are_fetched_again(
    model: Model, pair: tuple[StoreProcess, StoreProcess], tmp_path: Path
) -> None:
    """One flipped byte, one short chunk: the transfer is tried again and the log is whole."""
    spec = "move.mid_send:flip_byte:once,move.mid_send:short:100:once"
    faults = {"BATON_FAULTS_ENABLED": "1", "FAULT": spec}
    with running_store(model, tmp_path, node_id="n2", environment=faults) as faulty:
        asyncio.run(_moved_over_a_bad_wire(faulty, pair[1]))


async def _moved_over_a_bad_wire(faulty: StoreProcess, target: StoreProcess) -> None:
    async with connected(faulty) as old, connected(target) as new:
        writer, reader = await old.attach("w-old"), await new.attach("w-new")
        log = await old.open(writer, PROMPT, cache_mode=2)
        await writer.prefill(log)
        answer = await adopted(old, new, log)
        assert answer.committed_position == len(PROMPT)
        here = await taken(reader, log, answer.generation)
        view = await reader.view(here)
        for position, token in enumerate(PROMPT):
            assert reader.read(view, position) == kv_value(token, position)
        await new.close(here, drop=True)

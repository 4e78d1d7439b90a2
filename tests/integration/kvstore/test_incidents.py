"""Incidents of systems like this one, on a real kvstore process with a worker that maps its arena.

Each test is named after its incident in docs/incidents.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable
from dataclasses import replace

import numpy as np
import pytest

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2 as pb
from baton.errors import Reason, ServiceError
from baton.ids import new_log_id, new_request_id
from baton.kv.layout import page_view
from tests.integration.kvstore.harness import (
    BLOCK,
    FakeLog,
    FakeWorker,
    Site,
    capability,
    kv_value,
)

_firsts = itertools.count(7)


def fresh_prompt(tokens: int = 2 * BLOCK + 5) -> list[int]:
    """Never seen by the store before."""
    high, low = divmod(next(_firsts), 200)
    return [high, low, 251, *(index % 200 for index in range(tokens - 3))]


async def refused(call: Awaitable[object]) -> ServiceError:
    """The error a call is answered with."""
    with pytest.raises(ServiceError) as caught:
        await call
    return caught.value


def scribble(worker: FakeWorker, pages: list[int]) -> None:
    """What a step does that nobody stopped: it fills every slot it was ever given."""
    for page in pages:
        view = page_view(
            worker.model.geometry, np.frombuffer(worker.attached.arena.page(page), dtype=np.uint8)
        )
        view.k[:] = -4242.0
        view.v[:] = 4242.0


def pages_of(log: FakeLog) -> list[int]:
    """The pages behind what was committed."""
    log.table.require(len(log.tokens))
    return [log.table.row(index).page for index in range(log.committed // BLOCK, 3)]


async def fill(site: Site, worker: FakeWorker, kept: list[FakeLog]) -> list[FakeLog]:
    """Logs of as many requests as there are pages for, the start of each committed; `kept` and they
    are renewed meanwhile.
    """
    logs: list[FakeLog] = []
    while True:
        try:
            log = await site.open(worker, fresh_prompt(), cache_mode=common_pb2.CACHE_MODE_OFF)
        except ServiceError as error:
            if error.reason is Reason.PAGES_EXHAUSTED:
                return logs
            raise
        logs.append(log)
        await worker.commit(log, BLOCK + 1)
        held = [one.held for one in (*kept, *logs)]
        await worker.store.renew_leases(worker.incarnation, held, len(logs))


async def leave(site: Site, *workers: FakeWorker) -> None:
    """They die."""
    for worker in workers:
        worker.leave()
        site.workers.remove(worker)
    await site.until("everything came back", pages_quarantined=0, pages_granted=0)


@pytest.mark.parametrize("abort", ["cancel", "drop", "lease"])
async def test_a1_a2_a11_pages_of_an_aborted_writer_go_to_nobody_while_it_writes(
    site: Site, abort: str
) -> None:
    """The mapping is real and so is the late write; the victim's bytes are its canary."""
    slow, other = await site.attach(f"slow-{abort}"), await site.attach(f"other-{abort}")
    log = await site.open(slow, fresh_prompt())
    await slow.commit(log, BLOCK + 3)
    late = pages_of(log)
    if abort == "cancel":
        await site.stub.Cancel(pb.CancelRequest(log_id=log.log_id, capability=log.capability))
    elif abort == "drop":
        await site.close(log, drop=True)
    else:
        await site.until("the lease has ended", leases=0)
    assert (await site.counts()).pages_quarantined > 0, "a message or time alone frees nothing"
    victims = await fill(site, other, [])
    assert victims
    scribble(slow, late)
    for victim in victims:
        view = await other.view(victim)
        for position in range(victim.committed):
            assert other.read(view, position) == kv_value(victim.tokens[position], position)
    for victim in victims:
        await site.close(victim, drop=True)
    await leave(site, slow, other)


async def test_a3_a_stale_reference_never_reads_what_is_there_now(site: Site) -> None:
    """Six ways to refer to what is not there: each is an error, and nothing changes."""
    worker = await site.attach("a3")
    # 1: an id that never was.
    unknown = await refused(worker.store.replay(new_log_id(), capability(), BLOCK))
    assert unknown.reason is Reason.LOG_NOT_FOUND
    # 2: out of range: a page the arena does not have, and one that is somebody else's.
    log = await site.open(worker, fresh_prompt())
    count = worker.attached.arena.shape.page_count
    for page in (count, count + 1000, 2**31):
        assert (await refused(commit_of(worker, log, page))).reason is Reason.INVALID_REQUEST
    # 3: consumed: dropped, and asked for again.
    gone = await site.open(worker, fresh_prompt())
    await worker.prefill(gone, 5, "stop")
    await site.close(gone, drop=True)
    consumed = await refused(worker.store.replay(gone.log_id, gone.capability, BLOCK))
    assert consumed.reason in (Reason.STALE_GENERATION, Reason.LOG_NOT_FOUND)
    # 4: reused: the right page, from its life before.
    log.table.require(1)
    granted = log.table.row(0)
    stale = replace(granted, page_generation=granted.page_generation - 1)
    reused = await refused(commit_of(worker, log, stale.page, stale.page_generation))
    assert reused.reason is Reason.INVALID_REQUEST
    # 5: an expired lease, also for reading at that generation.
    await site.until("the lease has ended", leases=0)
    expired = await refused(commit_of(worker, log, granted.page, granted.page_generation))
    assert expired.reason is Reason.STALE_GENERATION
    read = worker.store.replay(log.log_id, log.capability, BLOCK, generation=log.generation)
    assert (await refused(read)).reason is Reason.STALE_GENERATION
    # 6: the wrong label.
    label = replace(site.model.label, rope=bytes(16))
    assert (await refused(site.attach("a3-other", label=label))).reason is Reason.COMPAT_MISMATCH
    await site.close(log, drop=True)


def commit_of(
    worker: FakeWorker, log: FakeLog, page: int, page_generation: int = 1
) -> Awaitable[object]:
    """A commit of the log's first slot into a page of the caller's choice."""
    entry = common_pb2.PageEntry(
        page=page, page_generation=page_generation, tokens=1, slot_crc32c=[1]
    )
    request = pb.CommitCheckpointRequest(
        log_id=log.log_id, generation=log.generation, from_position=0, to_position=1,
        pages=[entry], capability=log.capability,
    )  # fmt: skip
    answer: Awaitable[object] = worker.stub.CommitCheckpoint(request)
    return answer


async def test_a4_decode_never_goes_on_from_an_aborted_prefill(site: Site) -> None:
    """A cancelled log that was not sealed is gone: no take, no replay, no finish reason."""
    prefill, decode = await site.attach("a4-prefill"), await site.attach("a4-decode")
    log = await site.open(prefill, fresh_prompt())
    await prefill.commit(log, BLOCK + 2)
    await site.stub.Cancel(pb.CancelRequest(log_id=log.log_id, capability=log.capability))
    assert (await refused(decode.take(log))).reason is Reason.STALE_GENERATION
    assert (await refused(prefill.seal(log, 5))).reason is Reason.STALE_GENERATION


async def test_a6_what_was_not_sealed_is_found_by_nobody(site: Site) -> None:
    """A failed store stays invisible: neither its own tenant nor a fork sees a page of it."""
    worker = await site.attach("a6")
    prompt = fresh_prompt(3 * BLOCK)
    log = await site.open(worker, prompt)
    await worker.commit(log, 2 * BLOCK)
    assert (await opened(site, worker, prompt)).cached_tokens == 0
    parent = common_pb2.LogPosition(log_id=log.log_id, position=BLOCK)
    fork = site.stub.Fork(
        pb.ForkRequest(parent=parent, log_id=new_log_id(), capability=capability(), request_id="a6")
    )
    assert (await refused(fork)).reason is Reason.INVALID_REQUEST
    await site.stub.Cancel(pb.CancelRequest(log_id=log.log_id, capability=log.capability))
    assert (await opened(site, worker, prompt)).cached_tokens == 0


async def opened(site: Site, worker: FakeWorker, prompt: list[int]) -> pb.OpenResponse:
    """Another request of the same prompt, ended at once."""
    request = site.open_request(worker, prompt)
    answer: pb.OpenResponse = await site.stub.Open(request)
    await site.stub.Cancel(pb.CancelRequest(log_id=request.log_id, capability=request.capability))
    return answer


async def test_a7_what_open_promised_is_there_whatever_is_evicted(site: Site) -> None:
    """The answer is a pin: other requests take every page there is, and the prefix still reads."""
    worker = await site.attach("a7")
    prompt = fresh_prompt(4 * BLOCK)
    first = await site.open(worker, prompt)
    await worker.prefill(first, 5, "stop")
    await site.close(first)
    log = await site.open(worker, [*prompt, 9])
    assert log.committed == len(prompt)
    others = await fill(site, worker, [log])
    view = await worker.view(log)
    for position in range(log.committed):
        assert worker.read(view, position) == kv_value(prompt[position], position)
    for one in [log, *others]:
        await site.close(one, drop=True)
    await leave(site, worker)


async def test_a8_pages_of_a_dead_writer_come_back_and_only_then(site: Site) -> None:
    """Bounded, with the writer gone: fenced pages wait for the mapping, not for a message."""
    worker = await site.attach("a8")
    log = await site.open(worker, fresh_prompt())
    await worker.commit(log, BLOCK)
    await site.until("the lease has ended", leases=0)
    assert (await site.counts()).pages_quarantined > 0
    await leave(site, worker)


async def test_a14_a_message_of_another_run_is_refused(site: Site) -> None:
    """A restarted worker is another one: what the old run says and holds counts no more."""
    old = await site.attach("a14")
    log = await site.open(old, fresh_prompt())
    await leave(site, old)
    new = await site.attach("a14")
    stale = old.store.renew_leases(old.incarnation, [log.held], 9)
    assert (await refused(stale)).reason is Reason.INVALID_REQUEST
    grant = new.store.grant(log.log_id, log.generation, 1, new_request_id())
    assert (await refused(grant)).reason is Reason.STALE_GENERATION
    await site.close(log, drop=True)

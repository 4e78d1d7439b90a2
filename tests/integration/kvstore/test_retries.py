"""Every write over a real socket, repeated: the same answer once more, and another body refused.

One row for each call that changes something; a new call without a row fails the table's own test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from google.protobuf.message import Message

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.arena import client_wire as wire
from baton.arena.checksums import commit_rows
from baton.capability import Right
from baton.errors import Reason, ServiceError
from baton.ids import new_log_id, new_request_id
from baton.kv.digests import body_hash, chunk_list_digest
from baton.wire.blob import descriptor_from_header, header_from_descriptor
from tests.integration.kvstore.harness import BLOCK, FakeLog, FakeWorker, Site, capability
from tests.integration.kvstore.harness import worker_capability as worker_text

PROMPT = [11 + index % 100 for index in range(2 * BLOCK + 5)]

READS = {
    *("ReplayLog", "GetBlob", "DescribeBlob", "ListPrefixes", "DescribeLog", "DescribeArena"),
    "ProbeTransfer",
}
# What repeats itself without harm by its own rules, or has its own tests of repetition. A repeated
# MapLog pins once more until its lease; a repeated UnmapLog says that nothing is pinned any more.
BY_THEMSELVES = {"Attach", "RenewLeases", "Drain", "Distrust", "MapLog", "UnmapLog"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request that is accepted, and one of the same id that asks for something else."""

    request: Any
    other: Any


Build = Callable[[Site, FakeWorker], Awaitable[Case]]


def changed(request: Message, **fields: Any) -> Any:
    """A copy of the request with other fields."""
    copy = type(request)()
    copy.CopyFrom(request)
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


async def sealed(site: Site, worker: FakeWorker, **fields: Any) -> FakeLog:
    """A log whose prompt is done; nothing of it is found by others."""
    log = await site.open(worker, PROMPT, cache_mode=common_pb2.CACHE_MODE_OFF, **fields)
    await worker.prefill(log)
    return log


async def open_case(site: Site, worker: FakeWorker) -> Case:
    """Open: another output reservation is another body."""
    request = site.open_request(worker, PROMPT)
    return Case(request=request, other=changed(request, output_pages=3))


async def grant_case(site: Site, worker: FakeWorker) -> Case:
    """Grant."""
    log = await site.open(worker, PROMPT)
    request = kvstore_pb2.GrantRequest(
        log_id=log.log_id,
        generation=log.generation,
        pages=2,
        request_id=new_request_id(),
        worker_id=worker.worker_id,
        capability=worker_text(),
    )
    return Case(request=request, other=changed(request, pages=3))


async def checkpoint_case(site: Site, worker: FakeWorker) -> Case:
    """CommitCheckpoint, late: another chunk was committed before the repetition arrives."""
    log = await site.open(worker, PROMPT, cache_mode=common_pb2.CACHE_MODE_OFF)
    worker.write(log, 0, BLOCK)
    rows = commit_rows(worker.attached.arena, log.table, 0, BLOCK)
    request = kvstore_pb2.CommitCheckpointRequest(
        log_id=log.log_id,
        generation=log.generation,
        from_position=0,
        to_position=BLOCK,
        pages=[wire.row_to_proto(row) for row in rows],
        capability=log.capability,
        request_id=new_request_id(),
    )
    return Case(request=request, other=changed(request, to_position=BLOCK + 1))


async def seal_case(site: Site, worker: FakeWorker) -> Case:
    """Seal."""
    log = await site.open(worker, PROMPT, cache_mode=common_pb2.CACHE_MODE_OFF)
    await worker.commit(log, len(PROMPT))
    request = kvstore_pb2.SealRequest(
        log_id=log.log_id,
        generation=log.generation,
        chunk_list_digest=chunk_list_digest(site.model.label.kv_digest(), log.chunks),
        first_token_id=5,
        capability=log.capability,
        request_id=new_request_id(),
    )
    return Case(request=request, other=changed(request, first_token_id=6))


async def take_case(site: Site, worker: FakeWorker) -> Case:
    """Take: its repetition shows a generation that its first run ended."""
    log = await sealed(site, worker)
    request = kvstore_pb2.TakeRequest(
        log_id=log.log_id,
        generation=log.generation,
        worker_id=worker.worker_id,
        capability=log.capability,
        pages=1,
        request_id=new_request_id(),
    )
    return Case(request=request, other=changed(request, pages=2))


async def park_case(site: Site, worker: FakeWorker) -> Case:
    """Park: its repetition shows a generation that its first run ended."""
    log = await worker.take(await sealed(site, worker))
    request = kvstore_pb2.ParkRequest(
        log_id=log.log_id,
        generation=log.generation,
        worker_id=worker.worker_id,
        worker_capability=worker_text(),
        capability=log.capability,
        request_id=new_request_id(),
    )
    return Case(request=request, other=changed(request, worker_id=""))


async def truncate_case(site: Site, worker: FakeWorker) -> Case:
    """Truncate."""
    log = await sealed(site, worker)
    request = kvstore_pb2.TruncateRequest(
        log_id=log.log_id,
        generation=log.generation,
        position=BLOCK + 3,
        capability=log.capability,
        request_id=new_request_id(),
    )
    return Case(request=request, other=changed(request, position=BLOCK))


async def fork_case(site: Site, worker: FakeWorker) -> Case:
    """Fork with a writer."""
    log = await sealed(site, worker)
    child = new_log_id()
    request = kvstore_pb2.ForkRequest(
        parent=common_pb2.LogPosition(log_id=log.log_id, position=BLOCK + 7),
        log_id=child,
        capability=capability(child),
        writer_worker_id=worker.worker_id,
        request_id=new_request_id(),
    )
    return Case(request=request, other=changed(request, writer_worker_id=""))


async def cancel_case(site: Site, worker: FakeWorker) -> Case:
    """Cancel has no other body but another log, whose request ids are its own."""
    log = await site.open(worker, PROMPT)
    request = kvstore_pb2.CancelRequest(
        log_id=log.log_id, capability=log.capability, request_id=new_request_id()
    )
    return Case(request=request, other=None)


async def close_case(site: Site, worker: FakeWorker) -> Case:
    """Close: keeping and dropping are different orders."""
    log = await sealed(site, worker)
    request = kvstore_pb2.CloseRequest(
        log_id=log.log_id, capability=log.capability, request_id=new_request_id()
    )
    return Case(request=request, other=changed(request, drop=True))


async def publish_case(site: Site, worker: FakeWorker) -> Case:
    """Publish: its repetition gives the same prefix id."""
    log = await sealed(site, worker)
    prefix = kvstore_pb2.PublishedPrefix(
        name=new_request_id(), log=common_pb2.LogPosition(log_id=log.log_id, position=BLOCK)
    )
    request = kvstore_pb2.PublishRequest(
        prefix=prefix, capability=log.capability, request_id=new_request_id()
    )
    other = changed(request)
    other.prefix.log.position = BLOCK + 1
    return Case(request=request, other=other)


async def revoke_case(site: Site, worker: FakeWorker) -> Case:
    """Revoke: its repetition finds the prefix gone, and says what it said."""
    publish = await publish_case(site, worker)
    answer = await site.stub.Publish(publish.request)
    text = capability(rights=frozenset({Right.PUBLISH}))
    request = kvstore_pb2.RevokeRequest(
        prefix_id=answer.prefix.prefix_id, capability=text, request_id=new_request_id()
    )
    return Case(request=request, other=None)


CASES: dict[str, Build] = {
    "Open": open_case,
    "Grant": grant_case,
    "CommitCheckpoint": checkpoint_case,
    "Seal": seal_case,
    "Take": take_case,
    "Park": park_case,
    "Truncate": truncate_case,
    "Fork": fork_case,
    "Cancel": cancel_case,
    "Close": close_case,
    "Publish": publish_case,
    "Revoke": revoke_case,
}


@pytest.mark.parametrize("name", CASES)
async def test_a_repeated_write_is_answered_the_same_and_done_once(site: Site, name: str) -> None:
    """Twice at once, as by a hedging client, and once more later; then something else."""
    worker = await site.attach(f"retry-{name}")
    case = await CASES[name](site, worker)
    call = getattr(site.stub, name)
    first, overlapping = await asyncio.gather(call(case.request), call(case.request))
    counts = await site.counts()
    later = await call(case.request)
    assert first == overlapping == later
    assert await site.counts() == counts, "done twice"
    if case.other is None:
        return
    with pytest.raises(ServiceError) as refused:
        await call(case.other)
    assert refused.value.reason is Reason.ALREADY_EXISTS
    assert refused.value.field == "request_id"
    assert await site.counts() == counts


async def test_a_repeated_append_is_acked_and_another_token_is_refused(site: Site) -> None:
    """The position is an append's request id."""
    worker = await site.attach("retry-append")
    log = await sealed(site, worker)
    log = await worker.take(log)
    entry = worker.entry(log, 9)
    for _ in range(2):
        (outcome,) = await worker.send([entry])
        assert outcome.error is None
    other = worker.entry(log, 10)
    (outcome,) = await worker.send([other])
    assert outcome.error is not None
    assert (outcome.error.reason, outcome.error.field) == (Reason.INVALID_REQUEST, "position")


async def test_a_repeated_blob_is_stored_once(site: Site) -> None:
    """PutBlob: both streams are answered with the one log."""
    worker = await site.attach("retry-blob")
    log = await sealed(site, worker)
    read = kvstore_pb2.GetBlobRequest(
        log_id=log.log_id, to_position=BLOCK, capability=log.capability
    )
    pieces = [piece async for piece in site.stub.GetBlob(read)]
    header = header_from_descriptor(pieces[0].descriptor)
    crcs = [page.crc32c for page in pieces[0].descriptor.pages]
    descriptor = descriptor_from_header(replace(header, log_id=new_log_id()), crcs)
    head = kvstore_pb2.PutBlobHeader(request_id=new_request_id(), descriptor=descriptor)
    head.capability = capability(head.descriptor.log_id)
    chunks = [kvstore_pb2.PutBlobRequest(chunk=piece.chunk) for piece in pieces[1:]]

    async def put(header: kvstore_pb2.PutBlobHeader) -> kvstore_pb2.PutBlobResponse:
        async def stream() -> Any:
            yield kvstore_pb2.PutBlobRequest(header=header)
            for chunk in chunks:
                yield chunk

        answer: kvstore_pb2.PutBlobResponse = await site.stub.PutBlob(stream())
        return answer

    first, overlapping = await asyncio.gather(put(head), put(head))
    counts = await site.counts()
    assert first == overlapping == await put(head)
    assert await site.counts() == counts
    with pytest.raises(ServiceError) as refused:
        await put(changed(head, convert=True))
    assert refused.value.reason is Reason.ALREADY_EXISTS
    assert refused.value.field == "request_id"


async def test_an_open_repeated_after_its_log_was_taken_keeps_its_answer(site: Site) -> None:
    """What the gateway is told does not depend on who has the log meanwhile."""
    worker = await site.attach("retry-open")
    request = site.open_request(worker, PROMPT)
    first = await site.stub.Open(request)
    log = await worker.follow(request.log_id, first.generation, request.capability)
    await worker.prefill(log)
    await worker.take(log)
    again = await site.stub.Open(request)
    assert (again.generation, again.granted_pages) == (first.generation, first.granted_pages)
    other = changed(request, body_hash=body_hash(b"other"))
    with pytest.raises(ServiceError) as refused:
        await site.stub.Open(other)
    assert refused.value.reason is Reason.ALREADY_EXISTS


def test_every_write_has_a_row() -> None:
    """A new call that changes something must say what its repetition does."""
    service = kvstore_pb2.DESCRIPTOR.services_by_name["KVStoreService"]
    own = {
        method.name for method in service.methods if "move" not in method.input_type.name.lower()
    }
    moving = {"AdoptLog", "ExpectLog", "FollowLog", "FetchPages", "FetchSnapshot"}
    assert own - READS - BY_THEMSELVES - moving == {*CASES, "Append", "PutBlob"}

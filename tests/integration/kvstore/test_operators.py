"""What operators ask of a running kvstore: lists, lineage, use, eviction; imports; scrub."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2, operators_pb2, operators_pb2_grpc
from baton.capability import Right
from baton.errors import Reason, ServiceError
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
    running_store,
)

PROMPT = [3 + index % 90 for index in range(2 * BLOCK + 5)]
WAIT_S = 30.0


def operator_capability() -> str:
    """Signed when it is used: one signed at import has expired late in a long run."""
    return capability(tenant=None, rights=frozenset({Right.ADMIN}))


@pytest.fixture(scope="module")
def own_store(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    """A kvstore that scrubs everything five times a second."""
    directory: Path = tmp_path_factory.mktemp("kvstore-operators")
    with running_store(model, directory, "--lease-s", "60", "--scrub-period-s", "0.2") as running:
        yield running


@pytest.fixture
async def site(own_store: StoreProcess) -> AsyncIterator[Site]:
    """Connections of one test."""
    async with connected(own_store) as one:
        yield one


def operators(site: Site) -> Any:
    """The stub."""
    return operators_pb2_grpc.OperatorServiceStub(site.channel)


async def kept(site: Site, worker: FakeWorker, tokens: list[int]) -> FakeLog:
    """A log that was answered and closed."""
    log = await site.open(worker, tokens, cache_mode=common_pb2.CACHE_MODE_OFF)
    await worker.prefill(log, 5, "stop")
    await site.close(log)
    return log


async def refused(call: Any) -> ServiceError:
    """The error a call is answered with."""
    with pytest.raises(ServiceError) as caught:
        await call
    error: ServiceError = caught.value
    return error


async def test_list_inspect_and_lineage_say_where_logs_stand_and_nothing_of_their_content(
    site: Site,
) -> None:
    """Two logs, one a fork of the other: found by tenant and by the first digits."""
    worker = await site.attach("w-list")
    log = await kept(site, worker, [7, *PROMPT])
    fork = kvstore_pb2.ForkRequest(log_id=new_log_id(), request_id=new_request_id())
    fork.parent.log_id, fork.parent.position = log.log_id, len(PROMPT)
    fork.capability = capability(None)
    await site.stub.Fork(fork)
    asked = operators_pb2.ListLogsRequest(
        capability=operator_capability(), tenant="acme", log_id_prefix=log.log_id.hex()[:8]
    )
    listed = await operators(site).ListLogs(asked)
    (line,) = listed.logs
    assert (line.log_id, line.tenant, line.tokens) == (log.log_id, "acme", len(PROMPT) + 2)
    assert line.phase == operators_pb2.LOG_PHASE_KEPT
    assert line.committed_tokens == len(PROMPT) + 1
    assert line.host_pages == 3
    found = await operators(site).InspectLog(
        operators_pb2.InspectLogRequest(capability=operator_capability(), log_id=log.log_id)
    )
    (host,) = (tier for tier in found.tiers if tier.tier == "host")
    assert (host.own_pages, host.shared_pages) == (0, 3), "the fork has them too"
    assert list(found.child_log_ids) == [fork.log_id]
    assert found.finish_reason == "stop"
    tree = await operators(site).ListLineage(
        operators_pb2.ListLineageRequest(capability=operator_capability(), log_id=fork.log_id)
    )
    assert [(entry.log.log_id, entry.depth) for entry in tree.entries] == [
        (log.log_id, 0),
        (fork.log_id, 1),
    ]
    assert tree.entries[1].log.parent_position == len(PROMPT)


def _unknown() -> operators_pb2.LogPhase:
    return cast(operators_pb2.LogPhase, 77)


async def test_lists_are_bounded_and_say_so(site: Site) -> None:
    """More than a thousand at once is refused; what a page ends with begins the next."""
    worker = await site.attach("w-bounds")
    for first in (11, 12, 13):
        await kept(site, worker, [first, *PROMPT[:4]])
    ops = operators(site)
    for call in (
        ops.ListLogs(
            operators_pb2.ListLogsRequest(capability=operator_capability(), page_size=1001)
        ),
        ops.ListLineage(
            operators_pb2.ListLineageRequest(capability=operator_capability(), logs_max=1001)
        ),
        ops.ListLogs(
            operators_pb2.ListLogsRequest(capability=operator_capability(), page_token="zz")
        ),
        ops.ListLogs(
            operators_pb2.ListLogsRequest(capability=operator_capability(), phase=_unknown())
        ),
        ops.InspectLog(operators_pb2.InspectLogRequest(capability=operator_capability())),
    ):
        assert (await refused(call)).reason is Reason.INVALID_REQUEST
    seen: list[bytes] = []
    request = operators_pb2.ListLogsRequest(capability=operator_capability(), page_size=2)
    while True:
        answer = await ops.ListLogs(request)
        assert len(answer.logs) <= 2
        seen += [line.log_id for line in answer.logs]
        if not answer.next_page_token:
            break
        request.page_token = answer.next_page_token
    assert len(seen) == len(set(seen)) == answer.total >= 3


async def test_usage_adds_up_to_the_arena(site: Site) -> None:
    """Every page in use is somebody's, or quarantined."""
    worker = await site.attach("w-usage")
    await kept(site, worker, [21, *PROMPT])
    answer = await operators(site).ReportUsage(
        operators_pb2.ReportUsageRequest(capability=operator_capability())
    )
    counts = await site.counts()
    host = next(tier for tier in answer.tiers if tier.tier == "host")
    assert host.pages_total == counts.arena.page_count
    assert host.page_bytes == counts.arena.slot_bytes
    used = sum(one.pages for one in host.tenants)
    assert 0 < used <= host.pages_used == host.pages_total - counts.pages_free
    assert used >= host.pages_used - counts.pages_quarantined
    assert {one.tenant for one in host.tenants} == {"acme"}


async def test_evicted_log_keeps_its_tokens_and_frees_its_pages(site: Site) -> None:
    """A log that is being written is refused, saying by whom."""
    worker = await site.attach("w-evict")
    log = await kept(site, worker, [31, *PROMPT])
    request = operators_pb2.EvictLogRequest(capability=operator_capability(), log_id=log.log_id)
    done = await operators(site).EvictLog(request)
    assert done.pages == 3
    assert done.freed_pages >= 2, "the tail may wait for its writer to let go of it"
    assert done.tokens == len(PROMPT) + 2
    again = await operators(site).EvictLog(request)
    assert (again.pages, again.freed_pages) == (0, 0)
    view = await worker.view(log)
    assert list(view.token_ids) == [31, *PROMPT, 5]
    assert view.head.committed_position == 0
    writing = await site.open(worker, [32, *PROMPT])
    request = operators_pb2.EvictLogRequest(capability=operator_capability(), log_id=writing.log_id)
    error = await refused(operators(site).EvictLog(request))
    assert error.reason is Reason.INVALID_REQUEST
    assert "w-evict" in error.message
    await site.close(writing, drop=True)
    request.log_id = new_log_id()
    assert (await refused(operators(site).EvictLog(request))).reason is Reason.LOG_NOT_FOUND


# --- scrub ----------------------------------------------------------------------------------


async def scrubbed(site: Site, is_enough: Any) -> operators_pb2.TierScrub:
    """The host's report once it is as wanted."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        report = await operators(site).ReportScrub(
            operators_pb2.ReportScrubRequest(capability=operator_capability())
        )
        tier: operators_pb2.TierScrub = report.tiers[0]
        if is_enough(tier):
            return tier
        assert time.monotonic() < deadline_s, tier


async def test_scrub_finds_a_flipped_byte_and_the_next_use_computes_again(site: Site) -> None:
    """The page is out of use for good, the log keeps what stands before it, and a prompt that
    begins so is served from there. The page that is still written is left alone.
    """
    worker = await site.attach("w-scrub")
    tokens = [41, *PROMPT]
    log = await site.open(worker, tokens)
    await worker.prefill(log, 5, "stop")
    await site.close(log)
    writing = await site.open(worker, [42, *PROMPT])
    await worker.commit(writing, BLOCK + 3)
    view = await worker.view(log)
    before = await scrubbed(site, lambda tier: tier.passes >= 1)
    quarantined = (await site.counts()).pages_quarantined
    flip(worker, view.rows[1].page)
    found = await scrubbed(site, lambda tier: tier.damaged_pages > before.damaged_pages)
    assert found.damaged_pages == before.damaged_pages + 1
    view = await worker.view(log)
    assert view.head.committed_position == BLOCK
    assert list(view.token_ids) == [*tokens, 5]
    counts = await site.counts()
    assert counts.pages_quarantined >= quarantined + 1
    again = await site.open(worker, [*tokens, 5, 6])
    state = await worker.view(again)
    assert state.head.cached_tokens == BLOCK
    assert all(worker.read(state, position) for position in range(BLOCK))
    assert (await worker.view(writing)).head.committed_position == BLOCK + 3
    await site.close(again, drop=True)
    await site.close(writing, drop=True)
    assert "scrub_found_damage" in site.store.text()
    assert log.log_id.hex() in site.store.text()


def flip(worker: FakeWorker, page: int) -> None:
    """One bit of a page, as failing memory would."""
    content = np.frombuffer(worker.attached.arena.page(page), dtype=np.uint8)
    content[len(content) // 3] ^= 1


async def test_a_writer_of_a_damaged_page_is_fenced_and_the_next_one_computes(site: Site) -> None:
    """Its log goes on from the tokens under a new generation."""
    worker = await site.attach("w-fenced")
    log = await site.open(worker, [51, *PROMPT])
    await worker.prefill(log, 5)
    log = await worker.take(log)
    view = await worker.view(log)
    before = await scrubbed(site, lambda tier: True)
    flip(worker, view.rows[0].page)
    await scrubbed(site, lambda tier: tier.damaged_pages > before.damaged_pages)
    with pytest.raises(ServiceError) as stopped:
        await worker.append(log, 9)
    assert stopped.value.reason is Reason.STALE_GENERATION
    log.generation += 1
    log = await worker.take(log, pages=4)
    assert list(log.tokens) == [51, *PROMPT, 5]
    assert log.committed == 0
    await site.close(log, drop=True)


# --- imports --------------------------------------------------------------------------------


async def blobs_of(site: Site, log: FakeLog, cut: int) -> list[tuple[Any, bytes]]:
    """The log in two blobs, cut at a position."""
    found = []
    for first, end in ((0, cut), (cut, 0)):
        request = kvstore_pb2.GetBlobRequest(
            log_id=log.log_id, from_position=first, to_position=end, capability=log.capability
        )
        pieces = [piece async for piece in site.stub.GetBlob(request)]
        payload = b"".join(piece.chunk for piece in pieces[1:])
        found.append((pieces[0].descriptor, payload))
    return found


async def imported(
    site: Site, blobs: list[tuple[Any, bytes]], log_id: bytes, **fields: Any
) -> operators_pb2.ImportLogResponse:
    """An import for acme."""
    head = operators_pb2.ImportLogHeader(
        request_id=fields.pop("request_id", new_request_id()),
        capability=fields.pop("capability", capability(log_id)),
        log_id=log_id,
        total_tokens=fields.pop("total", sum(blob.total_tokens for blob, _ in blobs)),
        **fields,
    )

    async def pieces() -> AsyncIterator[operators_pb2.ImportLogRequest]:
        yield operators_pb2.ImportLogRequest(header=head)
        for descriptor, payload in blobs:
            yield operators_pb2.ImportLogRequest(descriptor=descriptor)
            for start in range(0, 0 if head.only_check else len(payload), 100_000):
                yield operators_pb2.ImportLogRequest(chunk=payload[start : start + 100_000])

    answer: operators_pb2.ImportLogResponse = await operators(site).ImportLog(pieces())
    return answer


async def test_consecutive_blobs_become_one_log_and_a_repetition_is_harmless(site: Site) -> None:
    """Its KV is that of the first, whatever position the blobs were cut at."""
    worker = await site.attach("w-import")
    log = await kept(site, worker, [61, *PROMPT])
    for cut in (BLOCK, BLOCK + 3):
        blobs, log_id, request_id = await blobs_of(site, log, cut), new_log_id(), new_request_id()
        answer = await imported(site, blobs, log_id, request_id=request_id)
        assert (answer.log.position, answer.pages) == (len(PROMPT) + 1, 3)
        again = await imported(site, blobs, log_id, request_id=request_id)
        assert again == answer
        copy = FakeLog(
            log_id=log_id,
            generation=1,
            capability=capability(log_id),
            tokens=[],
            table=log.table,
            committed=0,
            prompt_tokens=0,
        )
        copied = [payload for _, payload in await blobs_of(site, copy, 2 * BLOCK)]
        assert copied == [payload for _, payload in await blobs_of(site, log, 2 * BLOCK)]


async def test_an_import_is_whole_or_nothing(site: Site) -> None:
    """Gaps, damage, a foreign tokenizer, too few and too many bytes: refused, no page is lost."""
    worker = await site.attach("w-refused")
    log = await kept(site, worker, [71, *PROMPT])
    one, two = await blobs_of(site, log, BLOCK)
    free = (await site.counts()).pages_free
    foreign = common_pb2.KvBlobDescriptor()
    foreign.CopyFrom(one[0])
    foreign.tokenizer_hash = bytes(8)
    flipped = bytearray(two[1])
    flipped[100] ^= 1
    cases: list[tuple[Reason, list[tuple[Any, bytes]], dict[str, Any]]] = [
        (Reason.BLOB_INVALID, [two, one], {}),
        (Reason.BLOB_INVALID, [one, one], {}),
        (Reason.INVALID_REQUEST, [one], {"total": len(PROMPT) + 1}),
        (Reason.BLOB_INVALID, [one, two], {"total": BLOCK + 3}),
        (Reason.INVALID_REQUEST, [one, two], {"total": BLOCK}),
        (Reason.BLOB_INVALID, [one, (two[0], two[1][:-4])], {}),
        (Reason.BLOB_INVALID, [one, (two[0], two[1] + b"zzzz")], {}),
        (Reason.CHECKSUM_MISMATCH, [one, (two[0], bytes(flipped))], {}),
        (Reason.TOKENIZER_MISMATCH, [(foreign, one[1]), two], {}),
        (Reason.INVALID_REQUEST, [one, two], {"total": 0}),
    ]
    for reason, blobs, fields in cases:
        error = await refused(imported(site, blobs, new_log_id(), **fields))
        assert error.reason is reason, (reason, error)
    assert (await refused(imported(site, [one, two], log.log_id))).reason is Reason.ALREADY_EXISTS
    await site.until("all pages are back", pages_free=free)


async def test_an_import_kept_for_less_than_no_time_is_refused_before_its_blobs(
    site: Site,
) -> None:
    """The check says so too: nothing of a log that no record can hold is sent."""
    worker = await site.attach("w-ttl")
    log = await kept(site, worker, [83, *PROMPT])
    blobs = await blobs_of(site, log, BLOCK)
    free = (await site.counts()).pages_free
    for only_check in (True, False):
        call = imported(site, blobs, new_log_id(), only_check=only_check, ttl=Duration(seconds=-1))
        error = await refused(call)
        assert (error.reason, error.field) == (Reason.INVALID_REQUEST, "ttl")
    assert (await site.counts()).pages_free == free


async def test_a_check_stores_nothing_and_tells_the_tokenizer_first(site: Site) -> None:
    """Of a blob that is wrong in every way the tokenizer is named."""
    worker = await site.attach("w-check")
    log = await kept(site, worker, [81, *PROMPT])
    blobs = await blobs_of(site, log, BLOCK)
    free = (await site.counts()).pages_free
    log_id = new_log_id()
    answer = await imported(site, blobs, log_id, only_check=True)
    assert answer.pages == 3
    assert not answer.HasField("log")
    assert (await site.counts()).pages_free == free
    wrong = common_pb2.KvBlobDescriptor()
    wrong.CopyFrom(blobs[0][0])
    wrong.tokenizer_hash, wrong.model_digest, wrong.header_crc32c = bytes(8), bytes(16), 1
    error = await refused(imported(site, [(wrong, b"")], log_id, only_check=True))
    assert error.reason is Reason.TOKENIZER_MISMATCH
    await asyncio.gather(*(imported(site, blobs, new_log_id()) for _ in range(2)))

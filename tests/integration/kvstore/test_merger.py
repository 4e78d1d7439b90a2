"""A merger beside a real store: what it proposes is opened, refused or fetched there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from baton.api.common.v1 import common_pb2
from baton.api.merger.v1 import merger_pb2
from baton.errors import Reason, ServiceError
from baton.kv.digests import history_at, history_start
from baton.kv.layout import page_view
from baton.kv.manifest import Segment
from baton.rpc.status import from_rpc_error
from baton.wire.blob import header_from_descriptor
from baton.wire.segments import segment_to_proto
from tests.integration.kvstore.harness import (
    BLOCK,
    FakeLog,
    FakeWorker,
    Site,
    capability,
    kv_value,
)
from tests.unit.merger.serving import Stub, running_merger

TOKENS = 2 * BLOCK + 13
JOINT = BLOCK + 6


@pytest.fixture
async def merger() -> AsyncIterator[Stub]:
    """A merger of its own."""
    async with running_merger() as stub:
        yield stub


def segment(site: Site, log: FakeLog, start: int, end: int) -> Segment:
    """Positions [start, end) of a log, as it is now."""
    kv, tokens = site.model.label.kv_digest(), log.tokens
    return Segment(
        log_id=log.log_id,
        generation=log.generation,
        from_position=start,
        to_position=end,
        history_start=history_at(kv, BLOCK, tokens[:start]) if start else history_start(kv),
        history_end=history_at(kv, BLOCK, tokens[:end]),
        kv_digest=kv,
        tokenizer_hash=site.model.label.tokenizer,
        block_tokens=BLOCK,
        numeric_class_id=site.model.label.numeric_class.id,
    )


async def two_logs(site: Site, first: int) -> tuple[FakeWorker, FakeLog, FakeLog]:
    """Sealed logs of one history, each with pages of its own; `first` is told to nobody else."""
    worker = await site.attach()
    prompt = [first, *(3 + index % 100 for index in range(TOKENS - 1))]
    logs = []
    for _ in range(2):
        log = await site.open(worker, prompt, cache_mode=common_pb2.CACHE_MODE_OFF)
        await worker.prefill(log, 5)
        logs.append(log)
    return worker, logs[0], logs[1]


async def spliced(merger: Stub, *segments: Segment) -> common_pb2.Manifest:
    """What the merger proposes."""
    request = merger_pb2.SpliceRequest(
        segments=[segment_to_proto(one) for one in segments], block_tokens=BLOCK
    )
    manifest: common_pb2.Manifest = (await merger.Splice(request, timeout=10)).manifest
    return manifest


async def test_stale_segment_of_a_proposal_is_refused_by_open_naming_it(
    site: Site, merger: Stub
) -> None:
    """The log was taken by another writer since: the merger cannot know, the log's home does."""
    worker, one, two = await two_logs(site, 130)
    manifest = await spliced(merger, segment(site, one, 0, JOINT), segment(site, two, JOINT, 40))
    taken = await worker.take(two)
    assert taken.generation > two.generation
    request = site.open_request(worker, one.tokens[:TOKENS], manifest=manifest)
    with pytest.raises(ServiceError) as refused:
        await site.stub.Open(request)
    assert refused.value.reason is Reason.STALE_GENERATION
    assert refused.value.field == "segments[1].generation"
    assert refused.value.metadata["ours"] == str(taken.generation)
    # So does Materialize, before a byte flows.
    message = merger_pb2.MaterializeRequest(
        manifest=manifest,
        kvstore_address=site.store.address,
        capabilities=[capability(log.log_id) for log in (one, two)],
    )
    call = merger.Materialize(message, timeout=10)
    with pytest.raises(Exception, match="segments") as late:
        await call.read()
    error = from_rpc_error(late.value)
    assert (error.reason, error.metadata["segment"]) == (Reason.STALE_GENERATION, "1")
    fresh = await spliced(merger, segment(site, one, 0, JOINT), segment(site, taken, JOINT, 40))
    again = site.open_request(worker, one.tokens[:TOKENS], manifest=fresh)
    assert (await site.stub.Open(again)).cached_tokens == 40


async def test_segment_that_is_ahead_of_its_log_or_not_sealed_is_refused_naming_it(
    site: Site, merger: Stub
) -> None:
    """What an unsealed log has serves nobody; a number that nobody gave is no older one."""
    worker, one, _two = await two_logs(site, 132)
    ahead = replace(segment(site, one, 0, JOINT), generation=one.generation + 1)
    unsealed = await site.open(worker, one.tokens[:TOKENS], cache_mode=common_pb2.CACHE_MODE_OFF)
    await worker.commit(unsealed, TOKENS)
    for named, part in (("generation", ahead), ("log_id", segment(site, unsealed, 0, JOINT))):
        manifest = await spliced(merger, part)
        request = site.open_request(worker, one.tokens[:TOKENS], manifest=manifest)
        with pytest.raises(ServiceError) as refused:
            await site.stub.Open(request)
        assert refused.value.reason is Reason.INVALID_REQUEST
        assert refused.value.field == f"segments[0].{named}"
    await worker.seal(unsealed, 5)


async def test_proposal_is_taken_by_pointer_where_pages_allow_and_comes_whole_as_blobs(
    site: Site, merger: Stub
) -> None:
    """A joint inside block 1 and an end inside block 2: block 0 is shared, the others are copied;
    the blobs hold the same KV.
    """
    worker, one, two = await two_logs(site, 131)
    parts = segment(site, one, 0, JOINT), segment(site, two, JOINT, TOKENS)
    manifest = await spliced(merger, *parts)
    assert [(part.pages_shared, part.tokens_copied) for part in manifest.parts] == [
        (1, JOINT - BLOCK),
        (0, TOKENS - JOINT),
    ]
    tokens = [*one.tokens[:TOKENS], 7]
    log = await site.open(worker, tokens, manifest=manifest)
    assert log.committed == TOKENS
    view, source = await worker.view(log), await worker.view(one)
    other = await worker.view(two)
    pages = [row.page for row in view.rows]
    assert pages[0] == source.rows[0].page
    assert not {*pages[1:]} & {row.page for row in (*source.rows, *other.rows)}
    expected = [kv_value(tokens[position], position) for position in range(TOKENS)]
    assert [worker.read(view, position) for position in range(TOKENS)] == expected
    message = merger_pb2.MaterializeRequest(
        manifest=manifest,
        kvstore_address=site.store.address,
        capabilities=[capability(one.log_id), capability(two.log_id)],
    )
    assert await blob_values(site, merger, message) == expected
    await worker.prefill(log, 5)


async def blob_values(
    site: Site, merger: Stub, message: merger_pb2.MaterializeRequest
) -> list[float]:
    """The first K element of each position that comes."""
    payloads: list[tuple[common_pb2.KvBlobDescriptor, bytes]] = []
    async for piece in merger.Materialize(message, timeout=20):
        if piece.HasField("descriptor"):
            payloads.append((piece.descriptor, b""))
        else:
            payloads[-1] = (payloads[-1][0], payloads[-1][1] + piece.chunk)
    values: list[float] = []
    for descriptor, payload in payloads:
        header = header_from_descriptor(descriptor)
        at = 0
        for span in header.spans():
            size = span.tokens * site.model.geometry.token_bytes
            packed = np.frombuffer(payload[at : at + size], dtype=np.uint8)
            view = page_view(site.model.geometry, packed, span.tokens)
            values += view.k[0, 0, :, 0].tolist()
            at += size
    return values

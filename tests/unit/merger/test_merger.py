"""Splices over a real socket: alone, in batches, on a stream, by one merger or another."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest

from baton.api.merger.v1 import merger_pb2
from baton.errors import Reason, ServiceError
from baton.kv.digests import history_at, ids_hash, text_hash
from baton.kv.splice import splice
from baton.rpc.status import from_rpc_error
from baton.wire.segments import manifest_from_proto
from services.merger.batch_wire import SPLICES_MAX
from services.merger.servicer import SERVICE_NAME
from services.merger.splicing import SpliceOrder, carry_out
from tests.unit.merger.histories import BLOCK, IDS, KV, TEXT, drawn_request, request, segment
from tests.unit.merger.serving import Stub, connected_merger, running_merger


def order(*segments: Any, **more: Any) -> SpliceOrder:
    return SpliceOrder(segments=segments, block_tokens=BLOCK, **more)


def test_segments_that_meet_become_one_manifest() -> None:
    """The merger adds nothing to the pure splice."""
    parts = (segment(0, 16), segment(16, 32))
    assert carry_out(order(*parts)) == splice(parts)


def test_published_segment_needs_both_hashes_of_the_prompt_itself() -> None:
    """Missing, too many or wrong: refused naming segment and field."""
    published = segment(0, 16, is_published=True)
    good = {
        "expected_text_hashes": (text_hash(TEXT),),
        "expected_ids_hashes": (ids_hash(IDS[:16]),),
    }
    assert carry_out(order(published, **good)).total_tokens == 16
    for name, wrong, field in (
        ("expected_text_hashes", (), "expected_text_hashes"),
        ("expected_ids_hashes", (), "expected_ids_hashes"),
        ("expected_text_hashes", (text_hash(b"other"),), "segments[0].text_hash"),
        ("expected_ids_hashes", (ids_hash(IDS[:15]),), "segments[0].ids_hash"),
    ):
        with pytest.raises(ServiceError) as refused:
            carry_out(order(published, **{**good, name: wrong}))
        assert refused.value.field == field
    with pytest.raises(ServiceError) as refused:
        carry_out(order(segment(0, 16), **good))
    assert refused.value.reason is Reason.INVALID_REQUEST


def test_gap_and_other_block_size_are_refused() -> None:
    """The refusal names where."""
    with pytest.raises(ServiceError) as gap:
        carry_out(order(segment(0, 8), segment(16, 32)))
    assert gap.value.field == "segments[1].from_position"
    with pytest.raises(ServiceError) as blocks:
        carry_out(SpliceOrder(segments=(segment(0, 8),), block_tokens=16))
    assert blocks.value.reason is Reason.COMPAT_MISMATCH


@pytest.fixture
async def merger() -> AsyncIterator[Stub]:
    async with running_merger() as stub:
        yield stub


async def streamed(
    merger: Stub, batches: Sequence[merger_pb2.SpliceStreamRequest]
) -> list[merger_pb2.SpliceStreamResponse]:
    """The answers to messages on one stream."""

    async def messages() -> AsyncIterator[merger_pb2.SpliceStreamRequest]:
        for batch in batches:
            yield batch

    return [one async for one in merger.SpliceStream(messages(), timeout=10)]


async def refused_three_ways(
    merger: Stub, bad: merger_pb2.SpliceRequest
) -> tuple[ServiceError, list[merger_pb2.SpliceOutcome]]:
    """The refusal as a call's status, and in a batch and on a stream."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await merger.Splice(bad, timeout=5)
    batch = await merger.SpliceBatch(merger_pb2.SpliceBatchRequest(splices=[bad]), timeout=5)
    (answer,) = await streamed(merger, [merger_pb2.SpliceStreamRequest(splices=[bad])])
    return from_rpc_error(refused.value), [*batch.outcomes, *answer.outcomes]


async def test_splice_alone_in_a_batch_and_on_a_stream_give_the_same(merger: Stub) -> None:
    """Each has its own outcome; one refusal spoils nothing else."""
    good, bad = request(segment(0, 16), segment(16, 32)), request(segment(8, 16))
    expected = splice([segment(0, 16), segment(16, 32)])
    alone = await merger.Splice(good, timeout=5)
    assert manifest_from_proto(alone.manifest) == expected
    batch = await merger.SpliceBatch(
        merger_pb2.SpliceBatchRequest(splices=[good, bad, good]), timeout=5
    )
    kinds = [one.WhichOneof("outcome") for one in batch.outcomes]
    assert kinds == ["manifest", "error", "manifest"]
    assert batch.outcomes[1].error.field == "segments[0].from_position"
    answers = await streamed(
        merger,
        [merger_pb2.SpliceStreamRequest(batch_id=at, splices=[good]) for at in (7, 8)],
    )
    assert [one.batch_id for one in answers] == [7, 8]
    assert answers[1].outcomes[0].manifest == alone.manifest


async def test_segments_of_different_histories_are_refused_naming_the_segment(
    merger: Stub,
) -> None:
    """One token differs before the joint: the KV behind it would be a wrong answer."""
    other = [*IDS[:7], IDS[7] + 1, *IDS[8:]]
    strange = segment(16, 32)
    strange = replace(
        strange,
        history_start=history_at(KV, BLOCK, other[:16]),
        history_end=history_at(KV, BLOCK, other[:32]),
    )
    error, outcomes = await refused_three_ways(merger, request(segment(0, 16), strange))
    assert error.reason is Reason.INVALID_REQUEST
    assert (error.metadata["segment"], error.field) == ("1", "segments[1].history_start")
    for outcome in outcomes:
        assert outcome.error.reason == Reason.INVALID_REQUEST
        assert outcome.error.field == "segments[1].history_start"


async def test_segment_of_a_stale_generation_is_refused_naming_it(merger: Stub) -> None:
    """The log went on between the two looks at it; the older one is named, whichever it is."""
    old = segment(0, 16, log_id=b"l" * 16, generation=4)
    middle = segment(16, 24)
    new = segment(24, 32, log_id=b"l" * 16, generation=5)
    error, outcomes = await refused_three_ways(merger, request(old, middle, new))
    assert error.reason is Reason.STALE_GENERATION
    assert error.field == "segments[0].generation"
    assert (error.metadata["ours"], error.metadata["theirs"]) == ("5", "4")
    for outcome in outcomes:
        assert outcome.error.reason == Reason.STALE_GENERATION
        assert outcome.error.metadata["segment"] == "0"
    swapped = request(replace(old, generation=5), middle, replace(new, generation=4))
    error, _ = await refused_three_ways(merger, swapped)
    assert error.metadata["segment"] == "2"
    # A segment that names no generation is whatever the log is: OPEN looks.
    unnamed = request(replace(old, generation=0), middle, new)
    assert (await merger.Splice(unnamed, timeout=5)).HasField("manifest")


async def test_batches_are_bounded(merger: Stub) -> None:
    """At the limit it passes, one past it does not."""
    one = request(segment(0, 8))
    full = merger_pb2.SpliceBatchRequest(splices=[one] * SPLICES_MAX)
    assert len((await merger.SpliceBatch(full, timeout=10)).outcomes) == SPLICES_MAX
    full.splices.append(one)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await merger.SpliceBatch(full, timeout=10)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_bytes_that_are_no_message_are_the_callers_fault() -> None:
    """Not ours: INVALID_ARGUMENT, as a call and on a stream."""
    garbage = b"\x12\x05ab"
    async with connected_merger() as channel:
        stream = channel.stream_stream(f"/{SERVICE_NAME}/SpliceStream")()
        await stream.write(garbage)
        with pytest.raises(grpc.aio.AioRpcError) as streamed_away:
            await stream.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(f"/{SERVICE_NAME}/Splice")(garbage, timeout=5)
    for caught in (streamed_away, refused):
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_silent_stream_gives_its_place_up() -> None:
    """It has no deadline of its own, and places are few; one on which something comes stays."""
    one = merger_pb2.SpliceStreamRequest(splices=[request(segment(0, 8))])
    async with running_merger(silence_s_max=0.4) as merger:
        silent = merger.SpliceStream()
        await silent.write(one)
        assert len((await silent.read()).outcomes) == 1
        async with asyncio.timeout(10):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await silent.read()
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_two_mergers_give_equal_answers() -> None:
    """They keep nothing: any of them serves any message, the same messages in any order."""
    draw = random.Random(3)
    batches = [
        merger_pb2.SpliceStreamRequest(batch_id=at, splices=[drawn_request(draw) for _ in range(8)])
        for at in range(1, 60)
    ]
    async with running_merger() as one, running_merger() as other:
        answers = await streamed(one, batches)
        again = await streamed(other, batches[::-1])
    assert answers == again[::-1]
    kinds = {outcome.WhichOneof("outcome") for answer in answers for outcome in answer.outcomes}
    assert kinds == {"manifest", "error"}


def test_merger_never_imports_torch() -> None:
    """It runs on machines that have none."""
    code = "import sys, services.merger.__main__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

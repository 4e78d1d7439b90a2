"""Splices with expected hashes, batches, and KV passed on, over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.api.merger.v1 import merger_pb2, merger_pb2_grpc
from baton.client import ChannelPool
from baton.errors import Reason, ServiceError
from baton.kv.digests import history_at, history_start, ids_hash, text_hash
from baton.kv.manifest import Segment
from baton.kv.splice import splice
from baton.metrics import Metrics
from baton.rpc.server import ServerOptions, build_server
from baton.wire.segments import manifest_from_proto, manifest_to_proto, segment_to_proto
from services.merger.materialise import Materialiser
from services.merger.measures import MergerMeasures
from services.merger.servicer import SPLICES_MAX, MergerServicer
from services.merger.splicing import SpliceOrder, carry_out

KV = b"k" * 16
IDS = list(range(100, 132))
TEXT = b"a rendered system prompt"


def segment(start: int, end: int, *, is_published: bool = False) -> Segment:
    return Segment(
        log_id=bytes(15) + bytes([start + 1]),
        generation=1,
        from_position=start,
        to_position=end,
        history_start=history_at(KV, 8, IDS[:start]) if start else history_start(KV),
        history_end=history_at(KV, 8, IDS[:end]),
        kv_digest=KV,
        tokenizer_hash=b"t" * 8,
        block_tokens=8,
        numeric_class_id=7,
        text_hash=text_hash(TEXT) if is_published else None,
        ids_hash=ids_hash(IDS[:end]) if is_published else None,
    )


def order(*segments: Segment, **more: Any) -> SpliceOrder:
    return SpliceOrder(segments=segments, block_tokens=8, **more)


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


class BlobStore(kvstore_pb2_grpc.KVStoreServiceServicer):
    """Sends blobs of at most 8 tokens, one byte a token."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, str]] = []
        self.is_short = False

    async def DescribeBlob(
        self, request: kvstore_pb2.DescribeBlobRequest, context: Any
    ) -> kvstore_pb2.DescribeBlobResponse:
        tokens = min(8, len(IDS) - request.from_position)
        descriptor = common_pb2.KvBlobDescriptor(total_tokens=tokens)
        return kvstore_pb2.DescribeBlobResponse(descriptor=descriptor)

    # The stubs type a response stream as an iterator; grpc.aio takes an async one.
    async def GetBlob(  # type: ignore[override]
        self, request: kvstore_pb2.GetBlobRequest, context: Any
    ) -> AsyncIterator[kvstore_pb2.GetBlobResponse]:
        self.asked.append((request.from_position, request.to_position, request.capability))
        size = request.to_position - request.from_position
        descriptor = common_pb2.KvBlobDescriptor(
            first_position=request.from_position, payload_bytes=size, kv_digest=KV
        )
        yield kvstore_pb2.GetBlobResponse(descriptor=descriptor)
        yield kvstore_pb2.GetBlobResponse(chunk=bytes(size - int(self.is_short)))


@dataclass
class Served:
    stub: merger_pb2_grpc.MergerServiceAsyncStub
    store: BlobStore
    store_address: str


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """A merger and a store over real sockets."""
    pool, store = ChannelPool(), BlobStore()  # type: ignore[abstract]  # the rest is not called
    servers = [build_server(ServerOptions(bind="127.0.0.1:0")) for _ in range(2)]
    servers[0].register(
        merger_pb2_grpc.add_MergerServiceServicer_to_server,
        MergerServicer(Materialiser(pool), MergerMeasures(Metrics("merger"))),
        "merger",
    )
    servers[1].register(kvstore_pb2_grpc.add_KVStoreServiceServicer_to_server, store, "kvstore")
    for server in servers:
        await server.start()
    async with grpc.aio.insecure_channel(servers[0].target) as channel:
        stub = merger_pb2_grpc.MergerServiceStub(channel)
        yield Served(stub, store, servers[1].target)
    await pool.stop()
    for server in servers:
        await server.stop()


def request(*segments: Segment) -> merger_pb2.SpliceRequest:
    return merger_pb2.SpliceRequest(
        segments=[segment_to_proto(one) for one in segments], block_tokens=8
    )


async def test_splice_alone_in_a_batch_and_on_a_stream_give_the_same(served: Served) -> None:
    """Each has its own outcome; one refusal spoils nothing else."""
    good, bad = request(segment(0, 16), segment(16, 32)), request(segment(8, 16))
    expected = splice([segment(0, 16), segment(16, 32)])
    alone = await served.stub.Splice(good, timeout=5)
    assert manifest_from_proto(alone.manifest) == expected
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await served.stub.Splice(bad, timeout=5)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    batch = await served.stub.SpliceBatch(
        merger_pb2.SpliceBatchRequest(splices=[good, bad, good]), timeout=5
    )
    assert [one.WhichOneof("outcome") for one in batch.outcomes] == [
        "manifest",
        "error",
        "manifest",
    ]
    assert batch.outcomes[1].error.field == "segments[0].from_position"

    async def messages() -> AsyncIterator[merger_pb2.SpliceStreamRequest]:
        for batch_id in (7, 8):
            yield merger_pb2.SpliceStreamRequest(batch_id=batch_id, splices=[good])

    answers = [one async for one in served.stub.SpliceStream(messages(), timeout=5)]
    assert [one.batch_id for one in answers] == [7, 8]
    assert answers[1].outcomes[0].manifest == alone.manifest


async def test_batches_are_bounded(served: Served) -> None:
    """At the limit it passes, one past it does not."""
    one = request(segment(0, 8))
    full = merger_pb2.SpliceBatchRequest(splices=[one] * SPLICES_MAX)
    assert len((await served.stub.SpliceBatch(full, timeout=10)).outcomes) == SPLICES_MAX
    with pytest.raises(grpc.aio.AioRpcError):
        await served.stub.SpliceBatch(
            merger_pb2.SpliceBatchRequest(splices=[one] * (SPLICES_MAX + 1)), timeout=10
        )


async def test_materialize_streams_every_part_in_blobs_the_store_can_send(served: Served) -> None:
    """16 + 8 tokens over a limit of 8: three blobs, each under its part's capability."""
    manifest = splice([segment(0, 16), segment(16, 24)])
    message = merger_pb2.MaterializeRequest(
        manifest=manifest_to_proto(manifest),
        kvstore_address=served.store_address,
        capabilities=["cap-a", "cap-b"],
    )
    kinds = [
        one.WhichOneof("content") async for one in served.stub.Materialize(message, timeout=10)
    ]
    assert kinds == ["descriptor", "chunk"] * 3
    assert served.store.asked == [(0, 8, "cap-a"), (8, 16, "cap-a"), (16, 24, "cap-b")]


async def test_materialize_refuses_short_blobs_and_missing_capabilities(served: Served) -> None:
    """A stream that ends early is an error, never a short answer."""
    manifest = manifest_to_proto(splice([segment(0, 8)]))
    address = served.store_address
    served.store.is_short = True
    for capabilities in (["cap"], []):
        message = merger_pb2.MaterializeRequest(
            manifest=manifest, kvstore_address=address, capabilities=capabilities
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in served.stub.Materialize(message, timeout=10):
                pass
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

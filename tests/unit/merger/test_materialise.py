"""KV passed on from a store: what goes through, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, cast

import grpc
import numpy as np
import pytest

from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.api.merger.v1 import merger_pb2
from baton.client import ChannelPool
from baton.errors import Reason, ServiceError
from baton.kv.blob import BlobHeader, seal_header, split_range
from baton.kv.digests import ids_bytes
from baton.kv.layout import KvDtype, KvGeometry
from baton.kv.manifest import Segment
from baton.kv.splice import splice
from baton.metrics import Metrics
from baton.rpc.server import ServerOptions, build_server
from baton.rpc.status import from_rpc_error
from baton.wire.blob import descriptor_from_header
from baton.wire.segments import manifest_to_proto
from services.merger import materialise
from services.merger.materialise import Materialiser
from services.merger.measures import MergerMeasures
from services.merger.servicer import MergerServicer
from tests.unit.merger.histories import BLOCK, IDS, KV, segment
from tests.unit.merger.serving import running_merger

GEOMETRY: Final = KvGeometry(
    layers=1, kv_heads=1, head_dim=8, head_dim_v=8, block_tokens=BLOCK, dtype=KvDtype.F32
)
BLOB_BYTES_MAX: Final = 4096 + 2 * (GEOMETRY.token_bytes + 4) * BLOCK
"""Two blocks a blob."""


class BlobStore(kvstore_pb2_grpc.KVStoreServiceServicer):
    """Has every log, with the tokens of the one history; what it does wrong is said to it."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, str]] = []
        self.ids = IDS
        self.generation = 1
        self.cut_bytes = 0
        self.refusal = ""
        self.may_send = asyncio.Event()
        self.may_send.set()

    def _header(self, request: Any) -> tuple[BlobHeader, list[bytes], list[int]]:
        first, end = request.from_position, request.to_position
        ids = self.ids[first:end]
        header = BlobHeader(
            tokenizer_hash=b"t" * 8,
            dtype=KvDtype.F32,
            layers=1,
            kv_heads=1,
            head_dim=8,
            head_dim_v=8,
            block_tokens=BLOCK,
            first_position=first,
            total_tokens=end - first,
            generation=self.generation,
            model_digest=bytes(16),
            kv_digest=KV,
            log_id=request.log_id,
            numeric_class_id=7,
            layers_total=1,
            kv_heads_total=1,
        )
        pages = [
            np.full(span.tokens * GEOMETRY.token_bytes, span.block_index, np.uint8).tobytes()
            for span in header.spans()
        ]
        return seal_header(header, pages, ids), pages, ids

    async def DescribeBlob(
        self, request: kvstore_pb2.DescribeBlobRequest, context: Any
    ) -> kvstore_pb2.DescribeBlobResponse:
        if self.refusal:
            raise ServiceError(Reason[self.refusal], "no", field="log_id")
        header, pages, _ = self._header(request)
        descriptor = descriptor_from_header(header, [0] * len(pages))
        return kvstore_pb2.DescribeBlobResponse(descriptor=descriptor)

    # The stubs type a response stream as an iterator; grpc.aio takes an async one.
    async def GetBlob(  # type: ignore[override]
        self, request: kvstore_pb2.GetBlobRequest, context: Any
    ) -> AsyncIterator[kvstore_pb2.GetBlobResponse]:
        self.asked.append((request.from_position, request.to_position, request.capability))
        header, pages, ids = self._header(request)
        descriptor = descriptor_from_header(header, [0] * len(pages))
        yield kvstore_pb2.GetBlobResponse(descriptor=descriptor)
        await self.may_send.wait()
        payload = b"".join(pages) + ids_bytes(ids)
        payload = payload[: len(payload) - self.cut_bytes]
        # Uneven, so that the token ids begin inside a message and go on in another.
        for at in range(0, len(payload), 301):
            yield kvstore_pb2.GetBlobResponse(chunk=payload[at : at + 301])


@dataclass
class Site:
    merger: Any
    store: BlobStore
    store_address: str
    segments: list[Segment] = field(default_factory=lambda: [segment(0, 21), segment(21, 40)])

    def request(self, **changes: Any) -> merger_pb2.MaterializeRequest:
        """For the segments, each under a capability of its own."""
        fields = {
            "manifest": manifest_to_proto(splice(self.segments)),
            "kvstore_address": self.store_address,
            "capabilities": [f"cap-{index}" for index in range(len(self.segments))],
        }
        return merger_pb2.MaterializeRequest(**fields | changes)

    async def pieces(self, **changes: Any) -> list[merger_pb2.MaterializeResponse]:
        """All that comes."""
        came: list[merger_pb2.MaterializeResponse] = []
        await self._fetch(came, changes)
        return came

    async def refused(self, **changes: Any) -> tuple[ServiceError, int]:
        """The refusal, and how many messages came before it."""
        came: list[merger_pb2.MaterializeResponse] = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self._fetch(came, changes)
        return from_rpc_error(caught.value), len(came)

    async def _fetch(
        self, came: list[merger_pb2.MaterializeResponse], changes: dict[str, Any]
    ) -> None:
        async for one in self.merger.Materialize(self.request(**changes), timeout=10):
            came.append(one)  # noqa: PERF401 - what came before a refusal stays


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """A merger and a store over real sockets; blobs hold two blocks."""
    small = partial(split_range, blob_bytes_max=BLOB_BYTES_MAX)
    monkeypatch.setattr(materialise, "split_range", small)
    store = BlobStore()  # type: ignore[abstract]  # the rest is not called
    server = build_server(ServerOptions(bind="127.0.0.1:0"))
    server.register(kvstore_pb2_grpc.add_KVStoreServiceServicer_to_server, store, "kvstore")
    await server.start()
    async with running_merger() as merger:
        yield Site(merger, store, server.target)
    await server.stop()


async def test_every_part_comes_in_blobs_that_are_small_enough(site: Site) -> None:
    """21 and 19 tokens, two blocks a blob: cut at page boundaries, each under its capability."""
    pieces = await site.pieces()
    assert site.store.asked == [
        (0, 16, "cap-0"),
        (16, 21, "cap-0"),
        (21, 32, "cap-1"),
        (32, 40, "cap-1"),
    ]
    blobs: list[tuple[int, int, bytes]] = []
    for piece in pieces:
        if piece.HasField("descriptor"):
            described = piece.descriptor
            blobs.append((described.first_position, described.payload_bytes, b""))
        else:
            first, size, payload = blobs[-1]
            blobs[-1] = (first, size, payload + piece.chunk)
    assert [first for first, _, _ in blobs] == [0, 16, 21, 32]
    assert all(len(payload) == size for _, size, payload in blobs)
    # The block with the joint in it comes from both: 5 slots of one, 3 of the other.
    token_bytes = GEOMETRY.token_bytes
    assert blobs[1][2] == b"\x02" * (5 * token_bytes) + ids_bytes(IDS[16:21])
    assert blobs[2][2].startswith(b"\x02" * (3 * token_bytes) + b"\x03")


async def test_stale_generation_is_refused_before_a_byte_flows(site: Site) -> None:
    """The store is asked about every part first; the part is named."""
    site.store.generation = 7
    site.segments = [segment(0, 21, generation=7), segment(21, 40, generation=6)]
    error, came = await site.refused()
    assert error.reason is Reason.STALE_GENERATION
    assert error.field == "segments[1].generation"
    assert (error.metadata["ours"], error.metadata["theirs"]) == ("7", "6")
    assert (came, site.store.asked) == (0, [])
    site.segments = [replace(one, generation=0) for one in site.segments]
    assert await site.pieces()


async def test_log_of_other_tokens_than_the_manifest_says_is_refused(site: Site) -> None:
    """What comes is checked against the history digest: KV of another history never passes for
    this one's.
    """
    site.store.ids = [*IDS[:25], IDS[25] + 1, *IDS[26:]]
    error, _ = await site.refused()
    assert error.reason is Reason.INVALID_REQUEST
    assert error.field == "segments[1].history_end"


async def test_what_the_store_refuses_names_the_segment(site: Site) -> None:
    """Reason and field are the store's."""
    site.store.refusal = "LOG_NOT_FOUND"
    error, came = await site.refused()
    assert (error.reason, came) == (Reason.LOG_NOT_FOUND, 0)
    assert error.field == "segments[0].log_id"
    assert error.metadata["segment"] == "0"


@pytest.mark.parametrize("cut_bytes", [1, 301])
async def test_blob_that_ends_early_is_an_error(site: Site, cut_bytes: int) -> None:
    """Never a short answer."""
    site.store.cut_bytes = cut_bytes
    error, _ = await site.refused()
    assert error.reason is Reason.BLOB_INVALID
    assert error.metadata["segment"] == "0"


async def test_capabilities_address_and_manifest_are_checked_first(site: Site) -> None:
    """One capability per part; a manifest whose digest is not its own is nobody's."""
    for changes, named in (
        ({"capabilities": ["cap"]}, "capabilities"),
        ({"kvstore_address": ""}, "kvstore_address"),
    ):
        error, _ = await site.refused(**changes)
        assert (error.reason, error.field) == (Reason.INVALID_REQUEST, named)
    forged = site.request().manifest
    forged.digest = bytes(32)
    error, _ = await site.refused(manifest=forged)
    assert error.field == "manifest.digest"
    assert site.store.asked == []


async def test_transfers_under_way_are_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one too many is told to come again; a place is given back at the end."""
    monkeypatch.setattr(materialise, "TRANSFERS_MAX", 1)
    site.store.may_send.clear()
    first = site.merger.Materialize(site.request(), timeout=10)
    assert (await first.read()).HasField("descriptor")
    error, _ = await site.refused()
    assert error.reason is Reason.QUEUE_FULL
    assert error.retry_after_s is not None
    site.store.may_send.set()
    while await first.read() is not grpc.aio.EOF:
        pass
    assert await site.pieces()


async def test_client_that_takes_nothing_loses_its_place(site: Site) -> None:
    """Its call may have no deadline; what it held is free again."""
    async with ChannelPool() as pool:
        materialiser = Materialiser(pool)
        servicer = MergerServicer(
            materialiser, MergerMeasures(Metrics("merger")), untaken_s_max=0.05
        )

        async def hands_nothing_on() -> None:
            # A handler that does not look at its call's context may be given none.
            async with aclosing(servicer.materialize(site.request(), cast(Any, None))) as messages:
                async for _ in messages:
                    assert materialiser.under_way == 1
                    await asyncio.Event().wait()

        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            stuck = tasks.create_task(hands_nothing_on())
        assert stuck.cancelled()
        assert materialiser.under_way == 0

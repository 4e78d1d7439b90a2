"""Blobs while they travel: any cut into chunks, transfers that break off, clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.client_blobs import BlobClient
from baton.errors import Reason, ServiceError
from baton.ids import new_log_id, new_request_id
from baton.wire.blob import descriptor_from_header, header_from_descriptor
from baton.wire.blob_chunks import chunk_of, encoded_chunk, get_response_of
from tests.integration.kvstore.harness import (
    Model,
    Site,
    StoreProcess,
    capability,
    running_store,
)
from tests.integration.kvstore.test_blobs import TOKENS, fetched, reason_of, renamed, stored

Pieces = AsyncIterator[kvstore_pb2.PutBlobRequest]


@pytest.fixture(scope="module")
def store(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    """A kvstore of this module's own: what is counted here is nobody else's."""
    directory: Path = tmp_path_factory.mktemp("kvstore-streams")
    with running_store(model, directory, "--lease-s", "60") as running:
        yield running


async def quiet(site: Site) -> kvstore_pb2.DescribeArenaResponse:
    """The counts once nothing of an earlier test is on its way back."""
    return await site.until("quiet", pages_quarantined=0, pages_granted=0, transfers_open=0)


def header_of(
    descriptor: common_pb2.KvBlobDescriptor, request_id: str | None = None
) -> kvstore_pb2.PutBlobRequest:
    """The first message of a put."""
    return kvstore_pb2.PutBlobRequest(
        header=kvstore_pb2.PutBlobHeader(
            request_id=request_id or new_request_id(),
            capability=capability(descriptor.log_id),
            descriptor=descriptor,
        )
    )


async def put_cut(
    site: Site, descriptor: common_pb2.KvBlobDescriptor, payload: bytes, cuts: list[int]
) -> kvstore_pb2.PutBlobResponse:
    """A put whose chunks have these sizes in turn."""

    async def pieces() -> Pieces:
        yield header_of(descriptor)
        at, turn = 0, 0
        while at < len(payload):
            size = cuts[turn % len(cuts)]
            yield kvstore_pb2.PutBlobRequest(chunk=payload[at : at + size])
            at, turn = at + size, turn + 1

    answer: kvstore_pb2.PutBlobResponse = await site.stub.PutBlob(pieces())
    return answer


@pytest.mark.parametrize(
    "cuts", [[1 << 20], [4096], [99_991, 1], [8191, 3, 65_536], [0, 50_000], [777]], ids=str
)
async def test_a_blob_is_the_same_however_it_is_cut(site: Site, cuts: list[int]) -> None:
    """Chunks know nothing of pages: any cut gives the same log, empty chunks included."""
    log_id, text = await stored(site)
    descriptor, payload = await fetched(site, log_id, text)
    copy = renamed(descriptor)
    await put_cut(site, copy, payload, cuts)
    again, same = await fetched(site, copy.log_id, capability(copy.log_id))
    assert same == payload
    assert again.payload_crc32c == descriptor.payload_crc32c
    await site.until("nothing under way", transfers_open=0)


async def test_a_fetch_goes_on_from_any_byte(site: Site) -> None:
    """The descriptor comes again, the bytes from the offset on; beyond the end is refused."""
    log_id, text = await stored(site)
    descriptor, payload = await fetched(site, log_id, text)
    for offset in (0, 1, 4095, len(payload) // 2, len(payload) - 3, len(payload)):
        request = kvstore_pb2.GetBlobRequest(log_id=log_id, capability=text, offset_bytes=offset)
        first, *chunks = [piece async for piece in site.stub.GetBlob(request)]
        assert first.descriptor == descriptor
        assert b"".join(piece.chunk for piece in chunks) == payload[offset:]
    over = kvstore_pb2.GetBlobRequest(log_id=log_id, capability=text, offset_bytes=len(payload) + 1)

    async def beyond() -> None:
        async for _ in site.stub.GetBlob(over):
            pass

    assert await reason_of(beyond()) is Reason.INVALID_REQUEST


async def test_a_wrong_page_crc_is_refused_whatever_the_payloads_says(site: Site) -> None:
    """Each page answers for itself; nothing of the blob stays."""
    await quiet(site)
    log_id, text = await stored(site)
    descriptor, payload = await fetched(site, log_id, text)
    before = await site.counts()
    for index in range(len(descriptor.pages)):
        wrong = renamed(descriptor)
        wrong.pages[index].crc32c ^= 1
        with pytest.raises(ServiceError) as caught:
            await put_cut(site, wrong, payload, [50_000])
        assert caught.value.reason is Reason.CHECKSUM_MISMATCH
        assert caught.value.field == f"pages[{index}].crc32c"
    wrong = renamed(descriptor, payload_crc=descriptor.payload_crc32c ^ 1)
    with pytest.raises(ServiceError) as caught:
        await put_cut(site, wrong, payload, [50_000])
    assert caught.value.field == "payload_crc"
    await site.until("all given back", pages_free=before.pages_free)


async def test_a_chunk_over_the_bound_and_a_blob_over_the_room_are_refused(site: Site) -> None:
    """Too large a message, and more pages than there are: nothing stays reserved."""
    await quiet(site)
    log_id, text = await stored(site)
    descriptor, payload = await fetched(site, log_id, text)
    before = await site.counts()
    large = bytes((1 << 20) + 1)

    async def oversized() -> Pieces:
        yield header_of(renamed(descriptor))
        yield kvstore_pb2.PutBlobRequest(chunk=large)

    assert await reason_of(site.stub.PutBlob(oversized())) is Reason.INVALID_REQUEST
    geometry = site.model.geometry
    too_many = before.arena.page_count * geometry.block_tokens + 1
    header = replace(
        header_from_descriptor(descriptor),
        log_id=new_log_id(),
        total_tokens=too_many,
        payload_bytes=too_many * (geometry.token_bytes + 4),
    )
    crcs = [0] * sum(1 for _ in header.spans())
    huge = descriptor_from_header(header, crcs)
    assert await reason_of(put_cut(site, huge, payload, [1 << 20])) in (
        Reason.BLOB_INVALID,
        Reason.PAGES_EXHAUSTED,
    )
    await site.until("all given back", pages_free=before.pages_free)


async def test_who_leaves_half_way_leaves_nothing(site: Site) -> None:
    """Puts and gets that are cancelled in the middle: pages, pins and places come back."""
    await quiet(site)
    log_id, text = await stored(site)
    descriptor, payload = await fetched(site, log_id, text)
    before = await site.counts()
    never = asyncio.Event()

    async def halting() -> Pieces:
        yield header_of(renamed(descriptor))
        yield kvstore_pb2.PutBlobRequest(chunk=payload[: len(payload) // 2])
        await never.wait()

    for _ in range(3):
        call = site.stub.PutBlob(halting())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_outcome(call))
            await site.until("pages reserved", transfers_open=1)
            call.cancel()
        await site.until("put given up", transfers_open=0, pages_granted=0)
    for _ in range(3):
        request = kvstore_pb2.GetBlobRequest(log_id=log_id, capability=text)
        reading = site.stub.GetBlob(request)
        assert (await reading.read()).WhichOneof("content") == "descriptor"
        reading.cancel()
        await site.until("get given up", transfers_open=0)
    await site.until(
        "all given back", pages_free=before.pages_free, pages_shared=before.pages_shared
    )


async def _outcome(call: Any) -> None:
    """Waits for the end of a call, whatever it is."""
    try:
        await call
    except (ServiceError, asyncio.CancelledError):
        return


async def test_a_page_damaged_under_a_fetch_ends_it(site: Site) -> None:
    """Nothing of a page that differs from its record leaves, and the log gives up from there."""
    worker = await site.attach()
    log = await site.open(worker, [97, *TOKENS])
    await worker.prefill(log, 5, "stop")
    view = await worker.view(log)
    await site.close(log)
    page = worker.attached.arena.page(view.rows[1].page)
    page[17] ^= 1
    del page
    request = kvstore_pb2.GetBlobRequest(log_id=log.log_id, capability=log.capability)

    async def fetch() -> None:
        async for _ in site.stub.GetBlob(request):
            pass

    assert await reason_of(fetch()) is Reason.CHECKSUM_MISMATCH
    described = await site.stub.DescribeLog(
        kvstore_pb2.DescribeLogRequest(log_id=log.log_id, capability=log.capability)
    )
    assert described.head.committed_position == site.model.geometry.block_tokens
    await site.until("nothing pinned", transfers_open=0)


async def test_the_blocking_client_stores_and_fetches(site: Site) -> None:
    """What a stranger uses: a put, a get into a buffer of one's own, errors with their reason."""
    log_id, text = await stored(site)
    address = site.store.address

    def use() -> None:
        with BlobClient(address) as client:
            blob = client.get_blob(log_id, capability=text)
            assert blob.token_ids.tolist() == TOKENS
            copy = replace(blob.header, log_id=new_log_id())
            answer = client.put_blob(
                copy, blob.pages, blob.token_ids, capability=capability(copy.log_id), ttl_s=60.0
            )
            assert (answer.log_id, answer.tokens) == (copy.log_id, len(TOKENS))
            into = np.zeros(blob.header.payload_bytes + 100, dtype=np.uint8)
            again = client.get_blob(
                copy.log_id,
                capability=capability(copy.log_id),
                from_position=3,
                to_position=20,
                into=into,
            )
            assert again.token_ids.tolist() == TOKENS[3:20]
            assert again.pages[0].base is not None
            with pytest.raises(ServiceError) as caught:
                client.get_blob(log_id, capability=capability(new_log_id()))
            assert caught.value.reason is Reason.PERMISSION_DENIED
            with pytest.raises(ServiceError) as caught:
                client.get_blob(log_id, capability=text, into=bytearray(10))
            assert caught.value.field == "into"

    await asyncio.to_thread(use)


class _Lost(grpc.RpcError):
    """A connection that breaks off, as gRPC reports it."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "the connection broke off"

    def trailing_metadata(self) -> tuple[()]:
        return ()


async def test_a_broken_fetch_is_continued_where_it_was(site: Site) -> None:
    """The next stream is asked for the rest only, and the whole is verified."""
    log_id, text = await stored(site)
    address = site.store.address
    asked: list[int] = []

    def use() -> None:
        with BlobClient(address) as client:
            whole = client._get

            def breaking(request: kvstore_pb2.GetBlobRequest, **options: Any) -> Iterator[Any]:
                asked.append(request.offset_bytes)
                for piece in whole(request, **options):
                    if isinstance(piece, memoryview) and len(asked) < 3:
                        yield piece[:1000]
                        raise _Lost
                    yield piece

            client._get = breaking
            blob = client.get_blob(log_id, capability=text)
            assert blob.token_ids.tolist() == TOKENS

    await asyncio.to_thread(use)
    assert asked == [0, 1000, 2000]


def test_chunk_messages_are_those_of_the_contract() -> None:
    """Encoded by hand and by protobuf they are the same bytes, and either is understood."""
    for size in (0, 1, 127, 128, 16_383, 16_384, (1 << 20) - 4096):
        data = bytes(np.arange(size, dtype=np.uint32).astype(np.uint8))
        put = kvstore_pb2.PutBlobRequest(chunk=data).SerializeToString()
        get = kvstore_pb2.GetBlobResponse(chunk=data).SerializeToString()
        assert encoded_chunk([data[: size // 3], memoryview(data)[size // 3 :]]) == put == get
        payload = chunk_of(put)
        assert payload is not None
        assert bytes(payload) == data
    header = kvstore_pb2.GetBlobResponse(descriptor=common_pb2.KvBlobDescriptor(layers=3))
    assert get_response_of(header.SerializeToString()) == header
    assert chunk_of(header.SerializeToString()) is None
    # A second field behind the chunk: protobuf reads it, and takes the last of a oneof.
    chunk = encoded_chunk([b"some bytes"])
    both = chunk + header.SerializeToString()
    assert chunk_of(both) is None
    assert get_response_of(both) == header
    assert chunk_of(chunk[:-1]) is None
    assert chunk_of(b"") is None

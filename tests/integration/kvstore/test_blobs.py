"""Blobs in and out over a real socket: round trips, conversion, and everything that is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.errors import Reason, ServiceError
from baton.ids import new_log_id, new_request_id
from baton.kv.blob import BlobHeader, seal_header, split_payload
from baton.kv.convert import cast, gather, scatter
from baton.kv.crc import as_bytes, crc32c
from baton.kv.digests import history_at, ids_bytes
from baton.kv.layout import KvDtype
from baton.wire.blob import descriptor_from_header, header_from_descriptor
from tests.integration.kvstore.harness import BLOCK, Site, capability, kv_value

TOKENS = [5 + index % 150 for index in range(2 * BLOCK + 7)]
CHUNK = 100_000


async def stored(site: Site) -> tuple[bytes, str]:
    """A sealed log of TOKENS; its id and capability."""
    worker = await site.attach()
    log = await site.open(worker, TOKENS, cache_mode=common_pb2.CACHE_MODE_OFF)
    await worker.prefill(log, None)
    await site.close(log)
    return log.log_id, log.capability


async def fetched(
    site: Site, log_id: bytes, text: str, first: int = 0, end: int = 0
) -> tuple[common_pb2.KvBlobDescriptor, bytes]:
    """A blob as a client gets it."""
    request = kvstore_pb2.GetBlobRequest(
        log_id=log_id, from_position=first, to_position=end, capability=text
    )
    descriptor, payload = None, bytearray()
    async for piece in site.stub.GetBlob(request):
        if piece.WhichOneof("content") == "descriptor":
            descriptor = piece.descriptor
        else:
            assert len(piece.chunk) < 1 << 20
            payload += piece.chunk
    assert descriptor is not None
    return descriptor, bytes(payload)


async def put(
    site: Site, descriptor: common_pb2.KvBlobDescriptor, payload: bytes, **fields: Any
) -> kvstore_pb2.PutBlobResponse:
    """Stores a blob."""
    text = fields.pop("capability", capability(descriptor.log_id))
    request_id = fields.pop("request_id", new_request_id())

    async def pieces() -> AsyncIterator[kvstore_pb2.PutBlobRequest]:
        header = kvstore_pb2.PutBlobHeader(
            request_id=request_id, capability=text, descriptor=descriptor, **fields
        )
        yield kvstore_pb2.PutBlobRequest(header=header)
        for start in range(0, len(payload), CHUNK):
            yield kvstore_pb2.PutBlobRequest(chunk=payload[start : start + CHUNK])

    answer: kvstore_pb2.PutBlobResponse = await site.stub.PutBlob(pieces())
    return answer


def described(
    header: BlobHeader, pages: Sequence[Any], ids: Sequence[int]
) -> tuple[common_pb2.KvBlobDescriptor, bytes]:
    """Descriptor and payload of packed pages."""
    finished = seal_header(header, pages, ids)
    crcs = [crc32c(page) for page in pages]
    payload = b"".join(as_bytes(page).tobytes() for page in pages) + ids_bytes(ids)
    return descriptor_from_header(finished, crcs), payload


def renamed(descriptor: common_pb2.KvBlobDescriptor, **changes: Any) -> common_pb2.KvBlobDescriptor:
    """The same blob under a new log id, with a header that fits."""
    header = header_from_descriptor(descriptor)
    changed = replace(header, **{"log_id": new_log_id(), **changes})
    return descriptor_from_header(changed, [page.crc32c for page in descriptor.pages])


async def reason_of(call: Any) -> Reason:
    """Why it was refused."""
    with pytest.raises(ServiceError) as caught:
        await call
    return caught.value.reason


async def test_blob_comes_back_as_it_was_put_and_serves_as_a_parent(site: Site) -> None:
    """Fetch, store under another id, fetch again: equal; and a prompt continues it."""
    log_id, text = await stored(site)
    descriptor, payload = await fetched(site, log_id, text)
    assert descriptor.total_tokens == len(TOKENS)
    blob = split_payload(header_from_descriptor(descriptor), as_bytes(payload))
    assert list(blob.token_ids) == TOKENS
    copy = renamed(descriptor)
    answer = await put(site, copy, payload)
    assert answer.log.position == len(TOKENS)
    kv = site.model.label.kv_digest()
    assert answer.history_end == history_at(kv, BLOCK, TOKENS)
    again, same = await fetched(site, copy.log_id, capability(copy.log_id))
    assert same == payload
    assert again.payload_crc32c == descriptor.payload_crc32c
    worker = site.workers[0]
    parent = common_pb2.LogPosition(log_id=copy.log_id, position=len(TOKENS))
    request = site.open_request(worker, [*TOKENS, 1, 2], parent=parent)
    assert (await site.stub.Open(request)).cached_tokens == len(TOKENS)
    log = await worker.follow(request.log_id, 1, request.capability)
    view = await worker.view(log)
    assert all(worker.read(view, p) == kv_value(t, p) for p, t in enumerate(TOKENS))
    await site.close(log, drop=True)


async def test_range_with_partial_first_and_last_page_is_packed(site: Site) -> None:
    """Any range can be fetched; DescribeBlob says the same without the bytes."""
    log_id, text = await stored(site)
    descriptor, payload = await fetched(site, log_id, text, 3, BLOCK + 5)
    assert [(page.first_position, page.tokens) for page in descriptor.pages] == [
        (3, BLOCK - 3),
        (BLOCK, 5),
    ]
    blob = split_payload(header_from_descriptor(descriptor), as_bytes(payload))
    assert list(blob.token_ids) == TOKENS[3 : BLOCK + 5]
    alone = await site.stub.DescribeBlob(
        kvstore_pb2.DescribeBlobRequest(
            log_id=log_id, from_position=3, to_position=BLOCK + 5, capability=text
        )
    )
    assert alone.descriptor == descriptor


async def test_other_dtype_and_page_size_are_taken_when_conversion_is_asked_for(
    site: Site,
) -> None:
    """The header says what the bytes are; nothing is adapted unasked."""
    log_id, text = await stored(site)
    descriptor, payload = await fetched(site, log_id, text)
    header = header_from_descriptor(descriptor)
    blob = split_payload(header, as_bytes(payload))
    arrays = gather(header.geometry, 0, header.total_tokens, list(blob.pages))
    half = cast(arrays, KvDtype.BF16)
    other = replace(header, log_id=new_log_id(), dtype=KvDtype.BF16, block_tokens=8)
    other_descriptor, other_payload = described(other, scatter(half, 8, 0), TOKENS)
    assert await reason_of(put(site, other_descriptor, other_payload)) is Reason.COMPAT_MISMATCH
    await put(site, other_descriptor, other_payload, convert=True)
    back, back_payload = await fetched(site, other.log_id, capability(other.log_id))
    assert (back.dtype, back.block_tokens) == (common_pb2.KV_DTYPE_F32, BLOCK)
    rounded = cast(half, KvDtype.F32)
    expected = b"".join(page.tobytes() for page in scatter(rounded, BLOCK, 0))
    assert back_payload == expected + ids_bytes(TOKENS)


async def test_damaged_truncated_or_overlong_payload_is_refused_and_leaves_nothing(
    site: Site,
) -> None:
    """Whatever arrives is compared with what was promised before it becomes a log."""
    log_id, text = await stored(site)
    descriptor, payload = await fetched(site, log_id, text)
    before = await site.counts()
    flipped = bytearray(payload)
    flipped[1000] ^= 1
    cases = [
        (bytes(flipped), Reason.CHECKSUM_MISMATCH),
        (payload[:-1], Reason.BLOB_INVALID),
        (payload + b"x", Reason.BLOB_INVALID),
        (b"", Reason.BLOB_INVALID),
    ]
    for data, reason in cases:
        assert await reason_of(put(site, renamed(descriptor), data)) is reason
    after = await site.counts()
    assert (after.pages_free, after.logs_kept) == (before.pages_free, before.logs_kept)
    assert after.transfers_open == 0


async def test_log_that_would_be_kept_for_less_than_no_time_is_refused_before_it_is_one(
    site: Site,
) -> None:
    """A duration may be negative; a record of the log cannot hold that, and the log was made."""
    log_id, text = await stored(site)
    descriptor, payload = await fetched(site, log_id, text)
    before = await site.counts()
    for ttl in (Duration(seconds=-5), Duration(nanos=-1)):
        copy = renamed(descriptor)
        assert await reason_of(put(site, copy, payload, ttl=ttl)) is Reason.INVALID_REQUEST
        opening = site.open_request(await site.attach(), TOKENS)
        opening.ttl.CopyFrom(ttl)
        assert await reason_of(site.stub.Open(opening)) is Reason.INVALID_REQUEST
        for gone in (copy.log_id, opening.log_id):
            missing = fetched(site, gone, capability(gone))
            assert await reason_of(missing) is Reason.LOG_NOT_FOUND
    after = await site.counts()
    assert (after.pages_free, after.logs_kept) == (before.pages_free, before.logs_kept)
    assert after.pages_granted == before.pages_granted


async def test_descriptor_is_checked_before_a_byte_of_payload_is_taken(site: Site) -> None:
    """Tokenizer first, then the header's own consistency, the label, the shape."""
    log_id, text = await stored(site)
    descriptor, payload = await fetched(site, log_id, text)
    assert (
        await reason_of(put(site, renamed(descriptor, tokenizer_hash=bytes(8)), payload))
        is Reason.TOKENIZER_MISMATCH
    )
    assert (
        await reason_of(put(site, renamed(descriptor, model_digest=bytes(16)), payload))
        is Reason.COMPAT_MISMATCH
    )
    assert (
        await reason_of(put(site, renamed(descriptor, kv_digest=bytes(16)), payload))
        is Reason.COMPAT_MISMATCH
    )
    for name, value in (
        ("total_tokens", 1 << 30),
        ("payload_bytes", 1 << 40),
        ("layers", 9),
        ("header_crc32c", 1),
        ("version", 2),
        ("dtype", 0),
        ("flags", 4),
    ):
        broken = renamed(descriptor)
        setattr(broken, name, value)
        assert await reason_of(put(site, broken, b"")) is Reason.BLOB_INVALID, name
    partial, _ = await fetched(site, log_id, text, 3, 9)
    assert await reason_of(put(site, renamed(partial), b"")) is Reason.UNSUPPORTED


async def test_put_needs_a_capability_for_its_log_and_is_idempotent(site: Site) -> None:
    """Right, log and tenant are checked; a retry gets the same answer, a taken id is refused."""
    log_id, text = await stored(site)
    descriptor, payload = await fetched(site, log_id, text)
    copy = renamed(descriptor)
    other = capability(new_log_id())
    assert await reason_of(put(site, copy, payload, capability=other)) is Reason.PERMISSION_DENIED
    assert await reason_of(put(site, copy, payload, capability="")) is Reason.UNAUTHENTICATED
    first = await put(site, copy, payload, request_id="same", capability=capability(copy.log_id))
    again = await put(site, copy, payload, request_id="same", capability=capability(copy.log_id))
    assert first == again
    assert await reason_of(put(site, copy, payload)) is Reason.ALREADY_EXISTS


async def test_damaged_page_is_found_when_it_is_read_and_never_served(site: Site) -> None:
    """A byte flipped in the arena: the blob is refused, and lookups do not find the block."""
    worker = await site.attach()
    log = await site.open(worker, [99, *TOKENS])
    await worker.prefill(log, 5, "stop")
    view = await worker.view(log)
    await site.close(log)
    page = worker.attached.arena.page(view.rows[1].page)
    page[17] ^= 1
    del page
    request = kvstore_pb2.DescribeBlobRequest(log_id=log.log_id, capability=log.capability)
    assert await reason_of(site.stub.DescribeBlob(request)) is Reason.CHECKSUM_MISMATCH
    again = site.open_request(worker, [99, *TOKENS])
    assert (await site.stub.Open(again)).cached_tokens == BLOCK


async def test_damaged_tail_is_given_up_when_it_is_copied(site: Site) -> None:
    """Take verifies what it copies: the block is computed again, not continued."""
    one, two = await site.attach("one"), await site.attach("two")
    log = await site.open(one, [98, *TOKENS])
    await one.prefill(log)
    view = await one.view(log)
    page = one.attached.arena.page(view.rows[-1].page)
    page[0] ^= 1
    del page
    taken = await two.take(log, pages=2)
    assert taken.committed == 2 * BLOCK
    await two.commit(taken, len(TOKENS) + 1)
    await two.append(taken, 9)
    await site.close(taken, drop=True)


async def test_transfers_are_bounded(site: Site) -> None:
    """Each holds a blob's bytes: a fifth at once is told to come back."""
    log_id, text = await stored(site)
    descriptor, payload = await fetched(site, log_id, text)
    hold = asyncio.Event()

    async def slow() -> AsyncIterator[kvstore_pb2.PutBlobRequest]:
        copy = renamed(descriptor)
        header = kvstore_pb2.PutBlobHeader(
            request_id=new_request_id(), capability=capability(copy.log_id), descriptor=copy
        )
        yield kvstore_pb2.PutBlobRequest(header=header)
        await hold.wait()
        yield kvstore_pb2.PutBlobRequest(chunk=payload)

    calls = [site.stub.PutBlob(slow()) for _ in range(4)]
    await site.until("four open", transfers_open=4)
    assert await reason_of(put(site, renamed(descriptor), payload)) is Reason.QUEUE_FULL
    hold.set()
    for call in calls:
        await call
    await site.until("all done", transfers_open=0)

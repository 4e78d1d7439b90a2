"""KV put and got in place: the attached client, and the pins that keep what it reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from baton.api.kvstore.v1 import kvstore_pb2
from baton.arena.client import WorkerIdentity
from baton.client_shm import ShmClient
from baton.errors import Reason, ServiceError
from baton.ids import new_incarnation, new_log_id
from baton.kv.layout import pack_slots, page_view
from tests.integration.kvstore.harness import (
    BLOCK,
    Model,
    Site,
    StoreProcess,
    capability,
    running_store,
    worker_capability,
)

TOKENS = [3 + index % 150 for index in range(2 * BLOCK + 7)]


@pytest.fixture(scope="module")
def store(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    """A kvstore of this module's own: what is counted here is nobody else's."""
    directory: Path = tmp_path_factory.mktemp("kvstore-shm")
    with running_store(model, directory, "--lease-s", "60") as running:
        yield running


async def quiet(site: Site) -> kvstore_pb2.DescribeArenaResponse:
    """The counts once nothing of an earlier test is on its way back."""
    return await site.until("quiet", pages_quarantined=0, pages_granted=0, transfers_open=0)


def attached(site: Site, use: Callable[[ShmClient], None], name: str = "shm") -> None:
    """Runs `use` with an attached client of its own."""
    identity = WorkerIdentity(
        worker_id=name,
        incarnation=new_incarnation(),
        label=site.model.label,
        geometry=site.model.geometry,
        capability=worker_capability(),
        software_version="test",
    )
    with ShmClient.attach(site.store.address, identity) as client:
        use(client)


def kv_of(site: Site, tokens: int, seed: int = 1) -> np.ndarray:
    """Random packed KV."""
    draw = np.random.default_rng(seed)
    return draw.integers(0, 256, tokens * site.model.geometry.token_bytes, dtype=np.uint8)


def drop(client: ShmClient, log_id: bytes) -> None:
    """Ends a log at once."""
    text = capability(log_id)
    client.call("Close", kvstore_pb2.CloseRequest(log_id=log_id, capability=text, drop=True))


def content(site: Site, pages: Sequence[memoryview], tokens: int) -> bytes:
    """The packed bytes of mapped pages."""
    geometry = site.model.geometry
    packed = []
    for index, page in enumerate(pages):
        count = min(BLOCK, tokens - index * BLOCK)
        packed.append(pack_slots(geometry, page, 0, count).tobytes())
    return b"".join(packed)


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 9])
async def test_what_is_put_in_place_is_got_in_place(site: Site, tokens: int) -> None:
    """Whole and partial pages: the same bytes, the same ids, every CRC right."""

    def use(client: ShmClient) -> None:
        log_id, payload = new_log_id(), kv_of(site, tokens)
        ids = [5 + index % 100 for index in range(tokens)]
        text = capability(log_id)
        stored = client.put_blob(log_id, payload, ids, capability=text, is_shared=False)
        assert stored.tokens == tokens
        with client.get_blob(log_id, capability=text) as kv:
            kv.verify()
            assert kv.token_ids.tolist() == ids
            pages = [kv.page(index) for index in range(len(kv.pages))]
            assert content(site, pages, tokens) == payload.tobytes()
            del pages
        drop(client, log_id)

    before = await quiet(site)
    await asyncio.to_thread(attached, site, use)
    await site.until("all given back", pages_free=before.pages_free)


async def test_tokens_that_are_here_are_not_written_again(site: Site) -> None:
    """A shared log that begins as another: its blocks, and the beginning of its tail, are used."""

    def use(client: ShmClient) -> None:
        first, second = new_log_id(), new_log_id()
        payload = kv_of(site, len(TOKENS) + 20, seed=2)
        token_bytes = site.model.geometry.token_bytes
        ids = [*TOKENS, *([11] * 20)]
        head = _packed(site, payload, len(TOKENS))
        client.put_blob(first, head, TOKENS, capability=capability(first))
        client.put_blob(second, payload, ids, capability=capability(second))
        with client.get_blob(second, capability=capability(second)) as kv:
            kv.verify()
            assert kv.tokens == len(ids)
            with client.get_blob(first, capability=capability(first)) as other:
                assert kv.pages[:2].tolist() == other.pages[:2].tolist()
            pages = [kv.page(index) for index in range(len(kv.pages))]
            assert content(site, pages, len(ids)) == payload.tobytes()
            del pages
        assert payload.size == len(ids) * token_bytes
        for log_id in (first, second):
            drop(client, log_id)

    await asyncio.to_thread(attached, site, use)


def _packed(site: Site, payload: np.ndarray, tokens: int) -> np.ndarray:
    """The first tokens of packed KV, packed themselves: the last page is cut slot by slot."""
    geometry = site.model.geometry
    full = tokens // BLOCK
    whole = payload[: full * geometry.page_bytes]
    total = payload.size // geometry.token_bytes
    rest = payload[full * geometry.page_bytes :]
    last = page_view(geometry, rest, min(BLOCK, total - full * BLOCK))
    packed = np.empty((tokens - full * BLOCK) * geometry.token_bytes, dtype=np.uint8)
    view = page_view(geometry, packed, tokens - full * BLOCK)
    view.k[...] = last.k[:, :, : tokens - full * BLOCK]
    view.v[...] = last.v[:, :, : tokens - full * BLOCK]
    return np.concatenate([whole, packed])


async def test_mapped_pages_outlive_their_log(site: Site) -> None:
    """Dropped under a reader, the pages stay what they were until it lets go; once only."""
    before = await quiet(site)

    def use(client: ShmClient) -> None:
        log_id, payload = new_log_id(), kv_of(site, 2 * BLOCK, seed=3)
        text = capability(log_id)
        client.put_blob(log_id, payload, TOKENS[: 2 * BLOCK], capability=text, is_shared=False)
        kv = client.get_blob(log_id, capability=text)
        drop(client, log_id)
        kv.verify()
        assert bytes(kv.page(0)) == payload[: site.model.geometry.page_bytes].tobytes()
        held = client.call(
            "DescribeArena", kvstore_pb2.DescribeArenaRequest(capability=worker_capability())
        )
        assert held.pages_free == before.pages_free - 2
        assert kv.close()
        assert not kv.close()

    await asyncio.to_thread(attached, site, use)
    await site.until("let go", pages_free=before.pages_free)


async def test_a_lease_of_less_than_no_time_is_refused_and_pins_nothing(site: Site) -> None:
    """Pages were pinned before it was seen that the answer cannot say so."""
    before = await quiet(site)

    def use(client: ShmClient) -> None:
        log_id = new_log_id()
        text = capability(log_id)
        client.put_blob(log_id, kv_of(site, BLOCK), TOKENS[:BLOCK], capability=text)
        request = kvstore_pb2.MapLogRequest(
            log_id=log_id,
            capability=text,
            worker_id="shm",
            worker_capability=worker_capability(),
            lease=Duration(seconds=-1),
        )
        with pytest.raises(ServiceError) as caught:
            client.call("MapLog", request)
        assert caught.value.reason is Reason.INVALID_REQUEST
        drop(client, log_id)

    await asyncio.to_thread(attached, site, use)
    await site.until("let go", pages_free=before.pages_free)


async def test_a_lease_that_passed_is_told(site: Site) -> None:
    """What was read while nobody held the pages is worth nothing, and the reader hears of it."""
    before = await quiet(site)

    def use(client: ShmClient) -> None:
        log_id = new_log_id()
        text = capability(log_id)
        client.put_blob(log_id, kv_of(site, BLOCK), TOKENS[:BLOCK], capability=text)
        mapped = client.get_blob(log_id, capability=text, lease_s=0.001)
        drop(client, log_id)
        _until_free(client, before.pages_free)
        with pytest.raises(ServiceError) as caught, mapped:
            pass
        assert caught.value.reason is Reason.LEASE_EXPIRED

    await asyncio.to_thread(attached, site, use)


def _until_free(client: ShmClient, pages: int) -> None:
    """Asks until so many pages are free: a sweep ends leases."""
    request = kvstore_pb2.DescribeArenaRequest(capability=worker_capability())
    for _ in range(20_000):
        if client.call("DescribeArena", request).pages_free == pages:
            return
    raise AssertionError("the lease did not end")


async def test_a_reader_that_is_gone_holds_nothing(site: Site) -> None:
    """Its process's end is seen by its lock; nobody else can end its pins."""
    before = await quiet(site)
    log_id = new_log_id()

    def use(client: ShmClient) -> None:
        text = capability(log_id)
        client.put_blob(log_id, kv_of(site, BLOCK), TOKENS[:BLOCK], capability=text)
        mapped = client.get_blob(log_id, capability=text)
        attached(site, lambda other: _cannot_end(other, mapped.map_id), "another")
        drop(client, log_id)
        mapped.verify()

    await asyncio.to_thread(attached, site, use)
    await site.until("its pins went with it", pages_free=before.pages_free)


def _cannot_end(client: ShmClient, map_id: int) -> None:
    assert not client.unmap(map_id)


async def test_mapping_needs_both_rights(site: Site) -> None:
    """The tenant's right to the log, and a worker's to be here at all."""

    def use(client: ShmClient) -> None:
        log_id = new_log_id()
        text = capability(log_id)
        client.put_blob(log_id, kv_of(site, BLOCK), TOKENS[:BLOCK], capability=text)
        for tenant_text, worker_text, reason in (
            (capability(log_id, tenant="other"), worker_capability(), Reason.LOG_NOT_FOUND),
            (text, text, Reason.PERMISSION_DENIED),
            (worker_capability(), worker_capability(), Reason.PERMISSION_DENIED),
        ):
            request = kvstore_pb2.MapLogRequest(
                log_id=log_id,
                capability=tenant_text,
                worker_id="shm",
                worker_capability=worker_text,
            )
            with pytest.raises(ServiceError) as caught:
                client.call("MapLog", request)
            assert caught.value.reason is reason
        drop(client, log_id)

    await asyncio.to_thread(attached, site, use)


async def test_a_payload_that_does_not_fit_its_tokens_is_refused(site: Site) -> None:
    """Nothing is opened for it."""
    before = await quiet(site)

    def use(client: ShmClient) -> None:
        log_id = new_log_id()
        with pytest.raises(ServiceError) as caught:
            client.put_blob(log_id, bytes(100), TOKENS, capability=capability(log_id))
        assert caught.value.field == "payload"

    await asyncio.to_thread(attached, site, use)
    after = await site.counts()
    assert (after.pages_free, after.logs_open) == (before.pages_free, before.logs_open)

"""Blobs of KV that is on NVMe only: a reader gets it all the same, by either way."""

from __future__ import annotations

import asyncio

import pytest

from baton.arena.client import WorkerIdentity
from baton.client_blobs import BlobClient
from baton.client_shm import ShmClient
from baton.ids import new_incarnation
from tests.integration.kvstore.harness import Site, worker_capability

# Fixtures of another module: `own_store` is used by `site`.
from tests.integration.kvstore.test_tiers import copied, evict, own_store, site, turn

__all__ = ["own_store", "site"]


@pytest.mark.more
async def test_a_blob_comes_back_from_nvme(site: Site) -> None:
    """Evicted with a copy kept: streamed and mapped, it is what it was."""
    worker = await site.attach()
    log = await turn(site, worker)
    text, address = log.capability, site.store.address
    with_kv = len(log.tokens) - 1

    def streamed() -> tuple[list[int], list[bytes]]:
        with BlobClient(address) as client:
            blob = client.get_blob(log.log_id, capability=text)
            return blob.token_ids.tolist(), [page.tobytes() for page in blob.pages]

    def mapped() -> list[int]:
        identity = WorkerIdentity(
            worker_id="shm",
            incarnation=new_incarnation(),
            label=site.model.label,
            geometry=site.model.geometry,
            capability=worker_capability(),
            software_version="test",
        )
        with (
            ShmClient.attach(address, identity) as client,
            client.get_blob(log.log_id, capability=text) as kv,
        ):
            kv.verify()
            return kv.token_ids.tolist()

    before = await asyncio.to_thread(streamed)
    assert before[0] == log.tokens[:with_kv]
    await copied(site, log)
    await evict(site, log)
    assert await asyncio.to_thread(streamed) == before
    await evict(site, log)
    assert await asyncio.to_thread(mapped) == log.tokens[:with_kv]

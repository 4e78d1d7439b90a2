"""The NVMe file of a running kvstore: shown, found again, and what happens without it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.capability import Right
from baton.clock import SystemClock
from baton.ids import new_log_id, new_request_id
from baton.kv.splice import splice
from baton.wire.segments import manifest_to_proto, segment_from_proto
from tests.integration.kvstore.harness import (
    BLOCK,
    FakeLog,
    FakeWorker,
    Model,
    Site,
    StoreProcess,
    capability,
    connected,
    kv_value,
    running_store,
)

PROMPT = [3 + index % 90 for index in range(4 * BLOCK)]
SLOTS = 32
WAIT_S = 30.0

pytestmark = pytest.mark.more


def operator_capability() -> str:
    """Signed when it is used: one signed at import has expired late in a long run."""
    return capability(tenant=None, rights=frozenset({Right.READ, Right.ADMIN}))


@pytest.fixture
def own_store(model: Model, tmp_path: Path) -> Iterator[StoreProcess]:
    """A store of its own, with an NVMe tier in the directory of its log."""
    size = str(SLOTS * model.geometry.slot_bytes)
    with running_store(model, tmp_path, "--nvme-bytes", size, "--lease-s", "60") as store:
        yield store


@pytest.fixture
async def own(own_store: StoreProcess) -> AsyncIterator[Site]:
    """Connections of one test."""
    async with connected(own_store) as one:
        yield one


async def tier(site: Site) -> kvstore_pb2.NvmeInfo:
    """What the kvstore says of its NVMe tier."""
    request = kvstore_pb2.DescribeArenaRequest(capability=operator_capability())
    return (await site.stub.DescribeArena(request)).nvme


async def held(site: Site, slots: int) -> None:
    """Asks until so many slots have copies; each answer takes a round trip."""
    deadline_s = SystemClock().monotonic_s() + WAIT_S
    while (found := await tier(site)).slots_held < slots or found.slots_writing:
        assert SystemClock().monotonic_s() < deadline_s, found


async def published(site: Site, worker: FakeWorker) -> FakeLog:
    """A prefix of two and a half blocks, whose log is gone."""
    log = await site.open(worker, PROMPT)
    await worker.prefill(log, 7, "stop")
    await site.stub.Publish(
        kvstore_pb2.PublishRequest(
            prefix=kvstore_pb2.PublishedPrefix(
                name="system",
                log=common_pb2.LogPosition(log_id=log.log_id, position=2 * BLOCK + BLOCK // 2),
                segment=common_pb2.Segment(text_hash=b"t" * 32),
                tenants=["guest"],
                text_bytes=99,
            ),
            capability=log.capability,
            request_id=new_request_id(),
        )
    )
    await site.close(log, drop=True)
    return log


async def lost_power(site: Site) -> FakeWorker:
    """kill -9, and memory is gone: arena and workers."""
    for worker in site.workers:
        worker.leave()
    site.workers.clear()
    for path in site.store.arena_dir.glob("arena-*.kv"):
        path.unlink()
    await site.restart()
    return await site.attach("w1")


async def test_published_prefix_outlives_the_arena(own: Site) -> None:
    """It is copied at once, and read back for the first who uses it: also its partial last page."""
    await published(own, await own.attach())
    await held(own, 3)
    worker = await lost_power(own)
    listed = await own.stub.ListPrefixes(
        kvstore_pb2.ListPrefixesRequest(capability=operator_capability())
    )
    (prefix,) = listed.prefixes
    log_id = new_log_id()
    request = own.open_request(
        worker,
        [*PROMPT, 8],
        log_id=log_id,
        capability=capability(log_id, tenant="guest"),
        manifest=manifest_to_proto(splice([segment_from_proto(prefix.segment)])),
    )
    answer = await own.stub.Open(request)
    assert answer.cached_tokens == 2 * BLOCK + BLOCK // 2
    guest = await worker.follow(log_id, answer.generation, request.capability)
    view = await worker.view(guest)
    for position in range(answer.cached_tokens):
        assert worker.read(view, position) == kv_value(PROMPT[position], position)


async def test_without_its_file_the_tier_begins_anew(own: Site) -> None:
    """Copies in a file that is not there any more are misses; the prefix cannot be served and is
    withdrawn; everything else works.
    """
    await published(own, await own.attach())
    await held(own, 3)
    (own.store.directory / "log" / "nvme-n0.kv").unlink()
    worker = await lost_power(own)
    found = await tier(own)
    assert (found.slot_count, found.slots_free, found.slots_held) == (SLOTS, SLOTS, 0)
    listed = await own.stub.ListPrefixes(
        kvstore_pb2.ListPrefixesRequest(capability=operator_capability())
    )
    assert not listed.prefixes
    await published(own, worker)
    await held(own, 3)


async def test_a_kvstore_without_a_tier_forgets_copies_and_one_with_it_remembers(
    own: Site,
) -> None:
    """The file stays as it was meanwhile: what the log says of it is true again."""
    await published(own, await own.attach())
    await held(own, 3)
    flags = own.store.flags
    own.store.flags = ()
    own.workers.clear()
    await own.restart()
    assert (await tier(own)).slot_count == 0
    own.store.flags = flags
    await own.restart()
    found = await tier(own)
    assert (found.slots_held, found.slots_free) == (3, SLOTS - 3)

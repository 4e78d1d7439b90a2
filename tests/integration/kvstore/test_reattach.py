"""A kvstore that dies and comes back finds its arena: KV, writers and quarantine as before.

Real processes; KV bytes follow from token and position, so that a reader can tell whose they are.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.arena.replay import HeldLog, LogView
from baton.capability import Right
from baton.errors import Reason, ServiceError
from baton.ids import new_log_id, new_request_id
from baton.kv.splice import splice
from baton.wire.segments import manifest_to_proto, segment_from_proto
from services.kvstore.arena import DATA_OFFSET
from tests.integration.kvstore.attached_process import TOKENS
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

PROMPT = [4 + index % 100 for index in range(3 * BLOCK + 5)]


@pytest.fixture
def own_store(model: Model, tmp_path: Path) -> Iterator[StoreProcess]:
    """A store of the test's own, with a lease that outlives a restart."""
    with running_store(model, tmp_path, "--lease-s", "8") as store:
        yield store


@pytest.fixture
def hasty_store(model: Model, tmp_path: Path) -> Iterator[StoreProcess]:
    """As `own_store`, with a lease of a moment."""
    with running_store(model, tmp_path, "--lease-s", "1") as store:
        yield store


@pytest.fixture
async def own(own_store: StoreProcess) -> AsyncIterator[Site]:
    """Connections to it."""
    async with connected(own_store) as site:
        yield site


@pytest.fixture
async def hasty(hasty_store: StoreProcess) -> AsyncIterator[Site]:
    """Connections to it."""
    async with connected(hasty_store) as site:
        yield site


def page_bytes(worker: FakeWorker, view: LogView) -> list[bytes]:
    """The committed content of every page of a log, slot by slot where a page is partial."""
    return [bytes(worker.attached.arena.page(row.page)) for row in view.rows[:-1]]


def require_own_kv(worker: FakeWorker, view: LogView, committed: int) -> None:
    """Every committed slot holds what a writer of exactly these tokens wrote."""
    assert view.head.committed_position == committed
    for position in range(committed):
        assert worker.read(view, position) == kv_value(view.token_ids[position], position)


async def kept(site: Site, worker: FakeWorker, prompt: list[int]) -> FakeLog:
    """A log with an answer, ended and kept."""
    log = await site.open(worker, prompt)
    await worker.prefill(log)
    await worker.append(log, 9, "stop")
    await site.close(log)
    return log


async def test_kill_9_loses_neither_tokens_nor_kv_nor_writers(own: Site) -> None:
    """Kept, running and half prefilled logs; the same run of the worker goes on with each."""
    worker = await own.attach()
    ended = await kept(own, worker, [1, *PROMPT])
    running = await own.open(worker, [2, *PROMPT])
    await worker.prefill(running)
    for token in range(BLOCK + 3):
        await worker.append(running, token)
    half = await own.open(worker, [3, *PROMPT])
    await worker.commit(half, BLOCK * 3 // 2)
    before = {log.log_id: await worker.view(log) for log in (ended, running, half)}
    bytes_before = {key: page_bytes(worker, view) for key, view in before.items()}
    arena_id = worker.attached.arena.shape.arena_id
    counts = await own.counts()

    await own.restart()
    after = await own.counts()
    for name in ("pages_free", "pages_granted", "pages_live", "pages_shared", "leases"):
        assert getattr(after, name) == getattr(counts, name), name

    worker = await own.reattach(worker, [running.held, half.held])
    assert worker.attached.arena.shape.arena_id == arena_id
    held = {log.log_id: log.generation for log in worker.attached.held}
    assert held == {running.log_id: 2, half.log_id: 2}
    for log in (ended, running, half):
        view = await worker.view(log)
        require_own_kv(worker, view, before[log.log_id].head.committed_position)
        assert view.token_ids == before[log.log_id].token_ids
        assert page_bytes(worker, view) == bytes_before[log.log_id]
    running = await worker.follow(running.log_id, 2, running.capability)
    for token in range(BLOCK):
        await worker.append(running, token)
    await worker.append(running, 99, "stop")
    half = await worker.follow(half.log_id, 2, half.capability)
    half.table.grant(await worker.store.grant(half.log_id, 2, 4, new_request_id()))
    await worker.prefill(half, 5, "stop")
    for log in (running, half):
        await own.close(log)
        require_own_kv(worker, await worker.view(log), log.committed)
    await own.until("all at rest", leases=0, pages_granted=0, pages_quarantined=0)


async def test_what_was_kept_serves_new_requests_after_a_restart(own: Site) -> None:
    """The index is back: the next turn finds the blocks of the one before, and a prefix its own."""
    worker = await own.attach()
    await kept(own, worker, [1, *PROMPT])
    source = await kept(own, worker, [2, *PROMPT])
    await own.stub.Publish(
        kvstore_pb2.PublishRequest(
            prefix=kvstore_pb2.PublishedPrefix(
                name="system",
                log=common_pb2.LogPosition(log_id=source.log_id, position=2 * BLOCK),
                segment=common_pb2.Segment(text_hash=b"t" * 32),
                tenants=["guest"],
                text_bytes=99,
            ),
            capability=source.capability,
            request_id=new_request_id(),
        )
    )
    await own.close(source, drop=True)
    await own.restart()
    worker = await own.reattach(worker)
    again = await own.open(worker, [1, *PROMPT, 8, 9])
    view = await worker.view(again)
    assert view.head.cached_tokens == len(PROMPT) + 1
    require_own_kv(worker, view, len(PROMPT) + 1)
    operator = capability(tenant=None, rights=frozenset({Right.READ, Right.ADMIN}))
    listed = await own.stub.ListPrefixes(kvstore_pb2.ListPrefixesRequest(capability=operator))
    (prefix,) = listed.prefixes
    log_id = new_log_id()
    request = own.open_request(
        worker,
        [2, *PROMPT],
        log_id=log_id,
        capability=capability(log_id, tenant="guest"),
        manifest=manifest_to_proto(splice([segment_from_proto(prefix.segment)])),
    )
    answer = await own.stub.Open(request)
    assert answer.cached_tokens == 2 * BLOCK
    guest = await worker.follow(log_id, answer.generation, request.capability)
    require_own_kv(worker, await worker.view(guest), 2 * BLOCK)


@pytest.mark.more
async def test_append_that_was_logged_and_not_acked_is_not_doubled(own: Site) -> None:
    """A worker that never heard the ack sends its token again, under the new generation."""
    worker = await own.attach()
    log = await own.open(worker, PROMPT)
    await worker.prefill(log)
    await worker.append(log, 11)
    lost = worker.entry(log, 12)
    await worker.send([lost])
    await own.restart()
    worker = await own.reattach(worker, [log.held])
    log = await worker.follow(log.log_id, 2, log.capability)
    assert log.tokens[-2:] == [11, 12]
    await worker.append(log, 13, "stop")
    assert (await worker.view(log)).token_ids[-3:] == (11, 12, 13)


@pytest.mark.more
async def test_nothing_is_written_before_the_worker_attached_again(own: Site) -> None:
    """The append stream introduces a worker that the restarted store has to know."""
    worker = await own.attach()
    log = await own.open(worker, PROMPT)
    await worker.prefill(log)
    await own.restart()
    worker._append = None  # a broken stream
    with pytest.raises(ServiceError) as refused:
        await worker.append(log, 11)
    assert refused.value.reason is Reason.NO_WORKER


@pytest.mark.more
async def test_another_run_of_a_worker_inherits_nothing(own: Site) -> None:
    """A worker that died with its store comes back as somebody else: its logs are orphans."""
    worker = await own.attach()
    log = await own.open(worker, PROMPT)
    await worker.prefill(log)
    own.store.kill()
    worker.leave()
    own.workers.remove(worker)
    await asyncio.to_thread(own.store.start)
    fresh = await own.attach(worker.worker_id, [log.held])
    assert fresh.attached.held == ()
    view = await fresh.view(log)
    assert view.head.generation == 2
    require_own_kv(fresh, view, len(PROMPT))
    taken = await fresh.take(FakeLog(**{**vars_of(log), "generation": 2}))
    await fresh.append(taken, 9, "stop")
    await own.close(taken)
    await own.until("all at rest", leases=0, pages_granted=0, pages_quarantined=0)


def vars_of(log: FakeLog) -> dict[str, object]:
    """The fields of a fake log."""
    return {name: getattr(log, name) for name in log.__slots__}


async def test_log_that_is_not_attached_again_in_a_lease_is_anybodys(hasty: Site) -> None:
    """Its worker lives and says nothing: fenced, its pages quarantined, its KV adopted."""
    worker = await hasty.attach()
    log = await hasty.open(worker, PROMPT, output_pages=3)
    await worker.commit(log, 2 * BLOCK)
    await hasty.restart()
    counts = await hasty.until("fenced", leases=0)
    assert counts.pages_quarantined == 5, "granted and not committed: 2 of the prompt, 3 ahead"
    other = await hasty.attach("other")
    log.generation = 2
    taken = await other.take(log, pages=4)
    assert taken.committed == 2 * BLOCK
    await other.prefill(taken, 5, "stop")
    require_own_kv(other, await other.view(taken), len(PROMPT))
    late = await hasty.reattach(worker, [HeldLog(log_id=log.log_id, generation=1)])
    assert late.attached.held == ()
    await hasty.until("the old mapping is gone", pages_quarantined=0)


def attached_process(site: Site, log_id: bytes) -> subprocess.Popen[str]:
    """A worker with a process of its own, writing a log."""
    argv = [
        *(sys.executable, "-m", "tests.integration.kvstore.attached_process"),
        *(site.store.address, str(site.model.path), log_id.hex()),
    ]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


async def test_pages_of_a_stopped_worker_stay_away_until_it_is_gone(hasty: Site) -> None:
    """SIGSTOP over a restart: nobody is given what it may still write, whatever the need (O4)."""
    log_id = new_log_id()
    process = attached_process(hasty, log_id)
    try:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        assert line.split() == ["ready", "1"]
        granted = (await hasty.counts()).pages_granted
        os.kill(process.pid, signal.SIGSTOP)
        await hasty.restart()
        counts = await hasty.until("fenced after a lease", leases=0)
        assert counts.pages_quarantined == granted == 8
        worker = await hasty.attach()
        log = await hasty.open(worker, PROMPT)
        with pytest.raises(ServiceError) as refused:
            await worker.store.grant(log.log_id, 1, counts.arena.page_count, new_request_id())
        assert refused.value.reason is Reason.PAGES_EXHAUSTED
        free = (await hasty.counts()).pages_free
        pages = await worker.store.grant(log.log_id, 1, free, new_request_id())
        for page in pages:
            assert not any(worker.attached.arena.page(page.page)), "never granted unzeroed (O7)"
        assert (await hasty.counts()).pages_quarantined == granted
    finally:
        process.kill()
        process.wait(10.0)
        if process.stdout is not None:
            process.stdout.close()
    await hasty.until("it is gone", pages_quarantined=0)
    assert len(TOKENS) > BLOCK


@pytest.mark.more
async def test_garbage_of_a_life_before_is_zeroed_before_it_is_granted(own: Site) -> None:
    """Written, never committed, the writer gone with its store: its pages come back empty."""
    worker = await own.attach()
    log = await own.open(worker, PROMPT, output_pages=3)
    log.tokens += PROMPT
    worker.write(log, 0, len(PROMPT) + 2 * BLOCK)
    own.store.kill()
    worker.leave()
    own.workers.remove(worker)
    await asyncio.to_thread(own.store.start)
    fresh = await own.attach("fresh")
    await own.until("nobody holds anything", pages_granted=0, pages_quarantined=0)
    one = await own.open(fresh, [1])
    free = (await own.counts()).pages_free
    for page in await fresh.store.grant(one.log_id, 1, free, new_request_id()):
        assert not any(fresh.attached.arena.page(page.page))


def flip_arena_byte(store: StoreProcess, model: Model, page: int) -> None:
    """One bit of one page, behind everybody's back."""
    with (store.arena_dir / "arena-n0.kv").open("r+b") as file:
        file.seek(DATA_OFFSET + page * model.geometry.slot_bytes + 5)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    "block", [pytest.param(0, marks=pytest.mark.more), pytest.param(2, marks=pytest.mark.more), 3]
)
async def test_byte_that_flipped_meanwhile_is_found_and_computed_again(
    own: Site, block: int
) -> None:
    """Full pages and the partial tail: found at the first pin, cut there, never served (W2)."""
    worker = await own.attach()
    log = await own.open(worker, PROMPT)
    await worker.prefill(log)
    view = await worker.view(log)
    own.store.kill()
    flip_arena_byte(own.store, own.model, view.rows[block].page)
    await asyncio.to_thread(own.store.start)
    worker = await own.reattach(worker, [log.held])
    cut = await worker.follow(log.log_id, 2, log.capability)
    assert cut.committed == block * BLOCK
    cut.table.grant(await worker.store.grant(log.log_id, 2, 4, new_request_id()))
    await worker.commit(cut, len(PROMPT))
    require_own_kv(worker, await worker.view(cut), len(PROMPT))
    await worker.append(cut, 9, "stop")
    await own.close(cut)
    again = await own.open(worker, [*PROMPT, 5])
    require_own_kv(worker, await worker.view(again), len(PROMPT))


@pytest.mark.more
async def test_flipped_byte_of_a_kept_log_is_a_shorter_hit(own: Site) -> None:
    """The next turn adopts what is whole and computes the rest."""
    worker = await own.attach()
    log = await kept(own, worker, PROMPT)
    view = await worker.view(log)
    own.store.kill()
    flip_arena_byte(own.store, own.model, view.rows[1].page)
    await asyncio.to_thread(own.store.start)
    worker = await own.reattach(worker)
    again = await own.open(worker, [*PROMPT, 5])
    assert again.committed == BLOCK
    require_own_kv(worker, await worker.view(again), BLOCK)
    assert "kv_damaged" in own.store.text()


async def test_arena_of_another_shape_is_made_anew(own: Site) -> None:
    """Tokens are back, KV is not, and the same run of a worker may still go on."""
    worker = await own.attach()
    log = await own.open(worker, PROMPT)
    await worker.prefill(log)
    arena_id = worker.attached.arena.shape.arena_id
    own.store.kill()
    own.store.arena_bytes //= 2
    await asyncio.to_thread(own.store.start)
    worker = await own.reattach(worker, [log.held])
    assert worker.attached.arena.shape.arena_id != arena_id
    (held,) = worker.attached.held
    view = await worker.view(log)
    assert view.head.generation == held.generation == 3
    assert list(view.token_ids) == log.tokens
    assert view.head.committed_position == 0
    counts = await own.counts()
    assert counts.pages_free == counts.arena.page_count


@pytest.mark.more
async def test_frozen_store_is_not_held_against_its_workers(hasty: Site) -> None:
    """SIGSTOP of the store for longer than a lease: nobody could renew, so nobody is fenced."""
    worker = await hasty.attach()
    log = await hasty.open(worker, PROMPT)
    await worker.prefill(log)
    assert hasty.store.process is not None
    os.kill(hasty.store.process.pid, signal.SIGSTOP)
    try:
        # The store's clock is what has to pass; nothing of it can be waited for.
        await asyncio.to_thread(subprocess.run, ["sleep", "1.5"], check=True)
    finally:
        os.kill(hasty.store.process.pid, signal.SIGCONT)
    await worker.append(log, 9, "stop")
    assert "store_stood_still" in hasty.store.text()


@pytest.mark.more
def test_clean_stop_keeps_the_arena_unless_told(model: Model, tmp_path: Path) -> None:
    """A restart for an upgrade loses no KV; who wants the memory back says so."""
    with running_store(model, tmp_path) as store:
        asyncio.run(_written(store))
        assert store.stop() == 0
        assert [path.name for path in store.arena_dir.iterdir()] == ["arena-n0.kv"]
        store.flags = ("--remove-arena",)
        store.start()
        asyncio.run(_found(store))
        assert store.stop() == 0
        assert list(store.arena_dir.iterdir()) == []


async def _written(store: StoreProcess) -> None:
    async with connected(store) as site:
        await kept(site, await site.attach(), PROMPT)


async def _found(store: StoreProcess) -> None:
    async with connected(store) as site:
        worker = await site.attach()
        log = await site.open(worker, PROMPT)
        require_own_kv(worker, await worker.view(log), len(PROMPT) - 1)
        assert np.isfinite(kv_value(PROMPT[0], 0))

"""The log directory stays bounded under churn, and what is read back from it is what was there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.clock import SystemClock
from services.kvstore.compaction import Compactor
from services.kvstore.log.reader import scan_directory
from services.kvstore.log.recovery import recover
from services.kvstore.log.segments import SegmentWriter, segment_paths
from services.kvstore.log.writer import LogWriter
from services.kvstore.publishing import PublishOrder
from services.kvstore.state import AckLevel
from services.kvstore.store import Store
from services.kvstore.workers import WorkerTable
from tests.unit.kvstore.cores import NOW, WorkerModel, build_store, open_log, take
from tests.unit.kvstore.test_places import (
    ARENA_ID,
    NVME_ID,
    cold_of,
    copy,
    publish,
    tiered_store,
)

SEGMENT_BYTES = 1 << 14
SEGMENTS_MAX = 6


@dataclass(slots=True)
class Bench:
    """A store over a real directory."""

    store: Store
    writer: LogWriter
    compactor: Compactor

    async def work(self) -> None:
        """Writers that are gone say so; what was done is written; compaction takes a turn."""
        for fence in self.store.core.pool.fences():
            self.store.keeper.lift(fence)
        self.store.core.take_work()
        await self.writer.acked(AckLevel.OS)
        await self.compactor.turn()


@asynccontextmanager
async def running(
    directory: Path, make: Callable[[LogWriter], Store] = lambda sink: build_store(2048, sink=sink)
) -> AsyncIterator[Bench]:
    segments = SegmentWriter(
        directory, store_id=bytes(16), first_sequence=1, segment_bytes=SEGMENT_BYTES
    )
    with ThreadPoolExecutor(1) as executor:
        writer = LogWriter(segments, executor, next_lsn=1)
        store = make(writer)
        compactor = Compactor(
            core=store.core,
            journal=store.core.journal,
            writer=writer,
            workers=WorkerTable(),
            clock=SystemClock(),
            segments_max=SEGMENTS_MAX,
        )
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(writer.run())
            yield Bench(store, writer, compactor)
            writer.end()
        await writer.close()


def start(store: Store, draw: random.Random) -> WorkerModel:
    worker = open_log(store, [draw.randint(0, 99) for _ in range(draw.randint(1, 30))])
    worker.prefill(token=5)
    return take(store, worker.log_id, pages=2)


def tokens_of(store: Store) -> dict[bytes, tuple[int, list[int]]]:
    return {log.log_id: (log.generation, list(log.tokens)) for log in store.core.logs.values()}


@pytest.mark.parametrize("seed", [1, 2])
async def test_churn_keeps_the_directory_bounded_and_loses_nothing(tmp_path, seed):
    """Some logs live through everything, most come and go, forks outlive their parents."""
    draw, most = random.Random(seed), 0
    async with running(tmp_path) as bench:
        store = bench.store
        keepers = [start(store, draw) for _ in range(6)]
        passing: list[WorkerModel] = []
        for step in range(260):
            for worker in (*keepers, *passing):
                if draw.random() < 0.5 and worker.log.position < 180:
                    worker.append(draw.randint(0, 99))
            if len(passing) < 8:
                passing.append(start(store, draw))
            elif draw.random() < 0.5:
                gone = passing.pop(draw.randrange(len(passing)))
                store.keeper.close(gone.log_id, is_dropped=True, wall_s=NOW.wall_s)
            await bench.work()
            if step > 20:
                most = max(most, len(segment_paths(tmp_path)))
        assert bench.compactor.rewritten > 0
        assert bench.writer.counters.bytes > 30 * SEGMENT_BYTES
        expected = tokens_of(store)
    assert most <= SEGMENTS_MAX + 2
    recovered = recover(scan_directory(tmp_path), arena_id=bytes(16))
    assert not recovered.damaged
    assert {
        log.log_id: (log.generation, list(log.tokens)) for log in recovered.logs.values()
    } == expected


async def test_nothing_is_rewritten_under_the_bound(tmp_path):
    """Logs that come and go leave free segments behind; compaction costs nothing then."""
    draw = random.Random(3)
    async with running(tmp_path) as bench:
        for _ in range(60):
            worker = start(bench.store, draw)
            for _ in range(20):
                worker.append(1)
            bench.store.keeper.close(worker.log_id, is_dropped=True, wall_s=NOW.wall_s)
            await bench.work()
        assert bench.writer.counters.bytes > 5 * SEGMENT_BYTES
        assert bench.compactor.rewritten == 0
        assert len(segment_paths(tmp_path)) <= 2


async def test_published_prefix_of_a_log_that_is_gone_survives_compaction(tmp_path):
    """Its log was dropped long ago; what can be read back is the prefix and its tokens."""
    draw = random.Random(4)
    async with running(tmp_path) as bench:
        store = bench.store
        source = open_log(store, list(range(16)))
        source.prefill(token=5)
        published = store.prefix_keeper.publish(
            PublishOrder(
                prefix_id="p1",
                name="rules",
                tenant="acme",
                tenants=("*",),
                log_id=source.log_id,
                position=16,
                text_hash=bytes(32),
                ids_hash=b"",
                history_end=b"",
                text_bytes=0,
                template_digest=bytes(16),
                model="m",
                expire_wall_s=None,
            ),
            NOW.wall_s,
        )
        store.keeper.close(source.log_id, is_dropped=True, wall_s=NOW.wall_s)
        keepers = [start(store, draw) for _ in range(4)]
        for _ in range(2 * SEGMENTS_MAX * SEGMENT_BYTES // 128 // 4):
            for index, worker in enumerate(keepers):
                if worker.log.position >= 150:
                    store.keeper.close(worker.log_id, is_dropped=True, wall_s=NOW.wall_s)
                    keepers[index] = worker = start(store, draw)
                worker.append(3)
            await bench.work()
        assert bench.compactor.rewritten > 0
        assert len(segment_paths(tmp_path)) <= SEGMENTS_MAX + 2
    recovered = recover(scan_directory(tmp_path), arena_id=bytes(16))
    (prefix,) = recovered.prefixes
    assert (prefix.prefix_id, tuple(prefix.token_ids)) == ("p1", tuple(published.token_ids))
    assert source.log_id not in recovered.logs


async def test_copies_on_the_nvme_tier_survive_compaction(tmp_path):
    """Those of a log and of a prefix whose log is gone: the records that told of them first were
    freed long ago, and what is read back names the same slots.
    """
    draw = random.Random(5)
    async with running(tmp_path, lambda sink: tiered_store(sink, pages=2048)) as bench:
        store = bench.store
        kept = open_log(store, list(range(20)))
        kept.prefill(token=5, finish="stop")
        source = open_log(store, list(range(30, 50)))
        source.prefill(token=5, finish="stop")
        publish(store, source.log, 11)
        (prefix,) = store.core.prefixes.all()
        for owner in (kept.log, prefix):
            copy(store, owner, 4, (None,) * 4)
        expected = cold_of([kept.log, prefix])
        assert len(expected) == 2
        store.keeper.close(source.log_id, is_dropped=True, wall_s=NOW.wall_s)
        await bench.work()
        first = segment_paths(tmp_path)[0]
        workers = [start(store, draw) for _ in range(6)]
        while first.exists() or bench.compactor.rewritten < 12:
            for worker in workers:
                if worker.log.position < 180:
                    worker.append(1)
                else:
                    store.keeper.close(worker.log_id, is_dropped=True, wall_s=NOW.wall_s)
                    workers[workers.index(worker)] = start(store, draw)
            await bench.work()
    recovered = recover(scan_directory(tmp_path), ARENA_ID, NVME_ID)
    assert cold_of([*recovered.logs.values(), *recovered.prefixes]) == expected


async def test_a_published_prefix_keeps_its_pages_when_its_evicted_log_is_written_again(tmp_path):
    """The log's own SNAPSHOT has no pages any more; the prefix holds them still."""
    async with running(tmp_path) as bench:
        store = bench.store
        source = open_log(store, list(range(30)))
        source.prefill(token=5, finish="stop")
        publish(store, source.log, 20)
        (prefix,) = store.core.prefixes.all()
        store.home.give_up_kv(source.log, 0)
        assert len(prefix.rows) == 3
        bench.compactor._rewrite({source.log_id})
        await bench.work()
    (found,) = recover(scan_directory(tmp_path), arena_id=bytes(16)).prefixes
    assert found.rows == prefix.rows

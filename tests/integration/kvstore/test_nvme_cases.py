"""Field reports about caches on disk, at a running kvstore with an NVMe tier: files that are gone,
spoilt, not used or not deleted, a refused restore, sessions that come back wrong.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.integration.kvstore.harness import (
    BLOCK,
    FakeLog,
    FakeWorker,
    Model,
    Site,
    StoreProcess,
    connected,
    running_store,
)
from tests.integration.kvstore.test_tiers import FLAGS, copied, evict, next_turn, summary, turn

SESSIONS = 200
NVME_BYTES = 16 << 20
SPOILT: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda data: data[: len(data) // 2],
    "one byte less": lambda data: data[:-1],
    "its header": lambda data: data[:128],
    "empty": lambda _data: b"",
    "noise": lambda data: data[:200] + random.Random(3).randbytes(len(data) - 200),
    "one byte more": lambda data: data + b"x",
}


@pytest.fixture
def own_store(model: Model, tmp_path: Path) -> Iterator[StoreProcess]:
    """A store of its own: its file is spoilt."""
    flags = list(FLAGS)
    flags[flags.index("--nvme-bytes") + 1] = str(NVME_BYTES)
    with running_store(model, tmp_path, *flags) as store:
        yield store


@pytest.fixture
async def site(own_store: StoreProcess) -> AsyncIterator[Site]:
    """Connections of one test."""
    async with connected(own_store) as one:
        yield one


def nvme_file(site: Site) -> Path:
    """The tier's one file."""
    (path,) = (site.store.directory / "log").glob("nvme-*.kv")
    return path


async def on_nvme(site: Site, worker: FakeWorker) -> FakeLog:
    """A kept log whose KV is on NVMe only."""
    log = await turn(site, worker)
    await copied(site, log)
    await evict(site, log)
    return log


async def restarted(site: Site, name: str, change: Callable[[], object]) -> FakeWorker:
    """A store that was killed and comes back after `change`, and a worker."""
    for worker in site.workers:
        worker.leave()
    site.workers.clear()
    site.store.kill()
    change()
    await asyncio.to_thread(site.store.start)
    return await site.attach(name)


@pytest.mark.more
async def test_c58_a_file_that_is_gone_stops_nothing(site: Site) -> None:
    """Log and file durability: cut to nothing under the store, removed under it, and gone at the
    next start: the answer is computed, the store serves on.

    LMCache#1313, LMCache#2420, LMCache#1981.
    """
    worker = await site.attach()
    log = await on_nvme(site, worker)
    path = nvme_file(site)
    os.truncate(path, 0)
    assert await next_turn(site, worker, log) == 0
    assert (await summary(site, log)).cold_tokens == 0
    other = await turn(site, worker)
    assert await next_turn(site, worker, other) == len(other.tokens) - 1
    path.unlink()
    assert await next_turn(site, worker, other) == len(other.tokens) - 1
    await site.close(log, drop=True)
    await copied(site, other)
    await evict(site, other)
    worker = await restarted(site, "w1", lambda: None)
    assert await next_turn(site, worker, other) == 0
    again = await on_nvme(site, worker)
    assert await next_turn(site, worker, again) == len(again.tokens) - 1


@pytest.mark.more
async def test_c60_after_a_restart_the_file_is_used_and_nothing_grows(site: Site) -> None:
    """Log and file durability: what was on disk serves after the restart; the one file keeps its
    size, and no other name appears beside it.

    LMCache#562, LMCache#2273.
    """
    worker = await site.attach()
    log = await on_nvme(site, worker)
    path = nvme_file(site)
    size, names = path.stat().st_size, sorted(one.name for one in path.parent.glob("nvme-*"))
    worker = await restarted(site, "w1", lambda: None)
    assert await next_turn(site, worker, log) == len(log.tokens) - 1
    assert path.stat().st_size == size
    assert sorted(one.name for one in path.parent.glob("nvme-*")) == names


@pytest.mark.more
@pytest.mark.timeout(240)
async def test_c62_a_spoilt_file_spoils_no_answer(site: Site) -> None:
    """Poisoned KV: cut, empty, noise, one byte too many: what is found afterwards is what was
    written, or nothing; three times each, and a new log is stored and found.

    llama.cpp#27068, llama.cpp#14434.
    """
    worker = await site.attach()
    path = nvme_file(site)
    for number, spoil in enumerate(SPOILT.values()):
        log = await on_nvme(site, worker)
        spoilt = spoil(path.read_bytes())
        worker = await restarted(site, f"w{number + 1}", partial(path.write_bytes, spoilt))
        counts = [await next_turn(site, worker, log) for _ in range(3)]
        # Of noise behind a whole header the file is the one of before, and no slot is.
        assert set(counts) == {0}
        await site.close(log, drop=True)


@pytest.mark.more
@pytest.mark.timeout(240)
async def test_c65_sessions_that_come_back_are_their_own(site: Site) -> None:
    """Tenant isolation: many sessions, all moved to disk, read back at once in any order; every
    slot is the session's own (`next_turn` compares each with its token and position).

    LMCache#4385: blocks of other conversations came back, without an error.
    """
    worker = await site.attach()
    logs = [await session(site, worker, number) for number in range(SESSIONS)]
    for log in logs:
        await copied(site, log)
        await evict(site, log)
    random.Random(5).shuffle(logs)
    for first in range(0, SESSIONS, 8):
        found = await asyncio.gather(
            *(next_turn(site, worker, log) for log in logs[first : first + 8])
        )
        assert found == [len(log.tokens) - 1 for log in logs[first : first + 8]]


async def session(site: Site, worker: FakeWorker, number: int) -> FakeLog:
    """A kept log that says its number in every token."""
    high, low = divmod(number, 90)
    tokens = [3 + low, 3 + high] * BLOCK + [3 + low] * (number % BLOCK + 1)
    log = await site.open(worker, tokens)
    await worker.prefill(log, token=7)
    await worker.append(log, 2, "stop")
    await site.close(log)
    return log

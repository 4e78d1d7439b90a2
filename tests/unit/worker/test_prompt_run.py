"""The stages of a prompt's chunks: in order, beside each other, and never more than may be."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton.arena.client import Checkpoint
from baton.arena.replay import GrantedPage
from baton.engine.transformer import ComputeCancelled
from baton.errors import Reason, ServiceError
from baton.kv.layout import KvDtype, KvGeometry
from baton.worker.chunk_compute import ChunkWork, ComputedChunk, Logits
from baton.worker.chunker import Chunk
from baton.worker.prompt_run import PromptRun, RunTerms
from baton.worker.threads import Progress, WorkThread
from baton.worker.unvouched import Unvouched

CHUNK = 16
CHUNKS = 5
TOKENS = CHUNKS * CHUNK
TIMEOUT_S = 20.0
GEOMETRY = KvGeometry(
    layers=1, kv_heads=1, head_dim=32, head_dim_v=32, block_tokens=16, dtype=KvDtype.F32
)


class Device:
    """Stands for a device and its store. Every stage of every chunk waits until it is let go."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.under_way: set[str] = set()
        self.most_under_way = 0
        self.is_held = False
        self._changed = asyncio.Condition()
        self._let: set[str] = set()
        self.fails_at: str | None = None

    async def stage(self, name: str) -> None:
        """A stage of a chunk, such as `commit 2`, from its begin to its end."""
        self.told.append(f"{name} begins")
        self.under_way.add(name)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        async with self._changed:
            self._changed.notify_all()
            if self.is_held:
                await self._changed.wait_for(lambda: name in self._let)
            self.under_way.discard(name)
            self._changed.notify_all()
        if self.fails_at == name:
            raise ServiceError(Reason.WORKER_LOST, "the store is gone")
        self.told.append(f"{name} ends")

    async def reached(self, *names: str) -> None:
        """Returns when exactly these stages are under way."""
        async with asyncio.timeout(TIMEOUT_S), self._changed:
            await self._changed.wait_for(lambda: self.under_way == set(names))

    async def let(self, name: str) -> None:
        """The stage ends."""
        async with self._changed:
            self._let.add(name)
            self._changed.notify_all()

    # --- what a run calls ---------------------------------------------------------------------

    async def compute(self, work: ChunkWork) -> ComputedChunk:
        """A `ChunkComputer`."""
        work.begin()
        await self.stage(f"compute {work.chunk.first_position // CHUNK}")
        if work.chunk.should_cancel is not None and work.chunk.should_cancel():
            raise ComputeCancelled
        logits = np.zeros(4, dtype=np.float32) if work.chunk.wants_logits else None
        return ComputedChunk(logits=logits, asked_s=0.0, began_s=0.0, ended_s=0.0)

    def land(self, owner: int, first_position: int) -> None:
        """A `KvStages`: the copy is waited for where the chunk is packed."""
        self.told.append(f"land {first_position // CHUNK}")

    def forget(self, owner: int) -> None:
        """The run is over."""
        self.told.append("forget")

    async def commit_checkpoint(
        self, log: Any, positions: tuple[int, int], rows: Any, capability: str
    ) -> None:
        """A kvstore's commit."""
        await self.stage(f"commit {positions[0] // CHUNK}")

    async def seal(
        self, log: Any, digest: bytes, capability: str, *, last: Checkpoint, **_: Any
    ) -> int:
        """A kvstore's seal, which commits the last chunk."""
        self.told.append("seal begins")
        await self.stage(f"commit {last.first // CHUNK}")
        return last.end


class Bench:
    """One run over a device."""

    def __init__(self) -> None:
        self.device = Device()
        self.packing = WorkThread("test-packing")
        pages = [GrantedPage(page=number, page_generation=1) for number in range(CHUNKS)]
        memory = bytearray(CHUNKS * GEOMETRY.slot_bytes)
        size = GEOMETRY.slot_bytes
        arena = SimpleNamespace(
            geometry=GEOMETRY,
            page=lambda number: memoryview(memory)[number * size : (number + 1) * size],
        )
        head = SimpleNamespace(
            prompt_tokens=TOKENS,
            log_id=b"l" * 16,
            generation=1,
            committed_position=0,
            granted_pages=pages,
        )
        view: Any = SimpleNamespace(head=head, rows=(), token_ids=[7] * TOKENS)
        parts: Any = SimpleNamespace(
            geometry=GEOMETRY,
            arena=arena,
            store=self.device,
            stages=self.device,
            compute=None,
            engine=None,
            packing=self.packing,
            progress=Progress(),
            unvouched=Unvouched(),
            label=SimpleNamespace(kv_digest=lambda: bytes(16)),
        )
        terms = RunTerms(
            request_id="r", capability="c", chunk_tokens=CHUNK, on_commit=self._committed
        )
        self.run = PromptRun(parts, view, terms)

    async def _committed(self, chunk: Chunk) -> None:
        self.device.told.append(f"told {chunk.first // CHUNK}")

    async def all(self) -> None:
        """The whole run."""

        async def sampled(logits: Logits) -> None:
            await self.device.stage("sample")

        await self.run.compute_to_seal(self.device, sampled)
        await self.run.seal(None)


@pytest.fixture
async def bench() -> Any:
    made = Bench()
    yield made
    made.packing.close()


def at(told: list[str], what: str) -> int:
    """When it was told, which was once."""
    assert told.count(what) == 1, (what, told)
    return told.index(what)


async def test_a_chunk_is_computed_while_the_one_before_it_is_committed(bench: Bench) -> None:
    """Held everywhere, and let go one by one: compute i+1 and commit i are under way together, and
    nothing else is, however long the store takes.
    """
    device = bench.device
    device.is_held = True
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        group.create_task(bench.all())
        await device.reached("compute 0")
        await device.let("compute 0")
        for number in range(CHUNKS - 1):
            await device.reached(f"commit {number}", f"compute {number + 1}")
            # The store is slow: the chunk after the next has to wait for it.
            await device.let(f"compute {number + 1}")
            await device.reached(f"commit {number}")
            await device.let(f"commit {number}")
        # The last chunk is packed beside the choice of the first token, and goes with the seal.
        await device.reached("sample")
        await device.let("sample")
        await device.reached(f"commit {CHUNKS - 1}")
        await device.let(f"commit {CHUNKS - 1}")
    assert device.most_under_way == 2


async def test_every_chunk_goes_through_its_stages_in_order(bench: Bench) -> None:
    """Computed, landed, committed, told; each stage takes the chunks in their order."""
    await bench.all()
    told = bench.device.told
    for stage in ("compute {} ends", "land {}", "commit {} begins", "told {}"):
        times = [at(told, stage.format(number)) for number in range(CHUNKS)]
        assert times == sorted(times)
    for number in range(CHUNKS):
        stages = ("compute {} ends", "land {}", "commit {} begins", "commit {} ends", "told {}")
        times = [at(told, stage.format(number)) for stage in stages]
        assert times == sorted(times)
    assert at(told, "forget") < at(told, "seal begins") < at(told, f"commit {CHUNKS - 1} begins")
    assert bench.run.times.pack_s > 0.0
    assert bench.run.times.pack_wait_s > 0.0


async def test_a_commit_that_fails_ends_the_run_and_nothing_more_is_computed(bench: Bench) -> None:
    """The chunk under way is given up; the run is forgotten when nothing of it computes."""
    bench.device.fails_at = "commit 1"
    with pytest.raises(ServiceError) as failed:
        await bench.all()
    assert failed.value.reason is Reason.WORKER_LOST
    told = bench.device.told
    assert told[-1] == "forget"
    assert "compute 4 begins" not in told
    assert "land 2" not in told or at(told, "land 2") < at(told, "forget")


async def test_a_stopped_run_commits_what_was_computed_before(bench: Bench) -> None:
    """Between two layers: what is in the pages already is of use to the next attempt."""
    device = bench.device
    device.is_held = True
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        running = group.create_task(failure_of(bench))
        await device.reached("compute 0")
        await device.let("compute 0")
        await device.reached("commit 0", "compute 1")
        bench.run.stop()
        await device.let("commit 0")
        await device.reached("compute 1")
        await device.let("compute 1")
    assert running.result() is Reason.CANCELLED
    assert "told 0" in device.told
    assert "land 1" not in device.told
    assert device.told[-1] == "forget"


async def failure_of(bench: Bench) -> Reason:
    """Why the run failed."""
    with pytest.raises(ServiceError) as failed:
        await bench.all()
    return failed.value.reason

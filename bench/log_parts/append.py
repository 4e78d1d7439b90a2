"""How many tokens a second does the log take, acked, and how long does an ack take?

Three rows in one run, each acked at `os` and at `disk`, in batches of 32:
the kvstore's Append stream over gRPC, server and clients being two processes; the log writer alone,
in this process; and the same bytes by bare pwrite and fdatasync, the physical limit.
Closed loop: four streams, each sending its next batch when the last is acked. Open loop: batches at
the goals' rates (20,000/s and 5,000/s), latency counted from when each was due.
The second table shows what one append costs with 10 to 10,000 logs alive.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from services.kvstore.log.fields import PageRef
from services.kvstore.log.format import RecordAddress, RecordType
from services.kvstore.log.records import Append
from services.kvstore.log.segments import SegmentWriter
from services.kvstore.log.writer import LogWriter
from services.kvstore.state import AckLevel
from tests.integration.kvstore.harness import (
    BLOCK,
    FakeLog,
    FakeWorker,
    Site,
    StoreProcess,
    connected,
    tiny_model,
    worker_capability,
)
from tests.unit.kvstore.cores import WorkerModel, build_store, open_log

BATCH: Final = 32
STREAMS: Final = 4
PROMPT: Final = 4
RATES: Final = {AckLevel.OS: 20_000, AckLevel.DISK: 5_000}
LOG_COUNTS: Final = (10, 100, 1_000, 10_000)
ARENA_BYTES: Final = 512 << 20
RECORD_BYTES: Final = 128
_NAMES: Final = {AckLevel.OS: "os", AckLevel.DISK: "disk"}

SendBatch = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Samples:
    """Batches that were acked: when the run took how long, and each batch's latency."""

    seconds: float = 0.0
    batches: int = 0
    latencies_s: list[float] = field(default_factory=list)

    @property
    def appends_per_s(self) -> float:
        """Acked appends a second."""
        return self.batches * BATCH / self.seconds

    @property
    def p99_ms(self) -> float:
        """Of a batch's ack."""
        return statistics.quantiles(self.latencies_s, n=100)[98] * 1e3


async def closed_loop(senders: Sequence[SendBatch], batches: int) -> Samples:
    """Every sender sends its next batch when the last is acked."""
    found = Samples()

    async def run(send: SendBatch) -> None:
        for _ in range(batches):
            began_s = time.perf_counter()
            await send()
            found.latencies_s.append(time.perf_counter() - began_s)

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for send in senders:
            tasks.create_task(run(send))
    found.seconds = time.perf_counter() - began_s
    found.batches = len(found.latencies_s)
    return found


async def open_loop(senders: Sequence[SendBatch], batches: int, rate: int) -> Samples:
    """Batches are due at a fixed rate, whoever is late; senders share them in turn."""
    found = Samples()
    began_s = time.perf_counter()
    gap_s = BATCH / rate

    async def run(first: int, send: SendBatch) -> None:
        for index in range(first, batches * len(senders), len(senders)):
            due_s = began_s + index * gap_s
            await _pause(due_s - time.perf_counter())
            await send()
            found.latencies_s.append(time.perf_counter() - due_s)

    async with asyncio.TaskGroup() as tasks:
        for first, send in enumerate(senders):
            tasks.create_task(run(first, send))
    found.seconds = time.perf_counter() - began_s
    found.batches = len(found.latencies_s)
    return found


async def _pause(wait_s: float) -> None:
    if wait_s > 0:
        await asyncio.sleep(wait_s)  # noqa: TID251 - pacing an open loop


# --- the service ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Stream:
    """One Append stream with its prepared batches."""

    call: Any
    requests: list[kvstore_pb2.AppendRequest]
    sent: int = 0

    async def send(self) -> None:
        """The next batch, acked."""
        await self.call.write(self.requests[self.sent])
        self.sent += 1
        answer = await self.call.read()
        for outcome in answer.outcomes:
            assert not outcome.HasField("error"), outcome.error


def _requests(worker: FakeWorker, logs: list[FakeLog], tokens: int) -> list[Any]:
    """Batches of one token for each log. The store records a slot's CRC; it does not compute it."""
    requests = []
    for step in range(tokens):
        request = kvstore_pb2.AppendRequest(batch_id=step + 1)
        if step == 0:
            request.worker_id, request.capability = worker.worker_id, worker_capability()
        for log in logs:
            position = len(log.tokens) + step
            log.table.require(position)
            granted, slot = log.table.slot(position - 1)
            entry = request.entries.add(
                log_id=log.log_id,
                generation=log.generation,
                position=position,
                token_id=7,
                page=granted.page,
                page_generation=granted.page_generation,
                slot_crc32c=step,
            )
            if slot == BLOCK - 1:
                entry.page_crc32c = step
        requests.append(request)
    return requests


async def _stream(site: Site, index: int, level: AckLevel, tokens: int) -> Stream:
    """A worker of its own with 32 sealed logs that have the pages they will need."""
    worker = await site.attach(f"w{index}")
    logs = []
    for log_index in range(BATCH):
        prompt = [index + 1, log_index + 1, *([3] * (PROMPT - 2))]
        log = await site.open(
            worker,
            prompt,
            output_pages=tokens // BLOCK + 3,
            cache_mode=common_pb2.CACHE_MODE_OFF,
            ack_level=level.value,
        )
        await worker.prefill(log)
        logs.append(log)
    call = site.stub.Append()
    return Stream(call=call, requests=_requests(worker, logs, tokens))


async def _served(store: Any, level: AckLevel, batches: int) -> tuple[Samples, Samples]:
    """Closed loop, then open loop at the goal's rate, on the same streams."""
    paced = max(2, RATES[level] * batches // 20_000)
    async with connected(store) as site:
        streams = [
            await _stream(site, index, level, batches + paced + 1) for index in range(STREAMS)
        ]
        senders = [stream.send for stream in streams]
        for send in senders:
            await send()
        closed = await closed_loop(senders, batches)
        opened = await open_loop(senders, paced, RATES[level])
        for stream in streams:
            await stream.call.done_writing()
    return closed, opened


def service_rows(batches: int) -> dict[str, float]:
    """The kvstore process, through gRPC."""
    values: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="baton-log-") as folder:
        directory = Path(folder)
        model = tiny_model(directory / "model")
        for level, name in _NAMES.items():
            place = directory / name
            place.mkdir()
            store = StoreProcess(model=model, directory=place, arena_bytes=ARENA_BYTES)
            try:
                store.start()
                closed, opened = asyncio.run(_served(store, level, batches))
            finally:
                store.stop()
                shutil.rmtree(store.arena_dir, ignore_errors=True)
            values |= _row(f"append_{name}", closed)
            values[f"append_{name}_p99_ms_at_{RATES[level]}"] = opened.p99_ms
            values[f"append_{name}_per_s_at_{RATES[level]}"] = opened.appends_per_s
    return values


def _row(name: str, samples: Samples) -> dict[str, float]:
    return {f"{name}_per_s": samples.appends_per_s, f"{name}_p99_ms": samples.p99_ms}


# --- the writer alone, and the disk alone ---------------------------------------------------------


def _payload(position: int) -> bytes:
    ref = PageRef(arena_id=bytes(16), page=1, page_generation=1, crc=position)
    return Append(token_id=7, slot_ref=ref, slot=position % BLOCK).encode()


async def _written(directory: Path, level: AckLevel, batches: int) -> Samples:
    segments = SegmentWriter(directory, store_id=bytes(16), first_sequence=1)
    with ThreadPoolExecutor(1) as executor:
        writer = LogWriter(segments, executor, next_lsn=1)
        payload = _payload(5)

        def sender() -> SendBatch:
            logs = [secrets.token_bytes(16) for _ in range(BATCH)]
            count = iter(range(1 << 30))

            async def send() -> None:
                position = next(count)
                for log_id in logs:
                    address = RecordAddress(log_id=log_id, generation=1, position=position)
                    writer.submit(RecordType.APPEND, payload, address)
                await writer.acked(level)

            return send

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(writer.run())
            found = await closed_loop([sender() for _ in range(STREAMS)], batches)
            writer.end()
        await writer.close()
    return found


def writer_rows(directory: Path, batches: int) -> dict[str, float]:
    """The log writer in this process, four tasks."""
    values: dict[str, float] = {}
    for level, name in _NAMES.items():
        place = directory / f"writer-{name}"
        place.mkdir()
        values |= _row(f"writer_{name}", asyncio.run(_written(place, level, batches)))
        shutil.rmtree(place)
    return values


def disk_rows(directory: Path, batches: int) -> dict[str, float]:
    """One thread, a preallocated file, the bytes of one batch and its FLUSH at a time."""
    data = secrets.token_bytes(RECORD_BYTES * (BATCH + 1))
    values: dict[str, float] = {}
    for level, name in _NAMES.items():
        path = directory / f"raw-{name}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, len(data) * batches)
            os.fsync(descriptor)
            found = Samples(batches=batches)
            began_s = time.perf_counter()
            for index in range(batches):
                start_s = time.perf_counter()
                os.pwrite(descriptor, data, index * len(data))
                if level is AckLevel.DISK:
                    os.fdatasync(descriptor)
                found.latencies_s.append(time.perf_counter() - start_s)
            found.seconds = time.perf_counter() - began_s
        finally:
            os.close(descriptor)
            path.unlink()
        values |= _row(f"raw_{name}", found)
    return values


# --- cost per log ---------------------------------------------------------------------------------


def _cores_with(count: int, writer: LogWriter, tokens: int) -> list[WorkerModel]:
    """That many sealed logs in one store's cores, which has pages for so many tokens."""
    pages = 4 * count + tokens // 4
    store = build_store(pages, sink=writer)  # type: ignore[arg-type] # any record sink
    workers = []
    for index in range(count):
        worker = open_log(store, [index & 0xFF, index >> 8], is_cacheable=False)
        worker.prefill(token=5)
        workers.append(worker)
    return workers


async def _cost_with(directory: Path, count: int, tokens: int) -> float:
    """Microseconds an append costs with `count` logs alive: cores, record, group commit, ack."""
    segments = SegmentWriter(directory, store_id=bytes(16), first_sequence=1)
    with ThreadPoolExecutor(1) as executor:
        writer = LogWriter(segments, executor, next_lsn=1)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(writer.run())
            workers = _cores_with(count, writer, tokens)
            await writer.acked(AckLevel.OS)
            began_s = time.perf_counter()
            for start in range(0, tokens, BATCH):
                for index in range(start, start + BATCH):
                    worker = workers[index * 7919 % count]
                    worker.append(index & 0xFF)
                await writer.acked(AckLevel.OS)
            took_s = time.perf_counter() - began_s
            writer.end()
        await writer.close()
    return took_s / tokens * 1e6


def cost_rows(directory: Path, tokens: int, counts: Sequence[int]) -> dict[str, float]:
    """One append with 10 to 10,000 logs alive."""
    values: dict[str, float] = {}
    for count in counts:
        place = directory / f"logs-{count}"
        place.mkdir()
        cost_us = asyncio.run(_cost_with(place, count, tokens))
        values[f"append_us_at_{count}_logs"] = cost_us
        shutil.rmtree(place)
    return values


# --- the part -------------------------------------------------------------------------------------


def measure(quick: bool) -> dict[str, float]:
    """All rows: metric name -> value."""
    batches = 60 if quick else 600
    counts = LOG_COUNTS[:3] if quick else LOG_COUNTS
    values = service_rows(batches)
    with tempfile.TemporaryDirectory(prefix="baton-log-") as folder:
        directory = Path(folder)
        values |= writer_rows(directory, 4 * batches)
        values |= disk_rows(directory, 4 * batches)
        values |= cost_rows(directory, 640 if quick else 6_400, counts)
    return values


def table(values: dict[str, float]) -> str:
    """For people."""
    lines = [
        f"appends in batches of {BATCH}, {STREAMS} streams; p99 of a batch's ack",
        f"{'':34}{'os /s':>10}{'p99 ms':>9}{'disk /s':>10}{'p99 ms':>9}",
    ]
    for name, title in (
        ("append", "kvstore over gRPC"),
        ("writer", "the log writer alone"),
        ("raw", "bare pwrite, pwrite + fdatasync"),
    ):
        row = f"{title:34}"
        for level in _NAMES.values():
            row += (
                f"{values[f'{name}_{level}_per_s']:10,.0f}{values[f'{name}_{level}_p99_ms']:9.2f}"
            )
        lines.append(row)
    paced = f"{'kvstore at the goals: 20,000, 5,000':34}"
    for rated, rate in RATES.items():
        ack = _NAMES[rated]
        paced += f"{values[f'append_{ack}_per_s_at_{rate}']:10,.0f}"
        paced += f"{values[f'append_{ack}_p99_ms_at_{rate}']:9.2f}"
    lines += [paced, "", "one append with so many logs alive (cores, record, group commit, ack)"]
    for count in LOG_COUNTS:
        if f"append_us_at_{count}_logs" in values:
            lines.append(f"{count:>10,} logs{values[f'append_us_at_{count}_logs']:10.1f} us")
    return "\n".join(lines)

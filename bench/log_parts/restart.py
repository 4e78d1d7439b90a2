"""How fast does a killed kvstore come back, and how fast is the log read?

`replay_records_per_s`: appended tokens a second, from segment files to logs with their page tables,
on one core, checksums and chain included. The limit beside it reads the same files and computes one
CRC-32C over their bytes. `restart_ready_s`: from the start of the kvstore process until its health
says SERVING, over the log and the arena that kill -9 left, with 1,000 logs of 1,000 tokens each;
beside it the same start with an empty log.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np

from baton.api.kvstore.v1 import kvstore_pb2
from baton.kv.crc import crc32c
from bench.log_parts.generated import TENANT, Shape, generate, log_ids
from services.kvstore.log import native
from services.kvstore.log.reader import read_directory
from services.kvstore.log.recovery import recover
from services.kvstore.log.segments import segment_paths
from tests.integration.kvstore.harness import (
    Model,
    StoreProcess,
    capability,
    connected,
    tiny_model,
)

FULL: Final = Shape(logs=1000, tokens=1000)
QUICK: Final = Shape(logs=200, tokens=200)
REPEATS: Final = 3
ARENA_ID_AT: Final = 8
ARENA_ID_BYTES: Final = 16


def measure(quick: bool) -> dict[str, float]:
    """Figures by name; the kvstore is a real process."""
    shape = QUICK if quick else FULL
    base = Path(tempfile.mkdtemp(prefix="baton-bench-"))
    try:
        repeats = 1 if quick else REPEATS
        return _replay(base / "replay", shape, repeats) | _restart(base, shape, repeats)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _replay(directory: Path, shape: Shape, repeats: int) -> dict[str, float]:
    directory.mkdir()
    arena_id = b"a" * ARENA_ID_BYTES
    files = generate(directory, shape, arena_id=arena_id)
    limits_s, reads_s = [], []
    for _ in range(repeats):
        began_s = time.perf_counter()
        for path in segment_paths(directory):
            crc32c(np.fromfile(path, dtype=np.uint8))
        limits_s.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        recovered = recover(read_directory(directory), arena_id)
        reads_s.append(time.perf_counter() - began_s)
        assert len(recovered.logs) == shape.logs
        assert all(log.position == shape.tokens for log in recovered.logs.values())
        assert all(log.committed == shape.tokens - 1 for log in recovered.logs.values())
    read_s = statistics.median(reads_s)
    return {
        "replay_records_per_s": shape.appends / read_s,
        "replay_mb_per_s": files.total_bytes / read_s / 1e6,
        "replay_limit_records_per_s": shape.appends / statistics.median(limits_s),
        "replay_is_native": float(native.is_native()),
    }


def _restart(base: Path, shape: Shape, repeats: int) -> dict[str, float]:
    model = tiny_model(base / "model")
    directory = base / "store"
    directory.mkdir()
    pages = shape.logs * shape.pages_of_log
    arena_bytes = (pages + 64) * model.geometry.slot_bytes
    store = StoreProcess(
        model=model,
        directory=directory,
        arena_bytes=arena_bytes,
    )
    try:
        store.start()
        store.kill()
        empty_s = [_start(store) for _ in range(repeats)]
        _fill(store, model, shape)
        full_s = [_start(store) for _ in range(repeats)]
        store.start()
        asyncio.run(_check(store, shape))
        store.kill()
    finally:
        if store.process is not None and store.process.poll() is None:
            store.kill()
        shutil.rmtree(store.arena_dir, ignore_errors=True)
    return {
        "restart_ready_s": statistics.median(full_s),
        "restart_ready_max_s": max(full_s),
        "restart_empty_s": statistics.median(empty_s),
    }


def _start(store: StoreProcess) -> float:
    """Seconds from the process's start until it serves; then it is killed again."""
    began_s = time.perf_counter()
    store.start()
    took_s = time.perf_counter() - began_s
    store.kill()
    return took_s


async def _check(store: StoreProcess, shape: Shape) -> None:
    """The last log is there, with its tokens and its KV."""
    async with connected(store) as site:
        last = log_ids(shape)[-1]
        head = await site.stub.DescribeLog(
            kvstore_pb2.DescribeLogRequest(log_id=last, capability=capability(last, tenant=TENANT))
        )
        assert head.head.position == shape.tokens, head
        assert head.head.committed_position == shape.tokens - 1, head


def _fill(store: StoreProcess, model: Model, shape: Shape) -> None:
    """Puts the logs of a busy store in the place of the killed one's, over the same arena."""
    (arena,) = store.arena_dir.glob("*.kv")
    header = arena.open("rb").read(ARENA_ID_AT + ARENA_ID_BYTES)
    directory = store.directory / "log"
    for path in segment_paths(directory):
        path.unlink()
    generate(
        directory,
        shape,
        arena_id=header[ARENA_ID_AT:],
        kv_digest=model.label.kv_digest(),
        tokenizer_hash=model.label.tokenizer,
    )


def table(values: dict[str, float]) -> str:
    """The figures for people."""
    return "\n".join(
        [
            "Reading the log back",
            f"  replay        {values['replay_records_per_s']:12,.0f} appended tokens/s "
            f"({values['replay_mb_per_s']:,.0f} MB/s, "
            f"{'native' if values['replay_is_native'] else 'Python'} scan)",
            f"  the limit     {values['replay_limit_records_per_s']:12,.0f} tokens/s: the same "
            "files read, one CRC over them",
            f"  ready         {values['restart_ready_s']:12.2f} s after kill -9 "
            f"(at most {values['restart_ready_max_s']:.2f} s)",
            f"  empty log     {values['restart_empty_s']:12.2f} s",
        ]
    )

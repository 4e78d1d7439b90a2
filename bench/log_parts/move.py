"""How long does a log of 1,000 tokens take from one kvstore to another on this machine?

Two kvstore processes on loopback, the bundled model's KV size (23,040 bytes a token, 23 MB in all).
Measured at the caller of AdoptLog: `at once` fetches everything after the move began, `followed`
lets the coming home copy while the prompt is committed, as requests do. Beside them, in the same
run, what bounds them: the same pages over the same stream by a reader that only counts, and a bare
memory copy of as many bytes.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from baton.api.kvstore.v1 import kvstore_pb2
from baton.engine.config import read_config
from baton.engine.label import build_label, torch_numeric_class
from baton.ids import new_request_id
from baton.kv.layout import KvDtype
from baton.testing.tiny_models import TinyModel, write_directory
from baton.text.bundle import TextBundle
from tests.integration.kvstore.harness import (
    BLOCK,
    FakeLog,
    FakeWorker,
    Model,
    Site,
    StoreProcess,
    connected,
)

TOKENS: Final = 1000
CHUNK_TOKENS: Final = 256
ARENA_BYTES: Final = 128 << 20
# 15 layers x (K, V) x 3 heads x 64 x 4 bytes: what the bundled model has per token in bf16.
SHAPE: Final = TinyModel(
    layers=15, hidden=192, heads=3, kv_heads=3, head_dim=64, intermediate=192, max_context=2048
)
RUNS: Final = 12
RUNS_QUICK: Final = 4
MIB: Final = 1 << 20


def measure(quick: bool) -> dict[str, float]:
    """`move_ms` (at once) and what stands beside it; medians of a few moves."""
    runs = RUNS_QUICK if quick else RUNS
    with tempfile.TemporaryDirectory(prefix="bench-move-") as folder, ExitStack() as stack:
        model = _model(Path(folder) / "model")
        old, new = (
            stack.enter_context(_store(model, Path(folder) / name, name)) for name in ("n0", "n1")
        )
        values = asyncio.run(_moves(old, new, runs))
    values["move_memcpy_ms"] = _memcpy_ms(round(values["move_bytes"]))
    values["move_over_memcpy"] = values["move_ms"] / values["move_memcpy_ms"]
    values["move_over_stream"] = values["move_ms"] / values["move_stream_ms"]
    return values


def table(values: dict[str, float]) -> str:
    """The figures for people."""
    size = values["move_bytes"]
    lines = [f"Moving a log of {TOKENS} tokens ({size / MIB:.1f} MiB of KV), loopback, median"]
    for name, label in (
        ("move_ms", "AdoptLog, at once"),
        ("move_followed_ms", "AdoptLog, followed"),
        ("move_stream_ms", "pages over the stream, only counted"),
        ("move_memcpy_ms", "memory copy"),
    ):
        rate = size / values[name] / MIB if name != "move_followed_ms" else 0.0
        speed = f"{rate * 1000:9.0f} MiB/s" if rate else ""
        lines.append(f"  {label:38}{values[name]:9.1f} ms {speed}")
    lines.append(
        f"  hidden_transfer_share {values['hidden_transfer_share']:.3f}; of the move at once: "
        f"transfer {values['move_transfer_ms']:.1f} ms, verify {values['move_verify_ms']:.1f} ms"
    )
    lines.append(
        f"  {values['move_over_stream']:.2f} x the stream, "
        f"{values['move_over_memcpy']:.1f} x the memory copy"
    )
    return "\n".join(lines)


def _model(path: Path) -> Model:
    write_directory(path, SHAPE)
    config = read_config(path)
    geometry = config.kv_geometry(BLOCK, KvDtype.F32)
    label = build_label(
        path,
        config,
        TextBundle.load(path).tokenizer_hash,
        geometry,
        torch_numeric_class(config, KvDtype.F32),
    )
    return Model(path=path, label=label, geometry=geometry)


@contextmanager
def _store(model: Model, directory: Path, node_id: str) -> Iterator[StoreProcess]:
    directory.mkdir()
    store = StoreProcess(model=model, directory=directory, arena_bytes=ARENA_BYTES, node_id=node_id)
    try:
        store.start()
        yield store
    finally:
        if store.process is not None and store.process.poll() is None:
            store.stop()
        shutil.rmtree(store.arena_dir, ignore_errors=True)


async def _moves(old: StoreProcess, new: StoreProcess, runs: int) -> dict[str, float]:
    at_once: list[kvstore_pb2.AdoptLogResponse] = []
    move_s: list[float] = []
    followed_s: list[float] = []
    stream_s: list[float] = []
    shares: list[float] = []
    async with connected(old) as a, connected(new) as b:
        writer = await a.attach()
        for run in range(runs):
            for is_followed in (False, True):
                prompt = [4 + (run * 13 + index * 7) % 200 for index in range(TOKENS)]
                log = await a.open(writer, prompt, cache_mode=2)
                if is_followed:
                    await b.stub.ExpectLog(_expect(old, log))
                await _prefill(writer, log, b if is_followed else None)
                if not is_followed:
                    stream_s.append(await _streamed(a, log))
                began_s = time.perf_counter()
                answer = await b.stub.AdoptLog(_adopt(old, log))
                (followed_s if is_followed else move_s).append(time.perf_counter() - began_s)
                if is_followed:
                    shares.append(answer.hidden_transfer_share)
                else:
                    at_once.append(answer)
                assert answer.committed_position == TOKENS
                await b.close(log, drop=True)
                await a.until("the old home has dropped it", pages_live=0)
    return {
        "move_ms": statistics.median(move_s) * 1e3,
        "move_followed_ms": statistics.median(followed_s) * 1e3,
        "move_stream_ms": statistics.median(stream_s) * 1e3,
        "move_transfer_ms": _median_ms([one.transfer.ToMicroseconds() for one in at_once]),
        "move_verify_ms": _median_ms([one.verify.ToMicroseconds() for one in at_once]),
        "move_bytes": float(at_once[0].transfer_bytes),
        "hidden_transfer_share": statistics.median(shares),
    }


def _median_ms(microseconds: list[int]) -> float:
    return statistics.median(microseconds) / 1e3


async def _prefill(writer: FakeWorker, log: FakeLog, follower: Site | None) -> None:
    """The prompt in chunks; the follower has each before the next: prefill is slower than it."""
    while log.committed < log.prompt_tokens:
        await writer.commit(log, min(log.committed + CHUNK_TOKENS, log.prompt_tokens))
        if follower is not None and log.committed < log.prompt_tokens:
            await follower.until("the replica", pages_granted=log.committed // BLOCK)
    await writer.seal(log, 5)


async def _streamed(site: Site, log: FakeLog) -> float:
    """Seconds of the log's pages over the stream, read and thrown away."""
    request = kvstore_pb2.FetchPagesRequest(
        log_id=log.log_id,
        capability=log.capability,
        first_index=0,
        page_count=-(-TOKENS // BLOCK),
    )
    received, began_s = 0, time.perf_counter()
    async for response in site.stub.FetchPages(request):
        received += len(response.chunk.data)
    assert received >= TOKENS * site.model.geometry.token_bytes
    return time.perf_counter() - began_s


def _expect(old: StoreProcess, log: FakeLog) -> kvstore_pb2.ExpectLogRequest:
    return kvstore_pb2.ExpectLogRequest(
        log_id=log.log_id,
        from_kvstore_address=old.address,
        capability=log.capability,
        request_id=new_request_id(),
    )


def _adopt(old: StoreProcess, log: FakeLog) -> kvstore_pb2.AdoptLogRequest:
    return kvstore_pb2.AdoptLogRequest(
        log_id=log.log_id,
        generation=log.generation,
        from_kvstore_address=old.address,
        capability=log.capability,
        request_id=new_request_id(),
    )


def _memcpy_ms(size: int) -> float:
    """A copy of as many bytes, both sides touched before; the best of a few."""
    source, target = (np.ones(size, dtype=np.uint8) for _ in range(2))
    best_s = float("inf")
    for _ in range(8):
        began_s = time.perf_counter()
        target[:] = source
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s * 1e3

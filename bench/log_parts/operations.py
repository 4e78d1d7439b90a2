"""What forks, truncations and take-overs cost: in the store's cores at any length, over gRPC, and
with 10 to 10,000 logs.

The cores run as in the service, records encoded and handed to a sink that keeps none; medians. The
lengths share their pages by design (see docs/formats.md, 7.5), so the row of 262,144 tokens says
whether a fork really costs the same at any length. Over gRPC the server is another process, and a
call's time is a round trip with its record written; a take also compares the pages it adopts.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.engine.config import read_config
from baton.engine.label import build_label, torch_numeric_class
from baton.ids import new_log_id, new_request_id
from baton.kv.blocks import Scope, scope_secret
from baton.kv.layout import KvDtype
from baton.kv.numeric import TORCH_F32
from baton.sampling_parameters import SamplingParameters
from baton.testing.tiny_models import write_directory
from baton.text.bundle import TextBundle
from services.kvstore.core import Core, Limits
from services.kvstore.importing import Importer, ImportOrder
from services.kvstore.lease import LeaseTable
from services.kvstore.log.format import RecordAddress, RecordType
from services.kvstore.log.journal import LogJournal
from services.kvstore.log.state import Parent
from services.kvstore.pages import PagePool
from services.kvstore.state import AckLevel, LogState, Writer
from services.kvstore.store import ForkOrder, Now, OpenOrder, Store
from tests.integration.kvstore.harness import (
    BLOCK,
    Model,
    Site,
    StoreProcess,
    capability,
    connected,
)

LENGTHS: Final = (128, 1_024, 8_192, 262_144)
CALL_LENGTHS: Final = (128, 1_024, 8_192)
LOG_COUNTS: Final = (10, 100, 1_000, 10_000)
SHORT: Final = 64
NOW: Final = Now(monotonic_s=100.0, wall_s=1e6)
SCOPE: Final = Scope(tenant="acme")
WRITER: Final = Writer(worker_id="decode-0", slot=0, incarnation=1)
OPERATIONS: Final = ("fork", "take", "truncate", "open")


class _Sink:
    """Takes encoded records and keeps none."""

    def submit(self, kind: RecordType, payload: bytes, address: RecordAddress) -> None:
        """One record."""


def build(pages: int) -> Store:
    """A store's cores over that many pages of 16 slots."""
    limits = Limits(
        block_tokens=BLOCK, kv_digest=bytes(16), tokenizer_hash=bytes(8), logs_max=1 << 20
    )
    core = Core(
        limits=limits,
        pool=PagePool(pages),
        leases=LeaseTable(10.0),
        journal=LogJournal(_Sink(), limits, bytes(16), 10.0),
    )
    return Store(core, lambda scope: scope_secret(bytes(32), 1, scope))


def kept_log(store: Store, number: int, tokens: int) -> LogState:
    """A sealed log that nobody writes, as if its pages had come in with a blob."""
    importer, log_id = Importer(store), _log_id(number)
    rows = importer.reserve(log_id, tokens, SCOPE.tenant)
    for row in rows:
        if row.tokens == BLOCK:
            row.crc = 7
        else:
            row.slot_crcs = [7] * row.tokens
    order = ImportOrder(
        log_id=log_id,
        request_id="r",
        body_hash=bytes(32),
        tenant="acme",
        scope=SCOPE,
        label_digest=bytes(16),
        numeric_class=TORCH_F32.text,
        numeric_class_id=TORCH_F32.id,
        ttl_s=None,
    )
    return importer.adopt(order, rows, array("I", [number & 0xFFFF]) * tokens, NOW)


def _log_id(number: int) -> bytes:
    return number.to_bytes(16, "little")


def _median_us(call: Callable[[int], object], runs: int) -> float:
    times = []
    for run in range(runs):
        began_s = time.perf_counter()
        call(run)
        times.append(time.perf_counter() - began_s)
    return statistics.median(times) * 1e6


# --- in the cores ---------------------------------------------------------------------------------


def core_rows(runs: int) -> dict[str, float]:
    """Each operation at each length: `fork_us_at_8192` and so on."""
    values: dict[str, float] = {}
    for length in LENGTHS:
        for name, found in _core_costs(length, runs).items():
            values[f"{name}_us_at_{length}"] = found
    return values


def _core_costs(length: int, runs: int) -> dict[str, float]:
    """Forks inside a block, each taken, cut in half; and opens with the log as parent."""
    store = build(length // BLOCK + 1 + 4 * (runs + 1))
    source = kept_log(store, 1, length)
    position = length - 5
    parent = Parent(log_id=source.log_id, generation=0, position=position)
    prompt = source.tokens[:position] + array("I", [9] * 4)

    def fork(run: int) -> None:
        order = ForkOrder(log_id=_log_id(100 + run), request_id="f", scope=SCOPE, sampling=None)
        store.fork(parent, order, None, NOW)

    def take(run: int) -> None:
        store.home.take(_log_id(100 + run), 1, WRITER, TORCH_F32, pages=1, now_s=NOW.monotonic_s)

    def truncate(run: int) -> None:
        store.truncate(_log_id(100 + run), 2, length // 2 + 3, NOW)

    def open_again(run: int) -> None:
        order = OpenOrder(
            request_id="o",
            body_hash=bytes(32),
            log_id=_log_id(10_000 + run),
            tenant="acme",
            scope=SCOPE,
            tokens=prompt,
            sampling=SamplingParameters(),
            numeric_class=TORCH_F32,
            label_digest=bytes(16),
            base=parent,
            is_cacheable=True,
            output_pages=1,
            ttl_s=None,
            drop_at_end=False,
            ack_level=AckLevel.OS,
        )
        store.open(order, WRITER, NOW)

    calls = dict(zip(OPERATIONS, (fork, take, truncate, open_again), strict=True))
    return {name: _median_us(call, runs) for name, call in calls.items()}


# --- with many logs -------------------------------------------------------------------------------


def crowd_rows(runs: int) -> dict[str, float]:
    """What one operation, one sweep and one eviction cost with so many logs alive."""
    values: dict[str, float] = {}
    for count in LOG_COUNTS:
        store = build((count + 2 * runs) * (SHORT // BLOCK + 2))
        for number in range(count):
            kept_log(store, 1_000_000 + number, SHORT)
        parent = Parent(log_id=_log_id(1_000_000), generation=0, position=SHORT - 3)

        def fork(run: int, store: Store = store, parent: Parent = parent) -> None:
            order = ForkOrder(log_id=_log_id(run), request_id="f", scope=SCOPE, sampling=None)
            store.fork(parent, order, None, NOW)

        def sweep(run: int, store: Store = store) -> None:
            store.keeper.expire_leases(NOW.monotonic_s + run, NOW.wall_s)
            store.keeper.expire_logs(NOW.wall_s)

        def evict(run: int, store: Store = store) -> None:
            store.keeper.make_room(store.core.pool.free_count + 1)

        values[f"fork_us_with_{count}_logs"] = _median_us(fork, runs)
        values[f"sweep_us_with_{count}_logs"] = _median_us(sweep, runs)
        values[f"evict_us_with_{count}_logs"] = _median_us(evict, min(runs, count))
    return values


# --- over gRPC ------------------------------------------------------------------------------------


def call_rows(runs: int) -> dict[str, float]:
    """Round trips to a kvstore process."""
    with tempfile.TemporaryDirectory(prefix="baton-log-") as folder:
        directory = Path(folder)
        store = StoreProcess(
            model=_long_model(directory / "model"), directory=directory, arena_bytes=256 << 20
        )
        try:
            store.start()
            return asyncio.run(_calls(store, runs))
        finally:
            store.stop()
            shutil.rmtree(store.arena_dir, ignore_errors=True)


def _long_model(path: Path) -> Model:
    """The tiny model with a context of 16,384."""
    write_directory(path, extra_config={"max_position_embeddings": 16_384})
    config = read_config(path)
    geometry = config.kv_geometry(BLOCK, KvDtype.F32)
    numeric_class = torch_numeric_class(config, KvDtype.F32)
    tokenizer_hash = TextBundle.load(path).tokenizer_hash
    label = build_label(path, config, tokenizer_hash, geometry, numeric_class)
    return Model(path=path, label=label, geometry=geometry)


async def _calls(store: StoreProcess, runs: int) -> dict[str, float]:
    values: dict[str, float] = {}
    async with connected(store) as site:
        worker = await site.attach("bench")
        for length in CALL_LENGTHS:
            prompt = [3 + length % 7, *([5] * (length - 1))]
            log = await site.open(worker, prompt, cache_mode=common_pb2.CACHE_MODE_OFF)
            await worker.commit(log, length)
            await worker.seal(log, 5, "stop")
            costs = await _call_costs(site, log.log_id, length, runs)
            values |= {f"{name}_grpc_us_at_{length}": cost for name, cost in costs.items()}
    return values


async def _call_costs(site: Site, source: bytes, length: int, runs: int) -> dict[str, float]:
    ids = [new_log_id() for _ in range(runs)]
    texts = [capability(log_id) for log_id in ids]

    def fork(run: int) -> Awaitable[Any]:
        parent = common_pb2.LogPosition(log_id=source, position=length - 5)
        return _awaited(
            site.stub.Fork(
                kvstore_pb2.ForkRequest(
                    parent=parent,
                    log_id=ids[run],
                    capability=texts[run],
                    request_id=new_request_id(),
                )
            )
        )

    def take(run: int) -> Awaitable[Any]:
        return _awaited(
            site.stub.Take(
                kvstore_pb2.TakeRequest(
                    log_id=ids[run],
                    generation=1,
                    worker_id="bench",
                    capability=texts[run],
                    pages=1,
                    request_id=new_request_id(),
                )
            )
        )

    def truncate(run: int) -> Awaitable[Any]:
        return _awaited(
            site.stub.Truncate(
                kvstore_pb2.TruncateRequest(
                    log_id=ids[run],
                    generation=2,
                    position=length // 2 + 3,
                    capability=texts[run],
                    request_id=new_request_id(),
                )
            )
        )

    costs: dict[str, float] = {}
    for name, call in zip(OPERATIONS, (fork, take, truncate), strict=False):
        times = []
        for run in range(runs):
            began_s = time.perf_counter()
            await call(run)
            times.append(time.perf_counter() - began_s)
        costs[name] = statistics.median(times) * 1e6
    return costs


async def _awaited(call: Awaitable[Any]) -> Any:
    return await call


# --- the part -------------------------------------------------------------------------------------


def measure(quick: bool) -> dict[str, float]:
    """All figures; `fork_us`, `truncate_us`, `take_us` are the slowest length's in the cores."""
    values = core_rows(5 if quick else 31)
    slowest = {
        f"{name}_us": max(values[f"{name}_us_at_{length}"] for length in LENGTHS)
        for name in OPERATIONS
    }
    values |= crowd_rows(5 if quick else 31)
    values |= call_rows(5 if quick else 31)
    return slowest | values


def table(values: dict[str, float]) -> str:
    """Three tables, in microseconds."""
    lines = [_line("in the cores, us", [f"{length:,}" for length in LENGTHS])]
    for name in OPERATIONS:
        found = [values[f"{name}_us_at_{length}"] for length in LENGTHS]
        lines.append(_line(name if name != "open" else "open with parent", found))
    lines += ["", _line("over gRPC, us", [f"{length:,}" for length in CALL_LENGTHS])]
    for name in OPERATIONS[:3]:
        lines.append(
            _line(name, [values[f"{name}_grpc_us_at_{length}"] for length in CALL_LENGTHS])
        )
    lines += ["", _line("with so many logs, us", [f"{count:,}" for count in LOG_COUNTS])]
    for name in ("fork", "sweep", "evict"):
        lines.append(_line(name, [values[f"{name}_us_with_{count}_logs"] for count in LOG_COUNTS]))
    return "\n".join(lines)


def _line(title: str, cells: list[str] | list[float]) -> str:
    texts = [cell if isinstance(cell, str) else f"{cell:,.0f}" for cell in cells]
    return f"{title:24}" + "".join(f"{text:>12}" for text in texts)

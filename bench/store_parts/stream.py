"""Over gRPC on loopback: another process puts and gets blobs by PutBlob and GetBlob.

One stream at a time; 128 MiB is more than a blob may have, so it is two, one after the other. What
is got lands in a buffer touched before, every byte under a CRC on both sides; put includes the CRCs
of the pages that the descriptor lists. CPU is what the client's and the store's process spent on a
gigabyte. Medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.client_blobs import BlobClient
from baton.ids import new_log_id
from baton.kv.blob import split_range
from baton.memory import keep_freed_memory
from baton.rpc.blocking import open_blocking_channel
from bench.store_parts.site import (
    Kv,
    gbps,
    header_of,
    kv_of,
    median,
    rounds,
    running_site,
    sizes,
)
from tests.integration.kvstore.harness import Model, StoreProcess, capability


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spent:
    """One transfer: wall time, and the CPU seconds of either process."""

    seconds: float
    client_s: float
    store_s: float


def measure(quick: bool) -> dict[str, float | None]:
    """See the module."""
    keep_freed_memory()
    values: dict[str, float | None] = {}
    with running_site() as (store, model), BlobClient(store.address) as client:
        for mebibytes, tokens in sizes(quick).items():
            kv = kv_of(model, mebibytes, tokens)
            puts, gets = _rounds(client, store, model, kv, rounds(mebibytes, quick))
            values |= _row("put", kv, puts) | _row("get", kv, gets)
    largest = max(sizes(quick))
    return values | {
        f"{name}_stream_gbps": values[f"stream_{name}_gbps_{largest}"] for name in ("put", "get")
    }


def _rounds(
    client: BlobClient, store: StoreProcess, model: Model, kv: Kv, count: int
) -> tuple[list[_Spent], list[_Spent]]:
    puts, gets = [], []
    into = np.zeros(kv.payload.size + kv.token_ids.nbytes, dtype=np.uint8)
    ranges = split_range(model.geometry, 0, len(kv.token_ids))
    with open_blocking_channel(store.address) as channel:
        stub = kvstore_pb2_grpc.KVStoreServiceStub(channel)
        for _ in range(count):
            log_ids = [new_log_id() for _ in ranges]
            puts.append(_spent(store, partial(_put, client, model, kv, log_ids, ranges)))
            gets.append(_spent(store, partial(_get, client, log_ids, into)))
            for log_id in log_ids:
                stub.Close(
                    kvstore_pb2.CloseRequest(
                        log_id=log_id, capability=capability(log_id), drop=True
                    )
                )
    return puts, gets


def _put(
    client: BlobClient,
    model: Model,
    kv: Kv,
    log_ids: list[bytes],
    ranges: list[tuple[int, int]],
) -> None:
    """Each range as a log of its own: a blob that becomes a log begins at its position 0."""
    geometry = model.geometry
    for log_id, (first, end) in zip(log_ids, ranges, strict=True):
        header = header_of(model, log_id, 0, end - first)
        part = kv.payload[first * geometry.token_bytes : end * geometry.token_bytes]
        pages = [
            part[at : at + geometry.page_bytes] for at in range(0, part.size, geometry.page_bytes)
        ]
        client.put_blob(header, pages, kv.token_ids[first:end], capability=capability(log_id))


def _get(client: BlobClient, log_ids: list[bytes], into: np.ndarray) -> None:
    at = 0
    for log_id in log_ids:
        blob = client.get_blob(log_id, capability=capability(log_id), into=into[at:])
        at += blob.header.payload_bytes


def _spent(store: StoreProcess, work: Callable[[], None]) -> _Spent:
    assert store.process is not None
    pid = store.process.pid
    own_s, store_s, began_s = time.process_time(), _cpu_s(pid), time.perf_counter()
    work()
    seconds = time.perf_counter() - began_s
    return _Spent(
        seconds=seconds, client_s=time.process_time() - own_s, store_s=_cpu_s(pid) - store_s
    )


def _cpu_s(pid: int) -> float:
    """CPU seconds of another process so far, all threads; the kernel counts hundredths."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100.0


def _row(name: str, kv: Kv, spent: list[_Spent]) -> dict[str, float | None]:
    gigabytes = kv.size_bytes / 1e9
    at = f"stream_{name}_{{}}_{kv.mebibytes}"
    return {
        at.format("gbps"): gbps(kv.size_bytes, median([one.seconds for one in spent])),
        at.format("best_gbps"): gbps(kv.size_bytes, min(one.seconds for one in spent)),
        at.format("client_s_per_gb"): sum(one.client_s for one in spent) / len(spent) / gigabytes,
        at.format("store_s_per_gb"): sum(one.store_s for one in spent) / len(spent) / gigabytes,
    }


def table(values: dict[str, float | None]) -> str:
    """The figures for people."""
    lines = ["stream (gRPC)         GB/s    best   CPU s/GB: client   store"]
    for mebibytes in (1, 24, 128):
        for name in ("put", "get"):
            if f"stream_{name}_gbps_{mebibytes}" not in values:
                continue
            gbps_, best, client, store = (
                values[f"stream_{name}_{what}_{mebibytes}"] or 0.0
                for what in ("gbps", "best_gbps", "client_s_per_gb", "store_s_per_gb")
            )
            lines.append(
                f"{mebibytes:5} MiB {name}  {gbps_:13.2f} {best:7.2f} {client:18.2f} {store:7.2f}"
            )
    return "\n".join(lines)

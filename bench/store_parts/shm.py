"""Over shared memory: a process attached to the arena puts KV in place and gets it without a copy.

Put: Open, the copy into the granted pages with each page's CRC taken on the way, commit, seal,
close; over when the store has acked. Get: one call that pins the pages and lists them; the reader
then has views of the bytes. Verify: every page's CRC compared by the reader. memcpy is numpy's copy
of the same bytes into a buffer touched before, in the same rounds; copy+CRC is the put's own copy
into that buffer, without a store. Every put goes to pages that
were used and zeroed before; nothing is found in the cache. Medians.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from baton.api.kvstore.v1 import kvstore_pb2
from baton.arena.client import WorkerIdentity
from baton.arena.copying import copy_crc32c
from baton.client_shm import ShmClient
from baton.ids import new_incarnation, new_log_id
from bench.store_parts.site import (
    Kv,
    gbps,
    kv_of,
    median,
    rounds,
    running_site,
    sizes,
    timed,
)
from tests.integration.kvstore.harness import Model, StoreProcess, capability, worker_capability

STEPS = ("memcpy", "copy", "put", "get", "verify")


def measure(quick: bool) -> dict[str, float | None]:
    """See the module."""
    values: dict[str, float | None] = {}
    with (
        running_site() as (store, model),
        ShmClient.attach(store.address, identity(model)) as client,
    ):
        for mebibytes, tokens in sizes(quick).items():
            kv = kv_of(model, mebibytes, tokens)
            found = _rounds(client, store, kv, rounds(mebibytes, quick))
            values |= _row(kv, found)
    worst = max(value for name, value in values.items() if name.startswith("get_ms_") and value)
    largest = max(sizes(quick))
    headline = {
        "memcpy_gbps": values[f"memcpy_gbps_{largest}"],
        "copy_crc_gbps": values[f"copy_crc_gbps_{largest}"],
        "put_shm_gbps": values[f"put_gbps_{largest}"],
        "verify_gbps": values[f"verify_gbps_{largest}"],
        "get_shm_gbps": values[f"get_gbps_{largest}"],
        "get_shm_verified_gbps": values[f"get_verified_gbps_{largest}"],
        "get_shm_ms": worst,
    }
    return {f"shm_{name}": value for name, value in values.items()} | headline


def identity(model: Model) -> WorkerIdentity:
    """Who attaches."""
    return WorkerIdentity(
        worker_id="bench",
        incarnation=new_incarnation(),
        label=model.label,
        geometry=model.geometry,
        capability=worker_capability(),
        software_version="bench",
    )


def _rounds(client: ShmClient, store: StoreProcess, kv: Kv, count: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in STEPS}
    scratch = np.zeros_like(kv.payload)
    for _ in range(count):
        log_id = new_log_id()
        text = capability(log_id)
        put = partial(client.put_blob, log_id, kv.payload, kv.token_ids)
        found["memcpy"].append(timed(partial(np.copyto, scratch, kv.payload)))
        found["copy"].append(timed(partial(copy_crc32c, scratch, kv.payload)))
        found["put"].append(timed(partial(put, capability=text, is_shared=False)))
        began_s = time.perf_counter()
        mapped = client.get_blob(log_id, capability=text)
        found["get"].append(time.perf_counter() - began_s)
        found["verify"].append(timed(mapped.verify))
        assert mapped.close(), "let go while it was read"
        client.call("Close", kvstore_pb2.CloseRequest(log_id=log_id, capability=text, drop=True))
        _settle(client)
    return found


def _settle(client: ShmClient) -> None:
    """Until the dropped pages are zeroed: the next put is not to wait for them.

    A grant of pages is answered once they are ready, so a small log opened and dropped behind them
    tells.
    """
    log_id = new_log_id()
    text = capability(log_id)
    token_bytes = client.geometry.token_bytes
    client.put_blob(log_id, bytes(token_bytes), [7], capability=text, is_shared=False)
    client.call("Close", kvstore_pb2.CloseRequest(log_id=log_id, capability=text, drop=True))


def _row(kv: Kv, found: dict[str, list[float]]) -> dict[str, float | None]:
    size, at = kv.size_bytes, kv.mebibytes
    seconds = {name: median(times) for name, times in found.items()}
    return {
        f"memcpy_gbps_{at}": gbps(size, seconds["memcpy"]),
        f"copy_crc_gbps_{at}": gbps(size, seconds["copy"]),
        f"put_gbps_{at}": gbps(size, seconds["put"]),
        f"put_ms_{at}": seconds["put"] * 1e3,
        f"get_ms_{at}": seconds["get"] * 1e3,
        f"get_gbps_{at}": gbps(size, seconds["get"]),
        f"verify_gbps_{at}": gbps(size, seconds["verify"]),
        f"get_verified_gbps_{at}": gbps(size, seconds["get"] + seconds["verify"]),
    }


def table(values: dict[str, float | None]) -> str:
    """The figures for people."""
    lines = [
        "shared memory     memcpy GB/s   copy+CRC   put GB/s      ms   of memcpy    get ms   "
        "verify GB/s"
    ]
    for mebibytes in (1, 24, 128):
        if f"shm_put_gbps_{mebibytes}" not in values:
            continue

        def at(name: str, mebibytes: int = mebibytes) -> float:
            return values[f"shm_{name}_{mebibytes}"] or 0.0

        lines.append(
            f"{mebibytes:5} MiB {at('memcpy_gbps'):18.1f} {at('copy_crc_gbps'):10.1f} "
            f"{at('put_gbps'):10.2f} "
            f"{at('put_ms'):7.2f} {at('put_gbps') / at('memcpy_gbps'):11.2f} "
            f"{at('get_ms'):9.2f} {at('verify_gbps'):13.1f}"
        )
    return "\n".join(lines)

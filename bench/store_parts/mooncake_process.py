"""The processes of Mooncake's store, run by its own interpreter: nothing of Baton is imported.

node MASTER_PORT OWN_PORT            holds memory until its input ends; says `ready`
client MASTER_PORT OWN_PORT PLAN     PLAN: [[MiB, rounds], ...]; answers seconds as JSON
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

# In an environment of its own: type checkers do not see it.
from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

NODE_BYTES = 600 << 20
BUFFER_BYTES = 160 << 20


def connected(master_port: str, own_port: str, node_bytes: int) -> MooncakeDistributedStore:
    """A client of the master that offers so much memory."""
    store = MooncakeDistributedStore()
    status = store.setup(
        f"127.0.0.1:{own_port}",
        "P2PHANDSHAKE",
        node_bytes,
        BUFFER_BYTES,
        "tcp",
        "",
        f"127.0.0.1:{master_port}",
    )
    if status:
        raise SystemExit(f"setup: {status}")
    return store


def serve(master_port: str, own_port: str) -> None:
    """Until the input ends."""
    for _ in range(100):
        try:
            store = connected(master_port, own_port, NODE_BYTES)
            break
        except SystemExit:
            time.sleep(0.1)  # noqa: TID251 - the master tells nobody that it is up
    else:
        raise SystemExit("the master did not answer")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    store.close()


def measure(master_port: str, own_port: str, plan: list[tuple[int, int]]) -> None:
    """Puts and gets, each round under a key of its own, removed after it."""
    store = connected(master_port, own_port, 0)
    most = max(mebibytes for mebibytes, _ in plan) << 20
    source = np.random.default_rng(1).integers(0, 256, most, dtype=np.uint8)
    target = np.zeros(most, dtype=np.uint8)
    for buffer in (source, target):
        store.register_buffer(buffer.ctypes.data, buffer.nbytes)
    found: dict[int, dict[str, list[float]]] = {}
    for mebibytes, rounds in plan:
        size = mebibytes << 20
        times: dict[str, list[float]] = {"put": [], "get": []}
        for index in range(rounds):
            key = f"kv-{mebibytes}-{index}"
            began_s = time.perf_counter()
            status = store.put_from(key, source.ctypes.data, size)
            put_s = time.perf_counter()
            read = store.get_into(key, target.ctypes.data, size)
            get_s = time.perf_counter()
            if status or read != size or not np.array_equal(target[:size], source[:size]):
                raise SystemExit(f"put {status}, get {read} of {size}")
            times["put"].append(put_s - began_s)
            times["get"].append(get_s - put_s)
            target[:size] = 0
            store.remove(key, True)
        found[mebibytes] = times
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    sys.stdout.flush()
    store.close()


if __name__ == "__main__":
    if sys.argv[1] == "node":
        serve(sys.argv[2], sys.argv[3])
    else:
        measure(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))

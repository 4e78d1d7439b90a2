"""Redis on the same machine in the same run: a real redis-server over a unix socket, redis-py.

Nothing is persisted (`--save '' --appendonly no`). A range is stored as its users store KV: values
of 1 MiB under keys of their own. `put_pipelined`: all SETs in one pipeline; `put_plain`: one SET
after the other; the faster of the two is Redis's put. `get`: one GET after the other, faster than
MGET, whose answer must be there whole. Values of 4 to 64 MiB and TCP are slower. Medians; null
where redis-server is not installed.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.store_parts.site import gbps, median, rounds, sizes, timed

CHUNK_BYTES = 1 << 20
NAMES = ("put_pipelined", "put_plain", "get")
FIGURES = ("put", *NAMES)


def measure(quick: bool) -> dict[str, float | None]:
    """See the module."""
    try:
        import redis
    except ImportError:
        return _nothing()
    if shutil.which("redis-server") is None:
        return _nothing()
    values: dict[str, float | None] = {}
    with _server() as path:
        client = redis.Redis(unix_socket_path=path, socket_timeout=30.0)
        _until_up(client)
        for mebibytes in sizes(quick):
            values |= _row(client, mebibytes, rounds(mebibytes, quick))
        client.close()
    largest = max(sizes(quick))
    return values | {
        f"redis_{name}_gbps": values[f"redis_{name}_gbps_{largest}"] for name in FIGURES
    }


def _nothing() -> dict[str, float | None]:
    return {f"redis_{name}_gbps": None for name in FIGURES}


@contextmanager
def _server() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="baton-redis-") as folder:
        path = str(Path(folder) / "socket")
        command = ["redis-server", "--port", "0", "--unixsocket", path, "--save", ""]
        command += ["--appendonly", "no", "--dir", folder]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                yield path
            finally:
                process.terminate()


def _until_up(client: Any) -> None:
    import redis
    from redis.backoff import ConstantBackoff
    from redis.retry import Retry

    retry = Retry(ConstantBackoff(0.05), 200, supported_errors=(redis.ConnectionError, OSError))
    retry.call_with_retry(client.ping, lambda _error: None)


def _row(client: Any, mebibytes: int, count: int) -> dict[str, float | None]:
    size = mebibytes << 20
    content = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8).tobytes()
    parts = [(f"kv:{at}", content[at : at + CHUNK_BYTES]) for at in range(0, size, CHUNK_BYTES)]

    def put_pipelined() -> None:
        pipe = client.pipeline(transaction=False)
        for key, value in parts:
            pipe.set(key, value)
        pipe.execute()

    def put_plain() -> None:
        for key, value in parts:
            client.set(key, value)

    def get() -> None:
        for key, value in parts:
            assert len(client.get(key)) == len(value)

    found: dict[str, float | None] = {}
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(count):
        client.flushall()
        times["put_pipelined"].append(timed(put_pipelined))
        times["get"].append(timed(get))
        client.flushall()
        times["put_plain"].append(timed(put_plain))
    client.flushall()
    for name, seconds in times.items():
        found[f"redis_{name}_gbps_{mebibytes}"] = gbps(size, median(seconds))
    fastest = min(median(times["put_pipelined"]), median(times["put_plain"]))
    return found | {f"redis_put_gbps_{mebibytes}": gbps(size, fastest)}


def table(values: dict[str, float | None]) -> str:
    """The figures for people."""
    if values["redis_put_gbps"] is None:
        return "redis: redis-server or redis-py is not installed; left out"
    lines = ["redis (unix socket, no persistence)   put pipelined GB/s   put plain        get"]
    for mebibytes in (1, 24, 128):
        if f"redis_put_gbps_{mebibytes}" in values:
            piped, plain, get = (values[f"redis_{name}_gbps_{mebibytes}"] or 0.0 for name in NAMES)
            lines.append(f"{mebibytes:5} MiB {piped:46.2f} {plain:11.2f} {get:10.2f}")
    return "\n".join(lines)

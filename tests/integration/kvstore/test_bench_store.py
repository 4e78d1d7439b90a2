"""`make bench-store` runs: every part measures, and the last line is what readers parse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 240.0
OURS = (
    "memcpy_gbps",
    "put_shm_gbps",
    "get_shm_ms",
    "verify_gbps",
    "put_stream_gbps",
    "get_stream_gbps",
)
BESIDE_PEERS = (
    "put_vs_redis",
    "get_vs_redis",
    "stream_put_vs_redis",
    "stream_get_vs_redis",
    "put_vs_mooncake",
    "get_vs_mooncake",
)


@pytest.mark.more
def test_bench_store_gives_every_figure() -> None:
    """Ours are numbers; those beside a peer are null where it is not installed, and said so."""
    command = [sys.executable, "-m", "bench.store", "--quick"]
    command += ["--parts", "shm", "stream", "redis", "mooncake"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["bench"] == "store"
    metrics = last["metrics"]
    for name in OURS:
        assert metrics[name] > 0.0, name
    for name in BESIDE_PEERS:
        peer = name.rpartition("_")[2]
        is_there = metrics[f"{peer}_put_gbps"] is not None
        assert (metrics[name] is not None) == is_there, name
        assert is_there or f"{peer}: " in done.stdout, name

"""Prompts through a real prefill worker: what its commits cost, and how far they run ahead.

Owns the clusters that it starts and their load; the numbers are the worker's and the gateway's own.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from baton.stages import SEAL
from baton.testing.cluster import RunningCluster, running_cluster

TIMEOUT_S: Final = 120.0
COMMITTED_TOKENS: Final = 512
COMMITTED_PROMPTS: Final = 20
MOVED_TOKENS: Final = 2048
MOVED_PROMPTS: Final = 5
PACKING: Final = "baton_prefill_kv_pack_seconds_sum"
COMPUTING: Final = "baton_prefill_compute_seconds_sum"


def commit_share(model: str) -> float:
    """Seconds of packing, checksumming and committing over seconds of computing, of prompts that
    came one after the other. The seal counts as committing: it brings the last chunk.
    """
    with _cluster(model) as cluster:
        _ask(cluster, model, COMMITTED_TOKENS, seed=-1)  # the first one warms everything
        before = _worker_seconds(cluster)
        answers = [
            _ask(cluster, model, COMMITTED_TOKENS, seed) for seed in range(COMMITTED_PROMPTS)
        ]
        after = _worker_seconds(cluster)
    spent_s = {name: after[name] - before[name] for name in after}
    sealing_s = sum(float(one["baton"]["stage_seconds"][SEAL]) for one in answers)
    return round((spent_s[PACKING] + sealing_s) / spent_s[COMPUTING], 4)


def hidden_transfer_share(model: str) -> float:
    """The part of a prompt's KV that was on the decode worker's node when it was sealed."""
    with _cluster(model, "--nodes", "2") as cluster:
        shares = [
            float(_ask(cluster, model, MOVED_TOKENS, seed)["baton"]["hidden_transfer_share"])
            for seed in range(MOVED_PROMPTS)
        ]
    return round(statistics.median(shares), 4)


@contextmanager
def _cluster(model: str, *flags: str) -> Iterator[RunningCluster]:
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-") as folder,
        running_cluster(
            Path(folder) / "run", "--model", model, "--prefill-mode", "remote", *flags
        ) as cluster,
    ):
        yield cluster


def _ask(cluster: RunningCluster, model: str, tokens: int, seed: int) -> dict[str, Any]:
    """The answer to a prompt that no other begins with."""
    order = random.Random(seed)
    body = {
        "model": model,
        "prompt": [order.randrange(100, 40000) for _ in range(tokens)],
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "store": False,
    }
    url = f"{cluster.url}/v1/completions"
    answer = httpx.post(url, json=body, timeout=TIMEOUT_S, trust_env=False)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def _worker_seconds(cluster: RunningCluster) -> dict[str, float]:
    """What the prefill worker spent so far, by metric."""
    targets = json.loads((cluster.run_dir / "metrics-targets.json").read_text("ascii"))
    (address,) = (t["targets"][0] for t in targets if t["labels"]["process"] == "prefill-0")
    text = httpx.get(f"http://{address}/metrics", timeout=TIMEOUT_S, trust_env=False).text
    rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in rows if name in (PACKING, COMPUTING)}

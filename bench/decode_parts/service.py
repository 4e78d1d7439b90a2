"""Decode as it is served: the gaps between the tokens of one stream through the whole cluster.

Owns the cluster of the measurement. The stream is read as a client reads it, over HTTP.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import numpy as np

from baton.testing.cluster import running_cluster

ANSWERS: Final = 3
TOKENS: Final = 400
SKIPPED: Final = 8
TIMEOUT_S: Final = 120.0
PROMPT: Final = "1 2 3 4 5 6 7 8 9 10 11 12"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Gaps between tokens, in milliseconds."""

    p50_ms: float
    p99_ms: float
    samples: int


def measure_service(model: str, answers: int = ANSWERS) -> Served:
    """Stream a few long answers from a cluster of this machine; the hand-off is left out."""
    gaps_s: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-") as folder,
        running_cluster(Path(folder) / "run", "--model", model) as cluster,
    ):
        stream_times(cluster.url)  # the first answer warms everything
        for _ in range(answers):
            times_s = stream_times(cluster.url)
            gaps_s += [after - before for before, after in itertools.pairwise(times_s)][SKIPPED:]
    kept = np.array(gaps_s) * 1e3
    return Served(
        p50_ms=float(np.percentile(kept, 50)),
        p99_ms=float(np.percentile(kept, 99)),
        samples=len(kept),
    )


def stream_times(url: str) -> list[float]:
    """When each event of one streamed answer came, by this process's clock."""
    body = {
        "model": "smollm2",
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    times_s: list[float] = []
    with (
        httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as answer,
    ):
        answer.raise_for_status()
        times_s += [
            time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")
        ]
    return times_s

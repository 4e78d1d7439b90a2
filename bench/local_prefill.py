"""What a long prompt does to the others' tokens: computed by the decode worker, or by another.

Four answers stream from one decode worker of a real cluster while 1,100-word prompts come one
after the other. Owns the numbers; the load stands in `local_prefill_parts`.

    make bench-local-prefill                    about two minutes
    python -m bench.local_prefill --rounds 1    the smallest form
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from baton.testing.cluster import running_cluster
from bench.local_prefill_parts.streams import Round, alone, one_round

ROUNDS: Final = 5
QUIET_S: Final = 1.5
GOALS: Final = {"ratio": 3.0, "remote_ratio": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to prefill: milliseconds, and what the medians of rounds say."""

    name: str
    quiet_p50_ms: float
    quiet_p99_ms: float
    long_p50_ms: float
    long_p99_ms: float
    first_token_ms: float
    alone_ms: float

    @property
    def ratio(self) -> float:
        """The slowest gaps beside a long prompt, in usual gaps without one."""
        return self.long_p99_ms / self.quiet_p50_ms


def measure(mode: str, rounds: int, flags: tuple[str, ...]) -> Mode:
    """A cluster of its own that prefills this way."""
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-") as folder,
        running_cluster(Path(folder) / "run", "--prefill-mode", mode, *flags) as cluster,
    ):
        asyncio.run(one_round(cluster.url, 1000, 0.2))  # the first one warms everything
        found = [asyncio.run(one_round(cluster.url, seed, QUIET_S)) for seed in range(rounds)]
        alone_s = [asyncio.run(alone(cluster.url, 2000 + seed)) for seed in range(min(3, rounds))]
    return Mode(
        name=mode,
        quiet_p50_ms=_percentile(found, "quiet_s", 50),
        quiet_p99_ms=_percentile(found, "quiet_s", 99),
        long_p50_ms=_percentile(found, "long_s", 50),
        long_p99_ms=_percentile(found, "long_s", 99),
        first_token_ms=float(np.median([one.first_token_s for one in found])) * 1e3,
        alone_ms=float(np.median(alone_s)) * 1e3,
    )


def _percentile(rounds: list[Round], which: str, percent: float) -> float:
    """The median over the rounds of each round's percentile, in milliseconds."""
    return float(np.median([np.percentile(getattr(one, which), percent) for one in rounds])) * 1e3


def main() -> None:
    """Measure both ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", choices=("local", "remote"))
    options, flags = parser.parse_known_args()
    modes = [
        measure(mode, options.rounds, tuple(flags))
        for mode in ("local", "remote")
        if options.only in (None, mode)
    ]
    print(f"\n{len(os.sched_getaffinity(0))} cores; load {os.getloadavg()[0]:.1f} a minute ago")
    print(
        f"{'prefill':>8} {'quiet p50':>10} {'p99':>7} {'beside p50':>11} {'p99':>7} {'ratio':>6}"
        f" {'goal':>5} {'first token':>12} {'alone':>8}   (ms)"
    )
    metrics: dict[str, float] = {}
    for mode in modes:
        prefix = "" if mode.name == "local" else "remote_"
        goal = GOALS[f"{prefix}ratio"]
        print(
            f"{mode.name:>8} {mode.quiet_p50_ms:10.1f} {mode.quiet_p99_ms:7.1f}"
            f" {mode.long_p50_ms:11.1f} {mode.long_p99_ms:7.1f} {mode.ratio:6.2f}"
            f" {goal:5.1f} {mode.first_token_ms:12.0f} {mode.alone_ms:8.0f}"
        )
        metrics |= {
            f"{prefix}itl_quiet_p50": round(mode.quiet_p50_ms, 2),
            f"{prefix}itl_quiet_p99": round(mode.quiet_p99_ms, 2),
            f"{prefix}itl_long_p50": round(mode.long_p50_ms, 2),
            f"{prefix}itl_long_p99": round(mode.long_p99_ms, 2),
            f"{prefix}ratio": round(mode.ratio, 2),
            f"{prefix}first_token_ms": round(mode.first_token_ms, 1),
            f"{prefix}alone_first_token_ms": round(mode.alone_ms, 1),
        }
    print(json.dumps({"bench": "local-prefill", "metrics": metrics}))


if __name__ == "__main__":
    main()

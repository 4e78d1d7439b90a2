"""What does a lost worker cost? One table, one line of JSON.

Owns the measurement behind docs/resume.md, on the bundled model and real services. First the cost
itself: one log of 1,000 tokens goes back and forth between two decode workers of a host, each time
until the next token is computed; beside it what computing those 1,000 tokens again takes the
prefill worker of the same cluster. Then what clients see: the longest gap of each stream whose
worker was killed (SIGKILL), frozen (SIGSTOP) or drained, and of each whose whole host was lost,
killed or silent: kvstore and workers at once, of which only the gateway's tokens are left.

    make bench-resume
    python -m bench.resume --quick     a quick look
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import numpy as np

from baton.models import locate
from baton.testing.cluster import running_cluster
from bench.resume_parts.direct import Direct, measure_direct
from bench.resume_parts.gaps import (
    drain,
    freeze,
    gaps_ms,
    kill,
    lose_host,
    lose_silent_host,
)
from tests.faults.drill import Drill, drill_on

CONTEXT: Final = 1000
GAP_CONTEXT: Final = 256
HOPS: Final = 30
PREFILLS: Final = 5


@asynccontextmanager
async def drilled(folder: str, *flags: str) -> AsyncIterator[Drill]:
    """A cluster on the bundled model."""
    with running_cluster(Path(folder) / "run", "--model", "smollm2", *flags) as cluster:
        async with drill_on(cluster) as drill:
            yield drill


async def measure(quick: bool) -> tuple[Direct, dict[str, list[float]]]:
    """Everything, on two clusters one after the other."""
    rounds = 1 if quick else 3
    gaps: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        async with drilled(folder, "--decode", "2") as drill:
            direct = await measure_direct(
                drill,
                locate("smollm2"),
                context=CONTEXT,
                hops=6 if quick else HOPS,
                prefills=2 if quick else PREFILLS,
            )
            for name, disturb in (("kill", kill), ("freeze", freeze), ("drain", drain)):
                gaps[name] = await gaps_ms(
                    drill, disturb, context=GAP_CONTEXT, rounds=rounds, seed=len(gaps)
                )
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        async with drilled(folder, "--nodes", "2", "--decode", "2") as drill:
            for name, disturb in (("host", lose_host), ("silent_host", lose_silent_host)):
                gaps[name] = await gaps_ms(
                    drill, disturb, context=CONTEXT, rounds=1, seed=10 + len(gaps)
                )
    return direct, gaps


def metrics(direct: Direct, gaps: dict[str, list[float]]) -> dict[str, float | int]:
    """The figures by the names that the goals use."""
    resume_ms = statistics.median(direct.resume_ms)
    prefill_ms = statistics.median(direct.prefill_ms)
    found: dict[str, float | int] = {
        "resume_ms_p50": round(resume_ms, 2),
        "resume_ms_p99": round(_p99(direct.resume_ms), 2),
        "reprefill_ms_p50": round(prefill_ms, 1),
        "ratio": round(prefill_ms / resume_ms, 1),
        "gap_ms_p99": round(max(_p99(gaps["kill"]), _p99(gaps["freeze"])), 1),
    }
    for name, values in gaps.items():
        found[f"gap_{name}_ms_p50"] = round(statistics.median(values), 1)
        found[f"gap_{name}_ms_p99"] = round(_p99(values), 1)
        found[f"gap_{name}_streams"] = len(values)
    return found


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))


def print_table(direct: Direct, found: dict[str, float | int]) -> None:
    """The figures for people."""
    print(
        f"A log of {CONTEXT} tokens at another worker of the host, {len(direct.resume_ms)} times:"
    )
    print(
        f"  resume {found['resume_ms_p50']} ms to the next token (p99 {found['resume_ms_p99']}), "
        f"prefill of the same {found['reprefill_ms_p50']} ms: {found['ratio']} times (goal: 10)"
    )
    print("The longest gap that a client sees, in ms:")
    for name, context, goal in (
        ("kill", GAP_CONTEXT, "goal: p99 2,500"),
        ("freeze", GAP_CONTEXT, "goal: p99 2,500"),
        ("drain", GAP_CONTEXT, ""),
        ("host", CONTEXT, ""),
        ("silent_host", CONTEXT, ""),
    ):
        print(
            f"  {name.replace('_', ' '):12} p50 {found[f'gap_{name}_ms_p50']:8.1f}"
            f"   p99 {found[f'gap_{name}_ms_p99']:8.1f}"
            f"   {found[f'gap_{name}_streams']} streams of {context} tokens   {goal}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round of everything")
    direct, gaps = asyncio.run(measure(parser.parse_args().quick))
    found = metrics(direct, gaps)
    print_table(direct, found)
    print(json.dumps({"bench": "resume", "metrics": found}))


if __name__ == "__main__":
    main()

"""CPU seconds of a cluster's processes: what a load costs, also on a machine that others use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.testing.cluster import RunningCluster

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(cluster: RunningCluster) -> dict[str, float]:
    """User and system seconds by process name, all threads."""
    used: dict[str, float] = {}
    for file in sorted(cluster.run_dir.glob("*.pid")):
        stat = Path(f"/proc/{cluster.pid(file.stem)}/stat").read_text(encoding="ascii")
        # The name in brackets may hold anything; utime and stime are the 12th and 13th behind it.
        fields = stat.rpartition(")")[2].split()
        used[file.stem] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return used


@contextmanager
def spent(cluster: RunningCluster) -> Iterator[dict[str, float]]:
    """CPU seconds by process of the block, known when it is left."""
    before, used = cpu_seconds(cluster), dict[str, float]()
    yield used
    used |= {name: after - before[name] for name, after in cpu_seconds(cluster).items()}

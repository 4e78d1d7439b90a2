"""How fast is the log? Appends, restarts, operations and moves; one table each, one line of JSON.

Owns the run and the names of the figures; each part measures in `bench/log_parts/` and says there
how. Parts whose files are not there are named and left out.

    make bench-log
    python -m bench.log --quick                       a look in half a minute
    python -m bench.log --parts append restart
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from pathlib import Path
from typing import Final, Protocol

PARTS: Final = ("append", "restart", "operations", "move", "links")
GOALS: Final = {
    "append_os_per_s": ">= 20000",
    "append_disk_per_s": ">= 5000",
    "append_disk_p99_ms_at_5000": "< 10",
    "replay_records_per_s": ">= 300000",
    "restart_ready_s": "< 5",
    "fork_us": "< 1000",
    "truncate_us": "< 1000",
}


class Part(Protocol):
    """What a module of `bench/log_parts/` has."""

    def measure(self, quick: bool) -> dict[str, float]:
        """Figures by name; under a minute, quick under ten seconds."""

    def table(self, values: dict[str, float]) -> str:
        """The figures for people."""


def load(name: str) -> Part | None:
    """A part; None when it is not there."""
    if not (Path(__file__).parent / "log_parts" / f"{name}.py").is_file():
        return None
    module: Part = importlib.import_module(f"bench.log_parts.{name}")
    return module


def steal_and_load() -> str:
    """How busy the machine was with others: figures of a busy one say little."""
    return "load before: " + ", ".join(f"{value:.1f}" for value in os.getloadavg())


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="The log's benchmark.")
    parser.add_argument("--quick", action="store_true", help="small sizes: is it alive?")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    found: dict[str, float] = {}
    print(f"{os.cpu_count()} CPUs; {steal_and_load()}\n")
    for name in arguments.parts:
        part = load(name)
        if part is None:
            print(f"{name}: bench/log_parts/{name}.py is not there; left out\n")
            continue
        began_s = time.perf_counter()
        values = part.measure(arguments.quick)
        found |= values
        print(part.table(values))
        print(f"({name} took {time.perf_counter() - began_s:.1f} s)\n")
    for name, goal in GOALS.items():
        if name in found:
            print(f"{name:30}{found[name]:14,.2f}   goal {goal}")
    metrics = {name: round(value, 4) for name, value in found.items()}
    print(json.dumps({"bench": "log", "metrics": metrics}))


if __name__ == "__main__":
    main()

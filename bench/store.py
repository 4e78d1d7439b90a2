"""How fast is the store's data plane? KV in and out over shared memory and over gRPC.

memcpy, Redis and Mooncake's store are measured in the same run; one table each, one line of JSON.

Owns the run, the ratios and the names of the figures; each part measures in `bench/store_parts/`
and says there how. A peer that is not installed is said and left out: its figures are null. Parts
whose files are not there are named and left out. docs/store-benchmarks.md explains the figures.

    make bench-store
    python -m bench.store --quick                     a look
    python -m bench.store --parts shm redis
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from pathlib import Path
from typing import Final, Protocol

Values = dict[str, float | None]

PARTS: Final = ("shm", "stream", "redis", "mooncake", "nvme", "flatness")
LARGEST: Final = 128
GOALS: Final = {
    "put_shm_vs_memcpy": ">= 0.55",
    "get_shm_ms": "< 1",
    "put_vs_redis": ">= 5",
    "get_vs_redis": ">= 5",
    "put_vs_mooncake": ">= 2",
    "get_vs_mooncake": ">= 2",
    "put_stream_gbps": ">= 0.8",
    "get_stream_gbps": ">= 0.8",
    "stream_put_vs_redis": "reported",
    "stream_get_vs_redis": "reported",
    "promotion_vs_disk": ">= 0.8",
}
RATIOS: Final = {
    "put_shm_vs_memcpy": ("put_shm_gbps", "memcpy_gbps"),
    "put_vs_redis": ("put_shm_gbps", "redis_put_gbps"),
    "put_vs_redis_plain": ("put_shm_gbps", "redis_put_plain_gbps"),
    "get_vs_redis": ("get_shm_gbps", "redis_get_gbps"),
    "get_verified_vs_redis": ("get_shm_verified_gbps", "redis_get_gbps"),
    "stream_put_vs_redis": ("put_stream_gbps", "redis_put_gbps"),
    "stream_get_vs_redis": ("get_stream_gbps", "redis_get_gbps"),
    "put_vs_mooncake": ("put_shm_gbps", "mooncake_put_gbps"),
    "get_vs_mooncake": ("get_shm_gbps", "mooncake_get_gbps"),
    "get_verified_vs_mooncake": ("get_shm_verified_gbps", "mooncake_get_gbps"),
    "stream_put_vs_mooncake": ("put_stream_gbps", "mooncake_put_gbps"),
    "stream_get_vs_mooncake": ("get_stream_gbps", "mooncake_get_gbps"),
}
"""Each figure of the run's largest size over another's."""


class Part(Protocol):
    """What a module of `bench/store_parts/` has."""

    def measure(self, quick: bool) -> Values:
        """Figures by name; under 40 s, quick under 10 s. None: it could not be measured here."""

    def table(self, values: Values) -> str:
        """The figures for people."""


def load(name: str) -> Part | None:
    """A part; None when it is not there."""
    if not (Path(__file__).parent / "store_parts" / f"{name}.py").is_file():
        return None
    module: Part = importlib.import_module(f"bench.store_parts.{name}")
    return module


def ratios(values: Values) -> Values:
    """What follows from the parts' figures; None where one side is missing."""
    found: Values = {}
    for name, (ours, theirs) in RATIOS.items():
        above, below = values.get(ours), values.get(theirs)
        found[name] = above / below if above is not None and below else None
    return found


def run(parts: tuple[str, ...], quick: bool) -> Values:
    """Measures the parts one after the other, printing each table."""
    values: Values = {}
    for name in parts:
        part = load(name)
        if part is None:
            print(f"{name}: bench/store_parts/{name}.py is not there; left out\n")
            continue
        began_s = time.perf_counter()
        measured = part.measure(quick)
        values |= measured
        print(part.table(measured))
        print(f"({name} took {time.perf_counter() - began_s:.1f} s)\n", flush=True)
    return values | ratios(values)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="The store's benchmark.")
    parser.add_argument("--quick", action="store_true", help="small sizes: is it alive?")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    loads = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{os.cpu_count()} CPUs; load before: {loads}\n")
    values = run(tuple(arguments.parts), arguments.quick)
    for name, goal in GOALS.items():
        if name in values:
            value = values[name]
            shown = "-" if value is None else f"{value:,.2f}"
            print(f"{name:30}{shown:>14}   goal {goal}")
    metrics = {
        name: None if value is None else round(value, 4) for name, value in sorted(values.items())
    }
    print(json.dumps({"bench": "store", "metrics": metrics}))


if __name__ == "__main__":
    main()

"""Mooncake's store on the same machine in the same run: master, a node that holds the memory, and a
client, three processes, over TCP on loopback.

`scripts/bench_peers.sh mooncake` installs it into `.peers/mooncake`. The client holds no memory of
its own, as a worker whose KV is to survive it; it puts from and gets into registered buffers, the
fastest calls of its API, one object a range. Medians; null where it is not installed.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.store_parts.site import gbps, median, rounds, sizes
from tests.integration.kvstore.harness import socket_of_any_port

PEER = Path(__file__).parents[2] / ".peers" / "mooncake"
PROCESS = Path(__file__).with_name("mooncake_process.py")
START_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 90.0
NAMES = ("put", "get")


def measure(quick: bool) -> dict[str, float | None]:
    """See the module."""
    nothing: dict[str, float | None] = {f"mooncake_{name}_gbps": None for name in NAMES}
    if not (PEER / "bin" / "mooncake_master").is_file():
        return nothing
    plan = [(mebibytes, rounds(mebibytes, quick)) for mebibytes in sizes(quick)]
    found = _run(plan)
    if found is None:
        return nothing
    values: dict[str, float | None] = {}
    for mebibytes, _ in plan:
        for name in NAMES:
            seconds = found[str(mebibytes)][name]
            values[f"mooncake_{name}_gbps_{mebibytes}"] = gbps(mebibytes << 20, median(seconds))
    largest = max(sizes(quick))
    return values | {
        f"mooncake_{name}_gbps": values[f"mooncake_{name}_gbps_{largest}"] for name in NAMES
    }


def _run(plan: list[tuple[int, int]]) -> dict[str, Any] | None:
    """Seconds by size and call; None when it could not be run, which is said."""
    with ExitStack() as stack:
        ports = [str(stack.enter_context(socket_of_any_port())) for _ in range(4)]
        stack.pop_all().close()
        folder = stack.enter_context(TemporaryDirectory(prefix="baton-mooncake-"))
        log = stack.enter_context((Path(folder) / "log").open("wb"))
        master = [str(PEER / "bin" / "mooncake_master"), "-rpc_port", ports[0]]
        stack.enter_context(_process([*master, "-metrics_port", ports[1]], log))
        # Isolated: this folder has modules of the peers' names.
        python = [str(PEER / "bin" / "python"), "-I", str(PROCESS)]
        node = stack.enter_context(_process([*python, "node", ports[0], ports[2]], log))
        assert node.stdout is not None
        if node.stdout.readline() != b"ready\n":
            print(f"mooncake: its node did not start: {_tail(Path(folder) / 'log')}")
            return None
        done = subprocess.run(
            [*python, "client", ports[0], ports[3], json.dumps(plan)],
            check=False,
            stdout=subprocess.PIPE,
            stderr=log,
            timeout=RUN_TIMEOUT_S,
        )
        lines = done.stdout.splitlines()
        if done.returncode or not lines:
            print(f"mooncake: its client failed: {_tail(Path(folder) / 'log')}")
            return None
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer


@contextmanager
def _process(command: list[str], log: Any) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _tail(path: Path) -> str:
    return " | ".join(path.read_text("utf-8", "replace").splitlines()[-3:])


def table(values: dict[str, float | None]) -> str:
    """The figures for people."""
    if values["mooncake_put_gbps"] is None:
        return "mooncake: not installed (scripts/bench_peers.sh mooncake); left out"
    lines = ["mooncake store (TCP on loopback)   put GB/s        get"]
    for mebibytes in (1, 24, 128):
        if f"mooncake_put_gbps_{mebibytes}" in values:
            put, get = (values[f"mooncake_{name}_gbps_{mebibytes}"] or 0.0 for name in NAMES)
            lines.append(f"{mebibytes:5} MiB {put:33.2f} {get:10.2f}")
    return "\n".join(lines)

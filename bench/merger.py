"""How many splices does one merger answer, and how soon? And how fast does KV come through it?

Beside it in the same run and in turn with it, the limit: a server of the same gRPC library that
returns what it gets, and one that sends bytes. Merger, load and limit are processes of their own;
a splice joins a published prefix of some 400 tokens (both hashes) and a conversation's tokens.

- open loop: 5,000 splices/s in batches of 8 on one stream, latency from when a batch was due;
- closed loop: the most it does, in batches of 8, 32 and 128; `splices_per_s` is the largest. The
  limit counts messages and not what is in them: it says the more, the fewer splices a message has;
- unary: 32 calls of one splice under way;
- materialize: 60 MiB of KV of two logs, the joint inside a page, from a kvstore over the merger to
  the client, every byte under a CRC.

    make bench-merger
    python -m bench.merger --quick                     a look
    chrt -r 1 .venv/bin/python -m bench.merger         before whatever else runs

Every figure is the median of the rounds. `others_cores`: cores that processes other than these kept
busy meanwhile; figures of a busy machine say little. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

from baton.api.merger.v1 import merger_pb2
from baton.client_blobs import BlobClient
from baton.ids import new_log_id
from baton.kv.digests import history_at, history_start
from baton.kv.manifest import Segment
from baton.kv.splice import splice
from baton.wire.segments import manifest_to_proto
from bench.merger_parts.load import Plan
from bench.store_parts.site import header_of, kv_of, running_site
from tests.integration.kvstore.harness import BLOCK, Model, StoreProcess, capability

RATE: Final = 5_000
BATCHES: Final = {8: 4, 32: 2, 128: 1}
"""Splices of a message: streams that carry them, four messages under way on each."""
ROUNDS: Final = 5
SECONDS: Final = 2.0
START_S: Final = 30.0
TOKENS: Final = 2_730
JOINT: Final = 1_205
GOALS: Final = {
    "p99_ms": "<= 5 (5,000 splices/s, batches of 8)",
    "splices_per_s": ">= 50000 (closed loop)",
}
_TICKS: Final = os.sysconf("SC_CLK_TCK")

Values = dict[str, float]


@contextmanager
def served(argv: list[str], port_file: Path) -> Iterator[tuple[str, int]]:
    """A server's process until the block ends: its address and pid."""
    process = subprocess.Popen([sys.executable, "-m", *argv], stdin=subprocess.PIPE)
    try:
        deadline_s = time.monotonic() + START_S
        while not port_file.exists():
            assert process.poll() is None, f"{argv[0]} ended with {process.returncode}"
            assert time.monotonic() < deadline_s, f"{argv[0]} is not ready"
            time.sleep(0.02)  # noqa: TID251 - the file appears when the server is ready
        yield port_file.read_text("ascii").strip(), process.pid
    finally:
        process.terminate()
        process.wait(20.0)


def load(plan: Plan) -> Values:
    """The figures of a load process."""
    argv = [sys.executable, "-m", "bench.merger_parts.load", json.dumps(asdict(plan))]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300.0)
    assert done.returncode == 0, done.stderr
    values: Values = json.loads(done.stdout.splitlines()[-1])
    return values


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def machine_s() -> float:
    """CPU seconds that the machine was busy so far."""
    fields = [int(text) for text in Path("/proc/stat").read_text("ascii").split()[1:9]]
    user, nice, system, _idle, _wait, irq, soft, steal = fields
    return (user + nice + system + irq + soft + steal) / _TICKS


class Others:
    """How many cores others kept busy since it was made; `pids` are our servers."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._began_s, self._busy_s, self._ours_s = time.monotonic(), machine_s(), self._ours()

    def _ours(self) -> float:
        times = os.times()
        own_s = times.user + times.system + times.children_user + times.children_system
        return own_s + sum(cpu_s(pid) for pid in self._pids)

    def cores(self) -> float:
        """Until now."""
        busy_s = machine_s() - self._busy_s - (self._ours() - self._ours_s)
        return max(busy_s / (time.monotonic() - self._began_s), 0.0)


def splice_rounds(directory: Path, rounds: int, seconds: float) -> list[Values]:
    """One merger, and the limit, in turn."""
    found: list[Values] = []
    with ExitStack() as stack:
        files = directory / "merger", directory / "bare"
        argv = ["services.merger", "--port-file", str(files[0]), "--log-level", "warning"]
        merger, pid = stack.enter_context(served(argv, files[0]))
        bare_argv = ["bench.merger_parts.bare", str(files[1])]
        bare, bare_pid = stack.enter_context(served(bare_argv, files[1]))
        for _ in range(rounds):
            others = Others(pid, bare_pid)
            values = splice_round(merger, bare, pid, seconds)
            values["others_cores"] = others.cores()
            found.append(values)
            print(
                f"  p99 {values['p99_ms']:6.2f} ms at {RATE}/s; closed loop "
                f"{values['splices_per_s']:9,.0f}/s; others kept "
                f"{values['others_cores']:.2f} cores busy",
                flush=True,
            )
    return found


def splice_round(merger: str, bare: str, pid: int, seconds: float) -> Values:
    """Every figure once; what waits first, before others have filled the machine."""
    values: Values = {}
    for name, target in (("", merger), ("limit_", bare)):
        plan = Plan(
            target=target, mode="open", rate=RATE, seconds=2 * seconds, is_echo=target == bare
        )
        opened = load(plan)
        values |= {
            f"{name}p50_ms": opened["p50_ms"],
            f"{name}p99_ms": opened["p99_ms"],
            f"{name}max_ms": opened["max_ms"],
        }
    for batch, streams in BATCHES.items():
        plan = Plan(
            target=merger, mode="closed", batch=batch, streams=streams, window=4, seconds=seconds
        )
        began_s = cpu_s(pid)
        ours = load(plan)
        spent_s = cpu_s(pid) - began_s
        limit = load(Plan(**asdict(plan) | {"target": bare, "is_echo": True}))
        values |= {
            f"splices_per_s_{batch}": ours["splices_per_s"],
            f"limit_splices_per_s_{batch}": limit["splices_per_s"],
            f"closed_p99_ms_{batch}": ours["p99_ms"],
            f"server_us_per_splice_{batch}": spent_s / ours["answered_in_all"] * 1e6,
        }
    unary = load(Plan(target=merger, mode="unary", window=32, seconds=seconds))
    values["unary_splices_per_s"] = unary["splices_per_s"]
    for batch in BATCHES:
        limit_per_s = values[f"limit_splices_per_s_{batch}"]
        values[f"splices_vs_limit_{batch}"] = values[f"splices_per_s_{batch}"] / limit_per_s
    values["splices_per_s"] = max(values[f"splices_per_s_{batch}"] for batch in BATCHES)
    return values


def manifest_request(store: StoreProcess, model: Model) -> merger_pb2.MaterializeRequest:
    """Two logs of one history in the store, and the manifest of a part of each."""
    kv = kv_of(model, 60, TOKENS)
    geometry, digest = model.geometry, model.label.kv_digest()
    ids = kv.token_ids.tolist()
    pages = [
        kv.payload[at : at + geometry.page_bytes]
        for at in range(0, kv.payload.size, geometry.page_bytes)
    ]
    segments = []
    with BlobClient(store.address) as client:
        for start, end in ((0, JOINT), (JOINT, TOKENS)):
            log_id = new_log_id()
            header = header_of(model, log_id, 0, TOKENS)
            put = client.put_blob(header, pages, kv.token_ids, capability=capability(log_id))
            segment = Segment(
                log_id=log_id,
                generation=put.generation,
                from_position=start,
                to_position=end,
                history_start=history_at(digest, BLOCK, ids[:start])
                if start
                else history_start(digest),
                history_end=history_at(digest, BLOCK, ids[:end]),
                kv_digest=digest,
                tokenizer_hash=model.label.tokenizer,
                block_tokens=BLOCK,
                numeric_class_id=model.label.numeric_class.id,
            )
            segments.append(segment)
    return merger_pb2.MaterializeRequest(
        manifest=manifest_to_proto(splice(segments)),
        kvstore_address=store.address,
        capabilities=[capability(segment.log_id) for segment in segments],
    )


def materialise_rounds(directory: Path, rounds: int) -> list[Values]:
    """KV over the merger, and the limit: as many bytes from a bare server, over one hop."""
    found: list[Values] = []
    with ExitStack() as stack:
        store, model = stack.enter_context(running_site())
        request = directory / "request"
        message = manifest_request(store, model)
        request.write_bytes(message.SerializeToString())
        wanted = directory / "wanted"
        wanted.write_text(str(TOKENS * (model.geometry.token_bytes + 4)), "ascii")
        files = directory / "merger-2", directory / "bare-2"
        argv = ["services.merger", "--port-file", str(files[0]), "--log-level", "warning"]
        merger, _ = stack.enter_context(served(argv, files[0]))
        bare_argv = ["bench.merger_parts.bare", str(files[1])]
        bare, _ = stack.enter_context(served(bare_argv, files[1]))
        for _ in range(rounds):
            ours = load(Plan(target=merger, mode="materialize", request=str(request)))
            limit = load(Plan(target=bare, mode="raw", request=str(wanted)))
            found.append(
                {
                    "materialize_gbps": ours["gbps"],
                    "limit_gbps": limit["gbps"],
                    "materialize_vs_limit": ours["gbps"] / limit["gbps"],
                }
            )
    return found


def medians(rounds: list[Values]) -> Values:
    """Of each figure."""
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def table(rounds: list[Values]) -> str:
    """Medians, and the smallest and largest of the rounds."""
    lines = [f"{'':28}{'median':>13}{'least':>13}{'most':>13}"]
    for name, value in medians(rounds).items():
        seen = [one[name] for one in rounds]
        goal = f"   goal {GOALS[name]}" if name in GOALS else ""
        lines.append(f"{name:28}{value:13,.2f}{min(seen):13,.2f}{max(seen):13,.2f}{goal}")
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="The merger's benchmark.")
    parser.add_argument("--quick", action="store_true", help="one short round: is it alive?")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of all figures, in turn")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of one load")
    arguments = parser.parse_args()
    rounds, seconds = (1, 1.0) if arguments.quick else (arguments.rounds, arguments.seconds)
    loads = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{os.cpu_count()} CPUs; load before: {loads}; {rounds} rounds", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-merger-") as folder:
        splices = splice_rounds(Path(folder), rounds, seconds)
        bytes_over = materialise_rounds(Path(folder), rounds)
    print(table(splices))
    print(table(bytes_over))
    values = medians(splices) | medians(bytes_over)
    metrics = {name: round(value, 4) for name, value in sorted(values.items())}
    print(json.dumps({"bench": "merger", "metrics": metrics}))


if __name__ == "__main__":
    main()

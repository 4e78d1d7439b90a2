"""Which grpcio can be trusted with bursts and cancels? Measured, one table, one line of JSON.

Owns the measurement behind docs/adr/0007-grpcio-version.md. For each candidate it starts a server
(`baton.rpc.server`) in one process and a client (`baton.rpc.channel`) in another and asks
- burst: of many simultaneous calls, how many are answered, how many refused with a reason, and how
  many end in a bare CANCELLED? The `plain` server, without our options, is the control.
- storm: when calls are cancelled at random points, how do memory and open calls grow after warm-up,
  and which way of ending a call early costs what? Calls that complete are the control.
- abandoned: is a stream that nobody holds any more cancelled, or does it run for ever?
Never measures speed. Without `--grpcio` it runs the installed grpcio only; another version is a
folder: `pip install --no-deps --target DIR grpcio==X grpcio-status==X ...`, then `--grpcio DIR`.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import ctypes
import gc
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import structlog

from baton.errors import ServiceError
from baton.rpc.channel import Channel, open_channel
from baton.rpc.server import ServerOptions, build_server

SERVICE: Final = "baton.bench.v1.StormService"
WARM_UP_ROUNDS: Final = 4
AT_ONCE: Final = 200
ABANDONED: Final = 50
WORK_S: Final = 0.02
HOLD_S: Final = 1.0
RUN_TIMEOUT_S: Final = 120.0
SETTLE_TIMEOUT_S: Final = 10.0
ROOT: Final = Path(__file__).resolve().parent.parent

_MALLINFO_FIELDS: Final = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd",
    "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO_FIELDS)


@dataclass(slots=True, kw_only=True)
class Memory:
    """One reading after a garbage collection, in bytes; `open_calls` on the server only."""

    rss_bytes: int
    native_bytes: int
    python_blocks: int
    open_calls: int = 0


@dataclass(slots=True)
class Counter:
    """Calls whose handler is running now, and an event that says there are none."""

    open_calls: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """One more inside the block."""
        self.open_calls += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.open_calls -= 1
            if self.open_calls == 0:
                self.idle.set()


def read_memory(open_calls: int = 0) -> Memory:
    """This process's memory once everything that can go is gone."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _Mallinfo
    info = libc.mallinfo2()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return Memory(
        rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        native_bytes=info.uordblks + info.hblkhd,
        python_blocks=sys.getallocatedblocks(),
        open_calls=open_calls,
    )


# --- server process ----------------------------------------------------------------------------
async def serve(*, is_plain: bool) -> None:
    """Prints the target, then a memory reading for each line on stdin; ends with stdin."""
    # stdout is for readings.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    counter = Counter()
    server, target = await _started(_handlers(counter), is_plain=is_plain)
    print(target, flush=True)
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while command := await lines.readline():
        if command.strip() == b"settled":
            await _wait(counter.idle, SETTLE_TIMEOUT_S)
        reading = read_memory(counter.open_calls)
        print(json.dumps([getattr(reading, name) for name in Memory.__slots__]), flush=True)
    await server.stop(*((0.2,) if is_plain else ()))


async def _started(handlers: dict[str, Any], *, is_plain: bool) -> tuple[Any, str]:
    if is_plain:
        plain = grpc.aio.server()
        generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
        plain.add_generic_rpc_handlers((generic,))
        port = plain.add_insecure_port("127.0.0.1:0")
        await plain.start()
        return plain, f"127.0.0.1:{port}"
    ours = build_server(ServerOptions(has_reflection=False))
    ours.register_handlers(SERVICE, handlers)
    await ours.start()
    return ours, ours.target


def _handlers(counter: Counter) -> dict[str, Any]:
    async def work(request: bytes, context: Any) -> bytes:
        with counter.counted():
            await _pause(WORK_S)
            return request

    async def hold(request: bytes, context: Any) -> bytes:
        with counter.counted():
            await _pause(HOLD_S)
            return request

    async def ticks(request: bytes, context: Any) -> AsyncIterator[bytes]:
        with counter.counted():
            while True:
                yield request
                await _pause(0.001)

    return {
        "Work": grpc.unary_unary_rpc_method_handler(work),
        "Hold": grpc.unary_unary_rpc_method_handler(hold),
        "Ticks": grpc.unary_stream_rpc_method_handler(ticks),
    }


# --- client process ----------------------------------------------------------------------------
class ServerProcess:
    """The server in a process of its own, asked for readings over its pipes."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, __file__, "--role", "server", *flags]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.target = self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    async def reading(self, command: str = "settled") -> Memory:
        """The server's memory, when idle or `now`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        values = json.loads(await asyncio.to_thread(self._line))
        return Memory(**dict(zip(Memory.__slots__, values, strict=True)))

    def close(self) -> None:
        """Ends the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=SETTLE_TIMEOUT_S)


async def burst(target: str, calls: int) -> collections.Counter[str]:
    """How each of `calls` simultaneous unary calls ended: OK, a reason, or bare_<code>."""
    async with open_channel(target) as channel:
        hold = channel.unary_unary(f"/{SERVICE}/Hold")

        async def one() -> str:
            try:
                await hold(b"x" * 128, timeout=30.0)
            except ServiceError as error:
                code = error.metadata.get("grpc_code")
                return f"bare_{code}" if code else error.reason.value
            except asyncio.CancelledError:
                return "bare_CANCELLED"
            return "OK"

        return collections.Counter(await asyncio.gather(*(one() for _ in range(calls))))


async def storm_round(
    channel: Channel, dice: random.Random, calls: int, ways: Sequence[Way]
) -> None:
    """`calls` calls, `AT_ONCE` at a time, each ended in one of the ways, drawn by lot."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(way: Way, delay_s: float) -> None:
        async with slots:
            try:
                await way(channel, delay_s)
            except (ServiceError, TimeoutError):
                pass
            except asyncio.CancelledError:
                # The call's own; nobody cancels this task.
                pass

    async with asyncio.TaskGroup() as group:
        for _ in range(calls):
            group.create_task(one(dice.choice(ways), dice.uniform(0.0, 1.2 * WORK_S)))
    # Same connection, so the server has heard of every cancel before it.
    await _completed(channel, 0.0)


async def _completed(channel: Channel, delay_s: float) -> None:
    await channel.unary_unary(f"/{SERVICE}/Work")(b"x")


async def _unary_cancelled(channel: Channel, delay_s: float) -> None:
    call = channel.unary_unary(f"/{SERVICE}/Work")(b"x")
    await _pause(delay_s)
    call.cancel()
    await call


async def _unary_left(channel: Channel, delay_s: float) -> None:
    async with asyncio.timeout(delay_s):
        await channel.unary_unary(f"/{SERVICE}/Work")(b"x")


async def _stream_cancelled(channel: Channel, delay_s: float) -> None:
    call = channel.unary_stream(f"/{SERVICE}/Ticks")(b"x")
    for _ in range(int(delay_s * 400)):
        await call.read()
    call.cancel()
    await call.read()


async def _stream_left(channel: Channel, delay_s: float) -> None:
    async with asyncio.timeout(delay_s):
        async for _ in channel.unary_stream(f"/{SERVICE}/Ticks")(b"x"):
            pass


async def _deadline(channel: Channel, delay_s: float) -> None:
    async for _ in channel.unary_stream(f"/{SERVICE}/Ticks")(b"x", timeout=max(delay_s, 1e-3)):
        pass


Way = Callable[[Channel, float], Awaitable[None]]
EARLY: Final[tuple[Way, ...]] = (
    _unary_cancelled, _unary_left, _stream_cancelled, _stream_left, _deadline,
)  # fmt: skip


async def abandoned(server: ServerProcess) -> int:
    """Of `ABANDONED` streams read once and dropped, how many the server still runs."""
    async with open_channel(server.target) as channel:

        async def glance() -> None:
            await channel.unary_stream(f"/{SERVICE}/Ticks")(b"x").read()

        for _ in range(ABANDONED):
            await glance()
        gc.collect()
        await _pause(0.5)
        gc.collect()
        await _pause(0.5)
        return (await server.reading("now")).open_calls


async def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """All figures of the grpcio that this process imported."""
    plain = ServerProcess("--plain")
    control = await burst(plain.target, arguments.calls)
    plain.close()
    server = ServerProcess()
    outcome = await burst(server.target, arguments.calls)
    figures: dict[str, float] = {
        "burst_calls": arguments.calls,
        "burst_answered": outcome["OK"],
        "burst_refused_with_reason": _refused(outcome),
        "burst_bare": _bare(outcome),
        "control_bare": _bare(control),
    }
    figures |= await _storm(server, arguments)
    figures["abandoned_still_running"] = await abandoned(server)
    server.close()
    return figures


def _bare(outcome: collections.Counter[str]) -> int:
    return sum(count for name, count in outcome.items() if name.startswith("bare_"))


def _refused(outcome: collections.Counter[str]) -> int:
    return sum(outcome.values()) - outcome["OK"] - _bare(outcome)


async def _storm(server: ServerProcess, arguments: argparse.Namespace) -> dict[str, float]:
    """Growth a call of the mixed storm, then of each way on its own."""
    figures: dict[str, float] = {}
    calls = arguments.calls_per_round
    here, there = await _readings(server, arguments, EARLY, arguments.rounds)
    figures["storm_open_calls"] = there[-1].open_calls
    for side, readings in (("client", here), ("server", there)):
        for name in ("rss_bytes", "native_bytes", "python_blocks"):
            values = [getattr(reading, name) for reading in readings]
            figures[f"{side}_{name}_per_call"] = slope(values) / calls
    for way in (_completed, *EARLY):
        here, there = await _readings(server, arguments, (way,), WARM_UP_ROUNDS)
        for side, readings in (("client", here), ("server", there)):
            grown = slope([reading.native_bytes for reading in readings])
            figures[f"{side}_native_bytes{way.__name__}"] = grown / calls
    return figures


async def _readings(
    server: ServerProcess, arguments: argparse.Namespace, ways: Sequence[Way], rounds: int
) -> tuple[list[Memory], list[Memory]]:
    """Memory of client and server after each round, warm-up left out."""
    dice = random.Random(arguments.seed)
    here: list[Memory] = []
    there: list[Memory] = []
    async with open_channel(server.target) as channel:
        for number in range(WARM_UP_ROUNDS + rounds):
            await storm_round(channel, dice, arguments.calls_per_round, ways)
            reading = await server.reading()
            if number >= WARM_UP_ROUNDS:
                here.append(read_memory())
                there.append(reading)
    return here, there


def slope(values: list[int]) -> float:
    """Growth per step: the median of the slopes of all pairs (Theil-Sen), robust to one jump."""
    pairs = [
        (values[j] - values[i]) / (j - i)
        for i in range(len(values))
        for j in range(i + 1, len(values))
    ]
    return statistics.median(pairs)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)  # noqa: TID251 - this is the load: work that takes time


# --- table -------------------------------------------------------------------------------------
def run_candidate(folder: str | None, rest: list[str]) -> tuple[str, dict[str, float]]:
    """(version, figures) of one run in a fresh process that imports grpcio from the folder."""
    path = os.pathsep.join(filter(None, (folder, str(ROOT))))
    done = subprocess.run(
        [sys.executable, __file__, "--role", "client", *rest],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=RUN_TIMEOUT_S,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    return result["version"], result["figures"]


def compare(arguments: argparse.Namespace) -> None:
    """Runs every candidate, interleaved, and prints medians over the runs."""
    rest = []
    for name in ("calls", "rounds", "calls_per_round", "seed"):
        rest += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(arguments.runs):
        for folder in arguments.grpcio or [None]:
            version, figures = run_candidate(folder, rest)
            print(f"grpcio {version} measured", file=sys.stderr)
            runs.setdefault(version, []).append(figures)
    medians = {
        version: {
            name: statistics.median(run[name] for run in of_version) for name in of_version[0]
        }
        for version, of_version in runs.items()
    }
    names = list(next(iter(medians.values())))
    head = f"median of {arguments.runs} runs"
    print(f"{head:36s}" + "".join(f"{version:>12s}" for version in medians))
    for name in names:
        print(f"{name:36s}" + "".join(f"{medians[v][name]:12.1f}" for v in medians))
    metrics = {
        f"{name}.{version}": round(value, 2)
        for version, figures in medians.items()
        for name, value in figures.items()
    }
    print(json.dumps({"bench": "grpc_cancel_storm", "metrics": metrics}))


def main() -> None:
    """Parses the arguments and plays one of the three roles."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--grpcio", action="append", metavar="DIR", help="folder of a candidate")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--calls", type=int, default=4000, help="simultaneous calls of the burst")
    parser.add_argument("--rounds", type=int, default=8, help="measured rounds of the storm")
    parser.add_argument("--calls-per-round", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--role", choices=("compare", "client", "server"), default="compare")
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "server":
        asyncio.run(serve(is_plain=arguments.plain))
    elif arguments.role == "client":
        figures = asyncio.run(measure(arguments))
        print(json.dumps({"version": grpc.__version__, "figures": figures}))
    else:
        compare(arguments)


if __name__ == "__main__":
    main()

"""A process that writes a log until it is killed, and the server that forks such processes.

    python -m tests.durability.child      reads one JSON order a line, answers with a pid a line

Importing takes half a second, writing a few milliseconds: the server imports once. The acks go to a
file in memory as soon as they are given, which outlives the process and the log's disk.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import structlog

from baton.errors import StartupError
from services.kvstore.log.native import is_native
from services.kvstore.state import AckLevel
from tests.durability.clients import SNAPSHOT_SHARE, Clients
from tests.durability.engine import Life

ACK: Final = struct.Struct("<QB")
ENDED, FAILED = 0, 3
"""Exit codes: everything was written; the log failed and said so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a child is to do. `acks` is a file; `no_sync` names calls that then do nothing; without
    `is_compacting` no segment is ever freed.
    """

    directory: str
    acks: str
    seed: int
    records_max: int
    segment_bytes: int
    no_sync: tuple[str, ...] = ()
    is_compacting: bool = True

    def line(self) -> bytes:
        """As the server reads it."""
        return json.dumps(asdict(self)).encode() + b"\n"


async def write(order: Order) -> int:
    """Writes a log; the exit code."""
    acks = os.open(order.acks, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def note(count: int, level: AckLevel) -> None:
        os.write(acks, ACK.pack(count, int(level)))

    with ThreadPoolExecutor(1) as executor:
        try:
            life = Life(Path(order.directory), executor, segment_bytes=order.segment_bytes)
            clients = Clients(
                life,
                order.seed,
                order.records_max,
                note,
                snapshot_share=SNAPSHOT_SHARE if order.is_compacting else 0.0,
            )
            failure = await clients.run()
            is_failed = failure is not None or clients.is_refused
            if failure is None:
                await life.writer.close()
        except (OSError, StartupError):
            is_failed = True
    return FAILED if is_failed else ENDED


def acked(path: Path, level: AckLevel) -> int:
    """The highest count acked at `level` or a stronger one; a half written last ack is none."""
    data = path.read_bytes() if path.exists() else b""
    whole = data[: len(data) // ACK.size * ACK.size]
    return max((count for count, code in ACK.iter_unpack(whole) if code >= level), default=0)


def _ignored(_descriptor: int) -> None:
    return


def main() -> None:
    """Forks one child for each line; says its own pid first, once it has imported everything, also
    what is imported with the first record.
    """
    is_native()
    os.write(1, b"%d\n" % os.getpid())
    for line in sys.stdin.buffer:
        order = Order(**json.loads(line))
        # A forked child maps no arena, and nothing here has started a thread yet.
        pid = os.fork()  # noqa: TID251
        if pid == 0:
            for name in order.no_sync:
                setattr(os, name, _ignored)
            structlog.configure(processors=[_dropped])
            code = asyncio.run(write(order))
            os._exit(code)
        os.write(1, b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        os.write(1, b"%d\n" % os.waitstatus_to_exitcode(status))


def _dropped(_logger: object, _name: str, _event: object) -> str:
    raise structlog.DropEvent


if __name__ == "__main__":
    main()

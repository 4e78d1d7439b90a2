"""The NVMe tier of a running store: its file, its threads, and the measure of the disk.

Owns their beginning and end, and measuring again when nothing was read for a while: a disk that was
slow once would otherwise never be asked again. Decides nothing about what stands there.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from baton.clock import Clock
from baton.kv.layout import KvGeometry
from services.kvstore.arena import Arena
from services.kvstore.tiers.disk_queue import DiskQueue
from services.kvstore.tiers.nvme_file import NvmeFile, NvmeSpec
from services.kvstore.tiers.slots import Slots

FILE_ID_BYTES: Final = 16
MEASURE_INTERVAL_S: Final = 30.0
LOOK_INTERVAL_S: Final = 5.0

_log = structlog.stdlib.get_logger("services.kvstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmePlan:
    """Where the file is to be, and what its slots may take."""

    directory: Path
    nvme_bytes: int


class NvmeTier:
    """See the module. `slots` are empty until a restart fills them."""

    def __init__(self, file: NvmeFile, arena: Arena, clock: Clock) -> None:
        self.file = file
        self.slots = Slots(file.slot_count, file.generation_floor)
        self.queue = DiskQueue(file, arena, clock)
        self._clock = clock
        self._is_stuck = False

    async def start(self) -> None:
        """Starts the threads."""
        self.queue.start()

    async def drain(self) -> None:
        """Nothing: what is asked for until the end is done."""

    async def stop(self) -> None:
        """Ends the threads; before the arena is unmapped."""
        loop = asyncio.get_running_loop()
        # Also where nobody waits for the answer as long as the disk takes.
        self._is_stuck = True
        self._is_stuck = not await loop.run_in_executor(None, self.queue.stop)
        if self._is_stuck:
            _log.error("nvme_threads_stuck", path=str(self.file.spec.path))

    def close(self) -> None:
        """Lets the file go, unless a thread is still in a call on it: then the process does."""
        if not self._is_stuck:
            self.file.close()

    async def measure_again(self) -> None:
        """Measures the disk if nothing was read for `MEASURE_INTERVAL_S`."""
        read_s = self.queue.reads.ended_s
        if read_s is None or self._clock.monotonic_s() - read_s >= MEASURE_INTERVAL_S:
            await self.queue.measure()


def open_file(plan: NvmePlan, node_id: str, geometry: KvGeometry, kv_digest: bytes) -> NvmeFile:
    """The file that `plan` describes. Blocking; StartupError."""
    file = NvmeFile.open(
        NvmeSpec(
            directory=plan.directory,
            node_id=node_id,
            nvme_bytes=plan.nvme_bytes,
            geometry=geometry,
            kv_digest=kv_digest,
            file_id=secrets.token_bytes(FILE_ID_BYTES),
        )
    )
    _log.info(
        "nvme_opened",
        path=str(file.spec.path),
        slots=file.slot_count,
        file="reattached" if file.is_reattached else "fresh",
        direct=file.is_direct,
    )
    return file

"""Worker records that gateways leave for each other, so that a fresh one knows whom to expect.

Owns their sealed form, the rhythm of writing and the one reading after a start. A hint is never
believed: it shows a worker as not heard yet and opens a connection to it early, and that is all.
What is read was perhaps written by anybody: names have one length, values are read up to a bound,
and only those that the cluster key signed, for this worker, not longer ago than a lease, are used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog

from baton.client import ChannelPool
from baton.clock import WaitingClock
from baton.errors import ServiceError
from baton.lifecycle import every
from services.gateway.hub import WorkerHub
from services.gateway.registry import WORKERS_MAX, WorkerRecord
from services.gateway.registry_wire import record_from_bytes, record_to_bytes
from services.gateway.shared_store import MAC_BYTES, Command, KeySpace, SharedStore

WRITE_INTERVAL_S: Final = 0.5
WRITES_MAX: Final = 256
"""Records a transaction; the others wait for the next one, and newer ones replace older ones."""

RECORD_BYTES_MAX: Final = 16 * 1024
HEADER_BYTES: Final = MAC_BYTES + 8
VALUE_BYTES_MAX: Final = HEADER_BYTES + RECORD_BYTES_MAX
SCAN_COUNT: Final = 1024
SCANS_MAX: Final = 64
READS_MAX: Final = 32
WARM_ASK_S: Final = 1.0
EARLY_CHANNELS_MAX: Final = 256
KIND: Final = "worker"

_log = structlog.stdlib.get_logger("baton.redis")


class RecordSeal:
    """Records with a signature and an end. Wall time ends hints and decides nothing else."""

    def __init__(self, keys: KeySpace, lease_s: float) -> None:
        self._keys = keys
        self._lease_ms = round(lease_s * 1000)

    @property
    def lease_ms(self) -> int:
        """How long a value is of use."""
        return self._lease_ms

    def key(self, worker_id: str) -> str:
        """Where a worker's value stands."""
        return self._keys.key(KIND, worker_id)

    def sealed(self, record: WorkerRecord, wall_s: float) -> bytes | None:
        """The value: signature, end in ms since the epoch (u64, little endian), record."""
        body = record_to_bytes(record)
        if len(body) > RECORD_BYTES_MAX:
            return None
        signed = (round(wall_s * 1000) + self._lease_ms).to_bytes(8, "little") + body
        return self._keys.mac(signed) + signed

    def opened(self, key: str, value: object, wall_s: float) -> WorkerRecord | None:
        """The record of a value that was found under a key; None unless all of it is right."""
        if not isinstance(value, bytes) or not HEADER_BYTES < len(value) <= VALUE_BYTES_MAX:
            return None
        signed = value[MAC_BYTES:]
        if value[:MAC_BYTES] != self._keys.mac(signed):
            return None
        left_ms = int.from_bytes(signed[:8], "little") - round(wall_s * 1000)
        if not 0 < left_ms <= 2 * self._lease_ms:
            return None
        try:
            record = record_from_bytes(signed[8:])
        except ServiceError:
            return None
        return record if self.key(record.worker_id) == key else None


class RegistryHints:
    """Writes what is heard, reads once what others heard. Fits `baton.lifecycle` as a part."""

    def __init__(
        self,
        store: SharedStore,
        hub: WorkerHub,
        channels: ChannelPool,
        *,
        seal: RecordSeal,
        pattern: str,
        clock: WaitingClock,
        spawn: Callable[..., None],
    ) -> None:
        self._store = store
        self._hub = hub
        self._channels = channels
        self._seal = seal
        self._pattern = pattern
        self._clock = clock
        self._spawn = spawn
        self._pending: dict[str, WorkerRecord] = {}
        self._early: set[str] = set()
        self._found = asyncio.Event()
        self._stopping = asyncio.Event()
        hub.on_heard(self._heard)
        store.on_up(self._found.set)

    async def start(self) -> None:
        """Begins; nothing is waited for."""
        self._spawn("hints", self._run())

    async def drain(self) -> None:
        """Nothing: what is not written is written by the next heartbeat."""

    async def stop(self) -> None:
        """Ends the rhythm."""
        self._stopping.set()
        self._found.set()

    def _heard(self, record: WorkerRecord) -> None:
        if record.worker_id in self._pending or len(self._pending) < WORKERS_MAX:
            self._pending[record.worker_id] = record

    async def _run(self) -> None:
        await self._found.wait()
        if self._stopping.is_set():
            return
        hints = await self.warm()
        if hints:
            _log.info("workers_hinted", workers=hints)
        await every(WRITE_INTERVAL_S, self._beat, clock=self._clock, stopping=self._stopping)

    async def _beat(self) -> None:
        self.write()
        await self._forget_early()

    def write(self) -> None:
        """Hand over the newest record of each worker heard since the last call."""
        names = list(self._pending)[:WRITES_MAX]
        wall_s = self._clock.wall_s()
        commands: list[Command] = []
        for name in names:
            value = self._seal.sealed(self._pending[name], wall_s)
            if value is not None:
                commands.append(("SET", self._seal.key(name), value, "PX", self._seal.lease_ms))
        if not commands or self._store.post(commands):
            for name in names:
                del self._pending[name]

    async def warm(self) -> int:
        """Hint at every worker that another gateway heard lately; returns how many are new."""
        cursor: object = b"0"
        hinted = 0
        for _ in range(SCANS_MAX):
            replies = await self._store.ask(
                [("SCAN", _cursor(cursor), "MATCH", self._pattern, "COUNT", SCAN_COUNT)],
                WARM_ASK_S,
            )
            page = None if replies is None else replies[0]
            if not isinstance(page, list) or len(page) != 2 or not isinstance(page[1], list):
                break
            cursor, names = page
            hinted += await self._read(
                [str(one, "ascii", "replace") for one in names if isinstance(one, bytes)]
            )
            if _cursor(cursor) == 0 or hinted >= WORKERS_MAX:
                break
        return hinted

    async def _read(self, keys: list[str]) -> int:
        hinted = 0
        for begin in range(0, len(keys), READS_MAX):
            part = keys[begin : begin + READS_MAX]
            # One byte more than allowed tells a long value from one that just fits.
            reads: list[Command] = [("GETRANGE", key, 0, VALUE_BYTES_MAX) for key in part]
            values = await self._store.ask(reads, WARM_ASK_S)
            for key, value in zip(part, values or (), strict=False):
                record = self._seal.opened(key, value, self._clock.wall_s())
                if record is not None and self._hub.hint(record):
                    self._open_early(record)
                    hinted += 1
        return hinted

    def _open_early(self, record: WorkerRecord) -> None:
        """Connect before the first request needs it."""
        for target in {record.address, record.kvstore_address} - {""} - self._early:
            if len(self._early) >= EARLY_CHANNELS_MAX:
                return
            with suppress(ServiceError):
                self._channels.get(target).get_state(try_to_connect=True)
                self._early.add(target)

    async def _forget_early(self) -> None:
        """Close what was opened for workers that then never spoke."""
        if not self._early:
            return
        heard: set[str] = set()
        hinted: set[str] = set()
        for status in self._hub.statuses():
            record = status.record
            group = hinted if self._hub.is_hint(record.worker_id) else heard
            group |= {record.address, record.kvstore_address}
        self._early -= heard
        for target in tuple(self._early - hinted):
            self._early.discard(target)
            await self._channels.forget(target)


def _cursor(value: object) -> int:
    """A scan's cursor; 0, its end, for anything else."""
    if isinstance(value, bytes) and len(value) <= 20 and value.isdigit():
        return int(value)
    return 0

"""Heartbeats: a worker tells every gateway in its list that it lives, with its full record.

Owns the rhythm and the record's shape. Gateways are independent: a slow or dead one never delays
the beat of another, and no beat waits for the one before. Never decides what a gateway believes.
Used by prefill, decode, kvstore and merger; imports no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, unique
from typing import Final

import structlog

from baton.clock import WaitingClock
from baton.errors import ServiceError
from baton.kv.label import PairLabel
from baton.kv.layout import KvGeometry
from baton.lifecycle import every

INTERVAL_S: Final = 0.5
CALL_TIMEOUT_S: Final = 0.5

_log = structlog.stdlib.get_logger("baton.heartbeat")


@unique
class Role(StrEnum):
    """What a process does."""

    PREFILL = "prefill"
    DECODE = "decode"
    KVSTORE = "kvstore"
    MERGER = "merger"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a router weighs; rates are 0 before the first measurement."""

    active: int = 0
    queued: int = 0
    queued_tokens: int = 0
    active_max: int = 0
    token_rate: float = 0.0
    pages_free: int = 0
    pages_total: int = 0
    tpot_s: float = 0.0
    prefill_token_rate: float = 0.0
    queue_max: int | None = None
    """Requests that may wait beyond the most at once; None: not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """All a worker says of itself. `label` and `geometry` are None for mergers."""

    worker_id: str
    role: Role
    incarnation: int
    address: str
    model: str
    version: str
    node_id: str = ""
    kvstore_address: str = ""
    label: PairLabel | None = None
    geometry: KvGeometry | None = None
    is_draining: bool = False
    is_ready: bool = False
    progress: int = 0
    load: Load = field(default_factory=Load)
    metrics_address: str = ""
    is_degraded: bool = False
    context_max: int = 0


RecordSource = Callable[[], Record]
Beat = Callable[[Record, float], Awaitable[str]]
"""Sends a record with a timeout in seconds; returns the gateway's name."""


class Heartbeats:
    """Beats to each gateway until `stopping` is set, with one last record that says draining."""

    def __init__(
        self,
        beats: Sequence[tuple[str, Beat]],
        record: RecordSource,
        clock: WaitingClock,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._beats = tuple(beats)
        self._record = record
        self._clock = clock
        self._interval_s = interval_s
        self._reachable: dict[str, bool] = {}

    @property
    def reachable(self) -> frozenset[str]:
        """Addresses of the gateways that answered their last beat."""
        return frozenset(address for address, is_up in self._reachable.items() if is_up)

    async def run(self, stopping: asyncio.Event) -> None:
        """Beat until `stopping` is set; returns then."""
        async with asyncio.TaskGroup() as group:
            for address, beat in self._beats:
                group.create_task(self._beat_to(address, beat, stopping))

    async def _beat_to(self, address: str, beat: Beat, stopping: asyncio.Event) -> None:
        async def once() -> None:
            await self._once(address, beat)

        await every(self._interval_s, once, clock=self._clock, stopping=stopping)
        await once()

    async def _once(self, address: str, beat: Beat) -> None:
        was_up = self._reachable.get(address)
        try:
            gateway_id = await beat(self._record(), CALL_TIMEOUT_S)
        except ServiceError as error:
            self._reachable[address] = False
            if was_up is not False:
                _log.warning("gateway_unreachable", gateway=address, reason=error.reason.value)
            return
        self._reachable[address] = True
        if not was_up:
            _log.info("gateway_heard_us", gateway=address, gateway_id=gateway_id)

"""What this gateway believes about workers, from their own heartbeats alone; hints are only shown.

Owns worker records, silence and incarnations. Pure: time is passed in, nothing is sent.

Invariants: one record per worker id; a record of a retired incarnation never comes back; a worker
is routable only while it is heard, ready, not draining, not in doubt and making progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum, unique
from typing import Final

from baton.kv.label import PairLabel

DEAD_AFTER_S: Final = 1.5
"""Silence after which a worker gets no new work and its streams count as lost."""

LEASE_S: Final = 3.0
"""Silence after which its record is dropped."""

STUCK_AFTER_S: Final = 60.0
"""Time without progress, heartbeats or not, after which a worker gets no new work and counts as
dead for what it runs."""

DOUBT_S: Final = 0.25
"""A worker whose connection broke gets no new work before it is heard so much later: a beat that
comes sooner may have been sent before it died."""

RETIRED_MAX: Final = 8
WORKERS_MAX: Final = 4096
HINTS_MAX: Final = WORKERS_MAX // 2
"""A table this full takes no hints: those that are heard need the room."""


@unique
class WorkerRole(StrEnum):
    """What a process does."""

    PREFILL = "prefill"
    DECODE = "decode"
    KVSTORE = "kvstore"
    MERGER = "merger"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """What the router weighs; rates are None before the first measurement."""

    active: int = 0
    queued: int = 0
    queued_tokens: int = 0
    active_max: int = 0
    token_rate: float | None = None
    pages_free: int = 0
    pages_total: int = 0
    tpot_s: float | None = None
    prefill_token_rate: float | None = None
    queue_max: int | None = None
    """Requests that may wait beyond the most at once; None: it did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A worker's own full record. `label` is None for mergers; `label_bytes` is its wire form."""

    worker_id: str
    role: WorkerRole
    incarnation: int
    node_id: str
    address: str
    kvstore_address: str
    model: str
    label: PairLabel | None = None
    label_bytes: bytes = b""
    version: str = ""
    is_draining: bool = False
    is_ready: bool = False
    progress: int = 0
    load: WorkerLoad = field(default_factory=WorkerLoad)
    metrics_address: str = ""
    is_degraded: bool = False
    context_max: int = 0

    @property
    def prompt_token_rate(self) -> float | None:
        """How fast it computes prompts, tokens a second: a decode worker's `token_rate` is that of
        its steps. None: not known.
        """
        load = self.load
        return load.token_rate if self.role is WorkerRole.PREFILL else load.prefill_token_rate


@dataclass(slots=True)
class _Entry:
    record: WorkerRecord
    heard_s: float
    progressed_s: float
    retired: deque[int]
    is_hint: bool = False
    doubted_s: float | None = None
    doubted_progress: int = 0

    def trust_again(self, record: WorkerRecord, now_s: float) -> None:
        """Whether a beat ends the doubt: of another run, or of one that lives and moves on."""
        if self.doubted_s is None:
            return
        has_moved = record.progress > self.doubted_progress
        is_late_enough = now_s - self.doubted_s >= DOUBT_S
        if record.incarnation != self.record.incarnation or (has_moved and is_late_enough):
            self.doubted_s = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker as this gateway sees it; `reason` is None when it gets new work."""

    record: WorkerRecord
    silence_s: float
    reason: str | None


class Registry:
    """Worker records by id."""

    def __init__(self, *, dead_after_s: float = DEAD_AFTER_S, lease_s: float = LEASE_S) -> None:
        assert 0.0 < dead_after_s <= lease_s
        self._dead_after_s = dead_after_s
        self._lease_s = lease_s
        self._entries: dict[str, _Entry] = {}

    @property
    def dead_after_s(self) -> float:
        """Silence after which a worker counts as dead."""
        return self._dead_after_s

    def observe(self, record: WorkerRecord, now_s: float) -> bool:
        """Take a heartbeat. False when it was ignored: an old incarnation, or the table is full."""
        entry = self._entries.get(record.worker_id)
        if entry is None or entry.is_hint:
            if entry is None and len(self._entries) >= WORKERS_MAX:
                return False
            retired: deque[int] = deque(maxlen=RETIRED_MAX)
            self._entries[record.worker_id] = _Entry(record, now_s, now_s, retired)
            return True
        if record.incarnation in entry.retired:
            return False
        entry.trust_again(record, now_s)
        if record.incarnation != entry.record.incarnation:
            entry.retired.append(entry.record.incarnation)
            entry.progressed_s = now_s
        elif record.progress != entry.record.progress:
            entry.progressed_s = now_s
        entry.record, entry.heard_s = record, now_s
        return True

    def doubt(self, worker_id: str, incarnation: int, now_s: float) -> None:
        """A connection to exactly this run broke or was refused: no new work until it is heard."""
        entry = self._entries.get(worker_id)
        if entry is None or entry.record.incarnation != incarnation or entry.is_hint:
            return
        entry.doubted_s, entry.doubted_progress = now_s, entry.record.progress

    def is_doubting(self, now_s: float) -> bool:
        """Whether some worker would be routable but for a doubt that its next beats may end."""
        return any(
            entry.doubted_s is not None and now_s - entry.heard_s <= self._dead_after_s
            for entry in self._entries.values()
        )

    def hint(self, record: WorkerRecord, now_s: float) -> bool:
        """Note a worker that another gateway heard: known, shown, never alive. False if known."""
        if record.worker_id in self._entries or len(self._entries) >= HINTS_MAX:
            return False
        self._entries[record.worker_id] = _Entry(record, now_s, now_s, deque(), is_hint=True)
        return True

    def is_hint(self, worker_id: str) -> bool:
        """Whether all that is known of a worker is a hint."""
        entry = self._entries.get(worker_id)
        return entry is not None and entry.is_hint

    def expire(self, now_s: float) -> tuple[WorkerRecord, ...]:
        """Drop and return the workers that were silent for a lease."""
        gone = [
            entry.record
            for entry in self._entries.values()
            if now_s - entry.heard_s > self._lease_s
        ]
        for record in gone:
            del self._entries[record.worker_id]
        return tuple(gone)

    def get(self, worker_id: str) -> WorkerRecord | None:
        """The last record of a worker, heard lately or not."""
        entry = self._entries.get(worker_id)
        return None if entry is None else entry.record

    def is_alive(self, worker_id: str, incarnation: int, now_s: float) -> bool:
        """Whether exactly this run of the worker was heard lately and has not come to a halt."""
        entry = self._entries.get(worker_id)
        return (
            entry is not None
            and not entry.is_hint
            and entry.record.incarnation == incarnation
            and now_s - entry.heard_s <= self._dead_after_s
            and now_s - entry.progressed_s <= STUCK_AFTER_S
        )

    def heard_s(self, worker_id: str, incarnation: int) -> float | None:
        """When exactly this run of the worker was heard last; None if it is not known."""
        entry = self._entries.get(worker_id)
        if entry is None or entry.is_hint or entry.record.incarnation != incarnation:
            return None
        return entry.heard_s

    def statuses(self, now_s: float) -> tuple[WorkerStatus, ...]:
        """Every known worker, ordered by id."""
        return tuple(
            WorkerStatus(
                record=entry.record,
                silence_s=max(0.0, now_s - entry.heard_s),
                reason=self._unroutable(entry, now_s),
            )
            for _, entry in sorted(self._entries.items())
        )

    def routable(self, role: WorkerRole, now_s: float) -> tuple[WorkerRecord, ...]:
        """Workers of a role that get new work, ordered by id."""
        return tuple(self._routable(role, now_s))

    def _routable(self, role: WorkerRole, now_s: float) -> Iterator[WorkerRecord]:
        for _, entry in sorted(self._entries.items()):
            if entry.record.role is role and self._unroutable(entry, now_s) is None:
                yield entry.record

    def _unroutable(self, entry: _Entry, now_s: float) -> str | None:
        if entry.is_hint:
            return "known from another gateway, not heard yet"
        silence_s = now_s - entry.heard_s
        if silence_s > self._dead_after_s:
            return f"silent for {silence_s:.1f} s"
        if entry.record.is_draining:
            return "draining"
        if not entry.record.is_ready:
            return "not ready"
        if now_s - entry.progressed_s > STUCK_AFTER_S:
            return "no progress"
        if entry.doubted_s is not None:
            return "its connection broke, and it was not heard since"
        return None

"""Finding the arena of before, and what the log says stands in it: the I/O around `restart`.

Owns the choice between the arena that is there and a fresh one, and the order of a start: arena,
log, tables; then, what nobody waits for: zeroing what is not referred to, and most lookups.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from dataclasses import dataclass
from typing import Final

import structlog

from baton.clock import WaitingClock
from services.kvstore.arena import Arena, ArenaSpec
from services.kvstore.identity import Identity
from services.kvstore.log.reader import LogScan
from services.kvstore.log.recovery import Recovered, recover
from services.kvstore.log.store_records import CloseReason
from services.kvstore.pages import PageState
from services.kvstore.restart import Standing, index_some, restore
from services.kvstore.runtime import Runtime
from services.kvstore.state import LogState

ARENA_ID_BYTES: Final = 16
FIRST_BLOCKS: Final = 4096
TURN_BLOCKS: Final = 256
TURN_PAUSE_S: Final = 0.005

_log = structlog.stdlib.get_logger("services.kvstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reattached:
    """The arena to use, what the log came to over it, and the worker slots locked in it."""

    arena: Arena
    recovered: Recovered
    locked_slots: frozenset[int]


def reattach(spec: ArenaSpec, scan: LogScan, nvme_id: bytes | None = None) -> Reattached:
    """The arena that `spec` describes, the one of before if it can be trusted, and what the log
    says of it and of the NVMe file `nvme_id`. Blocking.
    """
    arena = Arena.open(spec)
    if not arena.is_reattached:
        recovered = recover(scan, nvme_id=nvme_id)
        return Reattached(arena=arena, recovered=recovered, locked_slots=frozenset())
    recovered = recover(scan, arena.spec.arena_id, nvme_id)
    locked = frozenset(arena.locked_slots())
    if not (recovered.may_lack_grants and locked):
        return Reattached(arena=arena, recovered=recovered, locked_slots=locked)
    # Somebody may still write pages, and which ones the damaged log does not say.
    _log.error("arena_given_up", workers=len(locked))
    arena.remove()
    arena = Arena.open(spec)
    recovered = recover(scan, nvme_id=nvme_id)
    return Reattached(arena=arena, recovered=recovered, locked_slots=frozenset())


def new_arena_id() -> bytes:
    """The id of an arena that is made, if one has to be."""
    return secrets.token_bytes(ARENA_ID_BYTES)


def take_in(runtime: Runtime, found: Reattached, identity: Identity) -> deque[LogState]:
    """Fills the store's tables; needs its log and page work running. Returns the logs whose blocks
    are still to be made findable (`index_rest`).
    """
    recovered, pool = found.recovered, runtime.core.pool
    runtime.writer.living = recovered.living
    standing = Standing(
        is_same_arena=found.arena.is_reattached,
        locked_slots=found.locked_slots,
        model=identity.model,
        class_text=identity.class_text,
    )
    restored = restore(runtime.store, recovered, standing, runtime.now())
    for log_id in recovered.damaged:
        _drop_damaged(runtime, log_id)
    index_some(runtime.store, restored.unindexed, FIRST_BLOCKS)
    runtime.former.update(restored.former)
    runtime.workers.restore(restored.slot_owners, found.locked_slots)
    runtime.pages.soil(restored.dirty, lambda page: pool.state(page) is PageState.FREE)
    counts = pool.counts()
    _log.info(
        "store_restored",
        arena="reattached" if found.arena.is_reattached else "fresh",
        logs=len(runtime.core.logs),
        ended=len(recovered.dropped),
        damaged=len(recovered.damaged),
        written=restored.written,
        cut=restored.cut,
        prefixes=len(runtime.core.prefixes),
        prefixes_lost=len(restored.lost_prefixes),
        pages_live=counts.live,
        pages_shared=counts.shared,
        pages_granted=counts.granted,
        pages_quarantined=counts.quarantined,
    )
    return restored.unindexed


async def index_rest(
    runtime: Runtime, logs: deque[LogState], clock: WaitingClock, stopping: asyncio.Event
) -> None:
    """Makes the blocks of `logs` findable, a few at a time: a miss costs time only."""
    while logs and not stopping.is_set():
        index_some(runtime.store, logs, TURN_BLOCKS)
        await clock.wait(stopping, TURN_PAUSE_S)


def _drop_damaged(runtime: Runtime, log_id: bytes) -> None:
    """A log whose records are damaged is gone, loudly; its writers are told that they are stale."""
    generation = runtime.core.tombstones.get(log_id, 0) + 1
    runtime.core.tombstones[log_id] = generation
    runtime.journal.closed_by_id(log_id, generation, CloseReason.DAMAGED)
    _log.error("log_given_up", log_id=log_id.hex())

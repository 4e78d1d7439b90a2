"""Being attached to the node's kvstore: waiting for it at start, finding it again after a restart.

Owns the waits and the order of a re-attach: every holder stops writing, and parks its log or lets
go; the worker attaches again, naming what was parked; the arena of now is mapped and the engine
computes over it; then the parked logs come back under their new generations. Whether it is the
arena of before shows in their replay: KV that is not there is recomputed from tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog

from baton.arena.client import ArenaClient, AttachedArena, KVStoreClient, WorkerIdentity
from baton.arena.replay import HeldLog
from baton.clock import WaitingClock
from baton.errors import Reason, ServiceError
from baton.worker.engine import WorkerParts

PAUSE_S: Final = 0.25
SILENT_AFTER_S: Final = 3.0
SAYS_AGAIN_S: Final = 5.0
LET_GO_TIMEOUT_S: Final = 30.0

_PASSING: Final = frozenset(
    {Reason.WORKER_LOST, Reason.DRAINING, Reason.DEADLINE_EXCEEDED, Reason.QUEUE_FULL}
)
_log = structlog.stdlib.get_logger("baton.worker")


class Waiting:
    """Pauses between tries, saying what is waited for now and then; refusals end the wait."""

    def __init__(self, kvstore: str, clock: WaitingClock, stopping: asyncio.Event) -> None:
        self._kvstore = kvstore
        self._clock = clock
        self._stopping = stopping
        self._said_s: float | None = None

    async def pause(self, error: ServiceError) -> None:
        """Wait a moment if `error` may pass by itself and nobody stops us, else raise it.

        A refused ticket passes: the kvstore restarted between its two answers.
        """
        if error.reason not in _PASSING and error.field != "ticket":
            raise error
        now_s = self._clock.monotonic_s()
        if self._said_s is None or now_s - self._said_s >= SAYS_AGAIN_S:
            self._said_s = now_s
            _log.info("waiting_for_kvstore", kvstore=self._kvstore, reason=error.reason.value)
        if await self._clock.wait(self._stopping, PAUSE_S):
            raise error


async def attach_when_there(
    store: KVStoreClient,
    identity: WorkerIdentity,
    waiting: Waiting,
    held: Callable[[], Sequence[HeldLog]] = tuple,
) -> AttachedArena:
    """Attach as soon as the kvstore answers, naming what is held then; raises its refusal."""
    while True:
        try:
            attached = await ArenaClient.attach(store, identity, held())
        except ServiceError as error:
            await waiting.pause(error)
            continue
        _log.info(
            "arena_attached",
            node_id=attached.node_id,
            worker_slot=attached.worker_slot,
            pages=attached.arena.shape.page_count,
            lease_s=attached.lease_s,
            logs_kept=len(attached.held),
        )
        return attached


class Attachment:
    """Whether this worker is attached, and the way back when it is not."""

    def __init__(self, parts: WorkerParts, kvstore: str, clock: WaitingClock) -> None:
        self._parts = parts
        self._kvstore = kvstore
        self._clock = clock
        self._is_attached = True
        self._heard_s: float | None = clock.monotonic_s()
        self.exclusive = asyncio.Lock()
        """Held by whoever renews leases or attaches again: parked logs are in no renewal."""

    @property
    def is_usable(self) -> bool:
        """False while the kvstore does not know us or does not answer: no new work can be done."""
        if not self._is_attached or self._heard_s is None:
            return False
        return self._clock.monotonic_s() - self._heard_s <= SILENT_AFTER_S

    def heard(self, error: ServiceError | None = None) -> None:
        """The kvstore answered a call, or the call failed with `error`."""
        if error is None:
            self._heard_s = self._clock.monotonic_s()
        elif error.reason is Reason.WORKER_LOST:
            self._heard_s = None

    async def restore(self, stopping: asyncio.Event) -> None:
        """The kvstore does not know us: stop everything, attach again, map the arena of now.

        Raises ServiceError when the kvstore refuses this worker for good, or when something still
        writes: the process must end then, because its mapping may not go. `exclusive` is held.
        """
        _log.warning("kvstore_forgot_us", held=len(self._parts.held))
        await self._restore(stopping, None)

    async def renew(self, stopping: asyncio.Event, change: Callable[[], Awaitable[None]]) -> None:
        """Stop everything, `change` what this worker is, attach again as that. Raises as `restore`
        does, and what `change` raises: nothing steps or writes then, and this worker is not ready.
        """
        async with self.exclusive:
            await self._restore(stopping, change)

    async def _restore(
        self, stopping: asyncio.Event, change: Callable[[], Awaitable[None]] | None
    ) -> None:
        self._is_attached = False
        held = self._parts.held
        held.lose_store()
        if not await held.wait_none_writing(LET_GO_TIMEOUT_S):
            raise ServiceError(
                Reason.WORKER_LOST, "sequences did not stop after the kvstore was lost"
            )
        if change is not None:
            await change()
        waiting = Waiting(self._kvstore, self._clock, stopping)
        try:
            attached = await attach_when_there(
                self._parts.store, self._parts.identity, waiting, held.parked
            )
        except ServiceError:
            if stopping.is_set():
                return
            raise
        await self._parts.compute.run(lambda: self._parts.engine.remap(attached.arena))
        for stop_reading in self._parts.before_unmap:
            await stop_reading()
        self._parts.arena.adopt(attached.arena)
        held.return_kept(attached.held)
        self._is_attached = True
        self.heard()

"""Pages for sequences that have none: asked of the store, or of whoever has to give way.

Owns what a refusal leads to. Never grants a page itself and never chooses who gives way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from baton.clock import WaitingClock
from baton.errors import Reason, ServiceError
from baton.worker.engine import WorkerParts
from services.decode.machine import Sequence
from services.decode.members import Member
from services.decode.queueing import PAGES_SHORT, Queue

STARVED_MAX_S: Final = 10.0
"""After so long without an answer a sequence ends."""

GIVES_WAY_AFTER_S: Final = 1.0
"""A sequence to which nobody has to give way waits so long for a page, then gives its own up."""

ASK_AGAIN_S: Final = 0.25

Spawn = Callable[[Coroutine[Any, Any, None]], object]


class Feeder:
    """Asks for pages, for one sequence at most once at a time."""

    def __init__(self, parts: WorkerParts, queue: Queue, clock: WaitingClock) -> None:
        self._parts = parts
        self._queue = queue
        self._clock = clock
        self._came = asyncio.Event()

    def freed(self) -> None:
        """Somebody left or gave its pages up: those that wait for one ask at once."""
        self._came.set()
        self._came = asyncio.Event()

    def feed(self, member: Member, sequence: Sequence, spawn: Spawn) -> None:
        """A sequence cannot step for want of a page."""
        now_s = self._clock.monotonic_s()
        if member.starved_s is None:
            member.starved_s = now_s
        if member.is_granting:
            return
        if now_s - member.starved_s >= STARVED_MAX_S:
            sequence.fail(
                ServiceError(
                    Reason.PAGES_EXHAUSTED,
                    f"no page came free for this sequence within {STARVED_MAX_S:g} s",
                    retry_after_s=1.0,
                )
            )
            return
        member.is_granting = True
        spawn(self._grant(member, sequence))

    async def _grant(self, member: Member, sequence: Sequence) -> None:
        wanted = sequence.missing_pages()
        try:
            pages = await self._parts.store.grant(
                sequence.log.log_id,
                sequence.log.generation,
                wanted,
                f"{sequence.request_id}-{sequence.log.generation}-{sequence.tokens}",
            )
            sequence.table.grant(pages)
        except ServiceError as error:
            await self._refused(member, sequence, error, wanted)
        finally:
            member.is_granting = False

    async def _refused(
        self, member: Member, sequence: Sequence, error: ServiceError, wanted: int
    ) -> None:
        came = self._came
        # It may have ended, or been cancelled, while it was refused: then nobody wants the pages.
        if member.sequence is sequence and self._queue.has(member):
            if error.reason in PAGES_SHORT:
                self._short(member, sequence, error, wanted)
            elif not error.row.retryable:
                sequence.fail(error)
        await self._clock.wait(came, ASK_AGAIN_S)

    def _short(self, member: Member, sequence: Sequence, error: ServiceError, wanted: int) -> None:
        """There is no page: somebody gives way, the sequence itself at last."""
        is_tenants = error.reason is Reason.QUOTA_EXCEEDED
        if self._queue.make_way(member, is_tenants=is_tenants):
            member.starved_s = None
            return
        if is_tenants and can_never_fit(error, wanted, sequence.table.row_count):
            sequence.fail(error)
            return
        starved_s = member.starved_s
        now_s = self._clock.monotonic_s()
        if starved_s is not None and now_s - starved_s >= GIVES_WAY_AFTER_S:
            self._queue.give_way(member, is_tenants=is_tenants)


def can_never_fit(error: ServiceError, wanted: int, has: int) -> bool:
    """Whether a refusal for the quota says that `has` pages and `wanted` more are over it all."""
    try:
        wanted_bytes = int(error.metadata["wanted_bytes"])
        quota_bytes = int(error.metadata["quota_bytes"])
    except (KeyError, ValueError):
        return False
    return wanted > 0 and (has + wanted) * (wanted_bytes // wanted) > quota_bytes

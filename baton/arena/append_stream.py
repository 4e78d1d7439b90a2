"""The worker's append stream: one group commit at a time, acked before the next is sent.

Owns the stream's life: it opens on first use, introduces the worker once, matches acks by batch id,
and is given up whole when anything does not fit. One batch is in flight at a time, so no sequence
ever has more than one unacked append. Never decides what to do with a refused entry.

Invariant: a batch is resent only after its stream was given up; the store accepts the same token at
the same position and generation again without effect, so a resend never doubles a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from baton.arena.append import AppendEntry, AppendOutcome
from baton.arena.client import AppendCall, AppendCallFactory
from baton.clock import WaitingClock
from baton.errors import Reason, ServiceError


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendLimits:
    """`entries_max` per batch; `ack_timeout_s` for one try; `give_up_s` over all tries of a store
    that is silent, `unreachable_s` of one that is not there.
    """

    entries_max: int = 1024
    ack_timeout_s: float = 5.0
    give_up_s: float = 10.0
    unreachable_s: float = 4.0
    retry_pause_s: float = 0.2


class AppendStream:
    """Appends for all sequences of one worker. Safe to call from several tasks; they queue."""

    def __init__(
        self,
        open_call: AppendCallFactory,
        introduction: tuple[str, str],
        clock: WaitingClock,
        limits: AppendLimits | None = None,
    ) -> None:
        self._open_call = open_call
        self._introduction = introduction
        self._clock = clock
        self._limits = limits or AppendLimits()
        self._call: AppendCall | None = None
        self._next_batch_id = 1
        self._turn = asyncio.Lock()
        self._never = asyncio.Event()

    async def append(self, entries: Sequence[AppendEntry]) -> tuple[AppendOutcome, ...]:
        """Log one token per entry in one group commit; one outcome per entry, in order.

        Raises ServiceError WORKER_LOST when the store could not be reached or did not ack in time,
        or the store's refusal of the stream (UNAUTHENTICATED and the like).
        """
        assert 0 < len(entries) <= self._limits.entries_max, len(entries)
        assert len({entry.log_id for entry in entries}) == len(entries), "one entry per log"
        async with self._turn:
            return await self._until_acked(entries)

    def close(self) -> None:
        """Give the stream up; the next append opens another."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    async def _until_acked(self, entries: Sequence[AppendEntry]) -> tuple[AppendOutcome, ...]:
        began_s = self._clock.monotonic_s()
        while True:
            try:
                return await self._attempt(entries)
            except ServiceError as error:
                left_s = began_s + self._patience_s(error) - self._clock.monotonic_s()
                if not _may_pass(error) or left_s <= self._limits.retry_pause_s:
                    raise
            await self._clock.wait(self._never, self._limits.retry_pause_s)

    def _patience_s(self, error: ServiceError) -> float:
        """A store that is silent may be frozen and go on; one that is gone may come back."""
        limits = self._limits
        if error.reason is Reason.TRANSFER_TIMEOUT:
            return limits.give_up_s
        return limits.unreachable_s

    async def _attempt(self, entries: Sequence[AppendEntry]) -> tuple[AppendOutcome, ...]:
        is_done = False
        try:
            async with asyncio.timeout(self._limits.ack_timeout_s):
                outcomes = await self._exchange(entries)
            is_done = True
            return outcomes
        except TimeoutError as error:
            raise ServiceError(
                Reason.TRANSFER_TIMEOUT,
                f"the kvstore did not ack an append within {self._limits.ack_timeout_s:g} s",
            ) from error
        finally:
            # A cancelled or failed exchange may leave an ack behind, which would answer the next
            # batch.
            if not is_done:
                self.close()

    async def _exchange(self, entries: Sequence[AppendEntry]) -> tuple[AppendOutcome, ...]:
        introduction = None
        if self._call is None:
            self._call = self._open_call()
            introduction = self._introduction
        call, batch_id = self._call, self._next_batch_id
        self._next_batch_id += 1
        await call.send(batch_id, entries, introduction=introduction)
        acked_id, outcomes = await call.receive()
        if acked_id != batch_id or len(outcomes) != len(entries):
            raise ServiceError(
                Reason.INTERNAL,
                f"the kvstore acked batch {acked_id} with {len(outcomes)} outcomes; batch "
                f"{batch_id} has {len(entries)}",
            )
        return outcomes


def _may_pass(error: ServiceError) -> bool:
    # QUEUE_FULL: the store's log takes no more now, for want of space or because the disk is slow.
    return error.reason in (Reason.WORKER_LOST, Reason.TRANSFER_TIMEOUT, Reason.QUEUE_FULL)

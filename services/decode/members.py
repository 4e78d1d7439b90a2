"""The sequences of a decode worker: for whom, running, joining or waiting for a store.

Owns their states between two steps. Never computes, never calls anybody.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from baton.arena.checksums import SlotChecksum
from baton.arena.replay import HeldLog
from baton.errors import Reason, ServiceError
from baton.worker.output import OutputToken
from services.decode.events import StartOrder
from services.decode.machine import Sequence
from services.decode.outbox import Outbox
from services.decode.scheduler import Cause
from services.decode.tracks import Track


@dataclass(slots=True)
class Member:
    """A sequence in the worker, with whom it is for and until when.

    It waits (neither `sequence` nor `joining`), is on its way (`joining`), or runs (`sequence`).
    `next_index`: the output token its gateway lacks, where it joins. `resting`: its log as it
    waits, without a writer. `is_unsealed`: its prompt is still to be prefilled here.
    """

    order: StartOrder
    outbox: Outbox
    deadline_s: float | None
    track: Track
    sequence: Sequence | None = None
    joining: asyncio.Task[None] | None = None
    failure: ServiceError | None = None
    orphaned_s: float | None = None
    starved_s: float | None = None
    is_granting: bool = False
    has_lost_store: bool = False
    is_suspended: bool = False
    resting: HeldLog | None = None
    next_index: int = 0
    is_unsealed: bool = False
    is_announced: bool = False
    is_received: bool = False
    preempted: Cause | None = None
    told_s: float | None = None

    @property
    def request_id(self) -> str:
        """The internal request id."""
        return self.order.request_id

    @property
    def is_waiting(self) -> bool:
        """It neither runs nor joins."""
        return self.sequence is None and self.joining is None

    @property
    def may_be_preempted(self) -> bool:
        """It runs, and nothing else is about to stop it."""
        sequence = self.sequence
        if sequence is None or self.is_suspended:
            return False
        return sequence.failure is None and not sequence.is_finished

    def reattach(self, next_index: int, outbox: Outbox) -> None:
        """Its gateway came back, over another stream, and lacks tokens from `next_index` on."""
        self.outbox, self.orphaned_s = outbox, None
        if self.sequence is None:
            self.next_index, self.told_s, self.is_announced = next_index, None, False

    def preempt(self, cause: Cause) -> None:
        """It stops at the end of its step and gives its log up."""
        assert self.may_be_preempted
        self.preempted, self.is_suspended = cause, True

    def lose_store(self) -> None:
        """The store is gone: a running sequence is parked between two steps; what joins notices by
        its own calls.
        """
        self.has_lost_store = True
        self.is_suspended = self.sequence is not None

    def forget_loss(self) -> bool:
        """Whether the store was lost since it was asked last."""
        has_lost_store, self.has_lost_store = self.has_lost_store, False
        return has_lost_store

    def joined(self, sequence: Sequence) -> None:
        """It may step from now on, unless its store was lost in the meantime."""
        self.sequence, self.joining = sequence, None
        self.is_suspended = self.has_lost_store
        if self.failure is not None:
            sequence.fail(self.failure)

    def end(self, error: ServiceError) -> None:
        """It must end: a running sequence between two steps, a joining one at once."""
        self.failure = self.failure or error
        if self.sequence is not None:
            self.sequence.fail(error)
        elif self.joining is not None:
            self.joining.cancel()


def require_same_log(member: Member, order: StartOrder) -> bool:
    """Whether `order` asks for the very run that `member` is; False if that run is over.

    ALREADY_EXISTS when it is of another log, INVALID_REQUEST when it asks for tokens that are not.
    """
    if order.log.log_id != member.order.log.log_id:
        raise ServiceError(
            Reason.ALREADY_EXISTS, "this request id runs another log here", field="request_id"
        )
    sequence, known = member.sequence, {member.order.log.generation}
    known |= {log.generation for log in (member.resting, sequence and sequence.log) if log}
    # What joins was asked for its first missing token already; what waits can be told another.
    is_joining = member.joining is not None and order.next_index != member.next_index
    if order.log.generation not in known or is_joining:
        return False
    if sequence is not None and order.next_index > sequence.delivered_tokens:
        raise ServiceError(
            Reason.INVALID_REQUEST,
            f"next_index is {order.next_index}, but only {sequence.delivered_tokens} tokens "
            "are logged",
            field="next_index",
        )
    return True


@dataclass(frozen=True, slots=True)
class Stepped:
    """One member's result of a step: a token with its slot's checksum, or an error."""

    member: Member
    sequence: Sequence
    outcome: tuple[OutputToken, SlotChecksum] | ServiceError

"""What waits: for a slot, or for pages. Its log is given up meanwhile, and taken again.

Owns the way from the scheduler's decisions to logs without a writer and back. Never computes, never
decides who goes first (`scheduler`), never touches a running sequence but to mark it.

A log that waits has no writer: its tokens stay, its KV may be evicted and is computed again then.
So whoever waits holds no page that somebody who runs could use.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

import structlog

from baton.arena.replay import HeldLog
from baton.clock import Clock
from baton.errors import Reason, ServiceError
from baton.tracing import span
from baton.worker.engine import WorkerParts
from services.decode.events import Failed, Produced, Started, StartOrder, Waiting
from services.decode.machine import Sequence
from services.decode.measures import DecodeMeasures
from services.decode.members import Member
from services.decode.scheduler import Cause, SlotScheduler

PAGES_SHORT: Final = frozenset({Reason.PAGES_EXHAUSTED, Reason.QUOTA_EXCEEDED})
"""There are no pages now: the arena's, or the tenant's."""

PAGES_PATIENCE_S: Final = 300.0
"""So long pages may be refused to a sequence that cannot even begin to go on."""

TOLD_EVERY_S: Final = 5.0
"""How often a gateway hears that its sequence waits."""

_ENDED_PHASES: Final = frozenset({"ended", "kept"})

_log = structlog.stdlib.get_logger("baton.decode")


class Loop(Protocol):
    """What the queue needs of the runner."""

    def begin(self, member: Member, joining: Callable[[], Awaitable[None]]) -> None:
        """Run something beside the loop that ends in a joined, waiting or removed member."""
        ...

    def join(self, member: Member) -> Awaitable[None]:
        """Bring it to where it can step."""
        ...

    def post(self, member: Member, what: Started | Produced | Waiting | Failed) -> None:
        """Tell its gateway."""
        ...

    def wake(self) -> None:
        """Something changed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTools:
    """What the queue works with."""

    parts: WorkerParts
    slots: SlotScheduler
    measures: DecodeMeasures
    clock: Clock
    members: dict[str, Member]


class Queue:
    """The members that wait, and how they come to run."""

    def __init__(self, tools: QueueTools, loop: Loop) -> None:
        self._parts = tools.parts
        self._slots = tools.slots
        self._measures = tools.measures
        self._clock = tools.clock
        self._members = tools.members
        self._loop = loop

    # --- between two steps --------------------------------------------------------------------

    def turn(self) -> None:
        """Who has to make room does, who may go on goes on, and who waits is told so."""
        now_s = self._clock.monotonic_s()
        while (found := self._slots.preemption(now_s)) is not None:
            if not self._preempt(self._members[found.request_id], found.cause):
                break
            self.admit()
        self.admit()
        for member in self._members.values():
            if self._slots.is_waiting(member.request_id):
                self._tell(member, now_s)

    def enter(self, member: Member) -> None:
        """A new one: it goes on at once, or waits without its log. QUEUE_FULL past the bound."""
        self._slots.enter(member.order.claim, self._clock.monotonic_s())
        self._members[member.request_id] = member
        self.admit()
        if self._slots.is_waiting(member.request_id):
            self._slots.unsettle(member.request_id)
            self._loop.begin(member, lambda: self._hold(member))
            self._tell(member, self._clock.monotonic_s())

    def admit(self) -> None:
        """Those that get a slot now begin to join."""
        for request_id in self._slots.admit(self._clock.monotonic_s()):
            member = self._members[request_id]
            now_s = self._clock.monotonic_s()
            if not member.is_announced:
                waited_s = now_s - member.track.received_s
                self._measures.admitted(member.order.claim.service_class, waited_s)
            member.track.admitted(now_s)
            self._loop.begin(member, partial(self._loop.join, member))

    def _tell(self, member: Member, now_s: float) -> None:
        if member.told_s is not None and now_s - member.told_s < TOLD_EVERY_S:
            return
        member.told_s = now_s
        self._loop.post(
            member,
            Waiting(waiting=self._slots.waiting, is_preempted=member.is_announced),
        )

    def has(self, member: Member) -> bool:
        """Whether the member is still here: not removed, and not another run of its request."""
        return self._members.get(member.request_id) is member

    # --- preemption ---------------------------------------------------------------------------

    def make_way(self, member: Member, *, is_tenants: bool) -> bool:
        """Pages were refused to the member. False: nobody has to give way to it.

        One at a time: whoever was chosen gives its pages up before another is.
        """
        if self._slots.is_making_room():
            return True
        victim = self._slots.victim_for_pages(member.request_id, is_tenants=is_tenants)
        if victim == member.request_id:
            return False
        self._preempt(self._members[victim], Cause.PAGES, is_tenants=is_tenants)
        return True

    def give_way(self, member: Member, *, is_tenants: bool) -> None:
        """The member itself is the one that waits for pages."""
        self._preempt(member, Cause.PAGES, is_tenants=is_tenants)

    def _preempt(self, member: Member, cause: Cause, *, is_tenants: bool = False) -> bool:
        """False: it is about to stop by itself."""
        if not member.may_be_preempted:
            return False
        now_s = self._clock.monotonic_s()
        self._slots.preempt(member.request_id, cause, now_s, is_tenants=is_tenants)
        member.preempt(cause)
        member.told_s = None
        self._measures.preempted(cause)
        _log.info("sequence_preempted", request_id=member.request_id, cause=cause.value)
        self._loop.wake()
        return True

    async def give_up(self, member: Member, sequence: Sequence) -> None:
        """A preempted sequence, no step and no append of which is under way, and whose log is held
        no more: the log stays without a writer.
        """
        member.next_index, member.is_unsealed = sequence.delivered_tokens, False
        with span("park", request_id=member.request_id):
            member.resting = await self._park(member, sequence.log, is_writer=True)
        self._rest(member)

    # --- logs given up and taken again --------------------------------------------------------

    async def order_of(self, member: Member) -> StartOrder:
        """What to join: the log as it waits, and the tokens its gateway lacks.

        A log whose prompt is still to be computed here is taken again, with pages for it.
        """
        order = replace(
            member.order, next_index=member.next_index, is_local_prefill=member.is_unsealed
        )
        if member.resting is None:
            return order
        if member.is_unsealed:
            return replace(order, log=await self._taken(order, member.resting))
        return replace(order, log=member.resting)

    async def wait_again(self, member: Member, error: ServiceError) -> None:
        """It could not join for want of pages: it waits, and somebody may have to give way.

        Raises the error when it was refused for too long, and what the store says of the log.
        """
        now_s = self._clock.monotonic_s()
        since_s = self._slots.pages_wanted_s(member.request_id)
        if since_s is not None and now_s - since_s > PAGES_PATIENCE_S:
            raise error
        is_tenants = error.reason is Reason.QUOTA_EXCEEDED
        victim = None
        if not self._slots.is_making_room():
            victim = self._slots.victim_for_pages(member.request_id, is_tenants=is_tenants)
        self._slots.refused_pages(member.request_id, now_s, is_tenants=is_tenants, victim=victim)
        if victim not in (None, member.request_id):
            self._preempt(self._members[victim], Cause.PAGES, is_tenants=is_tenants)
        _log.info("join_waits", request_id=member.request_id, reason=error.reason.value)
        await self._rest_as_it_stands(member)
        self._rest(member)

    async def _hold(self, member: Member) -> None:
        """A new one has to wait."""
        order = member.order
        try:
            member.resting = await self._park(member, order.log, is_writer=order.is_local_prefill)
        except ServiceError as error:
            if error.metadata.get("phase") not in _ENDED_PHASES:
                raise
            # Its answer is complete: there is nothing to write, only to tell.
        self._rest(member)

    def _rest(self, member: Member) -> None:
        """Its log is given up: it may be admitted."""
        member.joining = None
        self._slots.settle(member.request_id)
        self._loop.wake()

    async def _rest_as_it_stands(self, member: Member) -> None:
        """A join broke off somewhere: the log is ours at another generation, or as it was."""
        order, resting = member.order, member.resting
        view = await self._parts.store.replay(
            order.log.log_id, order.capability, self._parts.geometry.block_tokens
        )
        head = view.head
        is_writer = head.writer_worker_id == self._parts.worker_id
        if resting is not None and head.generation == resting.generation and not is_writer:
            return
        if not is_writer and (resting is not None or head.generation != order.log.generation):
            raise ServiceError(
                Reason.STALE_GENERATION,
                "another owner has the log by now",
                field="generation",
            )
        member.is_unsealed = not head.is_sealed
        member.resting = await self._park(member, head.held, is_writer=is_writer)

    async def _park(self, member: Member, log: HeldLog, *, is_writer: bool) -> HeldLog:
        return await self._parts.store.park(
            log,
            member.order.capability,
            request_id=f"{member.request_id}-park-{log.generation}",
            is_writer=is_writer,
        )

    async def _taken(self, order: StartOrder, resting: HeldLog) -> HeldLog:
        """An unsealed log is ours again, with pages for its prompt and a token."""
        block_tokens = self._parts.geometry.block_tokens
        view = await self._parts.store.replay(
            resting.log_id, order.capability, block_tokens, generation=resting.generation
        )
        wanted = -(-view.head.prompt_tokens // block_tokens) + 1 - len(view.rows)
        taken = await self._parts.store.take(
            resting,
            order.capability,
            pages=max(1, wanted),
            request_id=f"{order.request_id}-again-{resting.generation}",
            compute_tokens_per_s=self._measures.compute_rate,
        )
        return HeldLog(log_id=resting.log_id, generation=taken.generation)

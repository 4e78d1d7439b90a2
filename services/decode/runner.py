"""The decode loop: one step for all sequences, one group commit, events after the ack.

Owns the sequences and the order of a turn: between steps sequences end, join and are preempted; a
step is computed while the append before it is acked; then its own append goes out. Who goes first
is the scheduler's, what waits the queue's (`queueing`), pages the feeder's (`feeding`). Never talks
protobuf, never grants a page, never raises a generation.

When the kvstore is lost the sequences stop at the end of their step, park their logs and go on from
them once this worker is attached again: what was computed and not logged is computed again, what
was logged and not sent is sent. Their gateways see a pause.

Invariant: a log is given up (`held.discard`) only between steps, when no thread writes its pages.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import structlog

from baton.arena.append import AppendOutcome
from baton.arena.append_stream import AppendStream
from baton.clock import WaitingClock
from baton.errors import Reason, ServiceError
from baton.faults import faults
from baton.ids import new_error_id
from baton.stages import DECODE_QUEUE_WAIT
from baton.tracing import span
from baton.worker.engine import WorkerParts
from services.decode.events import (
    Failed,
    Produced,
    Reservation,
    SequenceEvent,
    Started,
    StartOrder,
    Waiting,
)
from services.decode.feeding import Feeder
from services.decode.joining import Holder, Joined, Joiner
from services.decode.machine import Sequence, StepInput
from services.decode.measures import DecodeMeasures
from services.decode.members import Member, Stepped, require_same_log
from services.decode.outbox import Outbox
from services.decode.queueing import PAGES_SHORT, Queue, QueueTools
from services.decode.scheduler import SlotScheduler
from services.decode.stepping import Batch, Entries, compute, entries_of
from services.decode.tracks import Track

IDLE_TURN_S: Final = 0.25
PARK_AFTER_S: Final = 10.0
PARK_DRAINING_AFTER_S: Final = 1.0
"""A worker that drains does not wait long for a gateway that is gone."""

_log = structlog.stdlib.get_logger("baton.decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerTools:
    """What the loop works with."""

    parts: WorkerParts
    slots: SlotScheduler
    appends: AppendStream
    joiner: Joiner
    measures: DecodeMeasures
    clock: WaitingClock
    step_tokens_max: int | None = None


class Runner:
    """All sequences of one decode worker."""

    def __init__(self, tools: RunnerTools) -> None:
        self._parts = tools.parts
        self._slots = tools.slots
        self._appends = tools.appends
        self._joiner = tools.joiner
        self._measures = tools.measures
        self._clock = tools.clock
        self._step_tokens_max = tools.step_tokens_max
        self._members: dict[str, Member] = {}
        queue_tools = QueueTools(
            parts=tools.parts,
            slots=tools.slots,
            measures=tools.measures,
            clock=tools.clock,
            members=self._members,
        )
        self._queue = Queue(queue_tools, self)
        self._feeder = Feeder(tools.parts, self._queue, tools.clock)
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._tasks: asyncio.TaskGroup | None = None
        self._is_draining = False
        self._acked_s: float | None = None
        self._measures.active.follow(lambda: float(self._slots.active))
        self._measures.reserved.follow(lambda: float(self._slots.reserved))
        self._measures.used_pages.follow(lambda: float(self._used_pages()))
        self._measures.follow_waiting(self._slots)

    @property
    def is_draining(self) -> bool:
        """No new sequences are taken."""
        return self._is_draining

    @property
    def active(self) -> int:
        """Sequences here, joining and waiting ones included."""
        return len(self._members)

    async def run(self, stopping: asyncio.Event) -> None:
        """The loop, until `stopping` is set; what still runs then is handed back with an error."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._wake_on(stopping))
            pending: asyncio.Task[None] | None = None
            while not stopping.is_set():
                if pending is not None and any(m.is_suspended for m in self._members.values()):
                    await pending
                    pending = None
                self._tidy()
                stepped = await self._step()
                if pending is not None:
                    await pending
                elif not stepped:
                    await self._wait()
                entries = entries_of(stepped)
                pending = tasks.create_task(self._append(entries)) if entries else None
            if pending is not None:
                await pending
            self._hand_back()
        self._appends.close()

    def prepare(self, place: Reservation) -> int:
        """Reserve a place for a sequence to come; returns the sequences running now."""
        self._require_taking()
        if place.total_tokens > self._parts.context_max:
            raise ServiceError(
                Reason.PROMPT_TOO_LONG,
                f"the prompt and one token need {place.total_tokens} tokens; this worker holds at "
                f"most {self._parts.context_max}",
                field="prompt_tokens",
            )
        now_s = self._clock.monotonic_s()
        self._slots.reserve(place.request_id, now_s, place.hold_s, place.tenant)
        return self._slots.active

    def start(self, order: StartOrder, outbox: Outbox) -> None:
        """Begin to join a sequence; whatever comes of it is posted to `outbox`."""
        known = self._members.get(order.request_id)
        try:
            if known is not None:
                self._ask_again(known, order, outbox)
                return
            if not self._slots.is_reserved(order.request_id):
                self._require_taking()
            self._queue.enter(self._member(order, outbox))
            self._empty.clear()
        except ServiceError as error:
            outbox.post(SequenceEvent(request_id=order.request_id, what=Failed(error=error)))

    def _member(self, order: StartOrder, outbox: Outbox) -> Member:
        now_s = self._clock.monotonic_s()
        return Member(
            order=replace(order, received_s=now_s),
            outbox=outbox,
            deadline_s=None if order.deadline_s is None else now_s + order.deadline_s,
            track=Track(order.request_id, order.traceparent, now_s),
            next_index=order.next_index,
            is_unsealed=order.is_local_prefill,
        )

    def cancel(self, request_id: str) -> bool:
        """End a sequence between two steps, or give up its reservation; False if unknown."""
        member = self._members.get(request_id)
        if member is None:
            self._slots.leave(request_id)
            return False
        self._measures.cancel_reclaims.add()
        member.end(ServiceError(Reason.CANCELLED, "the request was cancelled"))
        self._wake.set()
        return True

    async def drain_within(self, timeout_s: float) -> int:
        """Take no new sequences; the number that still ran when the wait ended."""
        self._is_draining = True
        self._wake.set()
        await self._clock.wait(self._empty, timeout_s)
        return self.active

    def _ask_again(self, member: Member, order: StartOrder, outbox: Outbox) -> None:
        """A gateway asks again for a sequence that is still here: tell it what it lacks."""
        if not require_same_log(member, order):
            # Another worker had the log meanwhile: what runs here is over, and ends first.
            error = ServiceError(
                Reason.STALE_GENERATION,
                "an older run of this request ends here; ask again in a moment",
                retry_after_s=IDLE_TURN_S,
            )
            self._lose(member, error)
            raise error
        member.reattach(order.next_index, outbox)
        if (sequence := member.sequence) is not None:
            self.post(member, self._joiner.continued(sequence))
            for produced in sequence.delivered_from(order.next_index):
                self.post(member, produced)

    async def join(self, member: Member) -> None:
        """Bring one sequence to where it can step; what finds no pages waits again."""
        holder = Holder(
            on_lost=lambda error: self._lose(member, error),
            on_store_lost=lambda: self._lose_store(member),
        )
        await faults.reach("decode.before_accept")
        with member.track.scope(), span("join", request_id=member.request_id):
            try:
                joined = await self._joiner.join(await self._queue.order_of(member), holder)
            except ServiceError as error:
                if error.reason not in PAGES_SHORT or member.failure is not None:
                    raise
                await self._queue.wait_again(member, error)
                return
        self._announce(member, joined.started)
        self._joined(member, joined)

    def _announce(self, member: Member, started: Started) -> None:
        """Its gateway hears once that it runs here; not again after it was preempted."""
        if member.is_announced:
            return
        member.is_announced = True
        if not member.is_received:
            member.is_received = True
            self._measures.received.add()
        if member.order.is_local_prefill:
            # The first token waited for it, too.
            waited_s = member.track.waited_s
            stages = {DECODE_QUEUE_WAIT: waited_s, **started.stage_seconds}
            started = replace(started, stage_seconds=stages, total_s=started.total_s + waited_s)
        self.post(member, started)

    async def _come_back(self, member: Member, old: Sequence) -> None:
        """Go on with a sequence whose store was lost, once the store is back."""
        with member.track.scope(), span("come_back", request_id=old.request_id):
            joined = await self._joiner.come_back(member.order, old, member.forget_loss)
        _log.info("sequence_goes_on", request_id=old.request_id, sent=old.delivered_tokens)
        self._joined(member, joined)

    async def _answered(self, member: Member, joining: Callable[[], Awaitable[None]]) -> None:
        """Every way out of a join answers its gateway."""
        try:
            await joining()
        except ServiceError as error:
            self._remove(member, member.failure or error)
        except asyncio.CancelledError:
            self._remove(member, member.failure or _handed_back(self._parts.worker_id))
            raise
        except Exception as bug:  # noqa: BLE001  # one sequence's bug must not end the others
            error_id = new_error_id()
            _log.error("join_failed_unexpectedly", error_id=error_id, exc_info=bug)
            self._remove(member, ServiceError.internal(error_id))

    def begin(self, member: Member, joining: Callable[[], Awaitable[None]]) -> None:
        """Run a join beside the loop, in an empty context: the gateway's stream has its own ids."""
        assert self._tasks is not None, "run() is running"

        def never_began(task: asyncio.Task[None]) -> None:
            # A task that is cancelled before its first step runs none of its own clean-up.
            if task.cancelled():
                self._remove(member, member.failure or _handed_back(self._parts.worker_id))

        member.joining = self._tasks.create_task(
            self._answered(member, joining), context=contextvars.Context()
        )
        member.joining.add_done_callback(never_began)

    def _joined(self, member: Member, joined: Joined) -> None:
        member.track.joined(self._clock.monotonic_s())
        for produced in joined.replayed:
            self.post(member, produced)
        member.joining = None
        if joined.sequence is None:
            self._remove(member, None)
            return
        member.joined(joined.sequence)
        self._slots.settle(member.request_id)
        self.wake()

    def wake(self) -> None:
        """Something changed between two steps; who lacks pages asks again."""
        self._feeder.freed()
        self._wake.set()

    def _lose_store(self, member: Member) -> None:
        member.lose_store()
        self._wake.set()

    def _tidy(self) -> None:
        """Between two steps: end what has ended, see to what waits."""
        now_s = self._clock.monotonic_s()
        for member in tuple(self._members.values()):
            self._look_at_time(member, now_s)
            sequence = member.sequence
            if sequence is None:
                if member.is_waiting and member.failure is not None:
                    self._remove(member, member.failure)
                continue
            if sequence.is_finished:
                self._remove(member, None)
            elif sequence.failure is not None:
                self._remove(member, sequence.failure)
            elif member.is_suspended:
                self._park(member, sequence)
            elif sequence.is_starved():
                assert self._tasks is not None
                self._feeder.feed(member, sequence, self._tasks.create_task)
            else:
                member.starved_s = None
        self._queue.turn()

    def _park(self, member: Member, sequence: Sequence) -> None:
        """No step and no append of it is under way: its log waits, for the store or its turn."""
        member.sequence, member.is_suspended, member.starved_s = None, False, None
        member.track.step_dropped()
        if member.preempted is None:
            self.begin(member, lambda: self._come_back(member, sequence))
            return
        member.preempted = None
        # First, so that no renewal names it while the store ends this generation.
        self._parts.held.discard(sequence.log)
        self.begin(member, lambda: self._queue.give_up(member, sequence))

    def _look_at_time(self, member: Member, now_s: float) -> None:
        if member.failure is not None:
            return
        if member.deadline_s is not None and now_s >= member.deadline_s:
            member.end(
                ServiceError(Reason.DEADLINE_EXCEEDED, "the request's deadline passed in decode")
            )
        if not member.outbox.is_closed:
            return
        if member.orphaned_s is None:
            member.orphaned_s = now_s
        elif now_s - member.orphaned_s >= (
            PARK_DRAINING_AFTER_S if self._is_draining else PARK_AFTER_S
        ):
            _log.info("sequence_parked", request_id=member.order.request_id)
            member.end(
                ServiceError(Reason.WORKER_LOST, "the gateway of this sequence did not come back")
            )

    async def _step(self) -> list[Stepped]:
        """One token for every sequence that can step; empty when none can."""
        ready: dict[str, tuple[Member, Sequence, StepInput]] = {}
        for member in self._members.values():
            if member.is_suspended or member.sequence is None:
                continue
            step = member.sequence.next_step()
            if step is not None:
                ready[member.request_id] = (member, member.sequence, step)
        chosen = self._slots.choose_step(tuple(ready), self._step_tokens_max)
        batch: Batch = [ready[request_id] for request_id in chosen]
        if not batch:
            return []
        await faults.reach("decode.step")
        now_s = self._clock.monotonic_s()
        for member, _, _ in batch:
            member.track.step_began(now_s)
        stepped = await self._parts.compute.run(lambda: compute(self._parts, batch))
        self._joiner.stepped(self._clock.monotonic_s() - now_s, len(batch))
        return stepped

    async def _append(self, entries: Entries) -> None:
        """One group commit; its tokens leave as soon as it is acked."""
        began_s = self._clock.monotonic_s()
        try:
            await faults.reach("decode.before_append")
            outcomes = await self._appended(entries)
            if any(sequence.is_first_own for _, sequence, _ in entries):
                await faults.reach("decode.first_token")
        except ServiceError as error:
            _log.warning("append_failed", reason=error.reason.value, sequences=len(entries))
            for member, sequence, _ in entries:
                if error.reason is Reason.NO_WORKER:
                    # The store is back and does not know us: we are about to attach again.
                    self._lose_store(member)
                elif not member.is_suspended:
                    sequence.fail(error)
            return
        now_s = self._clock.monotonic_s()
        accepted = 0
        for (member, sequence, _), outcome in zip(entries, outcomes, strict=True):
            member.track.step_acked(began_s, now_s, len(entries))
            accepted += self._settle(member, sequence, outcome)
        if accepted:
            since_s = self._acked_s
            self._measures.stepped(accepted, 0.0 if since_s is None else now_s - since_s)
        self._acked_s = now_s

    async def _appended(self, entries: Entries) -> tuple[AppendOutcome, ...]:
        """The group commit, as a part of the trace of one of the sequences that are traced."""
        batch = [entry for _, _, entry in entries]
        traced = next((member.track for member, _, _ in entries if member.track.is_stepwise), None)
        if traced is None:
            return await self._appends.append(batch)
        with traced.scope(), span("append", sequences=len(batch)):
            return await self._appends.append(batch)

    def _settle(self, member: Member, sequence: Sequence, outcome: AppendOutcome) -> bool:
        """Post one entry's token; False when it was refused."""
        produced = sequence.acked(outcome)
        if produced is None:
            return False
        self._slots.served(sequence.request_id, 1, self._clock.monotonic_s())
        if self._members.get(sequence.request_id) is member:
            if produced.token.finish_reason is not None:
                produced = replace(produced, stage_seconds=member.track.stages())
            self.post(member, produced)
        return True

    def _lose(self, member: Member, error: ServiceError) -> None:
        member.end(error)
        self._wake.set()

    def post(self, member: Member, what: Started | Produced | Waiting | Failed) -> None:
        """Tell its gateway."""
        member.outbox.post(SequenceEvent(request_id=member.order.request_id, what=what))

    def _remove(self, member: Member, error: ServiceError | None) -> None:
        """The sequence is over: give up log and slot, tell its gateway why if it failed."""
        request_id = member.order.request_id
        if self._members.get(request_id) is not member:
            return
        del self._members[request_id]
        self._slots.leave(request_id)
        if member.sequence is not None:
            self._parts.held.discard(member.sequence.log)
        if error is not None:
            self.post(member, Failed(error=error))
        reason = None if error is None else error.reason
        self._measures.ended(reason)
        self.wake()
        member.track.ended(self._clock.monotonic_s(), None if reason is None else reason.value)
        if not self._members:
            self._acked_s = None
            self._empty.set()

    def _hand_back(self) -> None:
        """The worker stops: every sequence's gateway continues it elsewhere from its log."""
        for member in tuple(self._members.values()):
            error = member.failure or _handed_back(self._parts.worker_id)
            end = member.end if member.joining is not None else partial(self._remove, member)
            end(error)

    def _require_taking(self) -> None:
        if self._is_draining:
            raise ServiceError(
                Reason.DRAINING,
                f"{self._parts.worker_id} takes no new sequences",
                retry_after_s=1.0,
            )

    def _used_pages(self) -> int:
        sequences = (member.sequence for member in self._members.values())
        return sum(item.table.row_count for item in sequences if item is not None)

    async def _wait(self) -> None:
        """Until something happens, or it is time to look at deadlines."""
        self._joiner.idled()
        await self._clock.wait(self._wake, IDLE_TURN_S)
        self._wake.clear()

    async def _wake_on(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._wake.set()


def _handed_back(worker_id: str) -> ServiceError:
    return ServiceError(
        Reason.DRAINING, f"{worker_id} is stopping; the log stays, continue it elsewhere"
    )

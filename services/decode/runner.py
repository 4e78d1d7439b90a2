"""The decode loop: one step for all sequences, one group commit, events after the ack.

Owns the sequences and the order of a turn: between steps sequences end and join; a step is computed
while the append before it is acked; then its own append goes out. Never talks protobuf, never
grants a page, never raises a generation.

Invariant: a log is given up (`held.discard`) only between steps, when no thread writes its pages.
"""

from __future__ import annotations

import asyncio
import contextvars
from dataclasses import dataclass, replace
from typing import Final

import structlog

from baton.arena.append import AppendEntry, AppendOutcome
from baton.arena.append_stream import AppendStream
from baton.arena.checksums import SlotChecksum, slot_checksum
from baton.clock import WaitingClock
from baton.errors import Reason, ServiceError
from baton.faults import faults
from baton.ids import new_error_id
from baton.tracing import span
from baton.worker.engine import WorkerParts
from baton.worker.output import OutputToken
from services.decode.events import Failed, Produced, SequenceEvent, Started, StartOrder
from services.decode.joining import Joiner
from services.decode.machine import Sequence, StepInput
from services.decode.measures import DecodeMeasures
from services.decode.outbox import Outbox
from services.decode.scheduler import SlotScheduler
from services.decode.tracks import Track

IDLE_TURN_S: Final = 0.25
PARK_AFTER_S: Final = 10.0
STARVED_MAX_S: Final = 10.0

_log = structlog.stdlib.get_logger("baton.decode")


@dataclass(slots=True)
class _Member:
    """A sequence in the worker, with whom it is for and until when."""

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

    def end(self, error: ServiceError) -> None:
        """It must end: a running sequence between two steps, a joining one at once."""
        self.failure = self.failure or error
        if self.sequence is not None:
            self.sequence.fail(error)
        elif self.joining is not None:
            self.joining.cancel()


@dataclass(frozen=True, slots=True)
class _Stepped:
    """One member's result of a step: a token with its slot's checksum, or an error."""

    member: _Member
    sequence: Sequence
    outcome: tuple[OutputToken, SlotChecksum] | ServiceError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerTools:
    """What the loop works with."""

    parts: WorkerParts
    slots: SlotScheduler
    appends: AppendStream
    joiner: Joiner
    measures: DecodeMeasures
    clock: WaitingClock


class Runner:
    """All sequences of one decode worker."""

    def __init__(self, tools: RunnerTools) -> None:
        self._parts = tools.parts
        self._slots = tools.slots
        self._appends = tools.appends
        self._joiner = tools.joiner
        self._measures = tools.measures
        self._clock = tools.clock
        self._members: dict[str, _Member] = {}
        self._wake = asyncio.Event()
        self._never = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._tasks: asyncio.TaskGroup | None = None
        self._is_draining = False
        self._acked_s: float | None = None
        self._measures.active.follow(lambda: float(self._slots.active))
        self._measures.reserved.follow(lambda: float(self._slots.reserved))
        self._measures.used_pages.follow(lambda: float(self._used_pages()))

    @property
    def is_draining(self) -> bool:
        """No new sequences are taken."""
        return self._is_draining

    @property
    def active(self) -> int:
        """Sequences here, joining ones included."""
        return len(self._members)

    async def run(self, stopping: asyncio.Event) -> None:
        """The loop, until `stopping` is set; what still runs then is handed back with an error."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._wake_on(stopping))
            pending: asyncio.Task[None] | None = None
            while not stopping.is_set():
                self._tidy()
                stepped = await self._step()
                if pending is not None:
                    await pending
                elif not stepped:
                    await self._wait()
                entries = self._entries(stepped)
                pending = tasks.create_task(self._append(entries)) if entries else None
            if pending is not None:
                await pending
            self._hand_back()
        self._appends.close()

    def prepare(self, request_id: str, total_tokens: int, hold_s: float) -> int:
        """Reserve a slot for a sequence to come; returns the sequences running now."""
        self._require_taking()
        if total_tokens > self._parts.context_max:
            raise ServiceError(
                Reason.PROMPT_TOO_LONG,
                f"the prompt and one token need {total_tokens} tokens; this worker holds at most "
                f"{self._parts.context_max}",
                field="prompt_tokens",
            )
        self._slots.reserve(request_id, self._clock.monotonic_s(), hold_s)
        return self._slots.active

    def start(self, order: StartOrder, outbox: Outbox) -> None:
        """Begin to join a sequence; whatever comes of it is posted to `outbox`."""
        known = self._members.get(order.request_id)
        try:
            if known is not None:
                self._come_back(known, order, outbox)
                return
            self._require_taking()
            self._slots.enter(order.request_id, self._clock.monotonic_s())
        except ServiceError as error:
            outbox.post(SequenceEvent(request_id=order.request_id, what=Failed(error=error)))
            return
        now_s = self._clock.monotonic_s()
        deadline_s = None if order.deadline_s is None else now_s + order.deadline_s
        track = Track(order.request_id, order.traceparent, now_s)
        order = replace(order, received_s=now_s)
        member = _Member(order=order, outbox=outbox, deadline_s=deadline_s, track=track)
        self._members[order.request_id] = member
        self._empty.clear()
        # An empty context: the gateway's stream has a life and ids of its own.
        assert self._tasks is not None, "start() after run()"
        member.joining = self._tasks.create_task(self._join(member), context=contextvars.Context())

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
        await self._clock.wait(self._empty, timeout_s)
        return self.active

    def _come_back(self, member: _Member, order: StartOrder, outbox: Outbox) -> None:
        """A gateway asks again for a sequence that still runs here: tell it what it lacks."""
        sequence = member.sequence
        if order.log.log_id != member.order.log.log_id:
            raise ServiceError(
                Reason.ALREADY_EXISTS, "this request id runs another log here", field="request_id"
            )
        known = {member.order.log.generation}
        if sequence is not None:
            known.add(sequence.log.generation)
        is_same = sequence is not None or order.next_index == member.order.next_index
        if order.log.generation not in known or not is_same:
            # Another worker had the log meanwhile: what runs here is over, and ends first.
            error = ServiceError(
                Reason.STALE_GENERATION,
                "an older run of this request ends here; ask again in a moment",
                retry_after_s=IDLE_TURN_S,
            )
            self._lose(member, error)
            raise error
        if sequence is None:
            member.outbox, member.orphaned_s = outbox, None
            return
        if order.next_index > sequence.delivered_tokens:
            raise ServiceError(
                Reason.INVALID_REQUEST,
                f"next_index is {order.next_index}, but only {sequence.delivered_tokens} tokens "
                "are logged",
                field="next_index",
            )
        member.outbox, member.orphaned_s = outbox, None
        self._post(member, self._joiner.continued(sequence))
        for produced in sequence.delivered_from(order.next_index):
            self._post(member, produced)

    async def _join(self, member: _Member) -> None:
        """Bring one sequence to where it can step; every way out answers its gateway."""
        try:
            await faults.reach("decode.before_accept")
            with member.track.scope(), span("join", request_id=member.order.request_id):
                joined = await self._joiner.join(
                    member.order, lambda error: self._lose(member, error)
                )
        except ServiceError as error:
            self._remove(member, member.failure or error)
            return
        except asyncio.CancelledError:
            self._remove(member, member.failure or _handed_back(self._parts.worker_id))
            raise
        except Exception as bug:  # noqa: BLE001  # one sequence's bug must not end the others
            error_id = new_error_id()
            _log.error("join_failed_unexpectedly", error_id=error_id, exc_info=bug)
            self._remove(member, ServiceError.internal(error_id))
            return
        self._measures.received.add()
        member.track.joined(self._clock.monotonic_s())
        self._post(member, joined.started)
        for produced in joined.replayed:
            self._post(member, produced)
        member.joining = None
        if joined.sequence is None:
            self._remove(member, None)
            return
        member.sequence = joined.sequence
        if member.failure is not None:
            member.sequence.fail(member.failure)
        self._wake.set()

    def _tidy(self) -> None:
        """Between two steps: end what has ended, see to what waits."""
        now_s = self._clock.monotonic_s()
        for member in tuple(self._members.values()):
            self._look_at_time(member, now_s)
            sequence = member.sequence
            if sequence is None:
                continue
            if sequence.is_finished:
                self._remove(member, None)
            elif sequence.failure is not None:
                self._remove(member, sequence.failure)
            elif sequence.is_starved():
                self._feed(member, sequence, now_s)
            else:
                member.starved_s = None

    def _look_at_time(self, member: _Member, now_s: float) -> None:
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
        elif now_s - member.orphaned_s >= PARK_AFTER_S:
            _log.info("sequence_parked", request_id=member.order.request_id)
            member.end(
                ServiceError(Reason.WORKER_LOST, "the gateway of this sequence did not come back")
            )

    def _feed(self, member: _Member, sequence: Sequence, now_s: float) -> None:
        """Ask for pages for a sequence that has none; give up after a while."""
        if member.starved_s is None:
            member.starved_s = now_s
        if now_s - member.starved_s >= STARVED_MAX_S:
            sequence.fail(
                ServiceError(
                    Reason.PAGES_EXHAUSTED,
                    f"no page came free for this sequence within {STARVED_MAX_S:g} s",
                    retry_after_s=1.0,
                )
            )
        elif not member.is_granting and self._tasks is not None:
            member.is_granting = True
            self._tasks.create_task(self._grant(member, sequence))

    async def _grant(self, member: _Member, sequence: Sequence) -> None:
        try:
            pages = await self._parts.store.grant(
                sequence.log.log_id,
                sequence.log.generation,
                sequence.missing_pages(),
                f"{sequence.request_id}-{sequence.log.generation}-{sequence.tokens}",
            )
            sequence.table.grant(pages)
        except ServiceError as error:
            if not error.row.retryable:
                sequence.fail(error)
            await self._clock.wait(self._never, IDLE_TURN_S)
        finally:
            member.is_granting = False
            self._wake.set()

    async def _step(self) -> list[_Stepped]:
        """One token for every sequence that can step; empty when none can."""
        batch: list[tuple[_Member, Sequence, StepInput]] = []
        for member in self._members.values():
            step = None if member.sequence is None else member.sequence.next_step()
            if step is not None and member.sequence is not None:
                batch.append((member, member.sequence, step))
        if not batch:
            return []
        await faults.reach("decode.step")
        now_s = self._clock.monotonic_s()
        for member, _, _ in batch:
            member.track.step_began(now_s)
        return await self._parts.compute.run(lambda: self._compute(batch))

    def _compute(self, batch: list[tuple[_Member, Sequence, StepInput]]) -> list[_Stepped]:
        """In the compute thread: forward, sample, checksum."""
        logits = self._parts.engine.decode_step(
            [step.token_id for _, _, step in batch],
            [step.position for _, _, step in batch],
            [step.pages for _, _, step in batch],
        )
        stepped = []
        for row, (member, sequence, step) in enumerate(batch):
            outcome: tuple[OutputToken, SlotChecksum] | ServiceError
            try:
                token = sequence.output.choose(logits[row])
                checksum = slot_checksum(self._parts.arena, sequence.table, step.position)
                outcome = (token, checksum)
            except ServiceError as error:
                outcome = error
            stepped.append(_Stepped(member, sequence, outcome))
        self._parts.progress.worked()
        return stepped

    def _entries(self, stepped: list[_Stepped]) -> list[tuple[_Member, Sequence, AppendEntry]]:
        """What to log after a step, for the sequences that still may."""
        entries = []
        for item in stepped:
            if isinstance(item.outcome, ServiceError):
                item.sequence.fail(item.outcome)
                continue
            item.sequence.computed(*item.outcome)
            entry = None if item.sequence.failure is not None else item.sequence.entry()
            if entry is not None:
                entries.append((item.member, item.sequence, entry))
        return entries

    async def _append(self, entries: list[tuple[_Member, Sequence, AppendEntry]]) -> None:
        """One group commit; its tokens leave as soon as it is acked."""
        began_s = self._clock.monotonic_s()
        try:
            outcomes = await self._appended(entries)
            if any(sequence.is_first_own for _, sequence, _ in entries):
                await faults.reach("decode.first_token")
        except ServiceError as error:
            _log.warning("append_failed", reason=error.reason.value, sequences=len(entries))
            for _, sequence, _ in entries:
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

    async def _appended(
        self, entries: list[tuple[_Member, Sequence, AppendEntry]]
    ) -> tuple[AppendOutcome, ...]:
        """The group commit, as a part of the trace of one of the sequences that are traced."""
        batch = [entry for _, _, entry in entries]
        traced = next((member.track for member, _, _ in entries if member.track.is_stepwise), None)
        if traced is None:
            return await self._appends.append(batch)
        with traced.scope(), span("append", sequences=len(batch)):
            return await self._appends.append(batch)

    def _settle(self, member: _Member, sequence: Sequence, outcome: AppendOutcome) -> bool:
        """Post one entry's token; False when it was refused."""
        produced = sequence.acked(outcome)
        if produced is None:
            return False
        if self._members.get(sequence.request_id) is member:
            if produced.token.finish_reason is not None:
                produced = replace(produced, stage_seconds=member.track.stages())
            self._post(member, produced)
        return True

    def _lose(self, member: _Member, error: ServiceError) -> None:
        member.end(error)
        self._wake.set()

    def _post(self, member: _Member, what: Started | Produced | Failed) -> None:
        member.outbox.post(SequenceEvent(request_id=member.order.request_id, what=what))

    def _remove(self, member: _Member, error: ServiceError | None) -> None:
        """The sequence is over: give up log and slot, tell its gateway why if it failed."""
        request_id = member.order.request_id
        if self._members.get(request_id) is not member:
            return
        del self._members[request_id]
        self._slots.leave(request_id)
        if member.sequence is not None:
            self._parts.held.discard(member.sequence.log)
        if error is not None:
            self._post(member, Failed(error=error))
        reason = None if error is None else error.reason
        self._measures.ended(reason)
        member.track.ended(self._clock.monotonic_s(), None if reason is None else reason.value)
        if not self._members:
            self._acked_s = None
            self._empty.set()

    def _hand_back(self) -> None:
        """The worker stops: every sequence's gateway continues it elsewhere from its log."""
        for member in tuple(self._members.values()):
            error = member.failure or _handed_back(self._parts.worker_id)
            if member.sequence is not None:
                self._remove(member, error)
            else:
                member.end(error)

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
        await self._clock.wait(self._wake, IDLE_TURN_S)
        self._wake.clear()

    async def _wake_on(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._wake.set()


def _handed_back(worker_id: str) -> ServiceError:
    return ServiceError(
        Reason.DRAINING, f"{worker_id} is stopping; the log stays, continue it elsewhere"
    )

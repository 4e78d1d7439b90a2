"""The life of one sequence: open, prefill, hand-off, tokens, end; and what if a leg fails.

Owns the order of calls: a prefill that fails before its seal is tried again with a new log, a
decode worker that is lost after it is replaced at the next token (`recovery` says by whom). What
was sent to the client is never sent again. Cleaning up after an early end is handed to `cleanup`.

Invariant: deltas leave with consecutive indexes from 0, each once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from baton.errors import Reason, ServiceError
from baton.faults import faults
from baton.stages import KV_TRANSFER, OPEN, PER_TOKEN_DECODE, PREFILL_RPC, ROUTE, STAGES
from baton.tracing import current_trace, format_traceparent, record_span, span
from services.gateway.clients import Sealed
from services.gateway.decode_wire import StartCommand
from services.gateway.events import (
    Admitted,
    Completed,
    Event,
    Exactness,
    FinishReason,
    FirstToken,
    KvSource,
    ServingMode,
    TokenDelta,
    TokenUsage,
)
from services.gateway.handoffs import HandOff
from services.gateway.inbox import Failed, Inbox, Leaving, Lost, Started, Token
from services.gateway.legs import DECODE_RIGHTS, PREFILL_RIGHTS, Leg, Plan
from services.gateway.moving import Brought, LogMover
from services.gateway.opening import LogOpener, SequenceParts
from services.gateway.recovery import RESUMABLE, Loss, Recovery
from services.gateway.request import SequenceRequest
from services.gateway.reuse import RequestReuse
from services.gateway.side_by_side import together, watched
from services.gateway.timing import Timeline

_log = structlog.stdlib.get_logger("baton.gateway.sequence")

START_S_MAX: Final = 20.0
SLOWEST_TOKEN_RATE: Final = 50.0
"""Prompt tokens per second of a worker that is of any use."""

Emit = Callable[[Event], Awaitable[None]]


@dataclass(slots=True)
class _Progress:
    """What was learned on the way; ends up in `Completed`."""

    delivered: int = 0
    first_token_s: float | None = None
    exactness: Exactness = Exactness.EQUIVALENT
    usage: TokenUsage | None = None
    is_announced: bool = False
    is_recomputed: bool = False
    is_local_fallback: bool = False
    transfer_bytes: int = 0
    transport: str | None = None
    token_ids: list[int] = field(default_factory=list)
    brought: Brought | None = None
    move_s: float = 0.0
    moved_bytes: int = 0


class Sequence:
    """Runs one request; `emit` gets Admitted, FirstToken, TokenDelta..., Completed."""

    def __init__(self, parts: SequenceParts, request: SequenceRequest, emit: Emit) -> None:
        self._parts = parts
        self._request = request
        self._emit = emit
        self._progress = _Progress()
        self._timeline = Timeline(parts.clock, request.stage_seconds, request.ready_s)
        self._opener = LogOpener(parts, request, self._timeline)
        self._mover = LogMover(parts, self._opener)
        self._reuse = RequestReuse(parts.planner.reuse, request)
        self._recovery = Recovery(
            parts,
            request.request_id,
            len(request.prompt.token_ids),
            self._reuse.expected,
            tenant=request.tenant.name,
        )

    async def run(self) -> None:
        """To the end of the answer; raises ServiceError when there is no (more) answer."""
        self._timeline.began()
        left_s = self._request.deadline_s - self._parts.clock.monotonic_s()
        bound = asyncio.timeout(max(left_s, 0.0))
        try:
            with span("sequence", request_id=self._request.request_id):
                async with bound:
                    await self._attempts()
        except TimeoutError as error:
            if not bound.expired():
                raise
            raise ServiceError(
                Reason.DEADLINE_EXCEEDED,
                "the request's deadline passed; ask for fewer tokens or allow more time",
            ) from error
        finally:
            self._recovery.end()

    async def _attempts(self) -> None:
        while True:
            with self._timeline.stage(ROUTE):
                plan = await self._recovery.plan()
            try:
                await self._attempt(plan)
                return
            except ServiceError as error:
                if self._progress.delivered:
                    raise
                self._recovery.require_retry(plan, error)
                self._timeline.attempt_failed()
                self._progress.is_recomputed = error.reason is not Reason.QUEUE_FULL
                self._progress.is_local_fallback = self._recovery.is_local_only

    async def _attempt(self, plan: Plan) -> None:
        """One log from Open to its end; an early end fences it."""
        await faults.reach("gateway.before_open")
        with self._timeline.stage(OPEN):
            leg = await self._opener.open(plan)
        self._reuse.opened(plan.kvstore_address, leg.cached_tokens)
        is_complete = False
        try:
            with span("announce"):
                await self._announce(leg)
            if plan.prefill is None:
                await self._decode(leg, next_index=0)
            else:
                await self._remote(leg)
            is_complete = True
        finally:
            self._parts.cleanup.end(leg, is_complete=is_complete)

    async def _announce(self, leg: Leg) -> None:
        if self._progress.is_announced:
            return
        self._progress.is_announced = True
        plan = leg.plan
        await self._emit(
            Admitted(
                request_id=self._request.request_id,
                log_id=leg.log_id,
                prompt_tokens=len(self._request.prompt.token_ids),
                prefill_worker_id=None if plan.prefill is None else plan.prefill.worker_id,
                decode_worker_id=plan.decode.worker_id,
                mode=self._mode(leg),
            )
        )

    # --- prefill -----------------------------------------------------------------------------

    async def _remote(self, leg: Leg) -> None:
        """Prefill apart, then hand the sealed log to the decode worker."""
        leg.is_running = True
        with self._timeline.stage(PREFILL_RPC, worker=leg.plan.writer.worker_id):
            sealed = await together(self._prefilled(leg), self._mover.expect(leg))
        self._timeline.prefilled(None, sealed.stage_seconds, sealed.total_s)
        self._recovery.prefilled()
        leg.is_running, leg.is_sealed = False, True
        self._reuse.sealed(leg.home)
        self._progress.exactness = sealed.exactness
        leg.cached_tokens = sealed.usage.cached_tokens
        if sealed.first is None:
            raise ServiceError(Reason.INTERNAL, "the prefill worker sealed without a first token")
        if sealed.first.finish is not None:
            self._progress.usage = sealed.usage
        if sealed.first.finish is not None:
            await self._deliver(leg, sealed.first)
            await self._complete(leg, sealed.first.finish)
            return
        await self._decode(leg, next_index=1, first=sealed.first)

    async def _prefilled(self, leg: Leg) -> Sealed:
        """The prefill's end; WORKER_LOST as soon as its worker is silent."""
        running = self._parts.prefills.run(
            leg,
            self._opener.capability(leg.log_id, PREFILL_RIGHTS),
            timeout_s=max(self._opener.left_s(), 0.001),
        )
        return await watched(running, self._recovery.until_silent(leg.plan.writer))

    # --- decode ------------------------------------------------------------------------------

    async def _decode(self, leg: Leg, next_index: int, first: TokenDelta | None = None) -> None:
        """Tokens from `next_index` to the last, over lost workers. `first` is the one before it,
        which is sent as soon as the worker was told to go on.
        """
        while True:
            if self._mover.is_needed(leg):
                await self._deliver_first(leg, first)
                await self._bring(leg)
            loss = await self._attached_stretch(leg, next_index, first)
            if loss is None:
                return
            # Before the seal there is nothing to go on from: the next attempt starts over.
            if not leg.is_sealed:
                raise loss.error
            worker = await self._recovery.replacement(leg, loss)
            _log.info(
                "sequence_resumed",
                request_id=self._request.request_id,
                lost=leg.plan.decode.worker_id,
                decode=worker.worker_id,
                index=self._progress.delivered,
            )
            leg.plan = replace(leg.plan, decode=worker)
            next_index = self._progress.delivered

    async def _bring(self, leg: Leg) -> None:
        """The log comes to the decode worker's kvstore, or one with the same tokens does."""
        before = leg.home
        brought = await self._mover.bring(leg, self._progress.token_ids)
        if leg.home != before:
            self._reuse.moved(before, leg.home, leg.cached_tokens)
        progress = self._progress
        progress.brought = brought
        progress.is_recomputed = progress.is_recomputed or brought.is_recomputed
        progress.move_s += brought.seconds
        progress.moved_bytes += brought.transfer_bytes

    async def _attached_stretch(
        self, leg: Leg, next_index: int, first: TokenDelta | None
    ) -> Loss | None:
        """Tokens from one worker over cut connections: before another takes the log, the worker is
        asked whether it still runs the sequence. One that is dead refuses at once.
        """
        cut: Loss | None = None
        while True:
            had = self._progress.delivered
            loss = await self._stretch(leg, next_index, first)
            if loss is None or not loss.is_cut:
                return loss
            if cut is not None and self._progress.delivered == had:
                return cut
            cut, next_index = loss, self._progress.delivered

    async def _stretch(self, leg: Leg, next_index: int, first: TokenDelta | None) -> Loss | None:
        """Tokens from one worker: None after the last one, or how it was lost."""
        began_s = self._parts.clock.monotonic_s()
        handed = self._parts.handoffs.begun() if leg.is_sealed else nullcontext(HandOff())
        with span("decode", worker=leg.plan.decode.worker_id), handed as handoff:
            return await self._started_stretch(leg, next_index, first, (handoff, began_s))

    async def _started_stretch(
        self,
        leg: Leg,
        next_index: int,
        first: TokenDelta | None,
        begun: tuple[HandOff, float],
    ) -> Loss | None:
        handoff, began_s = begun
        try:
            stream = self._parts.streams.to(leg.plan.decode)
            inbox = stream.start(self._start(leg, next_index))
        except ServiceError as error:
            await self._deliver_first(leg, first)
            if error.reason not in RESUMABLE:
                raise
            return Loss(error=error, since_s=began_s, lost_s=began_s)
        leg.is_running, leg.is_reserved = True, False
        try:
            await self._deliver_first(leg, first)
            loss = await self._consume(leg, inbox, began_s, handoff)
        finally:
            if not inbox.is_closed:
                stream.stop(leg.request.request_id)
            stream.forget(leg.request.request_id)
        leg.is_running = False
        return loss

    def _start(self, leg: Leg, next_index: int) -> StartCommand:
        trace = current_trace()
        return StartCommand(
            request_id=leg.request.request_id,
            log_id=leg.log_id,
            generation=leg.generation,
            capability=self._opener.capability(leg.log_id, DECODE_RIGHTS),
            next_index=next_index,
            is_local_prefill=not leg.is_sealed,
            deadline_in_s=max(self._opener.left_s(), 0.001),
            traceparent=None if trace is None else format_traceparent(trace),
            start_s_max=self._start_s_max(leg),
            tenant=leg.request.tenant,
        )

    def _start_s_max(self, leg: Leg) -> float:
        """A sealed log is taken and replayed at once; at worst its KV is computed again."""
        if not leg.is_sealed:
            return math.inf
        tokens = len(self._request.prompt.token_ids) + self._progress.delivered
        return START_S_MAX + tokens / SLOWEST_TOKEN_RATE

    async def _consume(
        self, leg: Leg, inbox: Inbox, heard_s: float, handoff: HandOff
    ) -> Loss | None:
        """Deliver events to the last token (None), or to the loss of the worker."""
        clock, began_s = self._parts.clock, heard_s
        while True:
            match await inbox.get():
                case Started() as started:
                    handoff.received()
                    self._note_start(leg, started, began_s)
                case Token() as token:
                    before_s, heard_s = heard_s, clock.monotonic_s()
                    leg.is_sealed = True
                    if token.usage is not None:
                        self._progress.usage = token.usage
                        leg.cached_tokens = token.usage.cached_tokens
                    await self._deliver(leg, token.delta)
                    if token.delta.finish is not None:
                        self._timeline.note(token.stage_seconds)
                        await self._complete(leg, token.delta.finish)
                        # Its way from the worker, and on to the answer, is in no span of theirs.
                        ended_s = clock.monotonic_s()
                        record_span("last_token", current_trace(), (before_s, ended_s))
                        return None
                case Lost() as lost:
                    _log.warning("decode_lost", worker=leg.plan.decode.worker_id, why=lost.why)
                    return Loss(
                        error=_lost(leg),
                        since_s=lost.since_s,
                        lost_s=clock.monotonic_s(),
                        is_cut=lost.is_cut,
                    )
                case Leaving():
                    if self._recovery.may_move(leg):
                        now_s = clock.monotonic_s()
                        return Loss(error=_left(leg), since_s=now_s, lost_s=now_s)
                case Failed() as failed:
                    if failed.error.reason not in RESUMABLE:
                        raise failed.error
                    # Alive, but it lost the log or its store: since its last token.
                    return Loss(error=failed.error, since_s=heard_s, lost_s=clock.monotonic_s())

    def _note_start(self, leg: Leg, started: Started, began_s: float) -> None:
        leg.generation = max(leg.generation, started.generation)
        progress = self._progress
        if leg.is_sealed:
            record_span("handoff", current_trace(), (began_s, self._parts.clock.monotonic_s()))
            stages = dict(started.stage_seconds or {KV_TRANSFER: started.kv_transfer_s})
            stages[KV_TRANSFER] = stages.get(KV_TRANSFER, 0.0) + progress.move_s
            self._timeline.note(stages)
            # Bytes that came over the network count as they did; what is mapped counts once.
            progress.transfer_bytes += progress.moved_bytes or started.transfer_bytes
            moved = None if progress.brought is None else progress.brought.transport
            progress.transport = moved or started.transport or progress.transport
            progress.move_s, progress.moved_bytes = 0.0, 0
            return
        record_span("local_prefill", current_trace(), (began_s, self._parts.clock.monotonic_s()))
        progress.exactness = started.exactness
        self._timeline.prefilled(began_s, started.stage_seconds, started.total_s)

    # --- delivering --------------------------------------------------------------------------

    async def _deliver_first(self, leg: Leg, first: TokenDelta | None) -> None:
        if first is not None:
            await self._deliver(leg, first)

    async def _deliver(self, leg: Leg, delta: TokenDelta) -> None:
        """Send one token on, if it is the next; one that was sent before is dropped."""
        progress = self._progress
        if delta.index < progress.delivered:
            return
        if delta.index > progress.delivered:
            raise ServiceError(
                Reason.INTERNAL,
                f"token {delta.index} came where {progress.delivered} was due; the answer ends",
            )
        if progress.first_token_s is None:
            progress.first_token_s = self._timeline.first_token()
            await self._emit(
                FirstToken(
                    mode=self._mode(leg),
                    exactness=progress.exactness,
                    kv_source=self._kv_source(leg),
                    cached_tokens=leg.cached_tokens,
                )
            )
        progress.delivered += 1
        progress.token_ids.append(delta.token_id)
        self._recovery.progressed()
        await self._emit(delta)

    async def _complete(self, leg: Leg, finish: FinishReason) -> None:
        progress, now_s = self._progress, self._parts.clock.monotonic_s()
        if finish in (FinishReason.CANCELLED, FinishReason.ERROR):
            raise ServiceError(Reason.CANCELLED, f"the worker ended the answer as {finish.value}")
        assert progress.first_token_s is not None
        self._reuse.ended(leg.home, progress.token_ids)
        prompt_tokens = len(self._request.prompt.token_ids)
        usage = TokenUsage(
            prompt_tokens=prompt_tokens,
            cached_tokens=min(leg.cached_tokens, prompt_tokens),
            completion_tokens=progress.delivered,
        )
        elapsed_s = now_s - self._request.received_s
        ttft_s = progress.first_token_s - self._request.received_s
        per_token_s = (elapsed_s - ttft_s) / max(progress.delivered - 1, 1)
        self._timeline.note({PER_TOKEN_DECODE: per_token_s, **dict.fromkeys(STAGES, 0.0)})
        label, prefill = leg.plan.writer.label, leg.plan.prefill
        await self._emit(
            Completed(
                finish=finish,
                usage=usage,
                exactness=progress.exactness,
                exactness_reason="" if label is None else label.numeric_class.text,
                kv_source=self._kv_source(leg),
                mode=self._mode(leg),
                log_id=leg.log_id,
                generation=leg.generation,
                position=prompt_tokens + progress.delivered,
                kvstore_address=leg.home,
                prefill_worker_id=None if prefill is None else prefill.worker_id,
                decode_worker_id=leg.plan.decode.worker_id,
                time_to_first_token_s=ttft_s,
                elapsed_s=elapsed_s,
                first_token_s=progress.first_token_s,
                stage_seconds=self._timeline.stages,
                prefix_id=leg.prefix_id,
                resumed=self._recovery.resumes,
                routing=leg.plan.decision.reason,
                is_fallback=leg.plan.decision.is_fallback or progress.is_local_fallback,
                transfer_bytes=progress.transfer_bytes,
                transport=progress.transport,
                brought=None if progress.brought is None else progress.brought.how.value,
                hidden_transfer_share=(
                    None if progress.brought is None else progress.brought.hidden_share
                ),
            )
        )

    def _mode(self, leg: Leg) -> ServingMode:
        is_apart = leg.plan.prefill is not None
        return ServingMode.DISAGGREGATED if is_apart else ServingMode.AGGREGATED

    def _kv_source(self, leg: Leg) -> KvSource:
        if self._progress.is_recomputed:
            return KvSource.RECOMPUTED
        return KvSource.REMOTE if leg.plan.prefill is not None else KvSource.LOCAL


def _lost(leg: Leg) -> ServiceError:
    return ServiceError(
        Reason.WORKER_LOST,
        "the decode worker was lost and the answer could not go on elsewhere; "
        "send the request again",
        metadata={"worker": leg.plan.decode.worker_id},
        retry_after_s=1.0,
    )


def _left(leg: Leg) -> ServiceError:
    return ServiceError(
        Reason.DRAINING,
        "the decode worker is stopping and no other could go on with the answer; try again shortly",
        metadata={"worker": leg.plan.decode.worker_id},
        retry_after_s=1.0,
    )

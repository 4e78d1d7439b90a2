"""Going on when a part of a request died: which faults pass, who is left out, how long is waited.

Owns the patience of one request, the choice of who goes on and what it takes of them. Nothing here
talks to the client; what was delivered and what comes next is `sequence`'s.

A fault is answered within `PATIENCE_S` of the last sign of life of what died: the request goes on
elsewhere, or at the same part once it is back, or it fails with a reason. An answer may lose its
worker as often as it likes while it gains a token in between. Losses in a row without one are
bounded: a request that kills whoever computes its next token must not take the pool down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import structlog

from baton.clock import WaitingClock
from baton.errors import Reason, ServiceError
from services.gateway.legs import Leg, Plan
from services.gateway.opening import SequenceParts
from services.gateway.planner import PlanRequest
from services.gateway.registry import WorkerRecord

_log = structlog.stdlib.get_logger("baton.gateway.recovery")

PATIENCE_S: Final = 4.5
PAUSE_S: Final = 0.1
WATCH_INTERVAL_S: Final = 0.25
ATTEMPTS_MAX: Final = 2
"""Attempts at a request that workers could be failing on; faults of others are only timed."""

LOSSES_IN_A_ROW_MAX: Final = 3
"""Workers that one answer may lose without a token in between and still go on; one more ends it."""

PASSING: Final = frozenset(
    {
        Reason.WORKER_LOST,
        Reason.DRAINING,
        Reason.NO_WORKER,
        Reason.TRANSFER_TIMEOUT,
        Reason.LEASE_EXPIRED,
        Reason.STALE_GENERATION,
    }
)
"""Something died or changed hands: the same work may succeed in a moment."""

RESUMABLE: Final = PASSING | {Reason.QUEUE_FULL}
"""What an answer that has begun outlives: it waits for a slot rather than end for want of one."""

ELSEWHERE: Final = frozenset(
    {
        Reason.QUEUE_FULL,
        Reason.CHECKSUM_MISMATCH,
        Reason.COMPAT_MISMATCH,
        Reason.TOKENIZER_MISMATCH,
        Reason.INTERNAL,
        Reason.LOG_CORRUPT,
    }
)
"""A fault of this attempt, not of the request: another worker may do better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A sequence lost its worker. `since_s`: its last sign of life; `lost_s`: when we noticed.

    `is_cut`: only the connection is known to be gone, the worker may be well.
    """

    error: ServiceError
    since_s: float
    lost_s: float
    is_cut: bool = False


class Recovery:
    """What one request may still try."""

    def __init__(
        self,
        parts: SequenceParts,
        request_id: str,
        prompt_tokens: int,
        cached: Callable[[], Mapping[str, int]] = dict,
        *,
        tenant: str = "",
    ) -> None:
        """`cached`: tokens of the prompt that each kvstore should have now, by address."""
        self._parts = parts
        self._cached = cached
        self._request_id = request_id
        self._search = PlanRequest(prompt_tokens=prompt_tokens, tenant=tenant)
        self._since_s: float | None = None
        self._attempts = 0
        self._losses_in_a_row = 0
        self._assignment = parts.planner.assignment()
        self.resumes = 0

    @property
    def _clock(self) -> WaitingClock:
        return self._parts.clock

    @property
    def is_local_only(self) -> bool:
        """Remote prefill is out for this request."""
        return self._search.is_local_only

    def progressed(self) -> None:
        """A token came: whatever was wrong is over."""
        self._since_s = None
        self._losses_in_a_row = 0

    def left_s(self) -> float:
        """Seconds of patience that are left; all of it while nothing is wrong."""
        if self._since_s is None:
            return PATIENCE_S
        return self._since_s + PATIENCE_S - self._clock.monotonic_s()

    # --- before the first token ---------------------------------------------------------------

    async def plan(self) -> Plan:
        """The plan of the next attempt; after a fault it is waited for, and while the worker that
        could serve is only in doubt.
        """
        self._search = replace(self._search, cached=self._cached())
        plan = self._plan_now() if self._since_s is None else await self._plan_soon()
        if plan is None:
            plan = await self._plan_soon()
        cached = self._search.cached.get(plan.kvstore_address, 0)
        self._assignment.planned(plan, max(self._search.prompt_tokens - cached, 0))
        return plan

    def prefilled(self) -> None:
        """The prompt is computed; its worker has room for another."""
        self._assignment.prefilled()

    def end(self) -> None:
        """The request is over, however."""
        self._assignment.end()

    def _plan_now(self) -> Plan | None:
        """None: there is nobody, but somebody may be back in a moment."""
        try:
            return self._parts.planner.plan(self._search)
        except ServiceError as error:
            if error.reason is not Reason.NO_WORKER or not self._parts.planner.is_doubting():
                raise
            self._begin(self._clock.monotonic_s())
            return None

    async def _plan_soon(self) -> Plan:
        refusals: list[ServiceError] = []

        def find() -> Plan | None:
            try:
                return self._parts.planner.plan(self._search)
            except ServiceError as error:
                refusals.append(error)
                return None

        await self._pause()
        plan = await self._parts.until(find, self.left_s())
        if plan is None:
            raise refusals[-1]
        return plan

    def require_retry(self, plan: Plan, error: ServiceError) -> None:
        """Prepare for the next attempt, or raise the error: nothing more can be tried."""
        is_passing = error.reason in PASSING
        if not is_passing and error.reason not in ELSEWHERE:
            raise error
        self._begin(self._clock.monotonic_s())
        culprit = self._culprit(plan, error)
        if culprit is not None:
            self._attempts += 1
            if error.reason is Reason.WORKER_LOST:
                self._parts.planner.doubt(culprit)
        if self.left_s() <= 0.0 or self._attempts >= ATTEMPTS_MAX:
            raise error
        _log.warning(
            "attempt_failed",
            request_id=self._request_id,
            writer=plan.writer.worker_id,
            decode=plan.decode.worker_id,
            blamed=None if culprit is None else culprit.worker_id,
            reason=error.reason.value,
        )
        self._assignment.end()
        if culprit is not None:
            # One that was lost is in doubt: if it is heard again after all, it may have another go.
            is_watched = error.reason is Reason.WORKER_LOST
            self._leave_out(culprit, may_return=is_watched or not is_passing)

    def _culprit(self, plan: Plan, error: ServiceError) -> WorkerRecord | None:
        """The worker at fault; None when it is the store's, or nobody's."""
        named = error.metadata.get("worker")
        for worker in (plan.prefill, plan.decode):
            if worker is not None and worker.worker_id == named:
                return worker
        is_writers = error.reason in ELSEWHERE or error.reason is Reason.DRAINING
        return plan.writer if is_writers else None

    def _leave_out(self, culprit: WorkerRecord, *, may_return: bool) -> None:
        """Search without this run of the worker, where another can do its part.

        `may_return`: with nobody else it is asked again, because it is alive.
        """
        search = self._search
        runs = {*search.excluded_runs, (culprit.worker_id, culprit.incarnation)}
        for is_local_only in (search.is_local_only, True):
            probe = replace(search, excluded_runs=runs, is_local_only=is_local_only)
            try:
                self._parts.planner.plan(probe)
            except ServiceError:
                continue
            self._search = probe
            return
        if not may_return:
            # Nobody else: the same worker, restarted, will have another incarnation.
            self._search = replace(search, excluded_runs=runs, is_local_only=False)

    async def until_silent(self, worker: WorkerRecord) -> None:
        """Raises WORKER_LOST when this run of the worker counts as dead; never returns."""
        never = asyncio.Event()
        while self._parts.planner.is_alive(worker):
            await self._clock.wait(never, WATCH_INTERVAL_S)
        self._begin(self._parts.planner.heard_s(worker) or self._clock.monotonic_s())
        raise ServiceError(
            Reason.WORKER_LOST,
            "the prefill worker was lost before the first token; send the request again",
            metadata={"worker": worker.worker_id},
            retry_after_s=1.0,
        )

    # --- after it -----------------------------------------------------------------------------

    def may_move(self, leg: Leg) -> bool:
        """Whether somebody else could go on with the log of a worker that wants to leave."""
        worker, planner = leg.plan.decode, self._parts.planner
        return leg.is_sealed and any(
            planner.decode_for(address, worker, {worker.worker_id}) is not None
            for address in (leg.home, None)
        )

    async def replacement(self, leg: Leg, loss: Loss) -> WorkerRecord:
        """The worker that goes on with a sealed log: another, or the same once it is back.

        `leg` gets the log's generation of now. Raises the loss when patience is over.
        """
        self._note_loss(loss)
        if self._since_s is None:
            self.resumes += 1
            self._begin(loss.since_s)
        else:
            await self._pause()
        while True:
            found = await self._parts.until(lambda: self._next_worker(leg, loss), self.left_s())
            if found is None:
                raise loss.error
            # At once: others whose worker died with this one choose in the same moment.
            self._assignment.goes_on_at(found)
            is_elsewhere = found.kvstore_address != leg.home
            if is_elsewhere and self._parts.planner.is_store_silent(leg.home):
                return found
            try:
                state = await self._parts.stores.describe(leg.home, leg.log_id, leg.control)
            except ServiceError as error:
                is_passing = error.reason in PASSING or is_unanswered(error)
                if is_passing and is_elsewhere:
                    # The whole node may be gone: who brings the log there will find out.
                    return found
                if not is_passing or self.left_s() <= 0.0:
                    raise loss.error from error
                await self._pause()
                continue
            leg.generation = state.generation
            return found

    def _next_worker(self, leg: Leg, loss: Loss) -> WorkerRecord | None:
        """Who can go on now: another of the log's node, the same again, another anywhere."""
        worker, address, planner = leg.plan.decode, leg.home, self._parts.planner
        other = planner.decode_for(address, worker, {worker.worker_id})
        if other is not None:
            return other
        same = planner.decode_for(address, worker, ())
        is_back = same is not None and (
            same.incarnation != worker.incarnation or (planner.heard_s(same) or 0.0) > loss.lost_s
        )
        # On another node the log moves there, or is made there again from its tokens.
        return same if is_back else planner.decode_for(None, worker, {worker.worker_id})

    def _note_loss(self, loss: Loss) -> None:
        """Each death is a fault of its own: patience counts from the last; too many end it."""
        if loss.error.reason is not Reason.WORKER_LOST:
            return
        self._losses_in_a_row += 1
        if self._losses_in_a_row > LOSSES_IN_A_ROW_MAX:
            raise loss.error
        if self._since_s is not None:
            self._since_s = max(self._since_s, loss.since_s)

    def _begin(self, since_s: float) -> None:
        if self._since_s is None:
            self._since_s = since_s

    async def _pause(self) -> None:
        await self._clock.wait(asyncio.Event(), PAUSE_S)


def is_unanswered(error: ServiceError) -> bool:
    """The peer did not say it: nobody answered in time."""
    return error.reason is Reason.DEADLINE_EXCEEDED and "grpc_code" in error.metadata

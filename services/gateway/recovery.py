"""Going on when a part of a request died: which faults pass, who is left out, how long is waited.

Owns the patience of one request and the choice of who goes on. Nothing here talks to the client;
what was delivered and what comes next is `sequence`'s.

A fault is answered within `PATIENCE_S` of the last sign of life of what died: the request goes on
elsewhere, or at the same part once it is back, or it fails with a reason.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
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

RESUMES_MAX: Final = 3
"""How often one answer goes on elsewhere: a request that kills its workers must not go on."""

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
    """A sequence lost its worker. `since_s`: its last sign of life; `lost_s`: when we noticed."""

    error: ServiceError
    since_s: float
    lost_s: float


class Recovery:
    """What one request may still try."""

    def __init__(self, parts: SequenceParts, request_id: str, prompt_tokens: int) -> None:
        self._parts = parts
        self._request_id = request_id
        self._search = PlanRequest(prompt_tokens=prompt_tokens)
        self._since_s: float | None = None
        self._attempts = 0
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

    def left_s(self) -> float:
        """Seconds of patience that are left; all of it while nothing is wrong."""
        if self._since_s is None:
            return PATIENCE_S
        return self._since_s + PATIENCE_S - self._clock.monotonic_s()

    # --- before the first token ---------------------------------------------------------------

    async def plan(self) -> Plan:
        """The plan of the next attempt; after a fault it is waited for."""
        if self._since_s is None:
            return self._parts.planner.plan(self._search)
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
        if culprit is not None:
            self._leave_out(culprit, may_return=not is_passing)

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
            probe = PlanRequest(
                prompt_tokens=search.prompt_tokens, excluded_runs=runs, is_local_only=is_local_only
            )
            try:
                self._parts.planner.plan(probe)
            except ServiceError:
                continue
            self._search = probe
            return
        if not may_return:
            # Nobody else: the same worker, restarted, will have another incarnation.
            self._search = PlanRequest(prompt_tokens=search.prompt_tokens, excluded_runs=runs)

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

    async def replacement(self, leg: Leg, loss: Loss) -> WorkerRecord:
        """The worker that goes on with a sealed log: another, or the same once it is back.

        `leg` gets the log's generation of now. Raises the loss when patience is over.
        """
        if self._since_s is None:
            if self.resumes >= RESUMES_MAX:
                raise loss.error
            self.resumes += 1
            self._begin(loss.since_s)
        else:
            await self._pause()
        worker, address = leg.plan.decode, leg.plan.kvstore_address

        def find() -> WorkerRecord | None:
            other = self._parts.planner.decode_for(address, worker, {worker.worker_id})
            if other is not None:
                return other
            same = self._parts.planner.decode_for(address, worker, ())
            is_back = same is not None and (
                same.incarnation != worker.incarnation
                or (self._parts.planner.heard_s(same) or 0.0) > loss.lost_s
            )
            return same if is_back else None

        while True:
            found = await self._parts.until(find, self.left_s())
            if found is None:
                raise loss.error
            try:
                state = await self._parts.stores.describe(address, leg.log_id, leg.control)
            except ServiceError as error:
                if error.reason not in PASSING or self.left_s() <= 0.0:
                    raise loss.error from error
                await self._pause()
                continue
            leg.generation = state.generation
            return found

    def _begin(self, since_s: float) -> None:
        if self._since_s is None:
            self._since_s = since_s

    async def _pause(self) -> None:
        await self._clock.wait(asyncio.Event(), PAUSE_S)

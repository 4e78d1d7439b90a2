"""KV for a session's history: a log opened, computed and sealed, tried again where a part dies.

Owns the attempts at one history and its request. Nothing is named here: until a session names the
log, whatever dies leaves the session as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import Reason, ServiceError
from baton.faults import faults
from baton.ids import new_request_id
from baton.sampling_parameters import SamplingParameters
from services.gateway.legs import Leg, Plan
from services.gateway.opening import LogOpener, SequenceParts
from services.gateway.planner import PlanRequest
from services.gateway.prompts import ServedModel
from services.gateway.publishing import PUBLISH_TIMEOUT_S, prefill_kv
from services.gateway.recovery import Recovery
from services.gateway.registry import WorkerRecord
from services.gateway.request import (
    CacheMode,
    EncodedPrompt,
    ParentLog,
    SequenceRequest,
    Tenant,
)
from services.gateway.reuse import RequestReuse
from services.gateway.side_by_side import watched


class HistoryComputer:
    """Computes histories for sessions, without answers."""

    def __init__(self, parts: SequenceParts, model: ServedModel) -> None:
        self._parts = parts
        self._model = model

    async def computed(
        self,
        tenant: Tenant,
        ids: tuple[int, ...],
        base: ParentLog | None,
        ttl_s: float | None = None,
    ) -> tuple[Leg, int]:
        """A sealed log with KV for all of these ids, begun from `base`, and how much it began with.

        A worker or store that dies meanwhile costs another attempt, as it does an answer's first
        token; the caller ends the leg. `ttl_s`: how long the log is kept. PROMPT_TOO_LONG.
        """
        limit = self._parts.planner.context_max() or self._model.context_max
        if len(ids) >= min(limit, self._model.context_max):
            raise ServiceError(
                Reason.PROMPT_TOO_LONG,
                f"the history would have {len(ids)} tokens, the context holds {limit}; shorten it",
                field="replacement",
            )
        request = self._request(tenant, ids, base, ttl_s)
        opener = LogOpener(self._parts, request)
        reuse = RequestReuse(self._parts.planner.reuse, request)
        recovery = Recovery(
            self._parts, request.request_id, len(ids), reuse.expected, tenant=tenant.name
        )
        try:
            plan = self._plan_near(tenant, ids, base) or await recovery.plan()
            while True:
                try:
                    leg = await self._attempt(opener, recovery, plan)
                    reuse.sealed(leg.home)
                    return leg, leg.cached_tokens
                except ServiceError as error:
                    recovery.require_retry(plan, error)
                plan = await recovery.plan()
        finally:
            recovery.end()

    async def _attempt(self, opener: LogOpener, recovery: Recovery, plan: Plan) -> Leg:
        """One log from Open to its seal; one that does not come so far is given up."""
        await faults.reach("gateway.before_open")
        leg = await opener.open(plan)
        is_sealed = False
        try:
            await faults.reach("session.after_open")
            await watched(self._filled(leg), recovery.until_silent(plan.writer))
            is_sealed = True
        finally:
            if not is_sealed:
                self._parts.cleanup.end(leg, is_complete=False)
        return leg

    async def _filled(self, leg: Leg) -> None:
        try:
            await prefill_kv(self._parts, leg)
        except ServiceError as error:
            raise _blamed(error, leg.plan.writer) from error

    def _plan_near(self, tenant: Tenant, ids: Sequence[int], base: ParentLog | None) -> Plan | None:
        """A plan whose writer sits where the base is; None where there is none now."""
        if base is None:
            return None
        planner = self._parts.planner
        excluded: list[tuple[str, int]] = []
        while True:
            request = PlanRequest(
                prompt_tokens=len(ids), excluded_runs=tuple(excluded), tenant=tenant.name
            )
            try:
                plan = planner.plan(request)
            except ServiceError:
                return None
            if plan.kvstore_address == base.address:
                return plan
            excluded.append((plan.writer.worker_id, plan.writer.incarnation))

    def _request(
        self,
        tenant: Tenant,
        ids: tuple[int, ...],
        base: ParentLog | None,
        ttl_s: float | None,
    ) -> SequenceRequest:
        now_s = self._parts.clock.monotonic_s()
        return SequenceRequest(
            request_id=new_request_id(),
            tenant=tenant,
            prompt=EncodedPrompt(token_ids=ids, rendered=self._model.spell(ids)),
            sampling=SamplingParameters(temperature=0.0, seed=0, max_tokens=1),
            cache_mode=CacheMode.READ_WRITE,
            cache_salt=None,
            is_dropped_at_end=False,
            received_s=now_s,
            deadline_s=now_s + PUBLISH_TIMEOUT_S,
            ready_s=now_s,
            parent=base,
            ttl_s=ttl_s,
        )


def _blamed(error: ServiceError, worker: WorkerRecord) -> ServiceError:
    """The same error; a lost worker is named, so that the next attempt leaves it out."""
    if error.reason is not Reason.WORKER_LOST or "worker" in error.metadata:
        return error
    return ServiceError(
        error.reason,
        error.message,
        metadata={**error.metadata, "worker": worker.worker_id},
        retry_after_s=error.retry_after_s,
    )

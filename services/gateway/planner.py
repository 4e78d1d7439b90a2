"""From what workers say of themselves to a plan: which pair, or local prefill.

Owns the glue between the registry's records and the pure router and policy. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from baton.errors import Reason, ServiceError
from baton.kv.label import first_mismatch
from services.gateway.hub import WorkerHub
from services.gateway.legs import Plan
from services.gateway.policy import PairFacts, Placement, PlacementDecision, PrefillMode, place
from services.gateway.registry import WorkerRecord, WorkerRole
from services.gateway.router import (
    DecodeCandidate,
    PrefillCandidate,
    choose_decode,
    choose_prefill,
    predicted_ttft_s,
)

ASSUMED_TOKEN_RATE: Final = 500.0
"""Tokens per second of a worker that has measured nothing yet."""

NO_WORKER_RETRY_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is planned: the prompt's length, runs of workers (id, incarnation) not to use, whether
    remote is out.
    """

    prompt_tokens: int
    excluded_runs: Collection[tuple[str, int]] = ()
    is_local_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRules:
    """What an operator decided, and the tokenizer every worker must share."""

    mode: PrefillMode
    tokenizer_hash: bytes
    ttft_budget_s: float = 60.0
    prefill_queue_max: int = 64


class Planner:
    """Chooses workers for one model."""

    def __init__(
        self, hub: WorkerHub, rules: PlanRules, sequences_on: Callable[[str], int]
    ) -> None:
        self._hub = hub
        self._mode = rules.mode
        self._tokenizer_hash = rules.tokenizer_hash
        self._ttft_budget_s = rules.ttft_budget_s
        self._prefill_queue_max = rules.prefill_queue_max
        self._sequences_on = sequences_on

    def plan(self, request: PlanRequest) -> Plan:
        """A plan; raises NO_WORKER or QUEUE_FULL with a time to come back."""
        decodes = self._usable(WorkerRole.DECODE, request)
        prefills = [] if request.is_local_only else self._usable(WorkerRole.PREFILL, request)
        pairs = [(p, [d for d in decodes if can_pair(p, d)]) for p in prefills]
        pairs = [(p, matching) for p, matching in pairs if matching]
        roomy = [pair for pair in pairs if pair[0].load.queued < self._prefill_queue_max]
        decision = place(
            PrefillMode.LOCAL if request.is_local_only else self._mode,
            PairFacts(
                has_compatible_pair=bool(pairs),
                has_decode=bool(decodes),
                has_room_in_prefill_queue=bool(roomy),
            ),
        )
        if decision.placement is Placement.REFUSED:
            raise self._refused(decision)
        if decision.placement is Placement.REMOTE:
            return self._remote(roomy, request, decision)
        return self._local(decodes, decision)

    def decode_for(
        self, kvstore_address: str, like: WorkerRecord, excluded: Collection[str]
    ) -> WorkerRecord | None:
        """A decode worker that can go on with a log of this store and label."""
        found = [
            record
            for record in self._hub.routable(WorkerRole.DECODE)
            if record.kvstore_address == kvstore_address
            and record.worker_id not in excluded
            and can_pair(like, record)
        ]
        return self._least_busy(found)

    def is_alive(self, worker: WorkerRecord) -> bool:
        """Whether exactly this run of the worker was heard lately."""
        return self._hub.is_alive(worker.worker_id, worker.incarnation)

    def heard_s(self, worker: WorkerRecord) -> float | None:
        """When exactly this run of the worker was heard last, by our clock; None if forgotten."""
        return self._hub.heard_s(worker.worker_id, worker.incarnation)

    def context_max(self) -> int | None:
        """The longest history that every decode worker here holds; None when there is none."""
        limits = [
            record.context_max
            for record in self._hub.routable(WorkerRole.DECODE)
            if record.context_max > 0
        ]
        return min(limits, default=None)

    def _usable(self, role: WorkerRole, request: PlanRequest) -> list[WorkerRecord]:
        return [
            record
            for record in self._hub.routable(role)
            if (record.worker_id, record.incarnation) not in request.excluded_runs
            and record.label is not None
            and record.label.tokenizer == self._tokenizer_hash
            and record.kvstore_address
        ]

    def _remote(
        self,
        pairs: list[tuple[WorkerRecord, list[WorkerRecord]]],
        request: PlanRequest,
        decision: PlacementDecision,
    ) -> Plan:
        candidates = {p.worker_id: _prefill_candidate(p) for p, _ in pairs}
        chosen = choose_prefill(
            candidates.values(), request.prompt_tokens, self._ttft_budget_s
        ) or min(
            candidates.values(),
            key=lambda one: (predicted_ttft_s(one, request.prompt_tokens), one.worker_id),
        )
        prefill, decodes = next(pair for pair in pairs if pair[0].worker_id == chosen.worker_id)
        decode = self._least_busy(decodes)
        if decode is None:
            raise _full()
        return Plan(decode=decode, prefill=prefill, decision=decision)

    def _local(self, decodes: list[WorkerRecord], decision: PlacementDecision) -> Plan:
        decode = self._least_busy(decodes)
        if decode is None:
            raise _full()
        return Plan(decode=decode, prefill=None, decision=decision)

    def _least_busy(self, records: list[WorkerRecord]) -> WorkerRecord | None:
        by_id = {record.worker_id: record for record in records}
        # Cached pages are evictable, so free pages rank workers here and never refuse a request:
        # Open, at the store, is where pages are decided.
        chosen = choose_decode((self._decode_candidate(one) for one in records), 0)
        return None if chosen is None else by_id[chosen.worker_id]

    def _decode_candidate(self, record: WorkerRecord) -> DecodeCandidate:
        load = record.load
        busy = max(load.active + load.queued, self._sequences_on(record.worker_id))
        return DecodeCandidate(
            worker_id=record.worker_id,
            active=busy,
            # A worker queues what does not fit into its batch; four batches deep is enough.
            active_max=max(1, load.active_max) * 4,
            pages_free=load.pages_free,
            tpot_s=load.tpot_s,
        )

    def _refused(self, decision: PlacementDecision) -> ServiceError:
        if decision.reason == "prefill_queue_full":
            return ServiceError(
                Reason.QUEUE_FULL,
                "every prefill worker's queue is full; try again shortly",
                retry_after_s=NO_WORKER_RETRY_S,
            )
        role = "decode" if decision.reason == "no_decode_worker" else "prefill"
        return ServiceError(
            Reason.NO_WORKER,
            f"no {role} worker is ready; `baton doctor` and /readyz say what is missing",
            metadata={"role": role},
            retry_after_s=NO_WORKER_RETRY_S,
        )


def can_pair(writer: WorkerRecord, reader: WorkerRecord) -> bool:
    """Whether `reader` may continue what `writer` wrote: one store, labels that match."""
    if writer.label is None or reader.label is None:
        return False
    return (
        writer.kvstore_address == reader.kvstore_address
        and first_mismatch(reader.label, writer.label) is None
    )


def _prefill_candidate(record: WorkerRecord) -> PrefillCandidate:
    return PrefillCandidate(
        worker_id=record.worker_id,
        queued_tokens=record.load.queued_tokens,
        token_rate=record.load.token_rate or ASSUMED_TOKEN_RATE,
    )


def _full() -> ServiceError:
    return ServiceError(
        Reason.QUEUE_FULL,
        "every decode worker is full; try again shortly",
        retry_after_s=NO_WORKER_RETRY_S,
    )

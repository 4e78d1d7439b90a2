"""From what workers say of themselves to a plan: which pair, or local prefill.

Owns the glue between the registry's records and the pure router and policy. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from baton.errors import Reason, ServiceError
from baton.kv.label import first_mismatch
from services.gateway.assignments import Assignment, Assignments
from services.gateway.hub import WorkerHub
from services.gateway.legs import Plan
from services.gateway.policy import PairFacts, Placement, PlacementDecision, PrefillMode, place
from services.gateway.registry import WorkerRecord, WorkerRole
from services.gateway.reuse import ReuseHints
from services.gateway.router import (
    DecodeCandidate,
    PrefillCandidate,
    choose_decode,
    choose_prefill,
    predicted_ttft_s,
)

ASSUMED_TOKEN_RATE: Final = 500.0
"""Tokens per second of a worker that has measured nothing yet."""

ASSUMED_QUEUE: Final = 3
"""Places in the queue of a decode worker that does not say, for each slot."""

NO_WORKER_RETRY_S: Final = 1.0

WARM_TOKENS_MIN: Final = 64
"""Cached tokens that a decode worker's node must have more than another's to be preferred."""

WARM_SLACK: Final = 0.25
"""How much fuller such a worker may be than the least busy one, in batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is planned: the prompt's length, runs of workers (id, incarnation) not to use, whether
    remote is out, and how many of its tokens each kvstore is thought to have, by address.
    """

    prompt_tokens: int
    excluded_runs: Collection[tuple[str, int]] = ()
    is_local_only: bool = False
    cached: Mapping[str, int] = field(default_factory=dict)
    tenant: str = ""
    """Whose it is: full queues still take what is of a tenant with less than its share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRules:
    """What an operator decided, and what every worker must share.

    `model`: (model digest, RoPE digest) of this gateway's own model files; None where it has only
    their text parts, and then workers are believed.
    """

    mode: PrefillMode
    tokenizer_hash: bytes
    model: tuple[bytes, bytes] | None = None
    ttft_budget_s: float = 60.0
    prefill_queue_max: int = 64


class Planner:
    """Chooses workers for one model."""

    def __init__(self, hub: WorkerHub, rules: PlanRules) -> None:
        self._hub = hub
        self._mode = rules.mode
        self._tokenizer_hash = rules.tokenizer_hash
        self._model = rules.model
        self._ttft_budget_s = rules.ttft_budget_s
        self._prefill_queue_max = rules.prefill_queue_max
        self._assignments = Assignments()
        self.is_below_share: Callable[[str], bool] = lambda _tenant: False
        """Whether a tenant has less than its share of what runs at this gateway."""
        self.reuse = ReuseHints()
        hub.on_heard(lambda record: self._assignments.heard(record.worker_id))

    def assignment(self) -> Assignment:
        """What one request takes of workers; tell it each choice at once, and the end."""
        return Assignment(self._assignments)

    def plan(self, request: PlanRequest) -> Plan:
        """A plan; raises NO_WORKER or QUEUE_FULL with a time to come back."""
        decodes = self._usable(WorkerRole.DECODE, request)
        prefills = [] if request.is_local_only else self._usable(WorkerRole.PREFILL, request)
        pairs = [(p, [d for d in decodes if can_follow(p, d)]) for p in prefills]
        pairs = [(p, matching) for p, matching in pairs if matching]
        is_below = self._is_below_share(request)
        roomy = [
            pair for pair in pairs if is_below or pair[0].load.queued < self._prefill_queue_max
        ]
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
        return self._local(decodes, request, decision)

    def decode_for(
        self, kvstore_address: str | None, like: WorkerRecord, excluded: Collection[str]
    ) -> WorkerRecord | None:
        """A decode worker that can go on with a log of this store (None: of any, after a move)
        and label.
        """
        found = [
            record
            for record in self._hub.routable(WorkerRole.DECODE)
            if kvstore_address in (None, record.kvstore_address)
            and record.worker_id not in excluded
            and can_follow(like, record)
        ]
        return self._least_busy(found)

    def doubt(self, worker: WorkerRecord) -> None:
        """A call to this run of a worker broke or was refused: no new work until it is heard."""
        self._hub.doubt(worker)

    def is_doubting(self) -> bool:
        """Whether some worker is only in doubt: a moment's wait may bring it back."""
        return self._hub.is_doubting()

    def is_alive(self, worker: WorkerRecord) -> bool:
        """Whether exactly this run of the worker was heard lately."""
        return self._hub.is_alive(worker.worker_id, worker.incarnation)

    def heard_s(self, worker: WorkerRecord) -> float | None:
        """When exactly this run of the worker was heard last, by our clock; None if forgotten."""
        return self._hub.heard_s(worker.worker_id, worker.incarnation)

    def is_store_silent(self, address: str) -> bool:
        """Whether the kvstore there was heard once and counts as dead now; False if unknown."""
        return any(
            status.silence_s > self._hub.dead_after_s
            for status in self._hub.statuses()
            if status.record.role is WorkerRole.KVSTORE and status.record.address == address
        )

    def context_max(self) -> int | None:
        """The longest history that every decode worker here holds; None when there is none."""
        limits = [
            record.context_max
            for record in self._hub.routable(WorkerRole.DECODE)
            if record.context_max > 0 and self._mismatch(record) is None
        ]
        return min(limits, default=None)

    def strangers(self, role: WorkerRole) -> list[tuple[str, str]]:
        """(worker, field) of the ready workers of a role that are not of this gateway's model."""
        return [
            (record.worker_id, field)
            for record in self._hub.routable(role)
            if (field := self._mismatch(record)) is not None
        ]

    def _usable(self, role: WorkerRole, request: PlanRequest) -> list[WorkerRecord]:
        return [
            record
            for record in self._hub.routable(role)
            if (record.worker_id, record.incarnation) not in request.excluded_runs
            and self._mismatch(record) is None
            and record.kvstore_address
        ]

    def _mismatch(self, record: WorkerRecord) -> str | None:
        """Why a worker is not of this gateway's model: the field that differs, by name.

        Another model under the same name would answer otherwise, and a prefill and a decode of one
        model each would pair with nobody or, worse, take turns.
        """
        if record.label is None:
            return "label"
        if record.label.tokenizer != self._tokenizer_hash:
            return "tokenizer"
        if self._model is None:
            return None
        return next(
            (
                name
                for name, theirs, ours in (
                    ("model", record.label.model, self._model[0]),
                    ("rope", record.label.rope, self._model[1]),
                )
                if theirs != ours
            ),
            None,
        )

    def _remote(
        self,
        pairs: list[tuple[WorkerRecord, list[WorkerRecord]]],
        request: PlanRequest,
        decision: PlacementDecision,
    ) -> Plan:
        candidates = {p.worker_id: self._prefill_candidate(p, request) for p, _ in pairs}
        chosen = choose_prefill(
            candidates.values(), request.prompt_tokens, self._ttft_budget_s
        ) or min(
            candidates.values(),
            key=lambda one: (predicted_ttft_s(one, request.prompt_tokens), one.worker_id),
        )
        prefill, decodes = next(pair for pair in pairs if pair[0].worker_id == chosen.worker_id)
        is_below = self._is_below_share(request)
        decode = self._least_busy(decodes, prefill.kvstore_address, is_below_share=is_below)
        if decode is None:
            raise _full()
        return Plan(decode=decode, prefill=prefill, decision=decision)

    def _local(
        self, decodes: list[WorkerRecord], request: PlanRequest, decision: PlacementDecision
    ) -> Plan:
        decode = self._least_busy(decodes, is_below_share=self._is_below_share(request))
        if decode is None:
            raise _full()
        decode = self._warmer(decodes, request, decode)
        return Plan(decode=decode, prefill=None, decision=decision)

    def _warmer(
        self, decodes: list[WorkerRecord], request: PlanRequest, least_busy: WorkerRecord
    ) -> WorkerRecord:
        """A worker whose node has much more of the prompt, unless it is much busier: a beginning
        that everybody shares must not bring all of them to one node.
        """
        most = max(request.cached.get(one.kvstore_address, 0) for one in decodes)
        if most - request.cached.get(least_busy.kvstore_address, 0) < WARM_TOKENS_MIN:
            return least_busy
        warm = self._least_busy(
            [one for one in decodes if request.cached.get(one.kvstore_address, 0) == most]
        )
        if warm is None or self._batches(warm) > self._batches(least_busy) + WARM_SLACK:
            return least_busy
        return warm

    def _batches(self, record: WorkerRecord) -> float:
        """A decode worker's sequences, in batches of its own."""
        return self._assignments.sequences(record) / max(1, record.load.active_max)

    def _is_below_share(self, request: PlanRequest) -> bool:
        return bool(request.tenant) and self.is_below_share(request.tenant)

    def _least_busy(
        self,
        records: list[WorkerRecord],
        near: str | None = None,
        *,
        is_below_share: bool = False,
    ) -> WorkerRecord | None:
        """`near`: the kvstore where the KV will lie; a log moves only for want of a slot there."""
        by_id = {record.worker_id: record for record in records}
        # Cached pages are evictable, so free pages rank workers here and never refuse a request:
        # Open, at the store, is where pages are decided.
        candidates = [
            self._decode_candidate(one, near, is_below_share=is_below_share) for one in records
        ]
        chosen = choose_decode(candidates, 0)
        return None if chosen is None else by_id[chosen.worker_id]

    def _decode_candidate(
        self, record: WorkerRecord, near: str | None, *, is_below_share: bool
    ) -> DecodeCandidate:
        load = record.load
        slots = max(1, load.active_max)
        # A worker queues what does not fit into its batch; one that does not say how much: little.
        queue_max = ASSUMED_QUEUE * slots if load.queue_max is None else load.queue_max
        return DecodeCandidate(
            worker_id=record.worker_id,
            active=self._assignments.sequences(record),
            active_max=slots + queue_max * (2 if is_below_share else 1),
            pages_free=load.pages_free,
            tpot_s=load.tpot_s,
            is_local=near is None or record.kvstore_address == near,
        )

    def _prefill_candidate(self, record: WorkerRecord, request: PlanRequest) -> PrefillCandidate:
        return PrefillCandidate(
            worker_id=record.worker_id,
            queued_tokens=self._assignments.tokens(record),
            token_rate=record.load.token_rate or ASSUMED_TOKEN_RATE,
            cached_tokens=request.cached.get(record.kvstore_address, 0),
        )

    def _refused(self, decision: PlacementDecision) -> ServiceError:
        if decision.reason == "prefill_queue_full":
            return ServiceError(
                Reason.QUEUE_FULL,
                "every prefill worker's queue is full; try again shortly",
                retry_after_s=NO_WORKER_RETRY_S,
            )
        is_decode = decision.reason == "no_decode_worker"
        role = WorkerRole.DECODE if is_decode else WorkerRole.PREFILL
        name = "decode" if is_decode else "prefill"
        strangers = self.strangers(role)
        problem, metadata = f"no {name} worker is ready", {"role": name}
        if strangers:
            field = strangers[0][1]
            metadata["field"] = field
            problem = (
                f"no {name} worker of this gateway's model is ready: of {len(strangers)} the "
                f"{field} differs; start workers and gateway with the same model files"
            )
        return ServiceError(
            Reason.NO_WORKER,
            f"{problem}; `baton doctor` and /readyz say what is missing",
            metadata=metadata,
            retry_after_s=NO_WORKER_RETRY_S,
        )


def can_follow(writer: WorkerRecord, reader: WorkerRecord) -> bool:
    """Whether `reader` may continue what `writer` wrote, there or after a move: labels match."""
    if writer.label is None or reader.label is None:
        return False
    return first_mismatch(reader.label, writer.label) is None


def _full() -> ServiceError:
    return ServiceError(
        Reason.QUEUE_FULL,
        "every decode worker is full; try again shortly",
        retry_after_s=NO_WORKER_RETRY_S,
    )

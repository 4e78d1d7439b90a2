"""The gateway without its doors: what REST and gRPC call.

Owns the way from a tenant's checked wishes to running sequences: tokenise, check the context,
resolve seeds and limits, admit, run. All refusals happen before the first event.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from baton.clock import WaitingClock
from baton.errors import Reason, ServiceError
from baton.ids import new_request_id
from baton.sampling_parameters import SamplingParameters
from baton.stages import RECEIVE, TOKENISE
from baton.tracing import span
from services.gateway.answers import Emit, Events, Member, running
from services.gateway.client_sessions import Session, SessionClient
from services.gateway.hub import WorkerHub
from services.gateway.legs import CapabilityMint
from services.gateway.limits import Admission
from services.gateway.measures import GatewayMeasures
from services.gateway.opening import SequenceParts
from services.gateway.planner import PlanRequest
from services.gateway.prefix_desk import PrefixDesk, Spawn
from services.gateway.prompts import ServedModel, resolve_sampling
from services.gateway.publishing import Publisher
from services.gateway.registry import WorkerRole
from services.gateway.request import (
    CacheMode,
    ChatPrompt,
    Continues,
    EncodedPrompt,
    Prompt,
    SequenceRequest,
    SessionRef,
    Tenant,
)
from services.gateway.sequence import Sequence as SequenceRun
from services.gateway.session_calls import Continuation, Sessions

SEED_BITS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a client wants, checked as far as its own door can. `timeout_s` bounds all of it.

    `received_s`: when it came in, by the core's clock; None: now.
    """

    tenant: Tenant
    prompts: Sequence[tuple[Prompt, str]]
    sampling: SamplingParameters
    answers: int
    cache_mode: CacheMode
    cache_salt: str | None
    is_dropped_at_end: bool
    timeout_s: float
    model: str | None = None
    max_tokens_field: str = "max_tokens"
    request_id: str | None = None
    received_s: float | None = None
    continues: Continues | None = None


class GatewayCore:
    """One gateway's business, for one model."""

    def __init__(
        self,
        model: ServedModel,
        parts: SequenceParts,
        hub: WorkerHub,
        limits: Admission,
        measures: GatewayMeasures,
        *,
        spawn: Spawn,
    ) -> None:
        self.model = model
        self.hub = hub
        self.limits = limits
        self.measures = measures
        publisher = Publisher(parts, model, new_request_id)
        self.prefixes = PrefixDesk(publisher, limits, parts.clock, spawn)
        self.sessions = Sessions(parts, model, SessionClient(parts.stores.channels))
        self._parts = parts
        self._cancels: dict[tuple[str, str], Callable[[], None]] = {}

    @property
    def clock(self) -> WaitingClock:
        """This process's clock."""
        return self._parts.clock

    @property
    def mint(self) -> CapabilityMint:
        """What signs capabilities."""
        return self._parts.mint

    def is_ready(self) -> bool:
        """Whether a request could be served now."""
        try:
            self._parts.planner.plan(PlanRequest(prompt_tokens=1))
        except ServiceError:
            return False
        return True

    def missing_part(self, service: str) -> str | None:
        """Why no `service` could serve now; None when one could. NOT_FOUND for an unknown one."""
        if service == "gateway":
            return None
        try:
            role = WorkerRole(service)
        except ValueError as error:
            raise ServiceError(
                Reason.NOT_FOUND,
                f"no service is named {service!r}; there are gateway, "
                + ", ".join(known.value for known in WorkerRole),
                field="service",
            ) from error
        if self.hub.routable(role):
            return None
        heard = [one.reason for one in self.hub.statuses() if one.record.role is role]
        return f"no {service} is known" if not heard else f"{service}: {heard[0]}"

    def context_max(self) -> int:
        """The longest history: the model's, or less where a worker holds less."""
        limit = self._parts.planner.context_max()
        return self.model.context_max if limit is None else min(limit, self.model.context_max)

    def kvstore_address(self) -> str:
        """A store that blobs can be put into; NO_WORKER when none is known."""
        for role in (WorkerRole.KVSTORE, WorkerRole.DECODE, WorkerRole.PREFILL):
            for record in self.hub.routable(role):
                if record.kvstore_address or role is WorkerRole.KVSTORE:
                    return record.kvstore_address or record.address
        raise ServiceError(Reason.NO_WORKER, "no kvstore is known yet", retry_after_s=1.0)

    async def prepare(self, ask: Ask) -> list[Member]:
        """The sequences of a request, fully checked; order: prompt by prompt, sample by sample."""
        began_s = self.clock.monotonic_s()
        received_s = began_s if ask.received_s is None else ask.received_s
        self.model.require(ask.model)
        ask.sampling.validate_for_vocabulary(self.model.tokenizer.vocab_size)
        seed, context_max = secrets.randbits(SEED_BITS), self.context_max()
        base_id = ask.request_id or new_request_id()
        with span(TOKENISE, prompts=len(ask.prompts)):
            continuation = await self._continued(ask)
            if continuation is None:
                tokenised = [
                    (await self.model.encode(prompt, field), field) for prompt, field in ask.prompts
                ]
            else:
                ids = continuation.token_ids
                spelt = EncodedPrompt(token_ids=ids, rendered=self.model.spell(ids))
                tokenised = [(spelt, ask.prompts[0][1])]
        ready_s = self.clock.monotonic_s()
        stages = {RECEIVE: began_s - received_s, TOKENISE: ready_s - began_s}
        session = None if continuation is None else _ref_of(continuation.point.session)
        members: list[Member] = []
        for index, (encoded, field) in enumerate(tokenised):
            request = SequenceRequest(
                request_id=base_id if index == 0 else f"{base_id}-p{index}",
                tenant=ask.tenant,
                prompt=encoded,
                sampling=resolve_sampling(
                    ask.sampling,
                    prompt_tokens=len(encoded.token_ids),
                    context_max=context_max,
                    seed=seed,
                    max_tokens_field=ask.max_tokens_field,
                    prompt_field=field,
                ),
                cache_mode=ask.cache_mode,
                cache_salt=ask.cache_salt,
                is_dropped_at_end=ask.is_dropped_at_end,
                received_s=received_s,
                deadline_s=received_s + ask.timeout_s,
                ready_s=ready_s,
                prompt_field=field,
                stage_seconds=stages,
                parent=None if continuation is None else continuation.point.head,
                session=session,
                ttl_s=None if session is None else session.ttl_s,
            )
            first = len(members)
            members += [
                Member(request=request.numbered(sample), after=first if sample else None)
                for sample in range(ask.answers)
            ]
        return members

    async def _continued(self, ask: Ask) -> Continuation | None:
        """The history that a request goes on with, if it names one."""
        if ask.continues is None:
            return None
        ((prompt, _),) = ask.prompts
        assert isinstance(prompt, ChatPrompt)
        return await self.sessions.continued(
            ask.tenant,
            ask.continues.wanted,
            prompt.turns,
            field=ask.continues.field,
            has_header=prompt.has_assistant_header,
        )

    @asynccontextmanager
    async def run(self, members: Sequence[Member]) -> AsyncIterator[Events]:
        """Admit and run; the block reads the events."""
        first = members[0].request
        async with (
            self.limits.admitted(first.tenant.name, len(members)) as rate,
            running(members, self._runner) as events,
        ):
            events.rate = rate
            key = (first.tenant.name, first.request_id)
            self._cancels[key] = events.cancel
            try:
                yield events
            finally:
                self._cancels.pop(key, None)

    def cancel(self, tenant: Tenant, request_id: str) -> bool:
        """Stop a running request of the tenant; False when there is none."""
        cancel = self._cancels.get((tenant.name, request_id))
        if cancel is None:
            return False
        cancel()
        return True

    def _runner(self, request: SequenceRequest, emit: Emit) -> SequenceRun:
        return SequenceRun(self._parts, request, self.sessions.naming(request, emit))


def _ref_of(session: Session | None) -> SessionRef | None:
    return None if session is None else session.ref

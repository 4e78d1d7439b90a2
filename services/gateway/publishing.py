"""Publishing a prefix: render, tokenise, cut to whole blocks, prefill, publish at the store.

Owns that order, and the list and revocation of prefixes across the stores this gateway sees. Who
may use a prefix is decided by its grant, at the store.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from baton.errors import Reason, ServiceError
from baton.kv.digests import history_at, history_start, ids_hash, text_hash
from baton.kv.label import PairLabel
from baton.kv.manifest import Segment
from baton.sampling_parameters import SamplingParameters
from services.gateway.client_prefixes import PrefixOffer
from services.gateway.clients import CONTROL_TIMEOUT_S
from services.gateway.decode_wire import StartCommand
from services.gateway.inbox import Failed, Lost, Token
from services.gateway.legs import CONTROL_RIGHTS, DECODE_RIGHTS, PREFILL_RIGHTS, Leg
from services.gateway.opening import LogOpener, SequenceParts
from services.gateway.planner import PlanRequest
from services.gateway.prefixes import PublishedPrefix, cut_to_blocks
from services.gateway.prompts import ServedModel
from services.gateway.request import (
    CacheMode,
    ChatTurn,
    EncodedPrompt,
    SequenceRequest,
    Tenant,
)

PUBLISH_TIMEOUT_S: Final = 300.0
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOrder:
    """What to publish: leading turns or raw text, for whom, for how long."""

    name: str
    turns: tuple[ChatTurn, ...]
    text: str | None
    tenants: tuple[str, ...]
    ttl_s: float | None

    def __post_init__(self) -> None:
        """The name is shown to people and typed in commands."""
        if not _NAME.fullmatch(self.name):
            raise ServiceError(
                Reason.INVALID_REQUEST,
                "name must be 1 to 128 of A-Z a-z 0-9 _ . - and begin with a letter or digit",
                field="name",
            )


class Publisher:
    """Publishes, lists and revokes."""

    def __init__(
        self,
        parts: SequenceParts,
        model: ServedModel,
        new_request_id: Callable[[], str],
    ) -> None:
        self._client = parts.prefix_client
        self._parts = parts
        self._model = model
        self._new_request_id = new_request_id

    async def publish(self, tenant: Tenant, order: PublishOrder) -> PublishedPrefix:
        """Compute and publish; ALREADY_EXISTS when the tenant has a prefix of this name."""
        if any(one.name == order.name for one in await self.owned(tenant)):
            raise ServiceError(
                Reason.ALREADY_EXISTS,
                f"a prefix named {order.name} is published; delete it first or choose another name",
                field="name",
            )
        token_ids = await self._token_ids(order)
        plan = self._parts.planner.plan(PlanRequest(prompt_tokens=len(token_ids)))
        label = plan.writer.label
        assert label is not None, "the planner takes labelled workers only"
        prompt = cut_to_blocks(token_ids, label.block_tokens, self._model.tokenizer.decode_bytes)
        if not prompt.token_ids:
            raise ServiceError(
                Reason.INVALID_REQUEST,
                f"the content has {len(token_ids)} tokens that no later turn can change; a prefix "
                f"needs at least {label.block_tokens}; publish a longer one",
                field="messages" if order.text is None else "text",
            )
        request = self._request(tenant, prompt)
        leg = await LogOpener(self._parts, request).open(plan)
        is_complete = False
        try:
            await prefill_kv(self._parts, leg)
            prefix = await self._publish(leg, order, label)
            is_complete = True
            return prefix
        finally:
            self._parts.cleanup.end(leg, is_complete=is_complete)

    async def _token_ids(self, order: PublishOrder) -> tuple[int, ...]:
        if order.text is None:
            return await self._model.encode_leading_turns(order.turns)
        return await self._model.encode_leading_text(order.text)

    def _request(self, tenant: Tenant, prompt: EncodedPrompt) -> SequenceRequest:
        now_s = self._parts.clock.monotonic_s()
        return SequenceRequest(
            request_id=self._new_request_id(),
            tenant=tenant,
            prompt=prompt,
            sampling=SamplingParameters(temperature=0.0, seed=0, max_tokens=1),
            cache_mode=CacheMode.READ_WRITE,
            cache_salt=None,
            is_dropped_at_end=False,
            received_s=now_s,
            deadline_s=now_s + PUBLISH_TIMEOUT_S,
            ready_s=now_s,
        )

    async def _publish(self, leg: Leg, order: PublishOrder, label: PairLabel) -> PublishedPrefix:
        prompt, address = leg.request.prompt, leg.plan.kvstore_address
        now_s = self._parts.clock.wall_s()
        offer = PrefixOffer(
            name=order.name,
            segment=_segment(leg, prompt, label),
            token_ids=prompt.token_ids,
            tenants=order.tenants,
            owner_tenant=leg.request.tenant.name,
            text_bytes=len(prompt.rendered),
            template_digest=self._parts.template_digest,
            model=self._model.name,
            expire_wall_s=None if order.ttl_s is None else now_s + order.ttl_s,
        )
        prefix = await self._client.publish(
            address, offer, capability=leg.control, request_id=leg.request.request_id
        )
        self._parts.prefixes.forget(address)
        return prefix

    async def usable(self, tenant: Tenant) -> list[PublishedPrefix]:
        """The prefixes that a tenant may use, at every store, by name."""
        now_s = self._parts.clock.wall_s()
        found = [
            prefix
            for address in self._parts.prefixes.addresses()
            for prefix in await self._parts.prefixes.fresh(address)
            if prefix.is_granted_to(tenant.name, now_s)
        ]
        return sorted(found, key=lambda one: (one.name, one.prefix_id))

    async def owned(self, tenant: Tenant) -> list[PublishedPrefix]:
        """The prefixes that a tenant published."""
        return [one for one in await self.usable(tenant) if one.owner_tenant == tenant.name]

    async def revoke(self, tenant: Tenant, id_or_name: str) -> None:
        """End a prefix of the tenant; PREFIX_NOT_FOUND for any other."""
        found = [one for one in await self.owned(tenant) if id_or_name in (one.prefix_id, one.name)]
        if not found:
            raise ServiceError(
                Reason.PREFIX_NOT_FOUND,
                "no published prefix of yours has this id or name; GET /v1/prefixes lists them",
                field="id",
            )
        for prefix in found:
            capability = self._parts.mint.mint(
                tenant, CONTROL_RIGHTS, ttl_s=CONTROL_TIMEOUT_S, request_id=self._new_request_id()
            )
            address = prefix.kvstore_address
            await self._client.revoke(address, prefix.prefix_id, capability)
            self._parts.prefixes.forget(address)


async def prefill_kv(parts: SequenceParts, leg: Leg) -> None:
    """KV alone at a prefill worker; one token more where only decode workers are. Seals."""
    opener = LogOpener(parts, leg.request)
    leg.is_running = True
    if leg.plan.prefill is not None:
        capability = opener.capability(leg.log_id, PREFILL_RIGHTS)
        await parts.prefills.run(leg, capability, timeout_s=PUBLISH_TIMEOUT_S, kv_only=True)
    else:
        await _prefill_locally(parts, leg, opener.capability(leg.log_id, DECODE_RIGHTS))
    leg.is_running, leg.is_sealed = False, True


async def _prefill_locally(parts: SequenceParts, leg: Leg, capability: str) -> None:
    stream = parts.streams.to(leg.plan.decode)
    inbox = stream.start(
        StartCommand(
            request_id=leg.request.request_id,
            log_id=leg.log_id,
            generation=leg.generation,
            capability=capability,
            next_index=0,
            is_local_prefill=True,
            deadline_in_s=PUBLISH_TIMEOUT_S,
            traceparent=None,
        )
    )
    try:
        while True:
            event = await inbox.get()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Lost):
                raise ServiceError(Reason.WORKER_LOST, event.why, retry_after_s=1.0)
            if isinstance(event, Token) and event.delta.finish is not None:
                return
    finally:
        stream.forget(leg.request.request_id)


def _segment(leg: Leg, prompt: EncodedPrompt, label: PairLabel) -> Segment:
    """The whole prompt as a segment that carries both hashes."""
    kv = label.kv_digest()
    return Segment(
        log_id=leg.log_id,
        generation=leg.generation,
        from_position=0,
        to_position=len(prompt.token_ids),
        history_start=history_start(kv),
        history_end=history_at(kv, label.block_tokens, prompt.token_ids),
        kv_digest=kv,
        tokenizer_hash=label.tokenizer,
        block_tokens=label.block_tokens,
        numeric_class_id=label.numeric_class.id,
        text_hash=text_hash(prompt.rendered),
        ids_hash=ids_hash(prompt.token_ids),
    )

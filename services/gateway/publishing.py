"""Publishing a prefix: render, tokenise, cut to whole blocks, prefill, publish at the store.

Owns that order, the versions of a name, and the list and revocation of prefixes across the stores
this gateway sees. Who may use a prefix is decided by its grant, at the store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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
from services.gateway.prefixes import PublishedPrefix, ReadingRules, cut_to_blocks
from services.gateway.prompts import ServedModel
from services.gateway.request import (
    CacheMode,
    ChatTurn,
    EncodedPrompt,
    SequenceRequest,
    Tenant,
)

PUBLISH_TIMEOUT_S: Final = 300.0
VERSION_TRIES_MAX: Final = 3
"""How often a version is counted anew where another gateway has just published that one."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOrder:
    """What to publish: leading turns or raw text, for whom, for how long. `is_pinned`: it stays in
    memory, past its end and past newer versions.
    """

    name: str
    turns: tuple[ChatTurn, ...]
    text: str | None
    tenants: tuple[str, ...]
    ttl_s: float | None
    is_pinned: bool = False

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

    @property
    def rules(self) -> ReadingRules:
        """What this gateway makes tokens with."""
        return ReadingRules(
            tokenizer_hash=self._model.tokenizer.tokenizer_hash(),
            template_digest=self._parts.template_digest,
        )

    @property
    def model_name(self) -> str:
        """The model whose prefixes these are."""
        return self._model.name

    async def publish(
        self, tenant: Tenant, order: PublishOrder, prefix_id: str = ""
    ) -> PublishedPrefix:
        """Compute and publish as the newest version of the name; what is published already is
        returned as it is. `prefix_id` empty: the store draws one.
        """
        token_ids = await self._token_ids(order)
        search = PlanRequest(prompt_tokens=len(token_ids), tenant=tenant.name)
        plan = self._parts.planner.plan(search)
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
        for one in await self._named(tenant, order.name):
            if self._is_same(one, order, prompt, label):
                return one
        request = self._request(tenant, prompt)
        leg = await LogOpener(self._parts, request).open(plan)
        is_complete = False
        try:
            await prefill_kv(self._parts, leg)
            prefix = await self._publish_next(leg, order, label, prefix_id)
            is_complete = True
        finally:
            self._parts.cleanup.end(leg, is_complete=is_complete)
        await self._supersede(tenant, prefix)
        return prefix

    def _is_same(
        self, newest: PublishedPrefix, order: PublishOrder, prompt: EncodedPrompt, label: PairLabel
    ) -> bool:
        """Whether a prefix is what an order wants: content, grants, pin, and about its time. One
        that has less than half of the time asked for is published again.
        """
        segment = newest.segment
        if self.rules.refusal(newest) is not None or segment.kv_digest != label.kv_digest():
            return False
        if (segment.ids_hash, segment.text_hash) != (
            ids_hash(prompt.token_ids),
            text_hash(prompt.rendered),
        ):
            return False
        is_granted_alike = set(newest.tenants) == set(order.tenants)
        if not is_granted_alike or newest.is_pinned != order.is_pinned:
            return False
        if order.ttl_s is None or newest.expire_wall_s is None:
            return order.ttl_s is None and newest.expire_wall_s is None
        left_s = newest.expire_wall_s - self._parts.clock.wall_s()
        return order.ttl_s / 2.0 <= left_s <= order.ttl_s

    async def _named(self, tenant: Tenant, name: str) -> list[PublishedPrefix]:
        """The newest of a tenant's prefixes under a name; none or one."""
        named = [one for one in await self.owned(tenant) if one.name == name]
        return [max(named, key=lambda one: one.version)] if named else []

    async def _publish_next(
        self, leg: Leg, order: PublishOrder, label: PairLabel, prefix_id: str
    ) -> PublishedPrefix:
        """Publish under the next version; another gateway may take that one first."""
        tries = 0
        while True:
            tries += 1
            newest = await self._named(leg.request.tenant, order.name)
            version = max((one.version for one in newest), default=0) + 1
            try:
                return await self._publish(leg, order, label, (prefix_id, version))
            except ServiceError as error:
                if error.reason is not Reason.ALREADY_EXISTS or tries == VERSION_TRIES_MAX:
                    raise

    async def _supersede(self, tenant: Tenant, prefix: PublishedPrefix) -> None:
        """The store of the new version has dropped its older ones; what other stores have goes
        here, but for pinned ones of other content.
        """
        older = [
            one
            for one in await self.owned(tenant)
            if one.name == prefix.name and one.version < prefix.version
        ]
        alike = (prefix.segment.ids_hash, prefix.segment.text_hash)
        await self._revoke_all(
            tenant,
            [
                one
                for one in older
                if not one.is_pinned or (one.segment.ids_hash, one.segment.text_hash) == alike
            ],
        )

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

    async def _publish(
        self, leg: Leg, order: PublishOrder, label: PairLabel, identity: tuple[str, int]
    ) -> PublishedPrefix:
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
            prefix_id=identity[0],
            version=identity[1],
            is_pinned=order.is_pinned,
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
        unique = {one.prefix_id: one for one in found}.values()
        return sorted(unique, key=lambda one: (one.name, -one.version, one.prefix_id))

    async def owned(self, tenant: Tenant) -> list[PublishedPrefix]:
        """The prefixes that a tenant published."""
        return [one for one in await self.usable(tenant) if one.owner_tenant == tenant.name]

    async def revoke(self, tenant: Tenant, id_or_name: str) -> int:
        """End a prefix of the tenant, by name all its versions; returns how many there were."""
        found = [one for one in await self.owned(tenant) if id_or_name in (one.prefix_id, one.name)]
        await self._revoke_all(tenant, found)
        return len(found)

    async def _revoke_all(self, tenant: Tenant, prefixes: Sequence[PublishedPrefix]) -> None:
        for prefix in prefixes:
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
            tenant=leg.request.tenant,
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

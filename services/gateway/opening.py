"""Opening a log for one attempt: the published prefix, the store and the decode slot.

Owns what every sequence of a gateway shares (`SequenceParts`) and the step from a plan to a leg.
Never computes and never talks to the client.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, TypeVar

import structlog

from baton.capability import Right
from baton.clock import WaitingClock
from baton.errors import Reason, ServiceError
from baton.ids import new_log_id
from baton.kv.manifest import Manifest
from baton.stages import SPLICE
from services.gateway.cleanup import Cleanup
from services.gateway.client_prefixes import PrefixClient
from services.gateway.clients import DecodeClient, PrefillClient, StoreClient
from services.gateway.decode_streams import DecodeStreams
from services.gateway.handoffs import HandOffs
from services.gateway.legs import CONTROL_RIGHTS, CapabilityMint, Leg, Plan
from services.gateway.planner import Planner
from services.gateway.prefix_cache import PrefixCache
from services.gateway.prefixes import PrefixMatch, PrefixQuery, ReadingRules, match_prefix
from services.gateway.request import CacheMode, SequenceRequest
from services.gateway.side_by_side import together
from services.gateway.timing import Timeline

_log = structlog.stdlib.get_logger("baton.gateway.opening")

_Found = TypeVar("_Found")

_PREFIX_GONE: Final = frozenset(
    {
        Reason.PREFIX_NOT_FOUND,
        Reason.LOG_NOT_FOUND,
        Reason.BLOCK_NOT_FOUND,
        Reason.NOT_FOUND,
        Reason.PERMISSION_DENIED,
        Reason.CHECKSUM_MISMATCH,
        Reason.STALE_GENERATION,
        Reason.COMPAT_MISMATCH,
    }
)
"""A published prefix that cannot be used after all: go on without it."""


class Until(Protocol):
    """What `find` returns, tried now and whenever a worker is heard; None when the time is up."""

    def __call__(
        self, find: Callable[[], _Found | None], timeout_s: float
    ) -> Awaitable[_Found | None]:
        """See the class."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParts:
    """What every sequence of a gateway uses."""

    planner: Planner
    stores: StoreClient
    prefills: PrefillClient
    decodes: DecodeClient
    streams: DecodeStreams
    prefixes: PrefixCache
    prefix_client: PrefixClient
    mint: CapabilityMint
    cleanup: Cleanup
    clock: WaitingClock
    template_digest: bytes
    until: Until
    handoffs: HandOffs = field(default_factory=HandOffs)


class LogOpener:
    """Opens the logs of one request, each under an id of its own."""

    def __init__(
        self, parts: SequenceParts, request: SequenceRequest, timeline: Timeline | None = None
    ) -> None:
        self._parts = parts
        self._request = request
        self._timeline = timeline or Timeline(parts.clock, {}, request.ready_s)
        self._opens = 0

    async def open(self, plan: Plan) -> Leg:
        """A log of this attempt; without the published prefix if that cannot be used."""
        if self._request.parent is not None:
            return await self._open_from_parent(plan)
        with self._timeline.stage(SPLICE):
            match = await self._prefix(plan)
        try:
            return await self._open(plan, match)
        except ServiceError as error:
            if match is None or error.reason not in _PREFIX_GONE:
                raise
            _log.warning("prefix_not_usable", reason=error.reason.value)
            self._parts.prefixes.forget(plan.kvstore_address)
            return await self._open(plan, None)

    async def _open_from_parent(self, plan: Plan) -> Leg:
        """A log forked at the exact token; if its parent is gone, from the tokens alone."""
        try:
            return await self._open(plan, None)
        except ServiceError as error:
            if error.reason not in _PREFIX_GONE:
                raise
            _log.warning("parent_not_usable", reason=error.reason.value)
            self._request = replace(self._request, parent=None)
            return await self._open(plan, None)

    async def _open(self, plan: Plan, match: PrefixMatch | None) -> Leg:
        """Open a log and reserve the decode slot, together; neither is left if the other fails."""
        request, log_id = self._next_wire_request(), new_log_id()
        control = self.capability(log_id, CONTROL_RIGHTS)
        base: Manifest | None = None
        if match is not None:
            with self._timeline.stage(SPLICE, prefix_id=match.prefix.prefix_id):
                base = await self._parts.prefixes.manifest(match, request.request_id)
        leg = Leg(request=request, plan=plan, log_id=log_id, control=control)
        is_open = False
        # The first token is prefill's: an answer of one token never comes to decode.
        leg.is_reserved = plan.prefill is not None and request.sampling.max_tokens != 1
        try:
            opening = self._parts.stores.open(leg, base=base)
            if leg.is_reserved:
                prepare = self._parts.decodes.prepare(plan.decode, request)
                opened = await together(opening, prepare)
            else:
                opened = await opening
            is_open = True
        finally:
            if not is_open:
                self._parts.cleanup.end(leg, is_complete=False)
        leg.generation = opened.generation
        leg.cached_tokens = opened.cached_tokens
        leg.prefix_id = opened.prefix_id or (None if match is None else match.prefix.prefix_id)
        return leg

    def _next_wire_request(self) -> SequenceRequest:
        """The request under an id of its own for each log: stores tell a retry by it."""
        self._opens += 1
        if self._opens == 1:
            return self._request
        return replace(self._request, request_id=f"{self._request.request_id}.{self._opens}")

    async def _prefix(self, plan: Plan) -> PrefixMatch | None:
        """The published prefix that the prompt begins with."""
        label = plan.writer.label
        if self._request.cache_mode is CacheMode.OFF or label is None:
            return None
        offered = await self._parts.prefixes.at(plan.kvstore_address)
        return match_prefix(
            offered,
            PrefixQuery(
                prompt=self._request.prompt,
                tenant=self._request.tenant.name,
                rules=ReadingRules(
                    tokenizer_hash=label.tokenizer, template_digest=self._parts.template_digest
                ),
                kv_digest=label.kv_digest(),
                kvstore_address=plan.kvstore_address,
                now_wall_s=self._parts.clock.wall_s(),
            ),
        )

    def capability(self, log_id: bytes, rights: frozenset[Right]) -> str:
        """A capability of this request for one log, as long as the request may last."""
        return self._parts.mint.mint(
            self._request.tenant,
            rights,
            ttl_s=max(self.left_s(), 1.0),
            request_id=self._request.request_id,
            log_id=log_id,
        )

    def left_s(self) -> float:
        """Seconds to the request's deadline; negative after it."""
        return self._request.deadline_s - self._parts.clock.monotonic_s()

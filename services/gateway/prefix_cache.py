"""What published prefixes the stores offer, kept by list version, and the splice of one.

Owns the cached lists and the way from a match to a manifest: the merger first, the same pure
function when no merger answers in time. Never decides what matches (that is `prefixes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import structlog

from baton.clock import Clock
from baton.errors import Reason, ServiceError
from baton.kv.manifest import Manifest
from baton.kv.splice import splice
from services.gateway.client_prefixes import PrefixClient
from services.gateway.clients import MergerClient
from services.gateway.hub import WorkerHub
from services.gateway.legs import CapabilityMint
from services.gateway.prefixes import PrefixMatch, PublishedPrefix
from services.gateway.registry import WorkerRole

_log = structlog.stdlib.get_logger("baton.gateway.prefix_cache")

FRESH_S: Final = 0.5
"""How long a list is believed without asking for its version again."""

LIST_CAPABILITY_TTL_S: Final = 60.0


@dataclass(slots=True)
class _List:
    version: int
    checked_s: float
    prefixes: tuple[PublishedPrefix, ...]


class PrefixCache:
    """Prefix lists by store address."""

    def __init__(
        self,
        client: PrefixClient,
        mergers: MergerClient,
        hub: WorkerHub,
        *,
        mint: CapabilityMint,
        clock: Clock,
    ) -> None:
        self._client = client
        self._mergers = mergers
        self._hub = hub
        self._mint = mint
        self._clock = clock
        self._lists: dict[str, _List] = {}

    def addresses(self) -> tuple[str, ...]:
        """The stores that routable workers are attached to, whatever tokenizer these have."""
        found = {
            record.kvstore_address
            for role in (WorkerRole.PREFILL, WorkerRole.DECODE)
            for record in self._hub.routable(role)
        }
        return tuple(sorted(found - {""}))

    async def at(self, address: str) -> tuple[PublishedPrefix, ...]:
        """The prefixes of one store; what was last known when it does not answer."""
        known = self._lists.get(address)
        if known is not None and self._clock.monotonic_s() - known.checked_s < FRESH_S:
            return known.prefixes
        try:
            return await self._refreshed(address, known)
        except ServiceError as error:
            _log.warning("prefix_list_failed", reason=error.reason.value)
            return () if known is None else known.prefixes

    async def fresh(self, address: str) -> tuple[PublishedPrefix, ...]:
        """The prefixes of one store as it has them now; raises what the store raises.

        Asked in full: use counts move without a new version of the list.
        """
        return await self._refreshed(address, None)

    def forget(self, address: str) -> None:
        """The list changed by our own doing: ask again."""
        self._lists.pop(address, None)

    async def _refreshed(self, address: str, known: _List | None) -> tuple[PublishedPrefix, ...]:
        capability = self._mint.mint_own(ttl_s=LIST_CAPABILITY_TTL_S, request_id="prefix-list")
        version = None if known is None else known.version
        answer = await self._client.listed(address, capability, version)
        now_s = self._clock.monotonic_s()
        if answer is None:
            assert known is not None, "only a known list can be unchanged"
            known.checked_s = now_s
            return known.prefixes
        self._lists[address] = _List(answer.version, now_s, answer.prefixes)
        return answer.prefixes

    async def manifest(self, match: PrefixMatch, request_id: str) -> Manifest:
        """The manifest that starts a history with the matched prefix."""
        segment = match.prefix.segment
        hashes = [(match.text_hash, match.ids_hash)]
        for merger in self._hub.routable(WorkerRole.MERGER):
            try:
                return await self._mergers.splice(merger.address, request_id, [segment], hashes)
            except ServiceError as error:
                if error.reason not in _MERGER_GONE:
                    raise
                _log.warning("merger_failed", merger=merger.worker_id, reason=error.reason.value)
                # The next requests shall not wait for it as well.
                self._hub.doubt(merger)
        return splice([segment])


_MERGER_GONE: Final = frozenset(
    {
        Reason.WORKER_LOST,
        Reason.DRAINING,
        Reason.QUEUE_FULL,
        Reason.DEADLINE_EXCEEDED,
        Reason.CANCELLED,
        Reason.INTERNAL,
    }
)

"""Calls about published prefixes, in the gateway's own words.

Owns the messages and the deadline of each call. Never caches and never matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.client import ChannelPool
from baton.kv.manifest import Segment
from baton.wire.durations import timestamp_from_proto, timestamp_to_proto
from baton.wire.segments import segment_from_proto, segment_to_proto
from services.gateway.clients import CONTROL_TIMEOUT_S
from services.gateway.prefixes import PublishedPrefix


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOffer:
    """What is published: the segment with both hashes, its ids, and for whom.

    `prefix_id` empty: the store draws one.
    """

    name: str
    segment: Segment
    token_ids: Sequence[int]
    tenants: Sequence[str]
    owner_tenant: str
    text_bytes: int
    template_digest: bytes
    model: str
    expire_wall_s: float | None
    prefix_id: str = ""
    version: int = 1
    is_pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixList:
    """A store's prefixes at a version."""

    version: int
    prefixes: tuple[PublishedPrefix, ...]


class PrefixClient:
    """Publish, list, revoke at a store."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    def _stub(self, address: str) -> kvstore_pb2_grpc.KVStoreServiceAsyncStub:
        return kvstore_pb2_grpc.KVStoreServiceStub(self._channels.get(address))

    async def listed(
        self, address: str, capability: str, known_version: int | None
    ) -> PrefixList | None:
        """The store's list; None when it still is the known version."""
        message = kvstore_pb2.ListPrefixesRequest(
            capability=capability, known_version=known_version or 0
        )
        answer = await self._stub(address).ListPrefixes(message, timeout=CONTROL_TIMEOUT_S)
        if answer.unchanged and known_version is not None:
            return None
        prefixes = tuple(_from_proto(one, address) for one in answer.prefixes)
        return PrefixList(version=answer.version, prefixes=prefixes)

    async def publish(
        self, address: str, offer: PrefixOffer, *, capability: str, request_id: str
    ) -> PublishedPrefix:
        """Offer a prefix; as it is stored."""
        message = kvstore_pb2.PublishedPrefix(
            name=offer.name,
            segment=segment_to_proto(offer.segment),
            tenants=offer.tenants,
            owner_tenant=offer.owner_tenant,
            text_bytes=offer.text_bytes,
            template_digest=offer.template_digest,
            model=offer.model,
            prefix_id=offer.prefix_id,
            version=offer.version,
            pinned=offer.is_pinned,
        )
        message.segment.token_ids.extend(offer.token_ids)
        message.log.CopyFrom(message.segment.log)
        if offer.expire_wall_s is not None:
            message.expire_time.CopyFrom(timestamp_to_proto(offer.expire_wall_s))
        request = kvstore_pb2.PublishRequest(
            prefix=message, capability=capability, request_id=request_id
        )
        answer = await self._stub(address).Publish(request, timeout=CONTROL_TIMEOUT_S)
        return _from_proto(answer.prefix, address)

    async def revoke(self, address: str, prefix_id: str, capability: str) -> None:
        """End a prefix."""
        message = kvstore_pb2.RevokeRequest(prefix_id=prefix_id, capability=capability)
        await self._stub(address).Revoke(message, timeout=CONTROL_TIMEOUT_S)


def _from_proto(message: kvstore_pb2.PublishedPrefix, address: str) -> PublishedPrefix:
    has_end = message.HasField("expire_time")
    # A store keeps as many zeros where the model has no template.
    template_digest = message.template_digest if any(message.template_digest) else b""
    return PublishedPrefix(
        prefix_id=message.prefix_id,
        name=message.name,
        segment=segment_from_proto(message.segment),
        text_bytes=message.text_bytes,
        template_digest=template_digest,
        owner_tenant=message.owner_tenant,
        tenants=tuple(message.tenants),
        model=message.model,
        create_wall_s=timestamp_from_proto(message.create_time),
        expire_wall_s=timestamp_from_proto(message.expire_time) if has_end else None,
        hits=message.hits,
        kvstore_address=address,
        version=message.version or 1,
        is_pinned=message.pinned,
        kv_bytes=message.kv_bytes,
        host_tokens=message.host_tokens,
        nvme_tokens=message.nvme_tokens,
    )

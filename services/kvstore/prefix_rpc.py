"""Publish, Revoke and ListPrefixes.

Owns the path of these calls and the ids of published prefixes.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

from baton.api.kvstore.v1 import kvstore_pb2
from baton.capability import Right
from baton.errors import Reason, ServiceError
from baton.kv.digests import history_start
from baton.wire.durations import timestamp_from_proto
from services.kvstore import wire
from services.kvstore.access import Access
from services.kvstore.answers import Answers
from services.kvstore.identity import Identity
from services.kvstore.prefixes import Prefix
from services.kvstore.publishing import PublishOrder
from services.kvstore.runtime import Runtime

PREFIX_ID_BYTES = 12
_GIVEN_ID: Final = re.compile(r"pfx-[0-9a-f]{24}", re.ASCII)


class PrefixCalls:
    """Serves the calls about published prefixes."""

    def __init__(self, runtime: Runtime, access: Access, identity: Identity) -> None:
        self._runtime = runtime
        self._access = access
        self._identity = identity
        self._answers = Answers()

    async def publish(self, request: kvstore_pb2.PublishRequest) -> kvstore_pb2.PublishResponse:
        """Publish."""
        given = request.prefix
        log_id = wire.require_log_id(given.log.log_id, "prefix.log.log_id")
        claims = self._access.tenant(request.capability, Right.PUBLISH, log_id=log_id)
        tenant, _ = claims.tenant_scope()
        call = self._answers.call(kvstore_pb2.PublishResponse, tenant, log_id, request)
        kept = call.known()
        if kept is None:
            kept = call.keep(self._publish(request, log_id, tenant))
        await self._runtime.acked(kept.level)
        return kept.answer

    def _publish(
        self, request: kvstore_pb2.PublishRequest, log_id: bytes, tenant: str
    ) -> kvstore_pb2.PublishResponse:
        given = request.prefix
        order = PublishOrder(
            prefix_id=_prefix_id(given.prefix_id),
            name=given.name,
            tenant=tenant,
            tenants=tuple(given.tenants),
            log_id=log_id,
            position=given.log.position,
            text_hash=given.segment.text_hash,
            ids_hash=given.segment.ids_hash,
            history_end=given.segment.history_end,
            text_bytes=given.text_bytes,
            template_digest=given.template_digest,
            model=given.model or self._identity.model,
            expire_wall_s=(
                timestamp_from_proto(given.expire_time) if given.HasField("expire_time") else None
            ),
            version=given.version or 1,
            is_pinned=given.pinned,
        )
        prefix = self._runtime.store.prefix_keeper.publish(order, self._runtime.now().wall_s)
        return kvstore_pb2.PublishResponse(prefix=self._to_proto(prefix))

    async def revoke(self, request: kvstore_pb2.RevokeRequest) -> kvstore_pb2.RevokeResponse:
        """Revoke."""
        claims = self._access.any_of(request.capability, (Right.PUBLISH, Right.ADMIN))
        is_operator = claims.tenant is None and Right.ADMIN in claims.rights
        tenant = None if is_operator else claims.tenant_scope()[0]
        subject = request.prefix_id.encode()
        call = self._answers.call(kvstore_pb2.RevokeResponse, tenant, subject, request)
        kept = call.known()
        if kept is None:
            keeper = self._runtime.store.prefix_keeper
            keeper.revoke(request.prefix_id, tenant, self._runtime.now().wall_s)
            kept = call.keep(kvstore_pb2.RevokeResponse())
        await self._runtime.acked(kept.level)
        return kept.answer

    def list(self, request: kvstore_pb2.ListPrefixesRequest) -> kvstore_pb2.ListPrefixesResponse:
        """ListPrefixes."""
        rights = (Right.READ, Right.OPEN, Right.PUBLISH, Right.ADMIN)
        claims = self._access.any_of(request.capability, rights)
        is_operator = claims.tenant is None and Right.ADMIN in claims.rights
        tenant = None if is_operator else claims.tenant_scope()[0]
        table = self._runtime.core.prefixes
        if request.known_version == table.version:
            return kvstore_pb2.ListPrefixesResponse(version=table.version, unchanged=True)
        prefixes = [self._to_proto(prefix) for prefix in table.visible_to(tenant)]
        for message in prefixes:
            # They would fill the largest message long before the table is full, and are content:
            # who may use a prefix knows it, and need not be told it.
            message.segment.ClearField("token_ids")
        return kvstore_pb2.ListPrefixesResponse(version=table.version, prefixes=prefixes)

    def _to_proto(self, prefix: Prefix) -> kvstore_pb2.PublishedPrefix:
        limits = self._runtime.core.limits
        message = wire.prefix_to_proto(prefix, limits, history_start(limits.kv_digest))
        page_bytes = self._runtime.arena.page_bytes
        message.kv_bytes = -(-prefix.position // limits.block_tokens) * page_bytes
        return message


def _prefix_id(given: str) -> str:
    """The id that the caller drew, or a new one."""
    if not given:
        return f"pfx-{secrets.token_hex(PREFIX_ID_BYTES)}"
    if not _GIVEN_ID.fullmatch(given):
        raise ServiceError(
            Reason.INVALID_REQUEST,
            f"prefix.prefix_id must be pfx- and {2 * PREFIX_ID_BYTES} hexadecimal digits, or empty",
            field="prefix.prefix_id",
        )
    return given

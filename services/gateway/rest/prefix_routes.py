"""The routes of published prefixes: publish, look, revoke.

Owns their request and answer shapes; what publishing is, is `prefix_desk`'s and `publishing`'s.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from services.gateway.core import GatewayCore
from services.gateway.prefix_desk import PrefixView
from services.gateway.publishing import PublishOrder
from services.gateway.rest.chat_request import CONTENT_CHARS_MAX, read_messages
from services.gateway.rest.context import RequestContext
from services.gateway.rest.exchange import Receive, Scope, Send, header, read_body, send_json
from services.gateway.rest.json_body import invalid, parse_object
from services.gateway.rest.reader import ObjectReader, checked_text
from services.gateway.rest.sampling_fields import read_model

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]
PATH: Final = "/v1/prefixes"
PREFIX_HEADER: Final = "x-baton-prefix"
TTL_S_MAX: Final = 10 * 365 * 86_400.0
TENANTS_MAX: Final = 1024
TENANT_CHARS_MAX: Final = 64


class PrefixRoutes:
    """The handlers, over one core."""

    def __init__(self, core: GatewayCore, body_bytes_max: int) -> None:
        self._core = core
        self._body_bytes_max = body_bytes_max

    def table(self) -> list[tuple[str, Handler, str]]:
        """(path, handler, method) of every route."""
        one = f"{PATH}/{{id:path}}"
        return [
            (PATH, self._publish, "POST"),
            (PATH, self._list, "GET"),
            (one, self._show, "GET"),
            (one, self._delete, "DELETE"),
        ]

    async def _publish(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_body(scope, receive, self._body_bytes_max)
        reader = ObjectReader(parse_object(raw))
        self._core.model.require(read_model(reader))
        order = _order(reader)
        desk, tenant = self._core.prefixes, RequestContext.of(scope).tenant
        if reader.flag("wait", default=not _prefers_async(scope)):
            view = desk.view_of(await desk.publish(tenant, order))
            await send_json(send, prefix_body(view))
            return
        view = desk.order(tenant, order)
        headers = {"location": f"{PATH}/{view.prefix_id}", "preference-applied": "respond-async"}
        await send_json(send, prefix_body(view), status=202, headers=headers)

    async def _list(self, scope: Scope, _receive: Receive, send: Send) -> None:
        views = await self._core.prefixes.visible(RequestContext.of(scope).tenant)
        await send_json(send, {"object": "list", "data": [prefix_body(one) for one in views]})

    async def _show(self, scope: Scope, _receive: Receive, send: Send) -> None:
        wanted = scope["path_params"]["id"]
        view = await self._core.prefixes.find(RequestContext.of(scope).tenant, wanted)
        await send_json(send, prefix_body(view))

    async def _delete(self, scope: Scope, _receive: Receive, send: Send) -> None:
        wanted = scope["path_params"]["id"]
        await self._core.prefixes.revoke(RequestContext.of(scope).tenant, wanted)
        await send_json(send, {"id": wanted, "object": "prefix", "deleted": True})


def _prefers_async(scope: Scope) -> bool:
    """RFC 7240's `Prefer: respond-async`."""
    preferences = (header(scope, "prefer") or "").lower().split(",")
    return any(one.partition(";")[0].strip() == "respond-async" for one in preferences)


def _order(reader: ObjectReader) -> PublishOrder:
    name = reader.text("name", chars_max=128)
    if name is None:
        raise invalid("name must be given", "name")
    text = reader.text("text", chars_max=CONTENT_CHARS_MAX)
    if (text is None) == (not reader.has("messages")):
        raise invalid("give either messages or text", "messages")
    turns = () if text is not None else read_messages(reader)[0]
    ttl_s = reader.real("ttl_s")
    if ttl_s is not None and not 1.0 <= ttl_s <= TTL_S_MAX:
        raise invalid(f"ttl_s must be from 1 to {TTL_S_MAX:g}", "ttl_s")
    tenants = reader.items("tenants", count_max=TENANTS_MAX) or []
    return PublishOrder(
        name=name,
        turns=turns,
        text=text,
        tenants=tuple(
            checked_text(one, f"tenants[{i}]", TENANT_CHARS_MAX) for i, one in enumerate(tenants)
        ),
        ttl_s=ttl_s,
        is_pinned=reader.flag("pin"),
    )


def prefix_body(view: PrefixView) -> dict[str, Any]:
    """A prefix as applications see it; what is not known yet is null."""
    body: dict[str, Any] = {
        "id": view.prefix_id,
        "object": "prefix",
        "name": view.name,
        "status": view.status.value,
        "detail": view.detail,
        "model": view.model,
        "version": None,
        "superseded_by": view.superseded_by,
        "tokens": None,
        "tenants": list(view.tenants),
        "owner": view.owner,
        "created": int(view.create_wall_s),
        "expires": None,
        "pin": view.is_pinned,
        "hits": 0,
    }
    prefix = view.prefix
    if prefix is None:
        return body
    segment = prefix.segment
    return body | {
        "version": prefix.version,
        "tokens": prefix.tokens,
        "expires": None if prefix.expire_wall_s is None else int(prefix.expire_wall_s),
        "hits": prefix.hits,
        "kv_bytes": prefix.kv_bytes,
        "host_tokens": prefix.host_tokens,
        "nvme_tokens": prefix.nvme_tokens,
        "text_hash": _hex(segment.text_hash),
        "ids_hash": _hex(segment.ids_hash),
        "tokenizer_hash": _hex(segment.tokenizer_hash),
        "template_digest": _hex(prefix.template_digest),
        "kv_digest": _hex(segment.kv_digest),
    }


def _hex(digest: bytes | None) -> str | None:
    return digest.hex() if digest else None

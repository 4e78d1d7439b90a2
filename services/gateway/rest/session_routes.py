"""`/v1/sessions`: conversations under names, over HTTP.

Owns the shapes of these requests and answers. Every refusal names the field and the remedy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from services.gateway.client_sessions import LineageLog, Session
from services.gateway.core import GatewayCore
from services.gateway.request import ID_CHARS_MAX, ChatTurn, Tenant
from services.gateway.rest.chat_request import CONTENT_CHARS_MAX, read_messages
from services.gateway.rest.context import RequestContext
from services.gateway.rest.exchange import Receive, Scope, Send, read_body, send_json
from services.gateway.rest.json_body import invalid, parse_object
from services.gateway.rest.reader import ObjectReader, checked_text, checked_whole
from services.gateway.session_calls import Changed
from services.gateway.session_edit import Anchor, EditOrder

TTL_S_MAX: Final = 7 * 86_400.0
TOKENS_MAX: Final = 1 << 20
GENERATION_MAX: Final = 1 << 62
ANCHOR_CHARS_MAX: Final = 65_536

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class SessionRoutes:
    """The handlers, over one core."""

    def __init__(self, core: GatewayCore, body_bytes_max: int) -> None:
        self._core = core
        self._body_bytes_max = body_bytes_max

    def table(self) -> list[tuple[str, Handler, str]]:
        """(Path, handler, method)."""
        one = "/v1/sessions/{id}"
        return [
            ("/v1/sessions", self._list, "GET"),
            ("/v1/sessions", self._create, "POST"),
            (one, self._show, "GET"),
            (one, self._delete, "DELETE"),
            (f"{one}/edit", self._edit, "POST"),
            (f"{one}/truncate", self._truncate, "POST"),
            (f"{one}/fork", self._fork, "POST"),
        ]

    async def _list(self, scope: Scope, _receive: Receive, send: Send) -> None:
        found = await self._core.sessions.listed(_tenant(scope))
        await send_json(send, {"object": "list", "data": [session_body(one) for one in found]})

    async def _create(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = await self._reader(scope, receive)
        source = reader.text("from", chars_max=ID_CHARS_MAX)
        if (source is None) == (not reader.has("messages")):
            raise invalid("give either from (a response or session id) or messages", "from")
        turns: tuple[ChatTurn, ...] = ()
        if source is None:
            turns, _ = read_messages(reader)
        ttl_s = _ttl(reader)
        _strict(reader)
        tenant = _tenant(scope)
        async with self._core.limits.admitted(tenant.name, 1):
            changed = await self._core.sessions.create(
                tenant, source=source, turns=turns, ttl_s=ttl_s
            )
        await send_json(send, changed_body(changed), status=201)

    async def _show(self, scope: Scope, _receive: Receive, send: Send) -> None:
        tenant, sessions = _tenant(scope), self._core.sessions
        session, lineage = await sessions.find(tenant, _id(scope), with_lineage=True)
        messages = await sessions.messages(tenant, session.head)
        body = {
            **session_body(session),
            "messages": [{"role": one.role.value, "content": one.content} for one in messages],
            "lineage": [log_body(one) for one in lineage],
        }
        await send_json(send, body)

    async def _delete(self, scope: Scope, _receive: Receive, send: Send) -> None:
        wanted = _id(scope)
        await self._core.sessions.delete(_tenant(scope), wanted)
        await send_json(send, {"id": wanted, "object": "session", "deleted": True})

    async def _edit(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = await self._reader(scope, receive)
        order = read_edit(reader)
        generation = _generation(reader)
        _strict(reader)
        tenant = _tenant(scope)
        async with self._core.limits.admitted(tenant.name, 1):
            changed = await self._core.sessions.edit(tenant, _id(scope), order, generation)
        await send_json(send, changed_body(changed))

    async def _truncate(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = await self._reader(scope, receive)
        position = reader.whole("position", low=1, high=TOKENS_MAX)
        if position is None:
            raise invalid("position must be given: how many tokens are kept", "position")
        generation = _generation(reader)
        _strict(reader)
        changed = await self._core.sessions.truncate(
            _tenant(scope), _id(scope), position, generation
        )
        await send_json(send, changed_body(changed))

    async def _fork(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = await self._reader(scope, receive)
        position = reader.whole("position", low=1, high=TOKENS_MAX)
        ttl_s = _ttl(reader)
        _strict(reader)
        changed = await self._core.sessions.fork(
            _tenant(scope), _id(scope), position=position, ttl_s=ttl_s
        )
        await send_json(send, changed_body(changed), status=201)

    async def _reader(self, scope: Scope, receive: Receive) -> ObjectReader:
        data = await read_body(scope, receive, self._body_bytes_max)
        return ObjectReader(parse_object(data) if data.strip() else {})


def _tenant(scope: Scope) -> Tenant:
    return RequestContext.of(scope).tenant


def _id(scope: Scope) -> str:
    wanted: str = scope["path_params"]["id"]
    return wanted


def _ttl(reader: ObjectReader) -> float | None:
    ttl_s = reader.real("ttl_s")
    if ttl_s is not None and not 1.0 <= ttl_s <= TTL_S_MAX:
        raise invalid(f"ttl_s must be from 1 to {TTL_S_MAX:g}", "ttl_s")
    return ttl_s


def _generation(reader: ObjectReader) -> int | None:
    return reader.whole("generation", low=1, high=GENERATION_MAX)


def _strict(reader: ObjectReader) -> None:
    """A field that is not known would change what the caller means: refused."""
    ignored = reader.ignored()
    if ignored:
        raise invalid(f"{ignored[0]} is not known here; leave it out", ignored[0])


def read_edit(reader: ObjectReader) -> EditOrder:
    """`start`, `end` and `replacement` of an edit; raises INVALID_REQUEST naming the path."""
    start = _anchor(reader, "start")
    if start is None:
        raise invalid("start must be given: an object with token, text or message", "start")
    end = _anchor(reader, "end")
    if not reader.has("replacement"):
        raise invalid(
            'replacement must be given: a text, {"token_ids": [...]} or a list of messages; "" '
            "deletes the range",
            "replacement",
        )
    value = reader.take("replacement")
    if isinstance(value, str):
        text = checked_text(value, "replacement", CONTENT_CHARS_MAX)
        return EditOrder(start=start, end=end, text=text)
    if isinstance(value, dict):
        return EditOrder(start=start, end=end, token_ids=_token_ids(value))
    if isinstance(value, list):
        return EditOrder(start=start, end=end, turns=_replacement_turns(value))
    raise invalid("replacement must be a text, an object with token_ids or a list", "replacement")


def _token_ids(value: Mapping[str, Any]) -> tuple[int, ...]:
    one = ObjectReader(value, "replacement")
    ids = one.items("token_ids", count_max=TOKENS_MAX)
    _strict(one)
    if ids is None:
        raise invalid("replacement.token_ids must be a list of token ids", "replacement.token_ids")
    return tuple(
        checked_whole(item, f"replacement.token_ids[{index}]", 0, (1 << 32) - 1)
        for index, item in enumerate(ids)
    )


def _replacement_turns(value: Sequence[Any]) -> tuple[ChatTurn, ...]:
    if not value:
        return ()
    turns, _ = read_messages(ObjectReader({"messages": value}))
    return turns


def _anchor(reader: ObjectReader, name: str) -> Anchor | None:
    value = reader.mapping(name)
    if value is None:
        return None
    one = ObjectReader(value, name)
    token = one.whole("token", low=0, high=TOKENS_MAX)
    message = one.whole("message", low=0, high=TOKENS_MAX)
    byte = one.whole("byte", low=0, high=CONTENT_CHARS_MAX)
    text = one.text("text", chars_max=ANCHOR_CHARS_MAX)
    _strict(one)
    if sum(given is not None for given in (token, message, text)) != 1:
        raise invalid(f"{name} must have exactly one of token, text and message", name)
    if byte is not None and message is None:
        raise invalid(f"{name}.byte needs message", f"{name}.byte")
    return Anchor(token=token, text=text, message=message, byte=byte)


def session_body(session: Session) -> dict[str, Any]:
    """A session as applications see it."""
    return {
        "id": session.session_id,
        "object": "session",
        "generation": session.generation,
        "tokens": session.head.position,
        "log_id": session.head.log_id.hex(),
        "created": int(session.create_wall_s),
        "expires": int(session.expire_wall_s),
        "parent": session.parent_id,
        "parent_position": session.parent_position if session.parent_id else None,
    }


def log_body(log: LineageLog) -> dict[str, Any]:
    """One log of a tree as applications see it."""
    return {
        "log_id": log.log_id.hex(),
        "parent_log_id": log.parent_log_id.hex() or None,
        "parent_position": log.parent_position,
        "tokens": log.tokens,
        "prompt_tokens": log.prompt_tokens,
        "request_id": log.request_id or None,
        "opened": None if log.opened_wall_s is None else int(log.opened_wall_s),
        "sessions": list(log.session_ids),
        "gone": log.is_gone,
        "depth": log.depth,
    }


def changed_body(changed: Changed) -> dict[str, Any]:
    """A session after a change, and what it took."""
    recount = changed.recount
    return {
        **session_body(changed.session),
        "reused_tokens": recount.reused,
        "recomputed_tokens": recount.recomputed,
        "dropped_tokens": recount.dropped,
        "inserted_tokens": recount.inserted,
    }

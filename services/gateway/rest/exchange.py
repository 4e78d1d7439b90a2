"""One HTTP exchange at the ASGI level: bounded body, JSON answers, streams, the client's leaving.

Owns reading and writing. A client that leaves cancels the work at once, whether it streams or not;
closing the sending side alone counts as leaving, as the HTTP server reports both alike.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing
from typing import Any, Final

from services.gateway.rest.errors import HttpRefusal

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON_TYPE: Final = "application/json"
SSE_HEADERS: Final[Mapping[str, str]] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class ClientGone(Exception):
    """The client left; nobody reads an answer."""


def header(scope: Scope, name: str) -> str | None:
    """A request header's value, the last one if it is repeated."""
    wanted = name.lower().encode()
    value = None
    for key, found in scope["headers"]:
        if key == wanted:
            value = found
    return None if value is None else value.decode("latin-1")


async def read_body(scope: Scope, receive: Receive, bytes_max: int) -> bytes:
    """The request's body; refused with 413 before more than `bytes_max` bytes are kept."""
    kind = header(scope, "content-type")
    if kind is not None and kind.partition(";")[0].strip().lower() != JSON_TYPE:
        raise HttpRefusal(415, f"send the body as {JSON_TYPE}", "unsupported_media_type")
    length = header(scope, "content-length")
    if length is not None and (not length.isdigit() or int(length) > bytes_max):
        raise _too_large(bytes_max)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > bytes_max:
            raise _too_large(bytes_max)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(bytes_max: int) -> HttpRefusal:
    return HttpRefusal(
        413,
        f"the body may have at most {bytes_max} bytes",
        "request_too_large",
        headers={"connection": "close"},
    )


async def while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Run `work` until it ends or the client leaves; then it is cancelled and ClientGone raised."""
    failure: list[Exception] = []

    async def guarded() -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  # raised again below, outside the group
            failure.append(error)

    async with asyncio.TaskGroup() as group:
        working = group.create_task(guarded())
        leaving = group.create_task(_left(receive))
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        is_gone = not working.done()
        working.cancel()
        leaving.cancel()
    if failure:
        raise failure[0]
    if is_gone:
        raise ClientGone


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def encode_json(value: object) -> bytes:
    """UTF-8 JSON without NaN or infinity."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


async def send_bytes(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """A whole response."""
    named = {**headers, "content-length": str(len(body))}
    await send({"type": "http.response.start", "status": status, "headers": raw_headers(named)})
    await send({"type": "http.response.body", "body": body})


async def send_json(
    send: Send, value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """A whole JSON response."""
    named = {"content-type": JSON_TYPE, **(headers or {})}
    await send_bytes(send, status, encode_json(value), named)


async def send_events(
    send: Send, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]
) -> None:
    """A stream of server-sent events, each flushed as it comes."""
    start = {"type": "http.response.start", "status": 200}
    await send({**start, "headers": raw_headers({**SSE_HEADERS, **headers})})
    async with aclosing(events):
        async for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def raw_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """ASGI's form of headers."""
    return [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]

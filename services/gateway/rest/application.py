"""The ASGI application: ids, credentials, routing, and an OpenAI error body for everything else.

Owns the order: ids first, then the credential, then the route; deny by default. An unexpected error
is logged once under an error id and answered opaquely.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import structlog
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router

from baton.errors import Reason, ServiceError
from baton.ids import new_error_id, new_request_id
from baton.tracing import (
    TraceContext,
    is_request_id,
    new_trace,
    parse_traceparent,
    request_scope,
    span,
)
from services.gateway.auth import DEV_TENANT, Authenticator
from services.gateway.registry import WorkerRole
from services.gateway.request import Tenant
from services.gateway.rest.context import CONTEXT_KEY, RequestContext
from services.gateway.rest.errors import (
    ErrorAnswer,
    HttpRefusal,
    answer_of,
    answer_of_refusal,
)
from services.gateway.rest.exchange import (
    JSON_TYPE,
    ClientGone,
    Message,
    Receive,
    Scope,
    Send,
    header,
    raw_headers,
    send_bytes,
)

_log = structlog.stdlib.get_logger("baton.gateway.rest")

OPEN_PATHS: Final = frozenset(
    {"/healthz", "/readyz", "/health", "/ping", "/readyz/gateway"}
    | {f"/readyz/{role.value}" for role in WorkerRole}
)
"""Answer without a credential; they say up or not and nothing else."""

UNTRACED_PATHS: Final = OPEN_PATHS | {"/metrics", "/version"}
"""Asked every few seconds by machines: spans of these would push out those of requests."""

ROOT_SPAN: Final = "request"
TRACES_PATH: Final = "/debug/traces/"

EXPOSED_HEADERS: Final = (
    "x-request-id",
    "x-baton-request-id",
    "x-serving-mode",
    "x-baton-exactness",
    "x-baton-kv-source",
    "x-baton-cached-tokens",
    "x-baton-ignored-params",
    "retry-after",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
)


class RestApplication:
    """What the HTTP server runs."""

    def __init__(self, routes: Sequence[Route], authenticator: Authenticator) -> None:
        self._router = Router(routes=list(routes), redirect_slashes=False)
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One exchange."""
        if scope["type"] != "http":
            return
        received_s = time.monotonic()
        request_id, client_id = new_request_id(), header(scope, "x-request-id")
        if client_id is not None and not is_request_id(client_id):
            client_id = None
        trace: TraceContext | None = parse_traceparent(header(scope, "traceparent")) or new_trace()
        writer = _Writer(send, request_id, client_id or request_id)
        if scope["path"] in UNTRACED_PATHS or scope["path"].startswith(TRACES_PATH):
            trace = None
        with (
            request_scope(request_id, trace),
            span(ROOT_SPAN, request_id=request_id, client_request_id=client_id) as root,
        ):
            try:
                with span("auth"):
                    tenant = self._tenant(scope)
                root.set(tenant=tenant.name)
                scope[CONTEXT_KEY] = RequestContext(
                    request_id=request_id,
                    client_request_id=client_id,
                    tenant=tenant,
                    received_s=received_s,
                )
                # Router answers 404 and 405 itself unless an application stands above it.
                scope["app"] = self
                await self._router(scope, receive, writer.send)
            except ClientGone:
                root.fail(Reason.CANCELLED.value)
            except Exception as error:  # noqa: BLE001  # whatever it is, the client gets an answer
                answer = _answer(error)
                root.fail(str(answer.body["error"]["code"]))
                await writer.fail(answer)

    def _tenant(self, scope: Scope) -> Tenant:
        if scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            return DEV_TENANT
        return self._authenticator.tenant_of(header(scope, "authorization"))


class _Writer:
    """Adds the ids to the response and knows whether it has begun."""

    def __init__(self, send: Send, request_id: str, echoed_id: str) -> None:
        self._send = send
        self._ids = raw_headers({"x-request-id": echoed_id, "x-baton-request-id": request_id})
        self._has_started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_started = True
            message = {**message, "headers": [*message.get("headers", ()), *self._ids]}
        await self._send(message)

    async def fail(self, answer: ErrorAnswer) -> None:
        if self._has_started:
            # Half an answer is out and its stream could not say why: breaking it is honest.
            raise ConnectionAbortedError("the response had begun")
        await send_bytes(
            self.send, answer.status, answer.content, {"content-type": JSON_TYPE, **answer.headers}
        )


def _answer(error: Exception) -> ErrorAnswer:
    if isinstance(error, ServiceError):
        return answer_of(error)
    if isinstance(error, HttpRefusal):
        return answer_of_refusal(error)
    if isinstance(error, HTTPException):
        return answer_of_refusal(_refusal(error))
    error_id = new_error_id()
    _log.error("request_failed_unexpectedly", error_id=error_id, exc_info=error)
    return answer_of(ServiceError.internal(error_id))


def _refusal(error: HTTPException) -> HttpRefusal:
    if error.status_code == 404:
        return HttpRefusal(404, "there is nothing at this path", "not_found")
    if error.status_code == 405:
        headers = dict(error.headers or {})
        return HttpRefusal(
            405, "this path has no such method", "method_not_allowed", headers=headers
        )
    return HttpRefusal(error.status_code, "the request was refused", "http_error")


def with_cors(application: Any, origins: Sequence[str]) -> Any:
    """The application behind a CORS rule; unchanged without origins."""
    if not origins:
        return application
    return CORSMiddleware(
        application,
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
        allow_headers=["*"],
        expose_headers=list(EXPOSED_HEADERS),
        max_age=600,
    )

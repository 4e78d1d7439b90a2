"""The small HTTP side of a service: /metrics, /healthz, /readyz, /debug/traces.

Owns the application; `baton.http_server` runs it. Health says up or not, and nothing of the
topology. Traces hold names, times and counts, never what tenants wrote.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from baton.faults import faults
from baton.faults.admin import fault_routes
from baton.metrics import Metrics
from baton.tracing import process_tracing
from baton.tracing_tree import process_spans

ID_CHARS_MAX: Final = 256

FindTrace = Callable[[str], Awaitable[dict[str, Any] | None]]
"""A trace by its own or its request's id, as `/debug/traces` answers; None when unknown."""


async def own_spans(wanted: str) -> dict[str, Any] | None:
    """What this process kept of a trace."""
    tracing = process_tracing()
    trace_id = wanted if tracing.records(wanted) else tracing.trace_of(wanted)
    return None if trace_id is None else process_spans(tracing, trace_id)


def metrics_application(
    metrics: Metrics, is_ready: Callable[[], bool], find_trace: FindTrace = own_spans
) -> Starlette:
    """An ASGI application: `/metrics` in Prometheus' text format, or in OpenMetrics' if asked for;
    `/healthz` alive; `/readyz` could serve (503 while it could not); `/debug/traces/{id}`;
    `/debug/faults` where fault points are on.
    """

    async def show(request: Request) -> Response:
        text, kind = metrics.negotiated(request.headers.get("accept"))
        return Response(text, media_type=kind)

    async def alive(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(_request: Request) -> Response:
        if is_ready():
            return PlainTextResponse("ok\n")
        return PlainTextResponse("not ready\n", status_code=503)

    async def trace(request: Request) -> Response:
        wanted = str(request.path_params["wanted"])
        found = await find_trace(wanted) if len(wanted) <= ID_CHARS_MAX else None
        if found is None:
            return PlainTextResponse("no such trace is kept here\n", status_code=404)
        return JSONResponse(found)

    return Starlette(
        routes=[
            Route("/metrics", show),
            Route("/healthz", alive),
            Route("/readyz", ready),
            Route("/debug/traces/{wanted}", trace),
            *fault_routes(faults),
        ]
    )

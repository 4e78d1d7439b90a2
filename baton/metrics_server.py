"""The small HTTP side of a gRPC service: /metrics, /healthz, /readyz.

Owns the application; `baton.http_server` runs it. Says up or not, and nothing of the topology.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from baton.metrics import Metrics


def metrics_application(metrics: Metrics, is_ready: Callable[[], bool]) -> Starlette:
    """An ASGI application: `/metrics` in Prometheus' text format, `/healthz` alive, `/readyz` could
    serve (503 while it could not).
    """

    async def show(_request: Request) -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def alive(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(_request: Request) -> Response:
        if is_ready():
            return PlainTextResponse("ok\n")
        return PlainTextResponse("not ready\n", status_code=503)

    return Starlette(
        routes=[Route("/metrics", show), Route("/healthz", alive), Route("/readyz", ready)]
    )

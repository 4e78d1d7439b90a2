"""Fault points over HTTP, for drills against running processes.

Owns one route, `/debug/faults`: GET shows what is armed and the counts, PUT arms the FAULT
specification in the body, DELETE disarms and lets paused work go (`?point=` one point only).
A process where fault points are off has no such route.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.faults.points import POINTS
from baton.faults.spec import SPEC_CHARS_MAX, FaultSpecError
from baton.faults.switchboard import Faults

PATH = "/debug/faults"
_BODY_BYTES_MAX = 4 * SPEC_CHARS_MAX


def fault_routes(faults: Faults) -> list[Route]:
    """The route for a service's small HTTP server; none where fault points are off."""
    if not faults.is_enabled:
        return []

    async def show(_request: Request) -> Response:
        return JSONResponse(_state(faults))

    async def arm(request: Request) -> Response:
        spec = await _text(request)
        if spec is None:
            return _refused([f"the body is not UTF-8 text of at most {_BODY_BYTES_MAX} bytes"])
        try:
            faults.arm(spec)
        except FaultSpecError as error:
            return _refused(list(error.faults))
        return JSONResponse(_state(faults))

    async def disarm(request: Request) -> Response:
        point = request.query_params.get("point")
        if point is not None and point not in POINTS:
            return _refused([f"no point is named {point!r}; there are {', '.join(sorted(POINTS))}"])
        faults.disarm(point)
        return JSONResponse(_state(faults))

    return [
        Route(PATH, show, methods=["GET"]),
        Route(PATH, arm, methods=["PUT"]),
        Route(PATH, disarm, methods=["DELETE"]),
    ]


def _state(faults: Faults) -> dict[str, Any]:
    armed = [
        {"point": fault.point, "action": fault.action.value, "once": fault.is_once}
        for fault in faults.armed
    ]
    return {"armed": armed, "hits": faults.hits, "fired": faults.fired}


def _refused(faults: list[str]) -> Response:
    return JSONResponse({"faults": faults}, status_code=400)


async def _text(request: Request) -> str | None:
    """The body, or None where it is too long or not text."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _BODY_BYTES_MAX:
            return None
    try:
        return body.decode("utf-8").strip()
    except UnicodeDecodeError:
        return None

"""Asking a server whether it serves.

Owns the client side of grpc.health.v1. Never retries.
"""

from __future__ import annotations

from typing import Final

import grpc
from grpc_health.v1 import health_pb2

READINESS: Final = "readiness"
_CHECK: Final = "/grpc.health.v1.Health/Check"


async def is_serving(channel: grpc.aio.Channel, timeout_s: float, service: str = READINESS) -> bool:
    """True when `service` is SERVING; False for anything else, silence included."""
    check = channel.unary_unary(
        _CHECK,
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    try:
        answer = await check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

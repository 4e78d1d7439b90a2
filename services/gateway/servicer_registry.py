"""The registry on the wire: heartbeats in, what this gateway believes out.

Owns the capability checks of both calls. Never routes.
"""

from __future__ import annotations

from typing import Any

import grpc

from baton.api.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from baton.capability import CapabilityVerifier, Right
from baton.wire.durations import duration_to_proto
from services.gateway.hub import WorkerHub
from services.gateway.wire import record_from_proto, record_to_proto

_Context = grpc.aio.ServicerContext[Any, Any]


class RegistryServicer(gateway_pb2_grpc.RegistryServiceServicer):
    """Implements RegistryService. `is_open`: listing needs no capability (loopback, dev key)."""

    def __init__(
        self,
        hub: WorkerHub,
        verifier: CapabilityVerifier,
        *,
        identity: tuple[str, int],
        is_open: bool,
    ) -> None:
        self._hub = hub
        self._verifier = verifier
        self._gateway_id, self._incarnation = identity
        self._is_open = is_open

    async def Heartbeat(
        self, request: gateway_pb2.HeartbeatRequest, context: _Context
    ) -> gateway_pb2.HeartbeatResponse:
        """Take a worker's record."""
        self._verifier.verify(request.capability, right=Right.HEARTBEAT)
        self._hub.observe(record_from_proto(request.worker))
        return gateway_pb2.HeartbeatResponse(
            gateway_id=self._gateway_id,
            incarnation=self._incarnation,
            dead_after=duration_to_proto(self._hub.dead_after_s),
        )

    async def ListWorkers(
        self, request: gateway_pb2.ListWorkersRequest, context: _Context
    ) -> gateway_pb2.ListWorkersResponse:
        """Show every known worker."""
        if not self._is_open:
            self._verifier.verify(request.capability, right=Right.ADMIN)
        return gateway_pb2.ListWorkersResponse(
            workers=[
                gateway_pb2.WorkerStatus(
                    record=record_to_proto(status.record),
                    silence=duration_to_proto(status.silence_s),
                    routable=status.reason is None,
                    reason=status.reason or "",
                )
                for status in self._hub.statuses()
            ]
        )

"""gRPC's own metric names (gRFC A66) for our calls, as Prometheus families.

Owns the two families of calls that a server answers. Methods are those registered in code, so their
number is bounded by the contract; targets are not a label.
"""

from __future__ import annotations

import grpc

from baton.metrics import Metrics
from baton.metrics_table import counter, histogram


class RpcMeasures:
    """`grpc_server_call_started_total` and `grpc_server_call_duration_seconds`."""

    def __init__(self, metrics: Metrics, side: str) -> None:
        assert side == "server", side
        self._started = counter(metrics, f"grpc_{side}_call_started")
        self._seconds = histogram(metrics, f"grpc_{side}_call_duration_seconds")

    def call_started(self, method: str) -> None:
        """Counts a call that began; `method` as gRPC writes it, `/package.Service/Method`."""
        self._started.add(grpc_method=method.removeprefix("/"))

    def call_handled(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        """Records how a call ended and how long it took."""
        self._seconds.observe(seconds, grpc_method=method.removeprefix("/"), grpc_status=code.name)

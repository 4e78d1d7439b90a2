"""gRPC's own metric names (gRFC A66) for our calls, as Prometheus families.

Owns the four families of calls, client and server. Methods are those registered in code, so their
number is bounded by the contract; targets are not a label.
"""

from __future__ import annotations

from typing import Final

import grpc

from baton.metrics import Label, Metrics

SECONDS_BUCKETS: Final = (
    0.0001, 0.0003, 0.0006, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.065, 0.13, 0.25, 0.5,
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0,
)  # fmt: skip
"""A66's latency bounds, every second one: its 40 are many for one series per method and code."""

_METHODS_MAX: Final = 128


class RpcMeasures:
    """`grpc_<side>_call_started_total` and `grpc_<side>_call_duration_seconds`."""

    def __init__(self, metrics: Metrics, side: str) -> None:
        assert side in ("server", "client"), side
        method = Label("grpc_method", values_max=_METHODS_MAX)
        status = Label("grpc_status", values_max=len(grpc.StatusCode))
        self._started = metrics.counter(
            f"grpc_{side}_call_started", "Calls begun.", labels=(method,)
        )
        self._seconds = metrics.histogram(
            f"grpc_{side}_call_duration_seconds",
            "From the call's begin to its status.",
            labels=(method, status),
            buckets=SECONDS_BUCKETS,
        )

    def call_started(self, method: str) -> None:
        """Counts a call that began; `method` as gRPC writes it, `/package.Service/Method`."""
        self._started.add(grpc_method=method.removeprefix("/"))

    def call_handled(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        """Records how a call ended and how long it took."""
        self._seconds.observe(seconds, grpc_method=method.removeprefix("/"), grpc_status=code.name)

"""Pings that find dead connections: what clients send and what servers bear, in one place.

Owns gRPC's keepalive options of both sides, because they only work as a pair: a server that is
pinged more often than it tolerates says GOAWAY "too_many_pings" and the connection is lost with
every call on it. Never holds what one side alone decides.
"""

from __future__ import annotations

from typing import Final

PING_INTERVAL_S: Final = 30.0
"""Silence after which either side asks whether the other still lives."""

PING_TIMEOUT_S: Final = 10.0
"""Time without an answer after which the connection counts as dead."""

PINGS_TOLERATED_EVERY_S: Final = 0.5
"""Pings at this rate are no offence. Beside the pings above, gRPC's client sends up to one a second
to measure bandwidth while it receives; a server that is done sending sees those as idle pings."""

Arguments = list[tuple[str, int]]


def client_arguments(interval_s: float = PING_INTERVAL_S) -> Arguments:
    """A client's options: pings also without calls, however long nothing is sent."""
    return [
        *_common_arguments(interval_s),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_arguments() -> Arguments:
    """A server's options: bears what `client_arguments` make a client send, and pings itself."""
    return [
        *_common_arguments(PING_INTERVAL_S),
        # gRPC calls it min_recv_ping_interval in its documents; an option it does not know by
        # this very name is ignored in silence, and the default is five minutes.
        ("grpc.http2.min_ping_interval_without_data_ms", round(PINGS_TOLERATED_EVERY_S * 1000)),
    ]


def _common_arguments(interval_s: float) -> Arguments:
    return [
        ("grpc.keepalive_time_ms", round(interval_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(PING_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
    ]

"""A gRPC server as every service runs it: bounded, observable, on loopback unless told otherwise.

Owns socket options, the bind rules, health (`""`, `liveness`, `readiness`, each full service name)
and reflection. Never knows what the services do. Fits `baton.lifecycle` as a part.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.errors import StartupError
from baton.rpc import keepalive
from baton.rpc.interceptor import CallLimits, ErrorInterceptor, ServerMeasures

MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
LIVENESS: Final = "liveness"
READINESS: Final = "readiness"

_UP: Final = health_pb2.HealthCheckResponse.SERVING
_DOWN: Final = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a server listens. `bind`: "host:port" (port 0: any free one) or "unix:/path".

    `is_insecure_bind_allowed` is the explicit flag for plain text beyond loopback.
    """

    bind: str = "127.0.0.1:0"
    is_insecure_bind_allowed: bool = False
    message_bytes_max: int = MESSAGE_BYTES_MAX
    has_reflection: bool = True
    pending_calls_max: int = 4096
    stop_grace_s: float = 2.0
    limits: CallLimits = field(default_factory=CallLimits)


def build_server(options: ServerOptions, measures: ServerMeasures | None = None) -> RpcServer:
    """A bound, not yet started server; StartupError names the address and port if it cannot
    bind.
    """
    check_bind(options.bind, is_insecure_bind_allowed=options.is_insecure_bind_allowed)
    return RpcServer(options, measures)


class RpcServer:
    """One listening address with its services. Register, start, and in the end drain and stop."""

    def __init__(self, options: ServerOptions, measures: ServerMeasures | None) -> None:
        self._options = options
        self.interceptor = ErrorInterceptor(options.limits, measures)
        self._server = grpc.aio.server(
            interceptors=[self.interceptor], options=_channel_arguments(options)
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names: list[str] = []
        self._port = _bound_port(self._server, options.bind)

    @property
    def port(self) -> int:
        """The port bound, also when 0 was asked for; 1 for a unix socket, as gRPC has it."""
        return self._port

    @property
    def target(self) -> str:
        """What a client on this host opens a channel to."""
        if self._options.bind.startswith("unix:"):
            return self._options.bind
        host = split_bind(self._options.bind)[0]
        return f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"

    def register(
        self, add: Callable[[Any, grpc.aio.Server], object], servicer: object, service_name: str
    ) -> None:
        """Adds a servicer by its generated `add_..._to_server`, under its full service name."""
        add(servicer, self._server)
        self._names.append(service_name)

    def register_handlers(
        self, service_name: str, handlers: dict[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Adds methods without generated code: method name -> handler."""
        generic = grpc.method_handlers_generic_handler(service_name, handlers)
        self._server.add_generic_rpc_handlers((generic,))
        self._names.append(service_name)

    async def start(self) -> None:
        """Begins to answer: alive, not yet ready."""
        if self._options.has_reflection:
            names = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        await self._health.set(LIVENESS, _UP)
        await self.set_ready(False)
        await self._server.start()

    async def set_ready(self, is_ready: bool) -> None:
        """What health says for everything but `liveness`."""
        for name in ("", READINESS, *self._names):
            await self._health.set(name, _UP if is_ready else _DOWN)

    async def drain(self) -> None:
        """Health turns to NOT_SERVING, so that callers look elsewhere; running calls go on."""
        await self.set_ready(False)

    async def stop(self) -> None:
        """Refuses new calls, gives running ones the grace, then cancels them."""
        await self._server.stop(self._options.stop_grace_s)


def check_bind(bind: str, *, is_insecure_bind_allowed: bool) -> None:
    """Refuses an address beyond loopback without the explicit flag."""
    if bind.startswith("unix:"):
        return
    host, _port = split_bind(bind)
    if not is_loopback(host) and not is_insecure_bind_allowed:
        raise StartupError(
            f"{bind} is reachable from other hosts and the connection would not be encrypted",
            hint="bind 127.0.0.1, or set --insecure-bind where the network is trusted",
        )


def is_loopback(host: str) -> bool:
    """True for localhost and loopback addresses; a name that would need resolving is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_bind(bind: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port"; StartupError for anything else."""
    host, colon, port_text = bind.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = port_text.isascii() and port_text.isdigit() and int(port_text) <= 65535
    if not colon or not host or not is_port:
        raise StartupError(
            f"{bind!r} is not an address to listen on", hint='write "host:port", as 127.0.0.1:7000'
        )
    return host, int(port_text)


def _bound_port(server: grpc.aio.Server, bind: str) -> int:
    try:
        return server.add_insecure_port(bind)
    except RuntimeError as error:
        raise StartupError(
            f"cannot listen on {bind}: the port is in use or the address is not this host's",
            hint="stop what listens there (`ss -ltnp` shows it), or choose another port; 0 is any",
        ) from error


def _channel_arguments(options: ServerOptions) -> list[tuple[str, int]]:
    """gRPC's options. Both pending limits are set, or bursts end in a bare CANCELLED."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", options.message_bytes_max),
        ("grpc.max_send_message_length", options.message_bytes_max),
        ("grpc.server.max_pending_requests", options.pending_calls_max),
        ("grpc.server.max_pending_requests_hard_limit", 2 * options.pending_calls_max),
        *keepalive.server_arguments(),
    ]

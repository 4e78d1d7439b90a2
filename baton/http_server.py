"""An ASGI application on a socket of ours, started and stopped by `baton.lifecycle`.

Owns the binding (same rules as gRPC: loopback unless told otherwise) and uvicorn's life. Never
installs signal handlers and never logs by itself: uvicorn's loggers end in `baton.log`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final

import uvicorn

from baton.errors import StartupError
from baton.rpc.server import check_bind, split_bind

START_TIMEOUT_S: Final = 10.0
STOP_GRACE_S: Final = 2

Application = Callable[[Any, Any, Any], Awaitable[None]]
Spawn = Callable[[str, Coroutine[Any, Any, None]], None]


class HttpServer:
    """One application on one address; a part of a `baton.lifecycle.Service`.

    `bind` is "host:port", port 0 takes any free one. The socket is bound when constructed, so that
    the port is known and a conflict is reported before anything else starts. `spawn` is the
    service's.
    """

    def __init__(
        self,
        application: Application,
        bind: str,
        spawn: Spawn,
        *,
        is_insecure_bind_allowed: bool = False,
    ) -> None:
        check_bind(bind, is_insecure_bind_allowed=is_insecure_bind_allowed)
        self._spawn = spawn
        self._socket = _bound_socket(bind)
        self._server = _Server(_config(application))
        self._ended = asyncio.Event()
        self._has_started = False

    @property
    def port(self) -> int:
        """The port bound."""
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """Where a client on this host finds it, without a path."""
        host = str(self._socket.getsockname()[0])
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Begins to answer."""
        self._has_started = True
        self._spawn("http_server", self._serve())
        async with asyncio.timeout(START_TIMEOUT_S):
            await self._server.has_started.wait()

    async def drain(self) -> None:
        """Nothing: responses under way end with what they wait for."""

    async def stop(self) -> None:
        """Refuses new connections and gives responses under way a moment."""
        self._server.should_exit = True
        if self._has_started:
            await self._ended.wait()
        self._socket.close()

    async def _serve(self) -> None:
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._ended.set()


def _config(application: Application) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        log_config=None,
        access_log=False,
        # The service starts and stops what the application needs.
        lifespan="off",
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=STOP_GRACE_S,
    )


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, saying when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the service's."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens."""
        await super().startup(sockets=sockets)
        self.has_started.set()


def _bound_socket(bind: str) -> socket.socket:
    host, port = split_bind(bind)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY on sockets that name their protocol, and on no others. Without it
    # every answer but a connection's first waits 40 ms for the client's delayed ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartupError(
            f"cannot listen on {bind}: {error.strerror or error}",
            hint="stop what listens there (`ss -ltnp` shows it), or choose another port; 0 is any",
        ) from error
    return listener

"""The HTTP server's connections."""

from __future__ import annotations

import asyncio
import socket

import httpx

from baton.http_server import HttpServer
from baton.lifecycle import Service
from baton.metrics import Metrics
from baton.metrics_server import metrics_application


def test_a_connections_answers_wait_for_no_delayed_ack() -> None:
    """Head and body are two writes: without TCP_NODELAY the body of every answer on a connection
    that was used before leaves 40 ms later.
    """
    options: list[int] = []

    async def main() -> None:
        service = Service("merger")

        async def wire(service: Service) -> None:
            application = metrics_application(Metrics("x"), lambda: True)
            server = HttpServer(application, "127.0.0.1:0", service.spawn)
            await service.start("http", server)
            async with httpx.AsyncClient(trust_env=False) as client:
                await client.get(server.url + "/healthz")
                for connection in server._server.server_state.connections:
                    held = connection.transport.get_extra_info("socket")
                    options.append(held.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            service.request_stop()

        await service.run(wire, has_signals=False)

    asyncio.run(main())
    assert options
    assert all(options)

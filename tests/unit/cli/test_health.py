"""`baton health` and the probe that containers run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from baton.cli import health_probe
from baton.rpc.server import RpcServer, ServerOptions, build_server
from tests.unit.cli.conftest import Run


class _Page(BaseHTTPRequestHandler):
    """/readyz is up, everything else is not."""

    def do_GET(self) -> None:
        is_up = self.path == "/readyz"
        self.send_response(200 if is_up else 503)
        self.end_headers()
        self.wfile.write(b"ok\n" if is_up else b"not\nready\n")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def page() -> Iterator[str]:
    """The address of a health page."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(timeout=10)
    server.server_close()


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    """A gRPC server with health, not ready yet."""
    server = build_server(ServerOptions())
    await server.start()
    yield server
    await server.stop()


def test_a_ready_page_is_up(page: str, run: Run) -> None:
    """The exit status is what a container engine reads."""
    assert run("health", "--http", f"{page}/readyz").code == 0
    assert health_probe.main(["--http", f"{page}/readyz"]) == 0


def test_a_page_that_says_no_is_down_and_says_why(page: str, run: Run) -> None:
    """The engine keeps the last output: one line of it must tell."""
    assert run("health", "--http", page).out == f"up: {page}/readyz: HTTP 200\n"
    assert run("health", "--http", f"{page}/").code == 0
    ran = run("health", "--http", f"{page}/other")
    assert ran.code == 1
    assert "HTTP 503: not ready" in ran.out


def test_nobody_there_is_down(page: str) -> None:
    """A probe never fails with a traceback."""
    assert not health_probe.ask_http("http://127.0.0.1:1/readyz", timeout_s=2.0).is_up
    assert not health_probe.ask_grpc("127.0.0.1:1", timeout_s=2.0).is_up
    assert not health_probe.ask_http("file:///etc/hostname").is_up


async def test_grpc_health_follows_readiness(server: RpcServer) -> None:
    """Alive is not ready."""
    before = await asyncio.to_thread(health_probe.ask_grpc, server.target)
    alive = await asyncio.to_thread(health_probe.ask_grpc, server.target, service="liveness")
    await server.set_ready(True)
    after = await asyncio.to_thread(health_probe.ask_grpc, server.target)
    assert (before.is_up, alive.is_up, after.is_up) == (False, True, True)


def test_exactly_one_service_is_asked(run: Run) -> None:
    """2, a wrong command line."""
    assert run("health").code == 2
    assert run("health", "--http", "http://127.0.0.1:1", "--grpc", "127.0.0.1:1").code == 2

"""A gateway that answers what a test tells it, over a real socket."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(slots=True, kw_only=True)
class Reply:
    """One prepared answer."""

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Seen:
    """One request as it came."""

    method: str
    path: str
    authorization: str | None
    body: Any


@dataclass(slots=True, kw_only=True)
class FakeGateway:
    """Replies by `METHOD path`, requests in order."""

    url: str = ""
    replies: dict[str, Reply] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)

    def answer(self, route: str, body: Any, status: int = 200, **headers: str) -> None:
        """Prepare a JSON answer."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        self.replies[route] = Reply(status=status, body=json.dumps(body).encode(), headers=names)

    def stream(self, route: str, *events: Any) -> None:
        """Prepare a streamed answer; an event is JSON or, as a string, sent as it is."""
        texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
        self.replies[route] = Reply(body="".join(f"data: {text}\n\n" for text in texts).encode())


def piece(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    """One chunk of a chat answer."""
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish_reason}]}


@contextmanager
def serving() -> Iterator[FakeGateway]:
    """A running fake; it is gone at the end of the block."""
    gateway = FakeGateway()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length") or 0))
            gateway.seen.append(
                Seen(
                    method=self.command,
                    path=self.path,
                    authorization=self.headers.get("authorization"),
                    body=json.loads(raw) if raw else None,
                )
            )
            missing = Reply(status=404, body=b'{"error": {"message": "no such route"}}')
            reply = gateway.replies.get(f"{self.command} {self.path}", missing)
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        do_GET = do_POST = do_DELETE = _serve

        def log_message(self, format: str, *args: Any) -> None:
            """Tests read `seen` instead."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    gateway.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield gateway
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)

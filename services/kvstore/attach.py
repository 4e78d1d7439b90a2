"""Attaching workers: tickets, and the unix socket that hands over the arena's descriptor.

Owns tickets (one use, a few seconds) and the socket: a client sends its ticket and a newline, the
answer is one status byte, `0` with the descriptor or `1` with a message. The descriptor carries the
lock of the worker's slot; ours is closed at once (O4).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from baton.errors import StartupError
from services.kvstore.arena import Arena
from services.kvstore.workers import AttachedWorker

TICKET_BYTES: Final = 16
TICKET_TTL_S: Final = 10.0
TICKETS_MAX: Final = 1024
PATH_BYTES_MAX: Final = 100
CONNECTION_TIMEOUT_S: Final = 5.0
CONNECTIONS_MAX: Final = 64
SOCKET_MODE: Final = 0o660

_log = structlog.stdlib.get_logger("services.kvstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ticket:
    worker: AttachedWorker
    expires_s: float


class AttachDesk:
    """Issues tickets and redeems them on a unix socket. Fits `baton.lifecycle` as a part.

    `on_attached(worker)` is called on the loop right before the descriptor is sent.
    """

    def __init__(
        self,
        arena: Arena,
        path: Path,
        now_s: Callable[[], float],
        on_attached: Callable[[AttachedWorker], None],
    ) -> None:
        if len(os.fsencode(path)) > PATH_BYTES_MAX:
            raise StartupError(
                f"the attach socket's path has over {PATH_BYTES_MAX} bytes: {path}",
                hint="choose a shorter --arena-dir",
            )
        self.path = path
        self._arena = arena
        self._now_s = now_s
        self._on_attached = on_attached
        self._tickets: dict[str, _Ticket] = {}
        self._server: asyncio.Server | None = None
        self._connections = 0

    def issue(self, worker: AttachedWorker) -> str:
        """A ticket for one fetch of the descriptor."""
        now_s = self._now_s()
        self._tickets = {k: t for k, t in self._tickets.items() if t.expires_s > now_s}
        if len(self._tickets) >= TICKETS_MAX:
            self._tickets.pop(next(iter(self._tickets)))
        ticket = secrets.token_hex(TICKET_BYTES)
        self._tickets[ticket] = _Ticket(worker=worker, expires_s=now_s + TICKET_TTL_S)
        return ticket

    async def start(self) -> None:
        """Listens."""
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, path=self.path)
        self.path.chmod(SOCKET_MODE)

    async def drain(self) -> None:
        """Nothing: workers may attach until the end."""

    async def stop(self) -> None:
        """Closes the socket and removes its path."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections > CONNECTIONS_MAX:
                await self._refuse(writer, "too many connections")
                return
            async with asyncio.timeout(CONNECTION_TIMEOUT_S):
                line = await reader.readline()
                await self._redeem(line.decode("ascii", "replace").strip(), writer)
        except (TimeoutError, OSError, ValueError) as error:
            _log.warning("attach_connection_failed", error=type(error).__name__)
        finally:
            self._connections -= 1
            writer.close()

    async def _redeem(self, text: str, writer: asyncio.StreamWriter) -> None:
        ticket = self._tickets.pop(text, None)
        if ticket is None or ticket.expires_s <= self._now_s():
            await self._refuse(writer, "the ticket is unknown, used or over; call Attach again")
            return
        worker = ticket.worker
        descriptor = self._arena.open_for_worker(worker.writer.slot)
        if descriptor is None:
            await self._refuse(writer, "the worker slot is still mapped; call Attach again")
            return
        try:
            self._on_attached(worker)
            await _send_descriptor(writer, descriptor)
        finally:
            os.close(descriptor)
        _log.info("worker_attached", worker_id=worker.writer.worker_id, slot=worker.writer.slot)

    async def _refuse(self, writer: asyncio.StreamWriter, message: str) -> None:
        writer.write(b"1" + message.encode())
        await writer.drain()


async def _send_descriptor(writer: asyncio.StreamWriter, descriptor: int) -> None:
    """Sends `0` and the descriptor. The stream has written nothing before, so the bytes go
    straight to the socket.
    """
    transport_socket = writer.get_extra_info("socket")
    copy = socket.socket(fileno=os.dup(transport_socket.fileno()))
    try:
        copy.setblocking(False)
        socket.send_fds(copy, [b"0"], [descriptor])
    finally:
        copy.close()

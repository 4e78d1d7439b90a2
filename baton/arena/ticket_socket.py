"""Fetching the arena's descriptor: a one-time ticket over a unix socket, SCM_RIGHTS back.

Owns the client's half of that protocol: send the ticket and a newline, receive one status byte with
the descriptor (`0`) or with a message (`1`). Blocking, with a deadline: callers use a thread.
"""

from __future__ import annotations

import os
import socket
from typing import Final

from baton.errors import Reason, ServiceError

PATH_BYTES_MAX: Final = 100
MESSAGE_BYTES_MAX: Final = 1024
GIVEN: Final = b"0"
REFUSED: Final = b"1"


def fetch_descriptor(socket_path: str, ticket: str, *, timeout_s: float) -> int:
    """The descriptor that `ticket` stands for, not inheritable; the caller owns it.

    Raises ServiceError WORKER_LOST when the socket cannot be reached or breaks off in time,
    PERMISSION_DENIED when the ticket is refused.
    """
    if len(os.fsencode(socket_path)) > PATH_BYTES_MAX:
        raise ServiceError(
            Reason.INVALID_REQUEST,
            f"the arena socket path has over {PATH_BYTES_MAX} bytes; use a shorter arena directory",
            field="socket_path",
        )
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(timeout_s)
            link.connect(socket_path)
            link.sendall(ticket.encode("ascii") + b"\n")
            return _receive(link)
    except OSError as error:
        raise ServiceError(
            Reason.WORKER_LOST,
            f"the arena socket did not hand over the arena ({error.strerror or error}); "
            "is the kvstore of this node running, and may this user open its socket?",
            field="socket_path",
        ) from error


def _receive(link: socket.socket) -> int:
    data, descriptors, flags, _ = socket.recv_fds(link, MESSAGE_BYTES_MAX, 1)
    if data[:1] == GIVEN and len(descriptors) == 1 and not flags & socket.MSG_CTRUNC:
        os.set_inheritable(descriptors[0], False)
        return descriptors[0]
    for descriptor in descriptors:
        os.close(descriptor)
    if data[:1] == REFUSED:
        raise ServiceError(
            Reason.PERMISSION_DENIED,
            f"the kvstore refused the arena: {data[1:].decode('utf-8', 'replace')}",
            field="ticket",
        )
    raise ServiceError(
        Reason.WORKER_LOST, "the arena socket closed before it handed over the arena"
    )

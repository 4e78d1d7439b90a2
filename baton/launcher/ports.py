"""Free TCP ports for children.

Owns the reservation: all sockets stay bound until `release`, so that no port is given twice.
"""

from __future__ import annotations

import socket


class PortReservation:
    """Binds free ports of one host; release them right before the children start."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._sockets: list[socket.socket] = []

    def next_port(self) -> int:
        """A free port that nobody else in this reservation has."""
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        held.bind((self._host, 0))
        self._sockets.append(held)
        return int(held.getsockname()[1])

    def release(self) -> None:
        """Give the ports back to the system."""
        while self._sockets:
            self._sockets.pop().close()


def is_free(host: str, port: int) -> bool:
    """True when a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True

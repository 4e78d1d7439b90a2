"""The small files by which processes of one machine find each other.

Owns port files ("host:port" and a newline, there exactly while the service is ready) and the one
way to write a private file whole. Never holds a lock and never decides who is alive: a port file of
a process killed hard stays behind, so its reader connects before it believes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final

from baton.errors import Reason, ServiceError, StartupError
from baton.rpc.server import split_bind

PRIVATE_MODE: Final = 0o600
PORT_FILE_BYTES_MAX: Final = 512


def write_private(path: Path, data: bytes) -> None:
    """Puts a file with mode 0600 in place, whole or not at all; makes its folder (0700) if missing.

    StartupError names the path if it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_MODE)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StartupError(
            f"cannot write {path}: {error.strerror}", hint="choose a folder that can be written"
        ) from error


def write_port_file(path: Path, address: str) -> None:
    """Says that `address` ("host:port") answers now; call it when ready to serve."""
    write_private(path, f"{address}\n".encode("ascii"))


def read_port_file(path: Path) -> str | None:
    """The "host:port" in a port file; None where there is none yet. INVALID_REQUEST for other
    text.
    """
    try:
        with path.open("rb") as file:
            data = file.read(PORT_FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    try:
        address = data.decode("ascii").removesuffix("\n")
        split_bind(address)
    except (UnicodeDecodeError, StartupError):
        raise ServiceError(
            Reason.INVALID_REQUEST, f'{path} does not hold "host:port"', field="port_file"
        ) from None
    return address


class PortFile:
    """Tells where a service answers. Give `set_ready` to `Service.on_ready_changed`."""

    def __init__(self, path: Path, address: str) -> None:
        self._path = path
        self._address = address
        # What an earlier process left would send readers to a dead port until we are ready.
        with contextlib.suppress(FileNotFoundError):
            path.unlink()

    async def set_ready(self, is_ready: bool) -> None:
        """Writes the file when ready, removes it when not."""
        if is_ready:
            write_port_file(self._path, self._address)
        else:
            self._path.unlink(missing_ok=True)

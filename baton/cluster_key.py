"""The cluster key: what gateways and kvstores sign and check capabilities with.

Owns how its file is read, so that both come to the same bytes. Never logs or returns it as text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog

from baton.capability import is_dev_key, key_or_dev
from baton.errors import StartupError
from baton.kv.digests import HASH_BYTES

_log = structlog.stdlib.get_logger("baton.cluster_key")

KEY_BYTES_MIN: Final = HASH_BYTES
KEY_FILE_BYTES_MAX: Final = 1024


def cluster_key(path: Path | None) -> bytes:
    """The key in the file, or the public development key where none is named; the latter warns."""
    key = key_or_dev(None if path is None else read_cluster_key(path))
    if is_dev_key(key):
        _log.warning("development_key_used")
    return key


def read_cluster_key(path: Path) -> bytes:
    """The key in a file: hex text, or raw bytes; at least 32 bytes.

    Raises StartupError (exit code 2) naming the file when it cannot be read or is too short.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(KEY_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise StartupError(
            f"cluster key file {path} cannot be read ({error.strerror})",
            hint="give a file of 64 hex digits, readable by this user",
            exit_code=2,
        ) from error
    try:
        key = bytes.fromhex(raw.decode("ascii").strip())
    except ValueError:
        key = raw
    if not KEY_BYTES_MIN <= len(key) <= KEY_FILE_BYTES_MAX:
        raise StartupError(
            f"cluster key file {path} holds {len(key)} bytes of key",
            hint=f"{KEY_BYTES_MIN} bytes at least; make one with `openssl rand -hex 32`",
            exit_code=2,
        )
    return key

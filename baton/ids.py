"""Identifiers: how they are drawn, written and read.

Owns the form of log ids, request ids, error ids and incarnations. Never keeps state: two calls
share nothing but the operating system's random source.
"""

from __future__ import annotations

import secrets
import time
from typing import Final

from baton.errors import Reason, ServiceError

LOG_ID_BYTES: Final = 16
_INCARNATION_RANDOM_BITS: Final = 20


def new_log_id() -> bytes:
    """A fresh log id: 16 random bytes, never all zero."""
    log_id = secrets.token_bytes(LOG_ID_BYTES)
    return log_id if any(log_id) else new_log_id()


def log_id_text(log_id: bytes) -> str:
    """The 32 lower-case hex digits of a log id."""
    assert len(log_id) == LOG_ID_BYTES, len(log_id)
    return log_id.hex()


def parse_log_id(text: str) -> bytes:
    """The 16 bytes of a log id written as 32 hex digits; INVALID_REQUEST for anything else."""
    try:
        log_id = bytes.fromhex(text)
    except ValueError:
        log_id = b""
    # fromhex tolerates blanks between bytes; a log id has exactly one spelling per case.
    if len(log_id) != LOG_ID_BYTES or len(text) != 2 * LOG_ID_BYTES:
        raise ServiceError(
            Reason.INVALID_REQUEST,
            f"a log id is {2 * LOG_ID_BYTES} hex digits, got {len(text)} characters",
            field="log_id",
        )
    return log_id


def new_request_id() -> str:
    """A fresh internal request id: 32 lower-case hex digits."""
    return secrets.token_hex(16)


def new_error_id() -> str:
    """A fresh id that ties an opaque INTERNAL answer to one traceback: 16 hex digits."""
    return secrets.token_hex(8)


def new_incarnation() -> int:
    """Names one run of one process: positive, under 2**63, larger for a later start.

    The order is a hint (it comes from wall time); only inequality may decide anything.
    """
    wall_ms = time.time_ns() // 1_000_000
    return (wall_ms << _INCARNATION_RANDOM_BITS) | secrets.randbits(_INCARNATION_RANDOM_BITS)

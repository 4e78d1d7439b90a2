"""How much time the running call has left.

Owns the context variable with the call's deadline (this process's monotonic clock). The server
interceptor sets it, the channel wrapper reads it, handlers may ask. A task that outlives its call
must not inherit it: `baton.lifecycle` starts tasks in an empty context.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from baton.errors import Reason, ServiceError

_deadline_s: ContextVar[float | None] = ContextVar("baton_deadline", default=None)


@contextmanager
def deadline_scope(timeout_s: float | None) -> Iterator[None]:
    """The block has `timeout_s` seconds from now; None: it has no deadline of its own."""
    is_bounded = timeout_s is not None and math.isfinite(timeout_s)
    token = _deadline_s.set(time.monotonic() + (timeout_s or 0.0) if is_bounded else None)
    try:
        yield
    finally:
        _deadline_s.reset(token)


def remaining_s() -> float | None:
    """Seconds left to the running call, never below zero; None without a deadline."""
    deadline_s = _deadline_s.get()
    return None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)


def timeout_within(timeout_s_max: float) -> float:
    """What a downstream call may take: at most `timeout_s_max`, at most what is left.

    DEADLINE_EXCEEDED if nothing is left: the call would only burden the callee.
    """
    left_s = remaining_s()
    if left_s is None:
        return timeout_s_max
    if left_s <= 0.0:
        raise ServiceError(
            Reason.DEADLINE_EXCEEDED, "the request's deadline passed before the next step began"
        )
    return min(left_s, timeout_s_max)

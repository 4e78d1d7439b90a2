"""How a worker drains: once, in the time that whoever asked gave it, and then its process ends.

Owns that a drain by call is an operator's, that it ends the process, and that the stop which
follows does not wait again. Never knows what it waits for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import structlog

DRAIN_TIMEOUT_MAX_S: Final = 600.0

_log = structlog.stdlib.get_logger("baton.worker")


class Draining:
    """The drain of one worker. `drain_within` takes no new work from its first call on, waits and
    returns what still runs; `request_stop` begins the end of the process; `require_operator`
    raises for a capability that is not an operator's.
    """

    def __init__(
        self,
        drain_within: Callable[[float], Awaitable[int]],
        request_stop: Callable[[], None],
        require_operator: Callable[[str], Awaitable[None]],
    ) -> None:
        self._drain_within = drain_within
        self._request_stop = request_stop
        self._require_operator = require_operator
        self._is_over = False

    async def by_call(self, timeout_s: float, capability: str) -> int:
        """Somebody asked for it: wait at most so long, then end the process, whatever still runs.
        Returns what that is; its gateways go on with it elsewhere.

        Raises ServiceError, and nothing has begun, unless the capability is an operator's.
        """
        await self._require_operator(capability)
        remaining = await self._drain_within(min(timeout_s, DRAIN_TIMEOUT_MAX_S))
        _log.info("worker_drained", remaining=remaining)
        self._is_over = True
        self._request_stop()
        return remaining

    async def at_stop(self, timeout_s: float) -> None:
        """The process is asked to end; after a drain by call it has waited already."""
        if not self._is_over:
            await self._drain_within(timeout_s)

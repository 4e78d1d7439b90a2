"""A walk over all logs that lets the event loop go on between its slices.

Owns the pauses only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from services.kvstore.core import Core
from services.kvstore.listing import slices
from services.kvstore.state import LogState


async def all_logs(core: Core) -> AsyncIterator[list[LogState]]:
    """All logs there were at the beginning and still are, some at a time."""
    for logs in slices(core):
        yield logs
        await asyncio.sleep(0)  # noqa: TID251 - no wait: whoever is ready comes first

"""What takes the bytes of one run of pages: chunks that the page thread writes one at a time, or
whole pages that a transport puts into place from a thread of its own.

Owns the hand-over from event loop to thread, and knows when no write is left. Never decides
what a damaged page means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from baton.errors import Reason, ServiceError
from baton.kv.crc import ByteArray
from services.kvstore.arena import Arena
from services.kvstore.moving.page_bytes import PageReceiver, Received
from services.kvstore.state import PageRow

Fill = Callable[[Sequence[ByteArray], Callable[[int], None]], None]


def _nobody() -> None:
    """Who is told of bytes when nobody wants to know."""


class PageSink:
    """Takes pages for `rows` (ours, with what they must hash to), from block `first_block` on.

    `moved` is called on the loop whenever bytes have come.
    """

    def __init__(
        self,
        arena: Arena,
        executor: Executor,
        first_block: int,
        rows: Sequence[PageRow],
        *,
        moved: Callable[[], None] = _nobody,
    ) -> None:
        self._arena = arena
        self._executor = executor
        self._first_block = first_block
        self._rows = rows
        self._receiver: PageReceiver | None = None
        self._writing: asyncio.Future[None] | None = None
        self._moved = moved
        self.offered = 0

    @property
    def result(self) -> Received:
        """What has become whole; complete once no write is left."""
        return Received() if self._receiver is None else self._receiver.result

    def begin(self, rows: Sequence[PageRow]) -> None:
        """The other side sends these; fewer than wanted where its KV ends."""
        if len(rows) > len(self._rows) or self._receiver is not None:
            raise _unwanted()
        for ours, theirs in zip(self._rows, rows, strict=False):
            if (ours.tokens, ours.crc, ours.slot_crcs) != (
                theirs.tokens,
                theirs.crc,
                theirs.slot_crcs,
            ):
                raise _unwanted()
        self.offered = len(rows)
        self._receiver = PageReceiver(self._arena, self._first_block, self._rows[: len(rows)])

    async def chunk(self, offset: int, data: bytes, crc: int) -> None:
        """Hands a chunk to the page thread once the one before is written."""
        if self._receiver is None:
            raise _unwanted()
        await self.flush()
        self._moved()
        self._writing = asyncio.get_running_loop().run_in_executor(
            self._executor, self._receiver.write, offset, data, crc
        )

    def place(self, executor: Executor, fill: Fill) -> asyncio.Future[None]:
        """Begins `fill` in a thread of `executor`: it is given where each page goes and whom to
        tell of each that is there. The result ends with it; `flush` waits for it too.
        """
        receiver, loop = self._receiver, asyncio.get_running_loop()
        if receiver is None or self._writing is not None:
            raise _unwanted()

        def placed(index: int) -> None:
            receiver.placed(index)
            loop.call_soon_threadsafe(self._moved)

        targets = [receiver.target(index) for index in range(self.offered)]
        self._writing = loop.run_in_executor(executor, fill, targets, placed)
        return self._writing

    def sent(self, crcs: Sequence[int]) -> None:
        """What was sent of what `place` put there; CHECKSUM_MISMATCH when the wire damaged it."""
        if self._receiver is None:
            raise _unwanted()
        self._receiver.sent(crcs)

    async def flush(self) -> None:
        """Returns when everything handed over is written; raises what was wrong with it."""
        writing = self._writing
        if writing is not None:
            # A cancel must not lose sight of a write that goes on.
            await asyncio.shield(writing)
            self._writing = None

    def when_idle(self, ended: Callable[[], None]) -> None:
        """Calls `ended` once no write is under way; at once if none is."""
        writing = self._writing
        if writing is None:
            ended()
            return

        def over(future: asyncio.Future[None]) -> None:
            # Whoever gave up does not ask what became of it.
            if not future.cancelled():
                future.exception()
            ended()

        if writing.done():
            over(writing)
        else:
            writing.add_done_callback(over)


def _unwanted() -> ServiceError:
    return ServiceError(
        Reason.CHECKSUM_MISMATCH, "the other side sends other pages than were asked for"
    )

"""The real log over a directory, as the tests here use it: one life from start to end.

Owns how writer and recovery are put together, in the way `assembly.py` does. The only file here
that knows their constructors.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from baton.errors import ServiceError
from services.kvstore.log.format import type_of
from services.kvstore.log.reader import LogScan, scan_directory
from services.kvstore.log.recovery import Recovered, recover
from services.kvstore.log.segments import SegmentWriter
from services.kvstore.log.writer import LogWriter
from services.kvstore.state import AckLevel, Phase
from tests.durability.workload import Seen, State, Step, session_view

SMALL_SEGMENT_BYTES: Final = 2048
RETRY_S: Final = 0.002


class InlineExecutor(Executor):
    """Runs work at once, in the caller: what a seed does, it does again."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Returns a finished future."""
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - handed to whoever waits, as an executor does
            future.set_exception(error)
        return future


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a start finds: the logs, and whether anything is reported as damaged or torn.

    `has_copies`: damaged bytes are kept aside, or a file is left alone that does not belong here,
    also where no record was lost with them.
    """

    state: State
    damaged: frozenset[bytes]
    is_damage_reported: bool
    has_copies: bool
    torn_bytes: int
    durable_lsn: int
    newest_lsn: int


def start(directory: Path) -> Found:
    """Recovers a directory, as a starting kvstore does: torn tails are cut."""
    scan = scan_directory(directory)
    return found_in(scan, recover(scan))


def found_in(scan: LogScan, recovered: Recovered) -> Found:
    """What a scan comes to."""
    return Found(
        state={
            log_id: Seen(
                log.generation, tuple(log.tokens), is_sealed=log.phase is not Phase.PREFILL
            )
            for log_id, log in recovered.logs.items()
        }
        | dict(
            session_view(one.session_id, one.generation, one.log_id, one.position)
            for one in recovered.sessions
        ),
        damaged=frozenset(recovered.damaged),
        is_damage_reported=scan.damaged_from is not None or bool(recovered.damaged),
        has_copies=bool(scan.verdict.broken or scan.verdict.foreign),
        torn_bytes=scan.torn_bytes,
        durable_lsn=scan.durable_lsn,
        newest_lsn=scan.newest_lsn,
    )


class Life:
    """A log that is open for writing. `run` beside whatever submits; then `end`.

    With an inline executor its flushes run inline too, so that a seed is repeatable.
    """

    def __init__(
        self,
        directory: Path,
        executor: Executor,
        *,
        segment_bytes: int = SMALL_SEGMENT_BYTES,
        first_lsn: int = 1,
    ) -> None:
        scan = scan_directory(directory)
        recovered = recover(scan)
        self.found = found_in(scan, recovered)
        segments = SegmentWriter(
            directory,
            store_id=scan.store_id or secrets.token_bytes(16),
            first_sequence=scan.next_sequence,
            segment_bytes=segment_bytes,
        )
        segments.durable_lsn = scan.newest_lsn
        self.writer = LogWriter(
            segments,
            executor,
            next_lsn=max(scan.newest_lsn + 1, first_lsn),
            retry_s=RETRY_S,
            flusher=executor if isinstance(executor, InlineExecutor) else None,
        )
        self.writer.living = recovered.living

    def submit(self, step: Step) -> None:
        """Hands one record over."""
        record = step.record
        self.writer.submit(type_of(record), record.encode(), step.address)

    async def acked(self, level: AckLevel) -> bool:
        """True at `level`; False when the writer says that it never will be."""
        try:
            await self.writer.acked(level)
        except ServiceError:
            return False
        return True

    async def freed(self) -> bool:
        """Removes segments that nothing needs any more; False when the log refuses."""
        try:
            await self.writer.free_oldest()
        except ServiceError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Batch:
    """Records submitted together, and the level that is waited for; None: nobody waits.

    With `is_freeing` segments that nothing needs are removed behind it.
    """

    steps: Sequence[Step]
    level: AckLevel | None
    is_freeing: bool = False


async def live(
    directory: Path,
    batches: Sequence[Batch],
    on_ack: Callable[[int, AckLevel], None],
    *,
    executor: Executor | None = None,
    segment_bytes: int = SMALL_SEGMENT_BYTES,
    is_clean: bool = True,
    first_lsn: int = 1,
) -> OSError | None:
    """One life: recovers, writes the batches one after the other, ends.

    `on_ack(count, level)` is called as soon as the first `count` records are acked. Returns the
    error that ended the writer, if one did.
    """
    own = ThreadPoolExecutor(1) if executor is None else None
    try:
        life = Life(
            directory,
            own or executor or InlineExecutor(),
            segment_bytes=segment_bytes,
            first_lsn=first_lsn,
        )
        return await _live(life, batches, on_ack, is_clean)
    finally:
        if own is not None:
            own.shutdown()


async def _live(
    life: Life,
    batches: Sequence[Batch],
    on_ack: Callable[[int, AckLevel], None],
    is_clean: bool,
) -> OSError | None:
    failure: OSError | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(life.writer.run())
            await _write(life, batches, on_ack)
            life.writer.end()
        if is_clean:
            await life.writer.close()
    except* OSError as errors:
        failure = first_error(errors)
    return failure


def first_error(errors: BaseExceptionGroup[OSError]) -> OSError:
    """The error within groups of groups."""
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, OSError)
    return found


async def _write(
    life: Life, batches: Sequence[Batch], on_ack: Callable[[int, AckLevel], None]
) -> None:
    count = 0
    for batch in batches:
        for step in batch.steps:
            life.submit(step)
        count += len(batch.steps)
        if batch.level is None:
            # The writer gets its turn or not, as it comes.
            await asyncio.sleep(0)  # noqa: TID251 - a turn of the loop, no waiting
            continue
        if not await life.acked(batch.level):
            return
        on_ack(count, batch.level)
        if batch.is_freeing and not await life.freed():
            return

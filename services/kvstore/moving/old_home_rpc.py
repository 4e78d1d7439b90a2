"""The old home's calls: FollowLog, Move, FetchSnapshot, FetchPages, MoveDone; and its questions.

Owns their paths: capability, core, record on disk, answer. Never keeps state of its own but the
transfers under way. Reads page bytes in the page thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import structlog

from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.capability import Right
from baton.client import ChannelPool
from baton.clock import WaitingClock
from baton.errors import Reason, ServiceError
from baton.faults import faults
from baton.kv.label import mismatch
from baton.wire.durations import duration_to_proto
from services.kvstore import wire
from services.kvstore.access import Access
from services.kvstore.core import invalid, stale
from services.kvstore.moving.departure import Departures
from services.kvstore.moving.own import OwnRight, require_kvstore
from services.kvstore.moving.page_bytes import content_ends, read_chunk
from services.kvstore.moving.pins import frozen, pinned
from services.kvstore.moving.stream_rpc import PAGES_MAX
from services.kvstore.moving.transport import STREAM
from services.kvstore.moving.ucx_rpc import UcxSender, target_of
from services.kvstore.moving.watch import LogWatch
from services.kvstore.runtime import Runtime
from services.kvstore.state import AckLevel, LogState, PageRow, Phase
from services.kvstore.tiers.promotion import Asked
from services.kvstore.tiers.wants import want_of_log

TRANSFERS_MAX: Final = 4
WAITING_MAX: Final = 64
FOLLOWERS_MAX: Final = 256
FOLLOW_TICK_S: Final = 5.0
INLINE_BYTES_MAX: Final = 1 << 20
ASK_TIMEOUT_S: Final = 2.0
LOAD_S: Final = 1.0
SETTLE_TRIES_MAX: Final = 16
ADDRESS_CHARS_MAX: Final = 256

_log = structlog.stdlib.get_logger("services.kvstore.moving")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """How this store speaks to others: channels, the right it shows them, the clock it waits by."""

    channels: ChannelPool
    right: OwnRight
    clock: WaitingClock

    def stub(self, address: str) -> kvstore_pb2_grpc.KVStoreServiceAsyncStub:
        """The stub of another kvstore."""
        return kvstore_pb2_grpc.KVStoreServiceStub(self.channels.get(address))


class OldHomeCalls:
    """Serves kvstores to which logs of this one move; `executor` is the page thread."""

    def __init__(
        self,
        runtime: Runtime,
        access: Access,
        departures: Departures,
        peers: Peers,
        executor: Executor,
        *,
        transports: tuple[str, ...] = (STREAM,),
        ucx: UcxSender | None = None,
    ) -> None:
        self._runtime = runtime
        self._core = runtime.core
        self._access = access
        self._departures = departures
        self._peers = peers
        self._executor = executor
        self._transports = transports
        self._ucx = ucx
        self._watch = LogWatch()
        self._places = asyncio.Semaphore(TRANSFERS_MAX)
        self._waiting = 0
        self._followers = 0
        runtime.journal.on_record = self._watch.changed

    # --- following --------------------------------------------------------------------------

    async def follow(
        self, request: kvstore_pb2.FollowLogRequest
    ) -> AsyncGenerator[kvstore_pb2.FollowLogResponse, None]:
        """FollowLog."""
        log_id = wire.require_log_id(request.log_id)
        log = self._access.log(request.capability, (Right.MOVE,), log_id)
        self._require_same_kv(request)
        if self._followers >= FOLLOWERS_MAX:
            raise ServiceError(
                Reason.QUEUE_FULL, f"{FOLLOWERS_MAX} logs are followed; retry", retry_after_s=0.5
            )
        self._followers += 1
        try:
            head = kvstore_pb2.FollowHead(
                generation=log.generation,
                position=log.position,
                committed_position=log.committed,
                sealed=log.is_sealed,
                transports=self._transports,
            )
            yield kvstore_pb2.FollowLogResponse(head=head)
            async with aclosing(self._commits(log_id)) as commits:
                async for response in commits:
                    yield response
        finally:
            self._followers -= 1

    def _require_same_kv(self, request: kvstore_pb2.FollowLogRequest) -> None:
        limits = self._core.limits
        for name in ("kv_digest", "tokenizer_hash", "block_tokens"):
            ours, theirs = getattr(limits, name), getattr(request, name)
            if ours != theirs:
                raise mismatch(name, _shown(ours), _shown(theirs))

    async def _commits(self, log_id: bytes) -> AsyncGenerator[kvstore_pb2.FollowLogResponse, None]:
        sent: list[tuple[int, int]] = []
        taken_by: int | None = None
        with self._watch.on(log_id) as changed:
            while True:
                changed.clear()
                log = self._core.logs.get(log_id)
                if log is None or not log.is_open:
                    break
                if log.is_sealed and taken_by is None:
                    taken_by = log.generation
                if taken_by is not None and log.generation != taken_by:
                    # Somebody writes it on here: it will not move to the follower now.
                    break
                for run in await self._new_rows(log, sent):
                    yield kvstore_pb2.FollowLogResponse(pages=run)
                await self._peers.clock.wait(changed, FOLLOW_TICK_S)
        may_move = log is not None and log.phase is Phase.MOVED
        yield kvstore_pb2.FollowLogResponse(end=kvstore_pb2.FollowEnd(may_move=may_move))

    async def _new_rows(
        self, log: LogState, sent: list[tuple[int, int]]
    ) -> list[kvstore_pb2.PageRun]:
        """Full pages committed since the last call; `sent` remembers what was told."""
        block_tokens = self._core.block_tokens
        full = log.committed // block_tokens
        del sent[full:]
        if sent:
            last = log.rows[len(sent) - 1]
            if sent[-1] != (last.page, last.page_generation):
                sent.clear()
        rows = log.rows[len(sent) : full]
        if not rows:
            return []
        # A page that is still copied into has no CRC yet.
        await self._runtime.ready([row.page for row in rows], AckLevel.OS)
        first = len(sent)
        rows = [frozen(row) for row in takewhile(self._is_full, log.rows[first:full])]
        sent += [(row.page, row.page_generation) for row in rows]
        return [
            kvstore_pb2.PageRun(
                first_index=first + start,
                pages=[wire.row_to_proto(row) for row in rows[start : start + PAGES_MAX]],
            )
            for start in range(0, len(rows), PAGES_MAX)
        ]

    def _is_full(self, row: PageRow) -> bool:
        return row.crc is not None and row.tokens == self._core.block_tokens

    # --- giving away ------------------------------------------------------------------------

    async def _loaded(self, log: LogState) -> bool:
        """What of the log is on NVMe only comes into the host first, as far as it does in a moment:
        copies do not move, and what the host lacks the new home computes again.
        """
        promoter = self._runtime.promoter
        if promoter is None:
            return False
        asked = Asked(prompt_tokens=log.position, tokens_per_s=None, wait_max_s=LOAD_S)
        return await promoter.prepare(want_of_log(log, log.position - 1), asked) > 0

    async def move(self, request: kvstore_pb2.MoveRequest) -> kvstore_pb2.MoveResponse:
        """Move."""
        log_id = wire.require_log_id(request.log_id)
        if not 1 <= len(request.to_kvstore_address) <= ADDRESS_CHARS_MAX:
            raise invalid("to_kvstore_address", f"must have 1 to {ADDRESS_CHARS_MAX} characters")
        log = await self._settled(request.capability, log_id)
        if await self._loaded(log):
            log = await self._settled(request.capability, log_id)
        await faults.reach("move.before_fence")
        log = self._departures.move(
            log_id,
            request.generation,
            request.to_kvstore_address,
            self._runtime.clock.monotonic_s(),
        )
        departed = self._departures.answer(log)
        # Were the record lost with the host, two stores would be the log's home.
        await self._runtime.acked(AckLevel.DISK)
        await faults.reach("move.after_fence")
        body = departed.snapshot.encode()
        return kvstore_pb2.MoveResponse(
            generation=departed.generation,
            chunk_list_digest=departed.digest,
            snapshot=body if len(body) <= INLINE_BYTES_MAX else b"",
            snapshot_bytes=len(body),
        )

    async def _settled(self, capability: str, log_id: bytes) -> LogState:
        """The log, with no copy into its pages under way: its CRCs are known."""
        for _ in range(SETTLE_TRIES_MAX):
            log = self._access.log(capability, (Right.MOVE,), log_id)
            pages = [row.page for row in log.rows]
            await self._runtime.ready(pages, AckLevel.OS)
            log = self._access.log(capability, (Right.MOVE,), log_id)
            if self._runtime.pages.is_ready([row.page for row in log.rows]):
                return log
        raise ServiceError(
            Reason.QUEUE_FULL, "the log's pages are still being written; retry", retry_after_s=0.1
        )

    async def snapshot(
        self, request: kvstore_pb2.FetchSnapshotRequest
    ) -> AsyncGenerator[kvstore_pb2.FetchSnapshotResponse, None]:
        """FetchSnapshot."""
        log_id = wire.require_log_id(request.log_id)
        log = self._access.log(request.capability, (Right.MOVE,), log_id)
        if log.phase is not Phase.MOVED or log.generation != request.generation:
            raise stale(log_id, request.generation, log.generation)
        body = self._departures.answer(log).snapshot.encode()
        for start in range(0, len(body), INLINE_BYTES_MAX):
            yield kvstore_pb2.FetchSnapshotResponse(chunk=body[start : start + INLINE_BYTES_MAX])

    async def done(self, request: kvstore_pb2.MoveDoneRequest) -> kvstore_pb2.MoveDoneResponse:
        """MoveDone."""
        log_id = wire.require_log_id(request.log_id)
        require_kvstore(self._access.any_of(request.capability, (Right.MOVE,), log_id=log_id))
        await faults.reach("move.before_drop")
        is_dropped = self._departures.done(log_id, request.generation)
        await self._runtime.acked(AckLevel.OS)
        await faults.reach("move.after_drop")
        return kvstore_pb2.MoveDoneResponse(dropped=is_dropped)

    # --- pages ------------------------------------------------------------------------------

    async def pages(
        self, request: kvstore_pb2.FetchPagesRequest
    ) -> AsyncGenerator[kvstore_pb2.FetchPagesResponse, None]:
        """FetchPages."""
        log_id = wire.require_log_id(request.log_id)
        if not 1 <= request.page_count <= PAGES_MAX:
            raise invalid("page_count", f"must be 1 to {PAGES_MAX}")
        transport = request.transport or STREAM
        if transport not in self._transports:
            raise ServiceError(
                Reason.UNSUPPORTED,
                f"this kvstore sends pages over {' or '.join(self._transports)} only",
                field="transport",
            )
        log = self._access.log(request.capability, (Right.MOVE,), log_id)
        ended = kvstore_pb2.FetchEnd()
        async with self._place() as queue_s:
            first, end = request.first_index, request.first_index + request.page_count
            await self._runtime.ready([row.page for row in log.rows[first:end]], AckLevel.OS)
            log = self._access.log(request.capability, (Right.MOVE,), log_id)
            rows = [frozen(row) for row in log.rows[first:end]]
            run = kvstore_pb2.PageRun(
                first_index=first, pages=[wire.row_to_proto(row) for row in rows]
            )
            with pinned(self._runtime, rows):
                yield kvstore_pb2.FetchPagesResponse(pages=run)
                if transport == STREAM:
                    async with aclosing(self._chunks(rows)) as chunks:
                        async for chunk in chunks:
                            yield kvstore_pb2.FetchPagesResponse(chunk=chunk)
                else:
                    ended = await self._beside(request, rows)
        ended.queue.CopyFrom(duration_to_proto(queue_s))
        yield kvstore_pb2.FetchPagesResponse(end=ended)

    async def _beside(
        self, request: kvstore_pb2.FetchPagesRequest, rows: list[PageRow]
    ) -> kvstore_pb2.FetchEnd:
        """The rows' content over ucx."""
        assert self._ucx is not None
        target = target_of(
            request.ucx,
            lambda token: self._access.any_of(token, (Right.MOVE,), log_id=request.log_id),
        )
        await faults.reach("move.mid_send")
        return await self._ucx.send(target, self._runtime.arena, rows)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[float]:
        """One of a few transfers at a time; how long that was waited for."""
        if self._waiting >= WAITING_MAX:
            raise ServiceError(
                Reason.QUEUE_FULL, f"{WAITING_MAX} transfers wait; retry", retry_after_s=0.5
            )
        began_s = self._runtime.clock.monotonic_s()
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        try:
            yield self._runtime.clock.monotonic_s() - began_s
        finally:
            self._places.release()

    async def _chunks(self, rows: list[PageRow]) -> AsyncGenerator[kvstore_pb2.PageChunk, None]:
        """The rows' content; one chunk is read ahead while the one before is sent."""
        arena, loop = self._runtime.arena, asyncio.get_running_loop()
        ends = content_ends(arena.geometry, rows)
        total = ends[-1] if ends else 0

        def begin(offset: int) -> asyncio.Future[tuple[bytes, int]]:
            return loop.run_in_executor(self._executor, read_chunk, arena, rows, ends, offset)

        offset, reading = 0, begin(0) if total else None
        try:
            while reading is not None:
                data, crc = await reading
                begin_at, offset = offset, offset + len(data)
                reading = begin(offset) if offset < total else None
                await faults.reach("move.mid_send")
                data = faults.flipped("move.mid_send", faults.shorten("move.mid_send", data))
                yield kvstore_pb2.PageChunk(offset_bytes=begin_at, data=data, crc32c=crc)
        finally:
            if reading is not None:
                # The pages are pinned no longer than this: the read must have ended.
                await asyncio.wait({reading})

    # --- questions --------------------------------------------------------------------------

    def ask(self, spawn: Callable[[bytes, str, int], None]) -> None:
        """Moved logs whose new home has said nothing: `spawn` asks it by `ask_about`."""
        for log in self._departures.to_ask(self._runtime.clock.monotonic_s()):
            assert log.moved_to is not None
            spawn(log.log_id, log.moved_to, log.generation)

    async def ask_about(self, log_id: bytes, new_home: str, generation: int) -> None:
        """Drops the pages if the new home has opened the log; else they wait on."""
        request = kvstore_pb2.DescribeMoveRequest(
            log_id=log_id, generation=generation, capability=self._peers.right.mint(log_id)
        )
        try:
            answer = await self._peers.stub(new_home).DescribeMove(request, timeout=ASK_TIMEOUT_S)
            if not answer.opened:
                _log.info("moved_log_not_opened", log_id=log_id.hex(), generation=generation)
                return
            self._departures.done(log_id, generation)
            await self._runtime.acked(AckLevel.OS)
        except ServiceError as error:
            _log.info("new_home_silent", log_id=log_id.hex(), reason=error.reason.value)


def _shown(value: bytes | int) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)

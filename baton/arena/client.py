"""A worker's client of its node's kvstore: typed calls, a deadline on every one.

Owns the calls and their shapes. Never retries a write by itself, except that attaching waits for a
kvstore that is not there yet. What the store refuses comes out as its own ServiceError.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.arena import client_wire as wire
from baton.arena.append import AppendEntry, AppendOutcome
from baton.arena.mapping import ArenaShape, MappedArena
from baton.arena.replay import GrantedPage, HeldLog, LogView, PageRow, ReplayPiece, fold_replay
from baton.arena.ticket_socket import fetch_descriptor
from baton.engine.sampling import SampledToken
from baton.errors import Reason, ServiceError
from baton.kv.label import PairLabel
from baton.kv.layout import KvGeometry
from baton.rpc.channel import NO_DEADLINE, Call, Channel
from baton.tracing import current_trace, format_traceparent
from baton.wire.durations import duration_from_proto
from baton.wire.finish import finish_to_proto
from baton.wire.label import label_to_proto

CALL_TIMEOUT_S: Final = 10.0
REPLAY_TIMEOUT_S: Final = 30.0
SOCKET_TIMEOUT_S: Final = 5.0
REPLAY_PIECES_MAX: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Who attaches: name, this run of it, what its KV is, its capability."""

    worker_id: str
    incarnation: int
    label: PairLabel
    geometry: KvGeometry
    capability: str
    software_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedArena:
    """An arena this worker may write into. `lease_s`: how long a log stays owned without progress.

    `held`: logs that are still the worker's after a re-attach, with their new generations.
    """

    arena: MappedArena
    worker_slot: int
    node_id: str
    lease_s: float
    held: tuple[HeldLog, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenLog:
    """A log this worker became the writer of; `view` None: it was not told of, and is replayed."""

    generation: int
    position: int
    pages: tuple[GrantedPage, ...]
    view: LogView | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The KV of positions [first, end): the rows that they touch."""

    first: int
    end: int
    rows: tuple[PageRow, ...]


class ArenaClient:
    """Attaches this process to its node's arena."""

    @staticmethod
    async def attach(
        store: KVStoreClient, identity: WorkerIdentity, held: Sequence[HeldLog] = ()
    ) -> AttachedArena:
        """Get a ticket, fetch the descriptor, map the arena; keep the result while the process is.

        Raises the kvstore's refusal (COMPAT_MISMATCH names the field), WORKER_LOST when it cannot
        be reached.
        """
        ticket = await store.attach_ticket(identity, held)
        descriptor = await asyncio.to_thread(
            fetch_descriptor, ticket.socket_path, ticket.ticket, timeout_s=SOCKET_TIMEOUT_S
        )
        return AttachedArena(
            arena=MappedArena(descriptor, ticket.shape),
            worker_slot=ticket.worker_slot,
            node_id=ticket.node_id,
            lease_s=ticket.lease_s,
            held=ticket.held,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachTicket:
    """What Attach answers: a one-time ticket and what it opens."""

    ticket: str
    socket_path: str
    shape: ArenaShape
    worker_slot: int
    node_id: str
    lease_s: float
    held: tuple[HeldLog, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaCounts:
    """The arena's shape and its free pages."""

    shape: ArenaShape
    pages_free: int


class KVStoreClient:
    """Typed calls of one kvstore over a channel it does not own.

    `capability` is the worker's own; attaching shows it too, and later calls go by that one.
    """

    def __init__(self, channel: Channel, worker_id: str, capability: str = "") -> None:
        self._stub = kvstore_pb2_grpc.KVStoreServiceStub(channel)
        self._worker_id = worker_id
        self._capability = capability

    @property
    def worker_id(self) -> str:
        """The attached worker's name, which grants and takes are made for."""
        return self._worker_id

    async def describe_arena(self) -> ArenaCounts:
        """The arena's shape and how many pages are free."""
        answer = await self._stub.DescribeArena(
            kvstore_pb2.DescribeArenaRequest(capability=self._capability), timeout=CALL_TIMEOUT_S
        )
        return ArenaCounts(shape=wire.arena_from_proto(answer.arena), pages_free=answer.pages_free)

    async def attach_ticket(
        self, identity: WorkerIdentity, held: Iterable[HeldLog] = ()
    ) -> AttachTicket:
        """Introduce this worker; the answer is worth one fetch of the descriptor."""
        self._capability = identity.capability
        request = kvstore_pb2.AttachRequest(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            capability=identity.capability,
            label=label_to_proto(identity.label, identity.geometry, identity.software_version),
            held=[_position(log) for log in held],
        )
        answer = await self._stub.Attach(request, timeout=CALL_TIMEOUT_S)
        return AttachTicket(
            ticket=answer.ticket,
            socket_path=answer.socket_path,
            shape=wire.arena_from_proto(answer.arena),
            worker_slot=answer.worker_slot,
            node_id=answer.node_id,
            lease_s=duration_from_proto(answer.lease),
            held=tuple(HeldLog(log_id=p.log_id, generation=p.generation) for p in answer.held),
        )

    async def replay(
        self, log_id: bytes, capability: str, block_tokens: int, *, generation: int = 0
    ) -> LogView:
        """The whole log; `generation` 0 accepts any, another one must be the log's."""
        request = kvstore_pb2.ReplayLogRequest(
            log_id=log_id, capability=capability, generation=generation
        )
        pieces: list[ReplayPiece] = []
        call = self._stub.ReplayLog(request, timeout=REPLAY_TIMEOUT_S)
        async for message in call:
            if len(pieces) >= REPLAY_PIECES_MAX:
                call.cancel()
                raise ServiceError(
                    Reason.LOG_CORRUPT, f"a replay of over {REPLAY_PIECES_MAX} messages"
                )
            pieces.append(wire.piece_from_proto(message, block_tokens))
        return fold_replay(pieces, block_tokens)

    async def grant(
        self, log_id: bytes, generation: int, pages: int, request_id: str
    ) -> tuple[GrantedPage, ...]:
        """More pages for a log this worker writes; PAGES_EXHAUSTED when there are none."""
        answer = await self._stub.Grant(
            kvstore_pb2.GrantRequest(
                log_id=log_id,
                generation=generation,
                pages=pages,
                request_id=request_id,
                worker_id=self._worker_id,
                capability=self._capability,
            ),
            timeout=CALL_TIMEOUT_S,
        )
        return wire.grants_from_proto(answer.pages)

    async def commit_checkpoint(
        self, log: HeldLog, span: tuple[int, int], rows: Sequence[PageRow], capability: str
    ) -> int:
        """Record the KV of positions [span[0], span[1]); returns the committed position."""
        answer = await self._stub.CommitCheckpoint(
            kvstore_pb2.CommitCheckpointRequest(
                log_id=log.log_id,
                generation=log.generation,
                from_position=span[0],
                to_position=span[1],
                pages=[wire.row_to_proto(row) for row in rows],
                capability=capability,
            ),
            timeout=CALL_TIMEOUT_S,
        )
        return int(answer.committed_position)

    async def seal(
        self,
        log: HeldLog,
        chunk_list_digest: bytes,
        capability: str,
        *,
        first_token: SampledToken | None,
        finish_reason: str | None,
        last: Checkpoint | None = None,
    ) -> int:
        """End prefill with the first token (None: KV only); returns the log's position.

        `last`: the last chunk, where it is not committed yet.
        """
        request = kvstore_pb2.SealRequest(
            log_id=log.log_id,
            generation=log.generation,
            chunk_list_digest=chunk_list_digest,
            capability=capability,
            finish_reason=finish_to_proto(finish_reason),
        )
        if last is not None:
            request.last_checkpoint.from_position = last.first
            request.last_checkpoint.to_position = last.end
            request.last_checkpoint.pages.extend(wire.row_to_proto(row) for row in last.rows)
        if first_token is not None:
            request.first_token_id = first_token.token_id
            logprob = wire.logprob_to_proto(first_token)
            if logprob is not None:
                request.logprob.CopyFrom(logprob)
        answer = await self._stub.Seal(request, timeout=CALL_TIMEOUT_S)
        return int(answer.position)

    async def take(
        self,
        log: HeldLog,
        capability: str,
        *,
        pages: int,
        request_id: str,
        compute_tokens_per_s: float = 0.0,
        block_tokens: int | None = None,
    ) -> TakenLog:
        """Become the log's writer under a new generation; STALE_GENERATION if another is newer.

        `compute_tokens_per_s`: how fast missing KV would be computed here; 0: not known.
        `block_tokens`: of the arena's pages, for an answer with the log's view.
        """
        answer = await self._stub.Take(
            kvstore_pb2.TakeRequest(
                log_id=log.log_id,
                generation=log.generation,
                worker_id=self._worker_id,
                capability=capability,
                pages=pages,
                request_id=request_id,
                compute_tokens_per_s=compute_tokens_per_s,
                with_log=block_tokens is not None,
            ),
            timeout=CALL_TIMEOUT_S,
        )
        view = None
        if block_tokens is not None and answer.log:
            pieces = [wire.piece_from_proto(piece, block_tokens) for piece in answer.log]
            view = fold_replay(pieces, block_tokens)
        return TakenLog(
            generation=answer.generation,
            position=answer.position,
            pages=wire.grants_from_proto(answer.pages),
            view=view,
        )

    async def park(
        self, log: HeldLog, capability: str, *, request_id: str, is_writer: bool
    ) -> HeldLog:
        """Leave a log without a writer, its KV evictable; returns it at the generation it waits at.

        `is_writer`: this worker wrote it and has stopped. STALE_GENERATION if another is newer.
        """
        request = kvstore_pb2.ParkRequest(
            log_id=log.log_id,
            generation=log.generation,
            capability=capability,
            request_id=request_id,
        )
        if is_writer:
            request.worker_id, request.worker_capability = self._worker_id, self._capability
        answer = await self._stub.Park(request, timeout=CALL_TIMEOUT_S)
        return HeldLog(log_id=log.log_id, generation=answer.generation)

    async def renew_leases(
        self, incarnation: int, logs: Sequence[HeldLog], progress: int
    ) -> frozenset[bytes]:
        """Keep logs owned; returns the ids of those that are no longer this worker's."""
        answer = await self._stub.RenewLeases(
            kvstore_pb2.RenewLeasesRequest(
                worker_id=self._worker_id,
                incarnation=incarnation,
                logs=[_position(log) for log in logs],
                progress=progress,
                capability=self._capability,
            ),
            timeout=CALL_TIMEOUT_S,
        )
        return frozenset(answer.lost_log_ids)

    async def distrust(self, incarnation: int, from_positions: Mapping[bytes, int]) -> int:
        """Give up the KV of logs (by id) from a position on; returns how many pages that were.

        Every log and published prefix that shares the pages loses them too; tokens stay.
        """
        answer = await self._stub.Distrust(
            kvstore_pb2.DistrustRequest(
                worker_id=self._worker_id,
                incarnation=incarnation,
                logs=[
                    common_pb2.LogPosition(log_id=log_id, position=position)
                    for log_id, position in from_positions.items()
                ],
                capability=self._capability,
            ),
            timeout=CALL_TIMEOUT_S,
        )
        return int(answer.pages)

    def open_append(self) -> AppendCall:
        """A fresh append stream; it lives until cancelled or broken, with ids of no request."""
        call = contextvars.Context().run(lambda: self._stub.Append(timeout=NO_DEADLINE))
        # The generated types know gRPC's own call; our channel hands out its wrapper.
        return AppendCall(cast("Call", call))


class AppendCall:
    """One bidirectional Append call in the library's own words."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def send(
        self, batch_id: int, entries: Sequence[AppendEntry], *, introduction: tuple[str, str] | None
    ) -> None:
        """Send one batch; `introduction` (worker id, capability) goes with the stream's first."""
        worker_id, capability = introduction or ("", "")
        await self._call.write(
            kvstore_pb2.AppendRequest(
                batch_id=batch_id,
                entries=[wire.entry_to_proto(entry) for entry in entries],
                worker_id=worker_id,
                capability=capability,
                traceparent=_sampled_traceparent(),
            )
        )

    async def receive(self) -> tuple[int, tuple[AppendOutcome, ...]]:
        """The next ack: its batch id and one outcome per entry; WORKER_LOST at the stream's end."""
        answer = await self._call.read()
        if not isinstance(answer, kvstore_pb2.AppendResponse):
            raise ServiceError(Reason.WORKER_LOST, "the kvstore ended the append stream")
        return answer.batch_id, tuple(wire.outcome_from_proto(item) for item in answer.outcomes)

    def cancel(self) -> None:
        """Give the call up; nothing more is sent or received."""
        self._call.cancel()


AppendCallFactory = Callable[[], AppendCall]


def _sampled_traceparent() -> str:
    """The trace of a batch that runs in one; most run in none."""
    trace = current_trace()
    return format_traceparent(trace) if trace is not None and trace.is_sampled else ""


def _position(log: HeldLog) -> common_pb2.LogPosition:
    return common_pb2.LogPosition(log_id=log.log_id, generation=log.generation)

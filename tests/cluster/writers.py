"""Simulated workers: they attach, write pages of mapped arenas, commit, append, renew.

Owns what a worker may do and when. A step that has begun writes its slots to the end, also after a
freeze longer than a lease and after its log went to somebody else: the late writer. It stops at the
end of that step, and only then lets go of the log by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.errors import Reason, ServiceError
from baton.kv.crc import slot_list_crc
from baton.kv.digests import ChunkPage, chunk_list_digest
from baton.kv.layout import page_crc, slot_crc, slot_crcs
from baton.wire.errors import error_from_proto
from tests.cluster.homes import LABEL, LEASE_S, SimHome
from tests.cluster.memory import BLOCK, GEOMETRY, kv_of, sampled_from
from tests.cluster.oracle import Oracle
from tests.cluster.steps import Process, Promise, Scheduler
from tests.cluster.wires import Wires

RENEW_S: Final = LEASE_S / 4
STEPS_S: Final = (0.002, 0.01, 0.05)


@dataclass(slots=True, eq=False)
class Held:
    """A log that is being written: its page table as this worker knows it."""

    log_id: bytes
    generation: int
    capability: str
    tokens: list[int] = field(default_factory=list)
    table: list[tuple[int, int]] = field(default_factory=list)
    committed: int = 0
    prompt_tokens: int = 0
    is_sealed: bool = False
    is_lost: bool = False
    chunks: list[list[ChunkPage]] = field(default_factory=list)
    # Slots that a step under way will write: (page, page generation, slot).
    pending: list[tuple[int, int, int]] = field(default_factory=list)

    def require(self) -> None:
        """Stops the work on a log that is no longer ours."""
        if self.is_lost:
            raise ServiceError(Reason.STALE_GENERATION, "lost", field="generation")


Emit = Callable[[int, int], None]
"""Told (position, token) after the token's record was acked."""


class SimWorker:
    """One worker process of one node; `restart` makes the next of its name."""

    def __init__(
        self, name: str, home: SimHome, scheduler: Scheduler, wires: Wires, oracle: Oracle
    ) -> None:
        self.name, self.home = name, home
        self.scheduler, self.wires, self.oracle = scheduler, wires, oracle
        self.capability = oracle.worker_capability(name)
        self._requests = itertools.count()
        self.restart()

    def restart(self) -> None:
        """A new process: nothing mapped, nothing held."""
        self.process = Process(self.name)
        self.incarnation = self.scheduler.random.getrandbits(48)
        self.held: dict[bytes, Held] = {}
        self.progress = 0
        self.is_stuck = False
        self.slot: int | None = None
        self.arena = self.home.arena
        self.oracle.workers[self.name] = self
        self._spawn(self._life())

    def die(self) -> None:
        """SIGKILL; the kernel drops its slot's lock with its mapping."""
        self.process.die()
        if self.slot is not None:
            self.arena.locked_slots.discard(self.slot)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> Promise[Any]:
        done: Promise[Any] = Promise()
        self.scheduler.spawn(self.process, work, done)
        return done

    def call(self, method: str, request: Any) -> Promise[Any]:
        """A call to this node's kvstore."""
        return self.wires.call(self.process, self.home, method, request)

    # --- attach and renew -------------------------------------------------------------------

    async def _life(self) -> None:
        while True:
            try:
                if self.slot is None:
                    await self._attach()
                else:
                    await self._renew()
            except ServiceError as error:
                if error.reason is Reason.NO_WORKER:
                    await self._forget_store()
            await self.scheduler.pause(RENEW_S)

    async def _attach(self) -> None:
        answer = await self.call(
            "Attach",
            kvstore_pb2.AttachRequest(
                worker_id=self.name,
                incarnation=self.incarnation,
                capability=self.capability,
                label=self.oracle.label,
            ),
        )
        if self.home.runtime is not None and answer.ticket in self.home.desk.tickets:
            self.home.hand_over(answer.ticket)
            self.arena = self.home.arena
            self.slot = answer.worker_slot

    async def _forget_store(self) -> None:
        """The store restarted: stop at the end of each step, then attach anew."""
        for held in self.held.values():
            held.is_lost = True
        while self.held:
            await self.scheduler.pause(0.01)
        if self.slot is not None:
            self.arena.locked_slots.discard(self.slot)
        self.slot = None

    async def _renew(self) -> None:
        self.progress += not self.is_stuck
        named = [
            common_pb2.LogPosition(log_id=one.log_id, generation=one.generation)
            for one in self.held.values()
        ]
        answer = await self.call(
            "RenewLeases",
            kvstore_pb2.RenewLeasesRequest(
                worker_id=self.name,
                incarnation=self.incarnation,
                logs=named,
                progress=self.progress,
                capability=self.capability,
            ),
        )
        sent = {(one.log_id, one.generation) for one in named}
        for log_id in answer.lost_log_ids:
            held = self.held.get(log_id)
            if held is not None and (log_id, held.generation) in sent:
                held.is_lost = True

    # --- work -------------------------------------------------------------------------------

    def run_prefill(self, log_id: bytes, generation: int, capability: str) -> Promise[int]:
        """The prompt, sealed; keeps the first token."""
        return self._spawn(self._prefill(Held(log_id, generation, capability)))

    def run_decode(
        self, log_id: bytes, generation: int, capability: str, end: int, emit: Emit
    ) -> Promise[int]:
        """Takes the log and appends until it has `end` tokens; keeps the generation."""
        return self._spawn(self._decode(log_id, generation, capability, end, emit))

    def stop(self, log_id: bytes) -> None:
        """The client is gone: stop at the end of the step."""
        held = self.held.get(log_id)
        if held is not None:
            held.is_lost = True

    async def _prefill(self, held: Held) -> int:
        self._hold(held)
        try:
            await self._replay(held)
            while held.committed < held.prompt_tokens:
                size = self.scheduler.random.choice((3, 8, 13))
                await self._commit(held, min(held.committed + size, held.prompt_tokens))
            token = sampled_from(self._kv_before(held, held.prompt_tokens))
            held.require()
            await self.call(
                "Seal",
                kvstore_pb2.SealRequest(
                    log_id=held.log_id,
                    generation=held.generation,
                    capability=held.capability,
                    chunk_list_digest=chunk_list_digest(LABEL.kv_digest(), held.chunks),
                    first_token_id=token,
                ),
            )
            return token
        finally:
            self._let_go(held)

    async def _decode(
        self, log_id: bytes, generation: int, capability: str, end: int, emit: Emit
    ) -> int:
        request = kvstore_pb2.TakeRequest(
            log_id=log_id,
            generation=generation,
            worker_id=self.name,
            capability=capability,
            pages=2,
            request_id=f"{self.name}-{self.incarnation}-{next(self._requests)}",
        )
        taken = await self.call("Take", request)
        held = Held(log_id, taken.generation, capability)
        self._hold(held)
        self.oracle.tell(log_id, held.generation)
        try:
            await self._replay(held)
            if held.committed < len(held.tokens) - 1:
                await self._commit(held, len(held.tokens) - 1)
            while len(held.tokens) < end:
                await self._append(held, is_last=len(held.tokens) + 1 == end)
                emit(len(held.tokens) - 1, held.tokens[-1])
            return held.generation
        finally:
            self._let_go(held)

    def _hold(self, held: Held) -> None:
        if self.slot is None:
            raise ServiceError(Reason.NO_WORKER, f"{self.name} is not attached")
        self.held[held.log_id] = held

    def _let_go(self, held: Held) -> None:
        if self.held.get(held.log_id) is held:
            del self.held[held.log_id]

    async def _replay(self, held: Held) -> None:
        pieces = await self.call(
            "ReplayLog",
            kvstore_pb2.ReplayLogRequest(
                log_id=held.log_id, capability=held.capability, generation=held.generation
            ),
        )
        granted: list[tuple[int, int]] = []
        for piece in pieces:
            match piece.WhichOneof("content"):
                case "head":
                    held.committed = piece.head.committed_position
                    held.prompt_tokens = piece.head.prompt_tokens
                    held.is_sealed = piece.head.sealed
                    granted = [(one.page, one.page_generation) for one in piece.head.granted_pages]
                case "tokens":
                    held.tokens.extend(piece.tokens.token_ids)
                case "pages":
                    held.table.extend((one.page, one.page_generation) for one in piece.pages.pages)
        held.table.extend(granted)
        self.oracle.granted(self, held, granted)
        self.oracle.replayed(self, held)

    def _kv_before(self, held: Held, position: int) -> int:
        """The KV number at position - 1, read from the arena; all wrong if it is not there."""
        if position == 0:
            return 0
        page, _ = held.table[(position - 1) // BLOCK]
        kv, mark = self.arena.get(page, (position - 1) % BLOCK)
        return kv if mark == position else -1 & 0xFFFFFF

    async def _write(self, held: Held, first: int, end: int) -> None:
        """One step: computing, then slots; in two halves, so that a crash or freeze may come
        between. Whatever happens to the log meanwhile, the step goes on to its end.
        """
        held.require()
        self.progress += not self.is_stuck
        spots = [
            (*held.table[position // BLOCK], position % BLOCK) for position in range(first, end)
        ]
        held.pending = spots
        for part in ((first, (first + end) // 2), ((first + end) // 2, end)):
            await self.scheduler.pause(self.scheduler.random.choice(STEPS_S))
            while self.is_stuck:
                await self.scheduler.pause(0.2)
            for position in range(*part):
                page, page_generation = held.table[position // BLOCK]
                kv = kv_of(held.tokens[position], self._kv_before(held, position))
                self.oracle.wrote(self, held, page, page_generation, position)
                self.arena.put(page, position % BLOCK, kv, position)
        held.pending = []
        held.require()

    async def _commit(self, held: Held, end: int) -> None:
        await self._pages_for(held, end)
        first = held.committed
        await self._write(held, first, end)
        arena = self.arena
        entries = []
        for index in range(first // BLOCK, -(-end // BLOCK)):
            page, page_generation = held.table[index]
            tokens = min(BLOCK, end - index * BLOCK)
            content = arena.page(page)
            is_full = tokens == BLOCK
            entries.append(
                common_pb2.PageEntry(
                    page=page,
                    page_generation=page_generation,
                    tokens=tokens,
                    crc32c=page_crc(GEOMETRY, content) if is_full else 0,
                    slot_crc32c=[] if is_full else slot_crcs(GEOMETRY, content, 0, tokens),
                )
            )
        await self.call(
            "CommitCheckpoint",
            kvstore_pb2.CommitCheckpointRequest(
                log_id=held.log_id,
                generation=held.generation,
                from_position=first,
                to_position=end,
                pages=entries,
                capability=held.capability,
            ),
        )
        held.committed = end
        held.chunks.append(_chunk(entries, first))

    async def _pages_for(self, held: Held, end: int) -> None:
        missing = -(-end // BLOCK) - len(held.table)
        if missing > 0:
            answer = await self.call(
                "Grant",
                kvstore_pb2.GrantRequest(
                    log_id=held.log_id,
                    generation=held.generation,
                    pages=missing,
                    worker_id=self.name,
                    capability=self.capability,
                    request_id=f"{self.name}-{self.incarnation}-{next(self._requests)}",
                ),
            )
            self._add_pages(held, answer.pages)

    def _add_pages(self, held: Held, pages: Any) -> None:
        granted = [(one.page, one.page_generation) for one in pages]
        held.table.extend(granted)
        self.oracle.granted(self, held, granted)

    async def _append(self, held: Held, *, is_last: bool) -> None:
        position = len(held.tokens)
        await self._pages_for(held, position)
        await self._write(held, position - 1, position)
        page, page_generation = held.table[(position - 1) // BLOCK]
        slot = (position - 1) % BLOCK
        content = self.arena.page(page)
        entry = kvstore_pb2.AppendEntry(
            log_id=held.log_id,
            generation=held.generation,
            position=position,
            token_id=sampled_from(self._kv_before(held, position)),
            page=page,
            page_generation=page_generation,
            slot_crc32c=slot_crc(GEOMETRY, content, slot),
            pages_wanted=int(slot == BLOCK - 2),
        )
        if slot == BLOCK - 1:
            entry.page_crc32c = page_crc(GEOMETRY, content)
        if is_last:
            entry.finish_reason = common_pb2.FINISH_REASON_LENGTH
        answer = await self.call(
            "Append",
            kvstore_pb2.AppendRequest(
                batch_id=1, entries=[entry], worker_id=self.name, capability=self.capability
            ),
        )
        (outcome,) = answer.outcomes
        if outcome.HasField("error"):
            raise error_from_proto(outcome.error)
        self._add_pages(held, outcome.pages)
        held.tokens.append(entry.token_id)
        held.committed = position


def _chunk(entries: list[Any], first: int) -> list[ChunkPage]:
    start = first // BLOCK * BLOCK
    return [
        ChunkPage(
            first_position=start + index * BLOCK,
            tokens=entry.tokens,
            crc=entry.crc32c if entry.tokens == BLOCK else slot_list_crc(entry.slot_crc32c),
        )
        for index, entry in enumerate(entries)
    ]

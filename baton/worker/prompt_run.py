"""Running a prompt: the missing KV of one log in chunks, each committed while the next computes.

Owns the order of compute, packing, commit and seal for one log; used by the prefill service and for
local prefill in decode. Never chooses which prompt goes next: a `ChunkComputer` computes a chunk
when it may. Never fences: a run that fails or is cancelled just stops writing.

Invariants: chunks are committed in order, one at a time, so that beside the chunk that is computed
at most one is packed and committed; when `compute` has returned or raised, no thread writes this
log's pages any more.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Final

from baton.arena.checksums import chunk_pages, commit_rows
from baton.arena.client import Checkpoint
from baton.arena.page_table import PageTable
from baton.arena.replay import HeldLog, LogView, PageRow
from baton.engine.prompt_chunk import PromptChunk
from baton.engine.transformer import ComputeCancelled
from baton.errors import Reason, ServiceError
from baton.faults import faults
from baton.kv.digests import ChunkPage, chunk_list_digest
from baton.stages import FIRST_TOKEN_SAMPLE, KV_PACK, PREFILL_COMPUTE, REQUEST_QUEUE_WAIT, SEAL
from baton.tracing import current_trace, record_span, span
from baton.worker.chunk_compute import ChunkComputer, ChunkTurns, ChunkWork, Logits, OneByOne
from baton.worker.chunker import Chunk, Chunking, plan_chunks, plan_semantic
from baton.worker.engine import ComputeLane, WorkerParts
from baton.worker.failures import first_failure
from baton.worker.output import OutputState, OutputToken

OnCommit = Callable[[Chunk], Awaitable[None]]
OnLogits = Callable[[Logits], Awaitable[None]]

_OWNERS: Final = count()
_CANCELLED = ServiceError(Reason.CANCELLED, "the request was cancelled while its prompt ran")


@dataclass(slots=True)
class RunTimes:
    """Seconds this run spent waiting for turns, computing, packing and committing, and sealing,
    which commits the last chunk where it was left to it.

    Packing runs beside the next chunk's computation: `pack_wait_s` is what the run waited for it.
    """

    queue_s: float = 0.0
    compute_s: float = 0.0
    pack_s: float = 0.0
    pack_wait_s: float = 0.0
    sample_s: float = 0.0
    seal_s: float = 0.0

    def stages(self) -> dict[str, float]:
        """By stage name; they follow each other."""
        return {
            REQUEST_QUEUE_WAIT: self.queue_s,
            PREFILL_COMPUTE: self.compute_s,
            KV_PACK: self.pack_wait_s,
            FIRST_TOKEN_SAMPLE: self.sample_s,
            SEAL: self.seal_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTerms:
    """How a run acts: its names, its chunks' size and where they end, whom it tells of a committed
    chunk, and by what it computes where it is given turns (`lane` None: the worker's own engine and
    thread).
    """

    request_id: str
    capability: str
    chunk_tokens: int
    on_commit: OnCommit
    lane: ComputeLane | None = None
    chunking: Chunking = Chunking.FIXED


class PromptRun:
    """One log's run over its replay `view`; `end` None: up to the end of the prompt."""

    def __init__(
        self, parts: WorkerParts, view: LogView, terms: RunTerms, *, end: int | None = None
    ) -> None:
        self._parts = parts
        self._view = view
        self._terms = terms
        self._end = view.head.prompt_tokens if end is None else end
        self._lane = terms.lane or ComputeLane(thread=parts.compute, engine=parts.engine)
        self._stop = threading.Event()
        self._stopped_by = _CANCELLED
        self._chunks: list[tuple[ChunkPage, ...]] = []
        self._owner = next(_OWNERS)
        self._left: tuple[Chunk, Checkpoint] | None = None
        self.log = HeldLog(log_id=view.head.log_id, generation=view.head.generation)
        self.table = PageTable.of_view(view, parts.geometry.block_tokens)
        self.times = RunTimes()

    @property
    def missing_tokens(self) -> int:
        """Positions whose KV is not committed when the run begins."""
        return max(0, self._end - self._view.head.committed_position)

    def stop(self, because: ServiceError | None = None) -> None:
        """Make the chunk under way end between two layers, and the run with `because`."""
        if not self._stop.is_set():
            self._stopped_by = because or _CANCELLED
            self._stop.set()

    async def compute_kv(self, turns: ChunkTurns | ChunkComputer) -> None:
        """Compute and commit everything that is missing, without logits."""
        await self._compute(self._computer(turns), None)

    async def compute(self, turns: ChunkTurns | ChunkComputer) -> Logits:
        """Compute and commit everything that is missing; the logits after the last position.

        Raises ServiceError: CANCELLED after `stop`, PAGES_EXHAUSTED, or what the store refused.
        """
        found: list[Logits] = []

        async def keep(logits: Logits) -> None:
            found.append(logits)

        computer = self._computer(turns)
        if not await self._compute(computer, keep):
            await keep(await self._logits_again(computer))
        return found[0]

    async def compute_to_seal(self, turns: ChunkTurns | ChunkComputer, on_logits: OnLogits) -> None:
        """As `compute`; the logits go to `on_logits`, beside which the last chunk is packed. It is
        committed by `seal`, which has to follow: one call to the store instead of two.
        """
        computer = self._computer(turns)
        if not await self._compute(computer, on_logits, leaves_last=True):
            await on_logits(await self._logits_again(computer))

    async def choose(self, state: OutputState, logits: Logits) -> OutputToken:
        """Sample the first token in the compute thread."""
        started_s = time.monotonic()
        with span(FIRST_TOKEN_SAMPLE):
            token = await self._parts.compute.run(lambda: state.choose(logits))
        self.times.sample_s += time.monotonic() - started_s
        return token

    async def seal(self, first: OutputToken | None) -> int:
        """Seal the log with its first token (None: KV only); returns the log's position."""
        started_s = time.monotonic()
        left, self._left = self._left, None
        if left is not None:
            await faults.reach("prefill.before_commit")
        with span(SEAL):
            digest = chunk_list_digest(self._parts.label.kv_digest(), self._chunks)
            position = await self._parts.store.seal(
                self.log,
                digest,
                self._terms.capability,
                first_token=None if first is None else first.sampled,
                finish_reason=None if first is None else first.finish_reason,
                last=None if left is None else left[1],
            )
        if left is not None:
            await self._terms.on_commit(left[0])
        self.times.seal_s += time.monotonic() - started_s
        return position

    def _computer(self, turns: ChunkTurns | ChunkComputer) -> ChunkComputer:
        return turns if isinstance(turns, ChunkComputer) else OneByOne(self._lane, turns)

    async def _compute(
        self,
        computer: ChunkComputer,
        on_logits: OnLogits | None,
        *,
        leaves_last: bool = False,
    ) -> bool:
        """Whether there was anything to compute; `on_logits` None: nobody wants logits.

        `leaves_last`: the last chunk is packed and kept for the seal.
        """
        await self._require_pages()
        chunks = await self._planned(self._view.head.committed_position)
        logits: Logits | None = None
        try:
            async with asyncio.TaskGroup() as group:
                committing: asyncio.Task[None] | None = None
                for chunk in chunks:
                    work = self._work(chunk, wants_logits=on_logits is not None and chunk.is_last)
                    logits = await self._chunk_computed(computer, work)
                    await faults.reach("prefill.after_compute")
                    await self._committed(committing)
                    is_left = leaves_last and chunk.is_last
                    committing = group.create_task(
                        self._keep(chunk) if is_left else self._commit(chunk)
                    )
                if logits is not None and on_logits is not None:
                    await on_logits(logits)
                await self._committed(committing)
        except* ServiceError as failures:
            raise first_failure(failures) from None
        finally:
            # Waits for a copy at most, and only where a chunk was not committed.
            self._parts.stages.forget(self._owner)
        return logits is not None

    async def _logits_again(self, computer: ChunkComputer) -> Logits:
        logits = await self._chunk_computed(computer, self._last_again())
        assert logits is not None
        return logits

    async def _planned(self, first: int) -> Iterable[Chunk]:
        """The chunks of what is missing. Reading a long prompt's text takes a while: not here."""
        tokens, block_tokens = self._terms.chunk_tokens, self._parts.geometry.block_tokens
        if self._terms.chunking is Chunking.FIXED:
            return plan_chunks(first, self._end, tokens, block_tokens)
        spelt, ids = self._parts.tokenizer.decode_bytes, self._view.token_ids[: self._end]

        def plan() -> list[Chunk]:
            return plan_semantic(first, [spelt(item) for item in ids], tokens, block_tokens)

        return await self._parts.packing.run(plan)

    async def _committed(self, committing: asyncio.Task[None] | None) -> None:
        """Wait for the commit under way, if there is one."""
        if committing is None:
            return
        started_s = time.monotonic()
        await committing
        self.times.pack_wait_s += time.monotonic() - started_s

    async def _require_pages(self) -> None:
        missing = self.table.missing_pages(0, self._end)
        if missing:
            pages = await self._parts.store.grant(
                self.log.log_id,
                self.log.generation,
                missing,
                f"{self._terms.request_id}-{self.log.generation}-prompt",
            )
            self.table.grant(pages)
        self.table.require(self._end)

    def _work(self, chunk: Chunk, *, wants_logits: bool) -> ChunkWork:
        unvouched, log_id = self._parts.unvouched, self.log.log_id
        return ChunkWork(
            chunk=PromptChunk(
                tokens=self._view.token_ids[chunk.first : chunk.end],
                first_position=chunk.first,
                page_table=self.table.pages(chunk.end),
                wants_logits=wants_logits,
                should_cancel=self._should_stop,
                owner=self._owner,
            ),
            begin=lambda: unvouched.note(log_id, chunk.first),
            stop=self._stop.set,
        )

    def _last_again(self) -> ChunkWork:
        """The last token of a prompt whose KV is complete already: an earlier writer died before
        its seal.

        A committed slot is never written twice, so the last token is computed in a spare page that
        holds a copy of its page.
        """
        last = self._end - 1
        spare = self.table.spare_page()
        pages = self.table.pages(self._end)
        arena = self._parts.arena

        def begin() -> None:
            arena.page(spare)[:] = arena.page(pages[-1])

        return ChunkWork(
            chunk=PromptChunk(
                tokens=self._view.token_ids[last : self._end],
                first_position=last,
                page_table=[*pages[:-1], spare],
                wants_logits=True,
                should_cancel=self._should_stop,
            ),
            begin=begin,
            stop=self._stop.set,
        )

    async def _chunk_computed(self, computer: ChunkComputer, work: ChunkWork) -> Logits | None:
        if self._stop.is_set():
            raise self._stopped_by
        try:
            computed = await computer.compute(work)
        except ComputeCancelled:
            raise self._stopped_by from None
        finally:
            self._parts.progress.worked()
        began_s, ended_s = computed.began_s, computed.ended_s
        self.times.queue_s += began_s - computed.asked_s
        self.times.compute_s += ended_s - began_s
        trace, chunk = current_trace(), work.chunk
        record_span(REQUEST_QUEUE_WAIT, trace, (computed.asked_s, began_s))
        record_span(
            PREFILL_COMPUTE,
            trace,
            (began_s, ended_s),
            first=chunk.first_position,
            tokens=len(chunk.tokens),
        )
        if self._stop.is_set():
            raise self._stopped_by
        return computed.logits

    def _should_stop(self) -> bool:
        self._parts.progress.worked()
        return self._stop.is_set()

    async def _commit(self, chunk: Chunk) -> None:
        started_s = time.monotonic()
        with span(KV_PACK, first=chunk.first, tokens=chunk.tokens):
            rows = await self._parts.packing.run(lambda: self._packed(chunk))
            await faults.reach("prefill.before_commit")
            await self._parts.store.commit_checkpoint(
                self.log, (chunk.first, chunk.end), rows, self._terms.capability
            )
        self._chunks.append(chunk_pages(rows, chunk.first, self._parts.geometry.block_tokens))
        self.times.pack_s += time.monotonic() - started_s
        await self._terms.on_commit(chunk)

    async def _keep(self, chunk: Chunk) -> None:
        """Pack the last chunk for the seal."""
        started_s = time.monotonic()
        with span(KV_PACK, first=chunk.first, tokens=chunk.tokens):
            rows = await self._parts.packing.run(lambda: self._packed(chunk))
        self._chunks.append(chunk_pages(rows, chunk.first, self._parts.geometry.block_tokens))
        self._left = (chunk, Checkpoint(first=chunk.first, end=chunk.end, rows=rows))
        self.times.pack_s += time.monotonic() - started_s

    def _packed(self, chunk: Chunk) -> tuple[PageRow, ...]:
        """The checksums of a chunk's pages, once its KV is there; a data fault damages the last
        page behind them.
        """
        self._parts.stages.land(self._owner, chunk.first)
        rows = commit_rows(self._parts.arena, self.table, chunk.first, chunk.end)
        faults.reach_blocking("prefill.mid_upload")
        faults.damage("prefill.mid_upload", self._parts.arena.page(rows[-1].page))
        return rows

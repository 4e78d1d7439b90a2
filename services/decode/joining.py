"""How a sequence comes to run here: take and replay a sealed log, or prefill an opened one.

Owns that path from order to `Sequence`. Never touches the batch: the runner adds what comes out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

from baton.arena.client import TakenLog
from baton.arena.page_table import PageTable
from baton.arena.replay import HeldLog, LogView
from baton.clock import Clock
from baton.errors import Reason, ServiceError
from baton.faults import faults
from baton.kv.label import require_match
from baton.stages import KV_TRANSFER, KV_UNPACK, LOG_REPLAY
from baton.tracing import span
from baton.worker.chunker import Chunk
from baton.worker.engine import WorkerParts
from baton.worker.held_logs import OnLost
from baton.worker.output import OutputState, OutputToken, replay_output
from baton.worker.prompt_run import PromptRun, RunTerms
from services.decode.events import Produced, Started, StartOrder, TokenCounts
from services.decode.machine import Sequence
from services.decode.measures import DecodeMeasures

_ENDED_PHASES: Final = frozenset({"ended", "kept"})


SHARED_MEMORY: Final = "shm"
"""How KV comes here: by reference, in the arena of this node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """`replayed`: tokens to send at once. `sequence` None: the log had ended already."""

    started: Started
    replayed: tuple[Produced, ...]
    sequence: Sequence | None


class FairTurns:
    """One chunk of local prefill at a time, prompts in turn, each between two decode steps.

    The compute thread takes jobs in order, and the loop always has at most one step there: so one
    chunk is the most that a step can wait for.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The right to compute one chunk; first come, first served."""
        async with self._lock:
            yield


class Joiner:
    """Turns orders into sequences."""

    def __init__(
        self, parts: WorkerParts, clock: Clock, measures: DecodeMeasures, chunk_tokens: int
    ) -> None:
        self._parts = parts
        self._clock = clock
        self._measures = measures
        self._chunk_tokens = chunk_tokens
        self._turns = FairTurns()

    async def join(self, order: StartOrder, lost: OnLost) -> Joined:
        """Take or prefill the log of `order`; it is held until the runner discards it.

        `lost` is called if the store gives the log to another owner. Raises ServiceError; nothing
        is held then.
        """
        if order.label is not None:
            require_match(self._parts.label, order.label)
        if order.is_local_prefill:
            return await self._prefilled(order, lost)
        try:
            return await self._taken(order, lost)
        except ServiceError as error:
            self._measures.transfer_failed(SHARED_MEMORY, error.reason)
            raise

    async def _taken(self, order: StartOrder, lost: OnLost) -> Joined:
        began_s = self._clock.monotonic_s()
        stages: dict[str, float] = {}
        try:
            with span(KV_TRANSFER):
                taken = await self._take(order)
        except ServiceError as error:
            if error.metadata.get("phase") not in _ENDED_PHASES:
                raise
            # A resume may meet a log whose answer is complete: nothing to own, only to tell.
            return self._told(order, await self._replay(order, order.log), began_s)
        stages[KV_TRANSFER] = self._clock.monotonic_s() - began_s
        log = HeldLog(log_id=order.log.log_id, generation=taken.generation)
        self._parts.held.add(log, lost)
        try:
            with span(KV_UNPACK):
                view = await self._replay(order, log)
                await faults.reach("decode.mid_fetch")
                self._check_sealed(view)
                if view.head.finish_reason is not None:
                    self._parts.held.discard(log)
                    return self._told(order, view, began_s)
                table = await self._completed(order, view)
                return self._joined(order, view, table, (began_s, stages))
        except (ServiceError, asyncio.CancelledError):
            self._parts.held.discard(log)
            raise

    async def _take(self, order: StartOrder) -> TakenLog:
        return await self._parts.store.take(
            order.log,
            order.capability,
            pages=1,
            # One id per distinct take: the store answers a repeated id from memory.
            request_id=(
                f"{order.request_id}-{self._parts.identity.incarnation:x}"
                f"-{order.log.generation}-{order.next_index}"
            ),
        )

    async def _prefilled(self, order: StartOrder, lost: OnLost) -> Joined:
        began_s = self._clock.monotonic_s()
        log = order.log
        with span(LOG_REPLAY):
            view = await self._replay(order, log)
        self._check_open(view)
        replay_s = self._clock.monotonic_s() - began_s
        run = PromptRun(self._parts, view, self._terms(order))

        def gone(error: ServiceError) -> None:
            run.stop(error)
            lost(error)

        self._parts.held.add(log, gone)
        try:
            state = OutputState(
                view.prompt_ids, view.head.sampling, self._parts.rule, self._parts.tokenizer
            )
            logits = await run.compute(self._turns)
            first = await run.choose(state, logits)
            await run.seal(first)
        except (ServiceError, asyncio.CancelledError):
            self._parts.held.discard(log)
            raise
        seconds = self._clock.monotonic_s() - began_s
        started = replace(
            self._started(view, view.head.prompt_tokens, 0.0, run.times.compute_s),
            stage_seconds={LOG_REPLAY: replay_s, **run.times.stages()},
            total_s=seconds,
        )
        sequence = self._sequence(order, view, run.table, (state, (first,)))
        if sequence is None:
            self._parts.held.discard(log)
        return Joined(
            started=started, replayed=_produced(view, (first,), order.next_index), sequence=sequence
        )

    def continued(self, sequence: Sequence) -> Started:
        """What a gateway hears that comes back for a sequence which never stopped."""
        return Started(
            generation=sequence.log.generation,
            position=sequence.output.prompt_tokens + sequence.delivered_tokens,
            kv_transfer_s=0.0,
            exactness=sequence.exactness,
        )

    def _told(self, order: StartOrder, view: LogView, began_s: float) -> Joined:
        """A finished log: what it holds from the wanted index on, and nothing to run."""
        _state, replayed = replay_output(view, self._parts.rule, self._parts.tokenizer)
        self._check_index(order, len(replayed))
        waited_s = self._clock.monotonic_s() - began_s
        return Joined(
            started=self._started(view, view.head.position, waited_s, None),
            replayed=_produced(view, replayed, order.next_index),
            sequence=None,
        )

    def _joined(
        self,
        order: StartOrder,
        view: LogView,
        table: PageTable,
        began: tuple[float, dict[str, float]],
    ) -> Joined:
        """`began`: when the join began, and its stages until the log was taken."""
        replay = replay_output(view, self._parts.rule, self._parts.tokenizer)
        self._check_index(order, len(replay[1]))
        seconds = self._clock.monotonic_s() - began[0]
        stages = {**began[1], KV_UNPACK: seconds - sum(began[1].values())}
        size_bytes = view.head.committed_position * self._parts.geometry.token_bytes
        queue_s = 0.0 if order.received_s is None else max(0.0, began[0] - order.received_s)
        self._measures.transferred(SHARED_MEMORY, queue_s, seconds, size_bytes)
        sequence = self._sequence(order, view, table, replay)
        if sequence is None:
            self._parts.held.discard(
                HeldLog(log_id=view.head.log_id, generation=view.head.generation)
            )
        return Joined(
            started=replace(
                self._started(view, view.head.position, seconds, None),
                stage_seconds=stages,
                total_s=seconds,
                transfer_bytes=size_bytes,
                transport=SHARED_MEMORY,
            ),
            replayed=_produced(view, replay[1], order.next_index),
            sequence=sequence,
        )

    def _sequence(
        self,
        order: StartOrder,
        view: LogView,
        table: PageTable,
        replay: tuple[OutputState, tuple[OutputToken, ...]],
    ) -> Sequence | None:
        """The running sequence; None when its output is complete."""
        state, delivered = replay
        if state.finish_reason is not None:
            return None
        tokens_max = self._parts.context_max
        if view.head.sampling.max_tokens is not None:
            tokens_max = min(tokens_max, view.head.prompt_tokens + view.head.sampling.max_tokens)
        return Sequence(
            request_id=order.request_id,
            log=view.head.held,
            table=table,
            output=state,
            last_token_id=delivered[-1].sampled.token_id,
            cached_tokens=view.head.cached_tokens,
            exactness=self._parts.exactness(view.head.base_numeric_class),
            tokens_max=tokens_max,
            delivered=delivered,
        )

    async def _replay(self, order: StartOrder, log: HeldLog) -> LogView:
        return await self._parts.store.replay(
            log.log_id,
            order.capability,
            self._parts.geometry.block_tokens,
            generation=log.generation,
        )

    async def _completed(self, order: StartOrder, view: LogView) -> PageTable:
        """The page table, after KV that the store no longer has was computed again."""
        needed = view.head.position - 1
        if view.head.committed_position >= needed:
            return PageTable.of_view(view, self._parts.geometry.block_tokens)
        run = PromptRun(self._parts, view, self._terms(order), end=needed)
        self._measures.recomputed_tokens.add(run.missing_tokens)
        await run.compute_kv(self._turns)
        return run.table

    def _terms(self, order: StartOrder) -> RunTerms:
        async def ignored(_chunk: Chunk) -> None:
            """Nobody watches the chunks of a local prefill."""

        return RunTerms(
            request_id=order.request_id,
            capability=order.capability,
            chunk_tokens=self._chunk_tokens,
            on_commit=ignored,
        )

    def _started(
        self, view: LogView, position: int, kv_transfer_s: float, prefill_s: float | None
    ) -> Started:
        return Started(
            generation=view.head.generation,
            position=position,
            kv_transfer_s=kv_transfer_s,
            exactness=self._parts.exactness(view.head.base_numeric_class),
            prefill_compute_s=prefill_s,
        )

    def _check_sealed(self, view: LogView) -> None:
        head = view.head
        if not head.is_sealed or head.position <= head.prompt_tokens:
            raise ServiceError(
                Reason.INVALID_REQUEST,
                "the log has no first token yet; seal it with one, or ask for local prefill",
                field="log_id",
            )
        self._check_fits(head.position + (head.finish_reason is None))

    def _check_open(self, view: LogView) -> None:
        head = view.head
        if head.is_sealed:
            raise ServiceError(
                Reason.ALREADY_EXISTS,
                "this log's prefill is complete; start it without local_prefill",
                field="local_prefill",
            )
        if head.writer_worker_id not in (None, self._parts.worker_id):
            raise ServiceError(
                Reason.PERMISSION_DENIED,
                f"the log was opened for {head.writer_worker_id}, not for {self._parts.worker_id}",
                field="log_id",
            )
        self._check_fits(head.prompt_tokens)

    def _check_fits(self, tokens: int) -> None:
        if tokens > self._parts.context_max:
            raise ServiceError(
                Reason.PROMPT_TOO_LONG,
                f"the log needs {tokens} tokens; this worker holds {self._parts.context_max}",
                field="prompt",
            )

    def _check_index(self, order: StartOrder, output_tokens: int) -> None:
        if order.next_index > output_tokens:
            raise ServiceError(
                Reason.INVALID_REQUEST,
                f"next_index is {order.next_index}, but only {output_tokens} tokens are logged",
                field="next_index",
            )


def _produced(
    view: LogView, tokens: tuple[OutputToken, ...], next_index: int
) -> tuple[Produced, ...]:
    head = view.head
    return tuple(
        Produced(
            token=token,
            usage=None
            if token.finish_reason is None
            else TokenCounts(
                prompt_tokens=head.prompt_tokens,
                cached_tokens=head.cached_tokens,
                completion_tokens=token.index + 1,
            ),
        )
        for token in tokens[next_index:]
    )

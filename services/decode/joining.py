"""How a sequence comes to run here: take and replay a sealed log, or prefill an opened one.

Owns that path from order to `Sequence`. Never touches the batch: the runner adds what comes out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
from baton.worker.held_logs import STORE_GONE, OnLost, OnStoreLost
from baton.worker.lasting_run import LastingRun, RunSteps
from baton.worker.output import OutputState, OutputToken, replay_output
from baton.worker.prompt_run import PromptRun, RunTerms
from services.decode.events import Produced, Started, StartOrder, TokenCounts
from services.decode.local_lane import LocalPrefills, PromptTurns
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Whom to tell when the store gave the log to another owner, and when the store was lost."""

    on_lost: OnLost
    on_store_lost: OnStoreLost


class Joiner:
    """Turns orders into sequences."""

    def __init__(
        self, parts: WorkerParts, clock: Clock, measures: DecodeMeasures, prefills: LocalPrefills
    ) -> None:
        self._parts = parts
        self._clock = clock
        self._measures = measures
        self._prefills = prefills

    def stepped(self, seconds: float, sequences: int) -> None:
        """A step of so many sequences took so long and ended now: prompts beside it keep to it."""
        self._prefills.stepped(seconds, sequences)

    def idled(self) -> None:
        """Nothing steps now: prompts need not hold back."""
        self._prefills.idled()

    async def join(self, order: StartOrder, holder: Holder) -> Joined:
        """Take or prefill the log of `order`; it is held until the runner discards it.

        Raises ServiceError; nothing is held then.
        """
        if order.label is not None:
            require_match(self._parts.label, order.label)
        if order.is_local_prefill:
            return await self._prefilled(order, holder)
        try:
            return await self._taken(order, holder)
        except ServiceError as error:
            self._measures.transfer_failed(SHARED_MEMORY, error.reason)
            raise

    async def come_back(
        self, order: StartOrder, old: Sequence, has_lost_store: Callable[[], bool]
    ) -> Joined:
        """Go on with a sequence that was stopped because its store was lost, once this worker is
        attached again.

        `has_lost_store` says, and forgets, whether the store was lost once more meanwhile. Raises
        ServiceError; nothing is held then.
        """
        log = old.log
        try:
            while True:
                log = await self._parts.held.back(log, self._parts.store_patience_s)
                has_lost_store()
                try:
                    return await self._rejoin(order, log, old.delivered_tokens)
                except ServiceError as error:
                    if not has_lost_store() and error.reason not in STORE_GONE:
                        raise
        except (ServiceError, asyncio.CancelledError):
            self._parts.held.discard(log)
            raise

    async def _rejoin(self, order: StartOrder, log: HeldLog, next_index: int) -> Joined:
        """Go on with a log that is held again: what is in it says how far the output came.

        `next_index` is the first output token that was not sent. Raises ServiceError; the log is
        still held then.
        """
        began_s = self._clock.monotonic_s()
        order = replace(order, next_index=next_index)
        with span(KV_UNPACK):
            view = await self._replay(order, log)
            self._check_sealed(view)
            if view.head.finish_reason is not None:
                self._parts.held.discard(log)
                return self._told(order, view, began_s)
            table = await self._completed(order, view)
        replay = replay_output(view, self._parts.rule, self._parts.tokenizer)
        self._check_index(order, len(replay[1]))
        sequence = self._sequence(order, view, table, replay)
        if sequence is None:
            self._parts.held.discard(log)
        waited_s = self._clock.monotonic_s() - began_s
        return Joined(
            started=self._started(view, view.head.position, waited_s, None),
            replayed=_produced(view, replay[1], order.next_index),
            sequence=sequence,
        )

    async def _taken(self, order: StartOrder, holder: Holder) -> Joined:
        began_s = self._clock.monotonic_s()
        stages: dict[str, float] = {}
        try:
            with span(KV_TRANSFER):
                taken = await self._take(order, with_log=True)
        except ServiceError as error:
            if error.metadata.get("phase") not in _ENDED_PHASES:
                raise
            # A resume may meet a log whose answer is complete: nothing to own, only to tell.
            return self._told(order, await self._replay(order, order.log), began_s)
        stages[KV_TRANSFER] = self._clock.monotonic_s() - began_s
        log = HeldLog(log_id=order.log.log_id, generation=taken.generation)
        self._parts.held.add(log, holder.on_lost, holder.on_store_lost)
        try:
            with span(KV_UNPACK):
                view = taken.view or await self._replay(order, log)
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

    async def _take(self, order: StartOrder, *, with_log: bool = False) -> TakenLog:
        return await self._parts.store.take(
            order.log,
            order.capability,
            pages=1,
            # One id per distinct take: the store answers a repeated id from memory.
            request_id=(
                f"{order.request_id}-{self._parts.identity.incarnation:x}"
                f"-{order.log.generation}-{order.next_index}"
            ),
            compute_tokens_per_s=self._measures.compute_rate,
            block_tokens=self._parts.geometry.block_tokens if with_log else None,
        )

    async def _prefilled(self, order: StartOrder, holder: Holder) -> Joined:
        began_s = self._clock.monotonic_s()
        with span(LOG_REPLAY):
            view = await self._replay(order, order.log)
            self._check_open(view)
            view = await self._adopted(order, view)
        replay_s = self._clock.monotonic_s() - began_s
        ended = await self._lasting(order, view, holder).run()
        view, run = ended.view, ended.run
        self._measures.prefilled(run.missing_tokens, run.times.compute_s)
        # From here on it is a running sequence's log.
        self._parts.held.hand_over(view.head.held, holder.on_lost, holder.on_store_lost)
        if view.head.is_sealed:
            return await self._rejoined(order, view.head.held)
        seconds = self._clock.monotonic_s() - began_s
        started = replace(
            self._started(view, view.head.prompt_tokens, 0.0, run.times.compute_s),
            stage_seconds={LOG_REPLAY: replay_s, **run.times.stages()},
            total_s=seconds,
        )
        state, first = ended.result
        sequence = self._sequence(order, view, run.table, (state, (first,)))
        if sequence is None:
            self._parts.held.discard(view.head.held)
        return Joined(
            started=started, replayed=_produced(view, (first,), order.next_index), sequence=sequence
        )

    async def _adopted(self, order: StartOrder, view: LogView) -> LogView:
        """The view to prefill from: of the next generation where an earlier run committed chunks.

        That run's list of chunks went with it, and the seal names the chunks of one generation.
        """
        if view.head.committed_position <= view.head.cached_tokens:
            return view
        taken = await self._take(order)
        log = HeldLog(log_id=order.log.log_id, generation=taken.generation)
        view = await self._replay(order, log)
        self._check_open(view)
        return view

    async def _rejoined(self, order: StartOrder, log: HeldLog) -> Joined:
        """A local prefill whose seal was found in the log after its store was lost."""
        try:
            return await self._rejoin(order, log, order.next_index)
        except (ServiceError, asyncio.CancelledError):
            self._parts.held.discard(log)
            raise

    def _lasting(
        self, order: StartOrder, view: LogView, holder: Holder
    ) -> LastingRun[tuple[OutputState, OutputToken]]:
        """A local prefill to its seal, over lost stores."""

        async def work(run: PromptRun, view: LogView) -> tuple[OutputState, OutputToken]:
            state = OutputState(
                view.prompt_ids, view.head.sampling, self._parts.rule, self._parts.tokenizer
            )
            first = await run.choose(state, await run.compute(self._turns(order, view)))
            await run.seal(first)
            return state, first

        def sealed(view: LogView) -> tuple[OutputState, OutputToken]:
            self._check_sealed(view)
            state, tokens = replay_output(view, self._parts.rule, self._parts.tokenizer)
            return state, tokens[0]

        def lost(error: ServiceError) -> None:
            lasting.stop(error)
            holder.on_lost(error)

        lasting = LastingRun(
            self._parts,
            view,
            RunSteps(
                begin=lambda view: PromptRun(self._parts, view, self._terms(order)),
                work=work,
                sealed=sealed,
                replay=lambda log: self._replay(order, log),
                on_lost=lost,
            ),
        )
        return lasting

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
        await run.compute_kv(self._turns(order, view))
        self._measures.recomputed(run.missing_tokens, run.times.compute_s)
        return run.table

    def _turns(self, order: StartOrder, view: LogView) -> PromptTurns:
        head = view.head
        return self._prefills.turns(order.claim, head.log_id, head.committed_position)

    def _terms(self, order: StartOrder) -> RunTerms:
        async def ignored(_chunk: Chunk) -> None:
            """Nobody watches the chunks of a local prefill."""

        return RunTerms(
            request_id=order.request_id,
            capability=order.capability,
            chunk_tokens=self._prefills.chunk_tokens,
            on_commit=ignored,
            lane=self._prefills.lane,
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

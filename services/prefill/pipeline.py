"""One run: from an opened log to a sealed one.

Owns the checks before work is queued, the order replay, compute, first token, seal, and what is
measured. Never talks protobuf (the servicer does), never fences a log (its gateway does): a run
that fails stops writing, frees its place and says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from baton.arena.replay import HeldLog, LogView
from baton.clock import Clock
from baton.errors import Reason, ServiceError
from baton.faults import faults
from baton.kv.label import PairLabel, require_match
from baton.scheduling.claims import Claim
from baton.stages import LOG_REPLAY
from baton.tracing import span
from baton.worker.chunk_compute import Logits
from baton.worker.chunker import Chunk, Chunking
from baton.worker.engine import WorkerParts
from baton.worker.lasting_run import EndedRun, LastingRun, RunSteps
from baton.worker.output import OutputState, OutputToken, replay_output
from baton.worker.prompt_run import OnCommit, PromptRun, RunTerms
from services.prefill.measures import PrefillMeasures
from services.prefill.turns import PromptTurns, Turns

_log = structlog.stdlib.get_logger("baton.prefill")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder:
    """What a gateway asks for. `label` None: it did not say; `claim`: whose turns it takes."""

    claim: Claim
    log: HeldLog
    capability: str
    label: PairLabel | None
    kv_only: bool

    @property
    def request_id(self) -> str:
        """The internal request id."""
        return self.claim.request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedRun:
    """How a run ended well; `first_token` is None for KV only.

    `stage_seconds` follow each other and make up `total_s`; `pack_s` also has what went on beside
    the computation.
    """

    first_token: OutputToken | None
    prompt_tokens: int
    cached_tokens: int
    exactness: str
    queue_wait_s: float
    compute_s: float
    pack_s: float
    stage_seconds: Mapping[str, float]
    total_s: float


class Pipeline:
    """All runs of one worker."""

    def __init__(
        self,
        parts: WorkerParts,
        turns: Turns,
        measures: PrefillMeasures,
        clock: Clock,
        chunk_tokens: int,
        *,
        chunking: Chunking = Chunking.FIXED,
    ) -> None:
        self._parts = parts
        self._turns = turns
        self._measures = measures
        self._clock = clock
        self._chunk_tokens = chunk_tokens
        self._chunking = chunking
        self._runs: dict[str, LastingRun[OutputToken | None]] = {}
        self._is_draining = False
        turns.token_rate = parts.prefill_rate
        measures.pending_requests.follow(lambda: float(len(turns.scheduler)))
        measures.waiting_requests.follow(lambda: float(turns.scheduler.queued))
        measures.running_requests.follow(
            lambda: float(len(turns.scheduler) - turns.scheduler.queued)
        )
        measures.pending_tokens.follow(lambda: float(turns.scheduler.pending_tokens))

    @property
    def token_rate(self) -> float:
        """Measured prompt tokens per second of computation; 0 where nobody measured."""
        return self._turns.token_rate

    @property
    def is_draining(self) -> bool:
        """No new runs are taken."""
        return self._is_draining

    @property
    def running(self) -> int:
        """Runs admitted and not ended."""
        return len(self._turns.scheduler)

    async def run(self, order: RunOrder, on_commit: OnCommit) -> SealedRun:
        """Compute, commit and seal; `on_commit` is awaited after each committed chunk.

        Raises ServiceError: what was refused or failed. The caller's cancellation stops the
        computation between two layers first.
        """
        try:
            sealed = await self._admitted(order, on_commit)
        except ServiceError as error:
            self._measures.failures.add(reason=error.reason.value)
            raise
        except asyncio.CancelledError:
            self._measures.failures.add(reason=Reason.CANCELLED.value)
            raise
        self._measures.sealed.add()
        return sealed

    def cancel(self, request_id: str, because: ServiceError | None = None) -> bool:
        """Stop a run, also one that waits for its turn; False when there is none."""
        run = self._runs.get(request_id)
        if run is None:
            return False
        error = because or ServiceError(Reason.CANCELLED, "the request was cancelled")
        run.stop(error)
        self._turns.refuse(request_id, error)
        return True

    async def drain_within(self, timeout_s: float) -> int:
        """Take no new runs; the number that still ran when the wait ended."""
        self._is_draining = True
        await self._turns.wait_empty(timeout_s)
        return self.running

    async def _admitted(self, order: RunOrder, on_commit: OnCommit) -> SealedRun:
        if self._is_draining:
            raise ServiceError(
                Reason.DRAINING, f"{self._parts.worker_id} takes no new prompts", retry_after_s=1.0
            )
        if order.label is not None:
            require_match(self._parts.label, order.label)
        entered_s = self._clock.monotonic_s()
        parts = self._parts
        turns = PromptTurns(self._turns, order.request_id, parts.compute, parts.engine)
        with self._turns.entered(order.claim):
            await faults.reach("prefill.after_accept")
            with span(LOG_REPLAY):
                view = await self._replay(order, order.log)
            self._check(view)
            replay_s = self._clock.monotonic_s() - entered_s
            run = LastingRun(self._parts, view, self._steps(order, on_commit, turns))
            self._runs[order.request_id] = run
            try:
                ended = await run.run()
                self._parts.held.discard(ended.view.head.held)
                return self._measured(ended, (entered_s, replay_s))
            finally:
                del self._runs[order.request_id]

    def _steps(
        self, order: RunOrder, on_commit: OnCommit, turns: PromptTurns
    ) -> RunSteps[OutputToken | None]:
        def begin(view: LogView) -> PromptRun:
            run = PromptRun(self._parts, view, self._terms(order, view, on_commit))
            self._turns.scheduler.set_tokens(order.request_id, run.missing_tokens)
            return run

        async def work(run: PromptRun, view: LogView) -> OutputToken | None:
            return await self._sealed(order, view, run, turns)

        def sealed(view: LogView) -> OutputToken | None:
            tokens = replay_output(view, self._parts.rule, self._parts.tokenizer)[1]
            return tokens[0] if tokens else None

        async def replay(log: HeldLog) -> LogView:
            return await self._replay(order, log)

        def lost(error: ServiceError) -> None:
            _log.warning("log_lost", reason=error.reason.value)
            self.cancel(order.request_id, error)

        return RunSteps(begin=begin, work=work, sealed=sealed, replay=replay, on_lost=lost)

    async def _replay(self, order: RunOrder, log: HeldLog) -> LogView:
        return await self._parts.store.replay(
            log.log_id,
            order.capability,
            self._parts.geometry.block_tokens,
            generation=log.generation,
        )

    async def _sealed(
        self, order: RunOrder, view: LogView, run: PromptRun, turns: PromptTurns
    ) -> OutputToken | None:
        first: OutputToken | None = None
        if order.kv_only:
            await run.compute_kv(turns)
        else:
            state = OutputState(
                view.prompt_ids, view.head.sampling, self._parts.rule, self._parts.tokenizer
            )

            async def choose(logits: Logits) -> None:
                nonlocal first
                await faults.reach("prefill.logits")
                faults.flip("prefill.logits", logits.data)
                first = await run.choose(state, logits)

            await run.compute_to_seal(turns, choose)
        await faults.reach("prefill.before_send")
        await run.seal(first)
        await faults.reach("prefill.after_seal")
        return first

    def _terms(self, order: RunOrder, view: LogView, on_commit: OnCommit) -> RunTerms:
        async def committed(chunk: Chunk) -> None:
            self._measures.computed_tokens.add(chunk.tokens)
            self._measures.kv_bytes.add(chunk.tokens * self._parts.geometry.token_bytes)
            left = view.head.prompt_tokens - chunk.end
            self._turns.scheduler.set_tokens(order.request_id, left)
            await on_commit(chunk)

        return RunTerms(
            request_id=order.request_id,
            capability=order.capability,
            chunk_tokens=self._chunk_tokens,
            chunking=self._chunking,
            on_commit=committed,
        )

    def _measured(
        self, ended: EndedRun[OutputToken | None], began: tuple[float, float]
    ) -> SealedRun:
        """`began`: when the run was admitted, and the seconds until its log was replayed."""
        run, first = ended.run, ended.result
        times, head = run.times, ended.view.head
        self._measures.queue_seconds.observe(times.queue_s)
        self._measures.compute_seconds.observe(times.compute_s)
        self._measures.pack_seconds.observe(times.pack_s)
        self._measures.hit_tokens.add(head.cached_tokens)
        return SealedRun(
            first_token=first,
            prompt_tokens=head.prompt_tokens,
            cached_tokens=head.cached_tokens,
            exactness=self._parts.exactness(head.base_numeric_class),
            queue_wait_s=times.queue_s,
            compute_s=times.compute_s,
            pack_s=times.pack_s,
            stage_seconds={LOG_REPLAY: began[1], **times.stages()},
            total_s=self._clock.monotonic_s() - began[0],
        )

    def _check(self, view: LogView) -> None:
        head = view.head
        if head.is_sealed:
            raise ServiceError(
                Reason.ALREADY_EXISTS, "this log's prefill is complete; hand it to a decode worker"
            )
        if head.writer_worker_id not in (None, self._parts.worker_id):
            raise ServiceError(
                Reason.PERMISSION_DENIED,
                f"the log was opened for {head.writer_worker_id}, not for {self._parts.worker_id}",
                field="log_id",
            )
        if head.prompt_tokens > self._parts.context_max:
            raise ServiceError(
                Reason.PROMPT_TOO_LONG,
                f"the prompt has {head.prompt_tokens} tokens; this worker holds at most "
                f"{self._parts.context_max}",
                field="prompt",
            )
        if max(view.prompt_ids) >= self._parts.vocabulary:
            raise ServiceError(
                Reason.INVALID_REQUEST,
                f"the prompt names a token id beyond the vocabulary of {self._parts.vocabulary}",
                field="prompt_token_ids",
            )

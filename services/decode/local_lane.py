"""Where local prefills compute: a thread of their own beside the steps, under the gap's budget.

Owns that thread, its place behind the steps (fewer of torch's threads, a lower priority, rests
between layers) and the turns of the prompts that share it. How much is what is decided in
`local_prefill`. Never touches a log: prompt runs do.

The step kernel holds no lock of Python's while it computes and torch none inside an operation, so
that a second core is all that a prompt needs; see docs/local_prefill.md.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from itertools import count
from typing import Final

import numpy as np
from numpy.typing import NDArray

from baton.clock import Clock
from baton.engine.transformer import set_threads
from baton.metrics import Metrics
from baton.metrics_table import gauge
from baton.scheduling.claims import Claim
from baton.worker.engine import ComputeLane, PromptEngine, WorkerParts
from baton.worker.threads import WorkThread
from services.decode.local_prefill import BudgetTerms, GapBudget, TurnQueue

ASSUMED_TOKENS_PER_S: Final = 100.0
"""Where nobody measured; the first piece tells."""
QUIET_WAIT_MAX_S: Final = 0.25
"""The longest wait for a quiet step: an append may take that long."""
NICE: Final = 2
"""How far behind the steps, the loop and the store it stands where cores are short."""


class LocalPrefills:
    """The local prefills of one worker. `threads`: of one operation, as the worker is told; None:
    prompts compute in the steps' own thread, a chunk between two steps.
    """

    def __init__(
        self, parts: WorkerParts, terms: BudgetTerms, clock: Clock, threads: int | None
    ) -> None:
        self._parts = parts
        self._clock = clock
        self.chunk_tokens = terms.chunk_tokens
        self.budget = GapBudget(terms)
        self._paced: PacedEngine | None = None
        self.lane: ComputeLane | None = None
        if threads is not None:
            self._paced = PacedEngine(parts.engine, self.budget, clock, threads)
            thread = WorkThread("local-prefill")
            parts.beside.append(thread)
            self.lane = ComputeLane(thread=thread, engine=self._paced)
        self._queue = TurnQueue()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._keys = count()
        self._stepped_s: float | None = None

    def show(self, metrics: Metrics) -> None:
        """What the budget does, as metrics."""
        budget = self.budget
        gauge(metrics, "baton_decode_local_prefill_rest_ratio").follow(lambda: budget.rest_ratio)
        gap = gauge(metrics, "baton_decode_gap_seconds")
        gap.follow(lambda: budget.quiet_s or 0.0, beside="nothing")
        gap.follow(lambda: budget.beside_s or 0.0, beside="prompt")

    def stepped(self, seconds: float, sequences: int) -> None:
        """A step of so many sequences took so long, and ended now. Called from the loop."""
        now_s = self._clock.monotonic_s()
        began_s = now_s - seconds if self._stepped_s is None else self._stepped_s
        self._stepped_s = now_s
        if self._paced is None:
            return
        is_beside = self._paced.has_computed_since(began_s)
        self.budget.stepped(now_s - began_s, sequences, is_beside=is_beside)
        self._paced.decoding(is_quiet=not is_beside)

    def idled(self) -> None:
        """Nothing steps now. Called from the loop."""
        self._stepped_s = None
        self.budget.idled()
        if self._paced is not None:
            self._paced.nobody_decodes()

    def turns(self, claim: Claim, log_id: bytes, position: int) -> PromptTurns:
        """The turns of one prompt, whose KV is missing from `position` on."""
        return PromptTurns(self, claim, (log_id, position))

    @asynccontextmanager
    async def turn(self, claim: Claim, writes: tuple[bytes, int]) -> AsyncIterator[None]:
        """The right to compute one chunk, for the block."""
        key = next(self._keys)
        await self._granted(key, claim)
        began_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            # A golden check that began meanwhile does not vouch for this chunk.
            self._parts.unvouched.note(*writes)
            self._queue.end_turn(key, self._clock.monotonic_s() - began_s)
            self._pass_on()

    async def _granted(self, key: int, claim: Claim) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[key] = waiter
        self._queue.ask(key, claim)
        self._pass_on()
        try:
            await waiter
        except asyncio.CancelledError:
            if self._queue.holder == key:
                # Granted and cancelled in the same turn of the loop: nobody would end the turn.
                self._queue.end_turn(key, 0.0)
                self._pass_on()
            else:
                self._queue.withdraw(key, claim)
            raise
        finally:
            del self._waiting[key]

    def _pass_on(self) -> None:
        """Wake whose turn it is; one that was cancelled meanwhile gives it up by itself."""
        key = self._queue.next_turn()
        if key is not None and not self._waiting[key].done():
            self._waiting[key].set_result(None)


class PromptTurns:
    """One prompt's `ChunkTurns`."""

    def __init__(self, prefills: LocalPrefills, claim: Claim, writes: tuple[bytes, int]) -> None:
        self._prefills = prefills
        self._claim = claim
        self._writes = writes

    def turn(self) -> AbstractAsyncContextManager[None]:
        """See `LocalPrefills.turn`."""
        return self._prefills.turn(self._claim, self._writes)


class PacedEngine:
    """An engine's prompt half in pieces and with rests. Called from the prompts' thread only, but
    for what the loop tells it.
    """

    def __init__(self, engine: PromptEngine, budget: GapBudget, clock: Clock, threads: int) -> None:
        self._engine = engine
        self._budget = budget
        self._threads = threads
        self._is_settled = False
        self._meter = _Meter(clock)
        self._nobody_decodes = threading.Event()
        self._nobody_decodes.set()
        self._quiet = threading.Event()

    def has_computed_since(self, since_s: float) -> bool:
        """Whether anything was computed between then and now."""
        return self._meter.has_run_since(since_s)

    def decoding(self, *, is_quiet: bool) -> None:
        """A step ended; `is_quiet`: nothing was computed beside it."""
        self._nobody_decodes.clear()
        if is_quiet:
            self._quiet.set()

    def nobody_decodes(self) -> None:
        """Whatever rests or waits goes on."""
        self._nobody_decodes.set()
        self._quiet.set()

    def prefill_kv(
        self,
        tokens: Sequence[int],
        first_position: int,
        page_table: Sequence[int],
        should_cancel: Callable[[], bool] | None = None,
    ) -> None:
        """See `Engine.prefill_kv`."""
        done = 0
        while done < len(tokens):
            piece = tokens[done : done + self._next_tokens()]
            self._compute(piece, first_position + done, page_table, should_cancel)
            done += len(piece)

    def prefill_chunk(
        self,
        tokens: Sequence[int],
        first_position: int,
        page_table: Sequence[int],
        should_cancel: Callable[[], bool] | None = None,
    ) -> NDArray[np.float32]:
        """See `Engine.prefill_chunk`."""
        done = 0
        while (most := self._next_tokens()) < len(tokens) - done:
            piece = tokens[done : done + most]
            self._compute(piece, first_position + done, page_table, should_cancel)
            done += most
        with _Piece(self._meter, self._rest, should_cancel) as last:
            logits = self._engine.prefill_chunk(
                tokens[done:], first_position + done, page_table, last.should_cancel
            )
        self._budget.computed(len(tokens) - done, last.computed_s)
        return logits

    def _compute(
        self,
        tokens: Sequence[int],
        first_position: int,
        page_table: Sequence[int],
        should_cancel: Callable[[], bool] | None,
    ) -> None:
        """One piece, without logits."""
        with _Piece(self._meter, self._rest, should_cancel) as piece:
            self._engine.prefill_kv(tokens, first_position, page_table, piece.should_cancel)
        self._budget.computed(len(tokens), piece.computed_s)

    def _rest(self, computed_s: float) -> bool:
        """Rests as long as the budget says after so much; whether it did."""
        rest_s = self._budget.rest_s(computed_s)
        if rest_s > 0.0:
            self._nobody_decodes.wait(rest_s)
        return rest_s > 0.0

    def _next_tokens(self) -> int:
        """How many tokens the next piece may have, after a look at a quiet step where one is
        due.
        """
        if not self._is_settled:
            _stand_back(self._threads)
            self._is_settled = True
        if self._budget.wants_quiet:
            self._quiet.clear()
            self._quiet.wait(QUIET_WAIT_MAX_S)
        return self._budget.piece_tokens()


class _Meter:
    """Whether anything is computed, and when that was last so. Written by the prompts' thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._is_computing = False
        self._since_s = 0.0
        self._ended_s = -1.0

    def has_run_since(self, since_s: float) -> bool:
        """Whether anything was computed between then and now; from any thread."""
        return self._is_computing or self._ended_s > since_s

    def begin(self) -> None:
        """Something is computed from now on."""
        self._is_computing = True
        # The processor's time: who was not let run was in nobody's way, and need not rest for it.
        self._since_s = time.thread_time()

    def end(self) -> float:
        """Nothing is; returns the seconds that it computed since it began."""
        # In this order: the loop never takes a layer that just ended for one that never was.
        self._ended_s = self._clock.monotonic_s()
        self._is_computing = False
        return time.thread_time() - self._since_s


class _Piece:
    """One piece under way: what it computed, and its rests."""

    def __init__(
        self,
        meter: _Meter,
        rest: Callable[[float], bool],
        is_cancelled: Callable[[], bool] | None,
    ) -> None:
        self._meter = meter
        self._rest = rest
        self._is_cancelled = is_cancelled
        self.computed_s = 0.0

    def __enter__(self) -> _Piece:
        self._meter.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.computed_s += self._meter.end()

    def should_cancel(self) -> bool:
        """Called before each layer: counts the one before, and rests."""
        if self._is_asked():
            return True
        layer_s = self._meter.end()
        self.computed_s += layer_s
        has_rested = self._rest(layer_s)
        self._meter.begin()
        return has_rested and self._is_asked()

    def _is_asked(self) -> bool:
        return self._is_cancelled is not None and self._is_cancelled()


def _stand_back(threads: int) -> None:
    """The thread that calls computes beside the steps from now on."""
    cpus = len(os.sched_getaffinity(0))
    own = max(1, min(threads, cpus - threads))
    if own != threads:
        set_threads(own)
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def budget_terms(parts: WorkerParts, gap: float, chunk_tokens: int) -> BudgetTerms:
    """The terms of a worker's budget."""
    return BudgetTerms(
        gap=gap,
        chunk_tokens=chunk_tokens,
        block_tokens=parts.geometry.block_tokens,
        layers=parts.geometry.layers,
        tokens_per_s=parts.prefill_rate or ASSUMED_TOKENS_PER_S,
    )

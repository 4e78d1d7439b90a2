"""Who computes a prompt's chunks: one by one in turn, or together with those of other prompts.

Owns the contract between a prompt's run and what computes for it. A run says what is to be computed
and waits; when it has an answer, or was cancelled and told so, no thread writes its pages any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from baton.engine.prompt_chunk import PromptChunk
from baton.worker.engine import ComputeLane, PromptEngine

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkWork:
    """A chunk to compute. `begin` is called first, in the thread that computes; `stop` makes the
    chunk's `should_cancel` say yes.
    """

    chunk: PromptChunk
    begin: Callable[[], None]
    stop: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedChunk:
    """What came of it. Times are of this process's monotonic clock; together with others' chunks,
    the computation is that of all of them.
    """

    logits: Logits | None
    asked_s: float
    began_s: float
    ended_s: float


@runtime_checkable
class ChunkComputer(Protocol):
    """Computes a run's chunks."""

    async def compute(self, work: ChunkWork) -> ComputedChunk:
        """Wait for its turn and compute. ComputeCancelled when the chunk said so; ServiceError."""
        ...


class ChunkTurns(Protocol):
    """Says when a prompt may compute its next chunk."""

    def turn(self) -> AbstractAsyncContextManager[None]:
        """The right to compute one chunk, for the block."""
        ...


class OneByOne:
    """Implements `ChunkComputer`: each chunk by itself, in its turn, by one lane."""

    def __init__(self, lane: ComputeLane, turns: ChunkTurns) -> None:
        self._lane = lane
        self._turns = turns

    async def compute(self, work: ChunkWork) -> ComputedChunk:
        """See `ChunkComputer`."""

        def job() -> Logits | None:
            work.begin()
            return compute_alone(self._lane.engine, work.chunk)

        asked_s = time.monotonic()
        async with self._turns.turn():
            began_s = time.monotonic()
            logits = await self._lane.thread.run(job, on_cancel=work.stop)
            ended_s = time.monotonic()
        return ComputedChunk(logits=logits, asked_s=asked_s, began_s=began_s, ended_s=ended_s)


def compute_alone(engine: PromptEngine, chunk: PromptChunk) -> Logits | None:
    """One chunk in a pass of its own; its logits where it wants them."""
    arguments = (chunk.tokens, chunk.first_position, chunk.page_table, chunk.should_cancel)
    if chunk.wants_logits:
        return engine.prefill_chunk(*arguments)
    engine.prefill_kv(*arguments)
    return None

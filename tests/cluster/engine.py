"""A model that is a function: the next token follows from the KV that is read from the pages.

Owns the scripted forward pass. Each KV slot holds its token and position, so that a page written by
somebody else, lost or stale gives another token than `answer_to` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from baton.arena.copying import checksum
from baton.engine.prompt_chunk import PromptChunk
from baton.engine.transformer import ComputeCancelled
from baton.kv.layout import KvDtype, KvGeometry, page_view
from baton.worker.chunk_compute import compute_alone
from tests.cluster.loop import LoopClock
from tests.cluster.network import Node

VOCABULARY: Final = 96
BLOCK: Final = 8
GEOMETRY: Final = KvGeometry(
    layers=1, kv_heads=1, head_dim=32, head_dim_v=32, block_tokens=BLOCK, dtype=KvDtype.F32
)
Result = TypeVar("Result")


def next_token(history: Iterable[int]) -> int:
    """What follows a history of token ids."""
    digest = blake3(b",".join(str(token).encode() for token in history)).digest()
    return int.from_bytes(digest[:4], "little") % VOCABULARY


def answer_to(prompt: Sequence[int], tokens: int) -> list[int]:
    """The undisturbed greedy answer."""
    history = list(prompt)
    for _ in range(tokens):
        history.append(next_token(history))
    return history[len(prompt) :]


class Pages:
    """The arena as workers and store see it: one buffer."""

    def __init__(self, count: int) -> None:
        self.geometry = GEOMETRY
        self.page_count = count
        self._bytes = bytearray(count * GEOMETRY.page_bytes)
        self.locked_slots: set[int] = set()

    def page(self, index: int) -> Any:
        """A writable page."""
        start = index * GEOMETRY.page_bytes
        return np.frombuffer(self._bytes, dtype=np.uint8)[start : start + GEOMETRY.page_bytes]

    def checksums(self, pages: Sequence[int]) -> list[int]:
        """The CRC-32C of each page."""
        return [checksum(self.page(page)) for page in pages]

    def zero(self, index: int) -> None:
        """Empties a page."""
        self.page(index)[:] = 0

    def is_slot_locked(self, slot: int) -> bool:
        """Whether the worker slot's process lives."""
        return slot in self.locked_slots

    def slot(self, page: int, slot: int) -> tuple[int, int]:
        """(token, position + 1) in a KV slot."""
        view = page_view(GEOMETRY, self.page(page))
        return int(view.k[0, 0, slot, 0]), int(view.v[0, 0, slot, 0])


class ScriptedEngine:
    """Implements `baton.worker.engine.Engine` over `Pages`."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    def prefill_kv(
        self,
        tokens: Sequence[int],
        first_position: int,
        page_table: Sequence[int],
        should_cancel: Callable[[], bool] | None = None,
    ) -> None:
        """Writes the chunk's slots."""
        for offset, token in enumerate(tokens):
            if should_cancel is not None and should_cancel():
                raise ComputeCancelled
            self._write(token, first_position + offset, page_table)

    def prefill_chunk(
        self,
        tokens: Sequence[int],
        first_position: int,
        page_table: Sequence[int],
        should_cancel: Callable[[], bool] | None = None,
    ) -> NDArray[np.float32]:
        """As `prefill_kv`, and the logits after the last position."""
        self.prefill_kv(tokens, first_position, page_table, should_cancel)
        return self._logits(first_position + len(tokens), page_table)

    def prefill_batch(self, chunks: Sequence[PromptChunk]) -> list[NDArray[np.float32] | None]:
        """Chunk by chunk, all unless all are cancelled."""
        if all(chunk.should_cancel is not None and chunk.should_cancel() for chunk in chunks):
            raise ComputeCancelled
        if len(chunks) == 1:
            return [compute_alone(self, chunks[0])]
        return [compute_alone(self, replace(chunk, should_cancel=None)) for chunk in chunks]

    def decode_step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        page_tables: Sequence[Sequence[int]],
    ) -> NDArray[np.float32]:
        """One token for each sequence."""
        rows = []
        for token, position, table in zip(tokens, positions, page_tables, strict=True):
            self._write(token, position, table)
            rows.append(self._logits(position + 1, table))
        return np.stack(rows)

    def remap(self, arena: Any) -> None:
        """The arena is the same for the whole run."""

    def _write(self, token: int, position: int, table: Sequence[int]) -> None:
        view = page_view(GEOMETRY, self._pages.page(table[position // BLOCK]))
        view.k[0, 0, position % BLOCK, 0] = token
        view.v[0, 0, position % BLOCK, 0] = position + 1

    def _logits(self, end: int, table: Sequence[int]) -> NDArray[np.float32]:
        history = []
        for position in range(end):
            token, mark = self._pages.slot(table[position // BLOCK], position % BLOCK)
            history.append(token if mark == position + 1 else -1)
        logits = np.zeros(VOCABULARY, dtype=np.float32)
        logits[next_token(history)] = 10.0
        return logits


class SlowThread:
    """Fits where a `WorkThread` is wanted: jobs in order, each after a while, always to its end.

    While its node is frozen nothing is computed; the job under way is done when it wakes.
    """

    def __init__(self, node: Node, clock: LoopClock, seconds: Callable[[], float]) -> None:
        self._node, self._clock, self._seconds = node, clock, seconds
        self._turn = asyncio.Lock()
        self.running = 0

    async def run(
        self, job: Callable[[], Result], *, on_cancel: Callable[[], None] | None = None
    ) -> Result:
        """The job's result; a cancelled caller waits for the job first, as for a real thread."""

        self.running += 1
        try:
            async with self._turn:
                try:
                    await self._clock.pass_(self._seconds())
                    await self._node.thawed()
                except asyncio.CancelledError:
                    if on_cancel is not None:
                        on_cancel()
                    self._late(job)
                    raise
                return job()
        finally:
            self.running -= 1

    def _late(self, job: Callable[[], Result]) -> None:
        try:
            job()
        except ComputeCancelled:
            return

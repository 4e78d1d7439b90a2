"""The torch forward over device memory as a prefill worker sees it.

Owns nothing but the shape of the calls: what happens stands in `baton.engine.device_chunks`. It
computes prompts; a worker that decodes computes over the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from baton.arena.mapping import MappedArena
from baton.engine.device_chunks import DeviceChunks
from baton.engine.golden_check import GoldenCheck
from baton.engine.prompt_chunk import PromptChunk
from baton.engine.transformer import Transformer
from baton.errors import Reason, ServiceError
from baton.worker.torch_engine import TorchEngine


class StagedEngine(TorchEngine):
    """Implements `baton.worker.engine.Engine` but for steps, and `KvStages`."""

    def __init__(
        self,
        transformer: Transformer,
        arena: MappedArena,
        chunk_tokens: int,
        check: GoldenCheck | None = None,
    ) -> None:
        super().__init__(transformer, check)
        self._chunks = DeviceChunks(transformer, arena, chunk_tokens)

    def land(self, owner: int, first_position: int) -> None:
        """See `KvStages.land`."""
        self._chunks.land(owner, first_position)

    def forget(self, owner: int) -> None:
        """See `KvStages.forget`."""
        self._chunks.forget(owner)

    def remap(self, arena: MappedArena) -> None:
        """KV lands in another arena from now on."""
        self._chunks.remap(arena)

    def prefill_kv(
        self,
        tokens: Sequence[int],
        first_position: int,
        page_table: Sequence[int],
        should_cancel: Callable[[], bool] | None = None,
    ) -> None:
        """UNSUPPORTED: a chunk without an owner has nowhere to land."""
        raise _unsupported("a chunk's KV without a run it belongs to")

    def prefill_chunk(
        self,
        tokens: Sequence[int],
        first_position: int,
        page_table: Sequence[int],
        should_cancel: Callable[[], bool] | None = None,
    ) -> NDArray[np.float32]:
        """As `Transformer.prefill_chunk`, whose KV goes nowhere; f32 [vocabulary]."""
        chunk = PromptChunk(
            tokens=tokens,
            first_position=first_position,
            page_table=page_table,
            wants_logits=True,
            should_cancel=should_cancel,
        )
        logits = self.prefill_batch([chunk])[0]
        assert logits is not None
        return logits

    def prefill_batch(self, chunks: Sequence[PromptChunk]) -> list[NDArray[np.float32] | None]:
        """See `DeviceChunks.prefill_batch`; f32 [vocabulary] each."""
        found = self._chunks.prefill_batch(chunks)
        return [None if logits is None else logits.cpu().numpy() for logits in found]

    def decode_step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        page_tables: Sequence[Sequence[int]],
    ) -> NDArray[np.float32]:
        """UNSUPPORTED: decode workers compute over the arena."""
        raise _unsupported("decode steps")


def _unsupported(what: str) -> ServiceError:
    return ServiceError(
        Reason.UNSUPPORTED, f"a prefill worker on a device does not compute {what}", field="device"
    )

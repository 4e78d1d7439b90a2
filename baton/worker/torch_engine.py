"""The torch forward pass as workers see it: tensors in the engine, arrays outside.

Owns the conversion of logits. Never copies KV and never imports torch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from baton.arena.mapping import MappedArena
from baton.engine.golden_check import GoldenCheck
from baton.engine.kv_pages import KvPages
from baton.engine.prompt_chunk import PromptChunk
from baton.engine.transformer import Transformer
from baton.kv.numeric import NumericClass


class TorchEngine:
    """Implements `baton.worker.engine.Engine` over one `Transformer`."""

    def __init__(self, transformer: Transformer, check: GoldenCheck | None = None) -> None:
        self.transformer = transformer
        self._checks = () if check is None else (check,)

    @property
    def steps_by(self) -> str:
        """What computes decode steps."""
        return "torch"

    @property
    def checks(self) -> tuple[GoldenCheck, ...]:
        """See `Engine.checks`."""
        return self._checks

    def fall_back(self) -> NumericClass:
        """See `Engine.fall_back`; there is nothing to fall back from."""
        return NumericClass.parse(self.transformer.numeric_class())

    def remap(self, arena: MappedArena) -> None:
        """Compute over another arena's pages from now on; the old one is not referred to."""
        self.transformer.pages = KvPages.from_buffer(
            arena.slots, arena.geometry, arena.shape.page_count
        )

    def prefill_kv(
        self,
        tokens: Sequence[int],
        first_position: int,
        page_table: Sequence[int],
        should_cancel: Callable[[], bool] | None = None,
    ) -> None:
        """See `Transformer.prefill_kv`."""
        self.transformer.prefill_kv(tokens, first_position, page_table, should_cancel)

    def prefill_chunk(
        self,
        tokens: Sequence[int],
        first_position: int,
        page_table: Sequence[int],
        should_cancel: Callable[[], bool] | None = None,
    ) -> NDArray[np.float32]:
        """See `Transformer.prefill_chunk`; f32 [vocabulary]."""
        logits = self.transformer.prefill_chunk(tokens, first_position, page_table, should_cancel)
        return cast("NDArray[np.float32]", logits.numpy())

    def prefill_batch(self, chunks: Sequence[PromptChunk]) -> list[NDArray[np.float32] | None]:
        """See `Transformer.prefill_batch`; f32 [vocabulary] each."""
        found = self.transformer.prefill_batch(chunks)
        return [None if logits is None else logits.numpy() for logits in found]

    def decode_step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        page_tables: Sequence[Sequence[int]],
    ) -> NDArray[np.float32]:
        """See `Transformer.decode_step`; f32 [batch, vocabulary]."""
        logits = self.transformer.decode_step(tokens, positions, page_tables)
        return cast("NDArray[np.float32]", logits.numpy())

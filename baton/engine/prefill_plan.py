"""Where the tokens of a batch of chunks go and what each sees: made once, used by every layer.

Owns the ragged layout: chunks of several prompts stand one after the other as rows of one matrix,
without padding; attention alone looks at each of them by itself. Never computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from baton.engine.config import ModelConfig
from baton.engine.prompt_chunk import PromptChunk
from baton.engine.rope import RopeTable
from baton.kv.layout import KvDtype

# Queries attend in blocks of this many rows, so that a long chunk neither computes the masked
# half of its scores nor needs a mask of its own length squared.
QUERY_BLOCK_ROWS: Final = 256
FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpan:
    """One chunk's rows [first_row, end_row) and what they see: the pages of `table`, up to `end`.

    `masks`: one for each block of rows.
    """

    first_row: int
    end_row: int
    end: int
    table: torch.Tensor
    masks: tuple[torch.Tensor, ...]
    wants_logits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """All rows of a batch; `last_rows` are those whose logits are wanted, in order of chunks."""

    spans: tuple[ChunkSpan, ...]
    token_pages: torch.Tensor
    token_slots: torch.Tensor
    cosine: torch.Tensor
    sine: torch.Tensor
    last_rows: torch.Tensor


class CausalMasks:
    """Additive masks, 0 or minus infinity, of `dtype`: windows of one buffer, which grows to the
    longest context that was seen. Not thread-safe.

    The buffer's rows are zeros with a triangle at their end; a block of queries sees so many of the
    zeros as there are keys before it.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.zeros((QUERY_BLOCK_ROWS, 0), dtype=dtype, device=device)

    def blocks(self, first_position: int, end: int) -> tuple[torch.Tensor, ...]:
        """One mask per query block of positions [first, end): [rows, keys up to its last row]."""
        if end + QUERY_BLOCK_ROWS > self._buffer.shape[1]:
            self._grow(end)
        triangle = self._buffer.shape[1] - QUERY_BLOCK_ROWS
        masks = []
        for first in range(first_position, end, QUERY_BLOCK_ROWS):
            rows = min(QUERY_BLOCK_ROWS, end - first)
            masks.append(self._buffer[:rows, triangle - first : triangle + rows])
        return tuple(masks)

    def _grow(self, end: int) -> None:
        """By a quarter at least, so that a long prompt does not grow it chunk by chunk."""
        context = max(end, len(self._buffer[0]) * 5 // 4)
        self._buffer = self._buffer.new_zeros((QUERY_BLOCK_ROWS, context + QUERY_BLOCK_ROWS))
        self._buffer[:, context:].fill_(-torch.inf).triu_(1)


def plan_batch(
    chunks: Sequence[PromptChunk], rope: RopeTable, block_tokens: int, masks: CausalMasks
) -> BatchPlan:
    """The plan of checked `chunks`, on the device of `rope`; `masks` are of attention's type."""
    spans, pages, positions = [], [], []
    device = rope.cosine.device
    first_row = 0
    for chunk in chunks:
        own = torch.arange(chunk.first_position, chunk.end, device=device)
        used = -(-chunk.end // block_tokens)
        table = torch.tensor(chunk.page_table[:used], dtype=torch.int64, device=device)
        positions.append(own)
        pages.append(table[own // block_tokens])
        spans.append(
            ChunkSpan(
                first_row=first_row,
                end_row=first_row + len(own),
                end=chunk.end,
                table=table,
                masks=masks.blocks(chunk.first_position, chunk.end),
                wants_logits=chunk.wants_logits,
            )
        )
        first_row += len(own)
    where = torch.cat(positions)
    return BatchPlan(
        spans=tuple(spans),
        token_pages=torch.cat(pages),
        token_slots=where % block_tokens,
        cosine=rope.cosine[where].unsqueeze(1),
        sine=rope.sine[where].unsqueeze(1),
        last_rows=torch.tensor(
            [span.end_row - 1 for span in spans if span.wants_logits],
            dtype=torch.int64,
            device=device,
        ),
    )


def pass_bytes(config: ModelConfig, kv: KvDtype, itemsize: int, rows: int, context: int) -> int:
    """What a pass of `rows` tokens takes at most beside weights and pages, where all of them see a
    context of so many tokens; `itemsize` is that of computation.

    It grows with the prompt by one layer's keys and values and by a block of queries' mask, no
    more.
    """
    heads = config.heads + 2 * config.kv_heads
    # The residual stream and a sum in float32, Q, K and V once as they are and thrice while they
    # are turned, gate and up and their product.
    row = 12 * config.hidden + heads * config.head_dim * (itemsize + 12)
    row += 5 * config.intermediate * itemsize
    # A buffer that grows is there twice for a moment, and up to a quarter too wide.
    masks = QUERY_BLOCK_ROWS * (context * 9 // 4 + 2 * QUERY_BLOCK_ROWS) * itemsize
    # Those of one prompt while those of the one before it are let go.
    gathered = 2 * 2 * config.kv_width * context * itemsize
    if kv.has_scales:
        gathered += 2 * config.kv_width * context * (itemsize + FLOAT_BYTES)
    return rows * row + masks + gathered + config.vocabulary * FLOAT_BYTES

"""Where the tokens of a batch of chunks go and what each sees: made once, used by every layer.

Owns the ragged layout: chunks of several prompts stand one after the other as rows of one matrix,
without padding; attention alone looks at each of them by itself. Never computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from baton.engine.prompt_chunk import PromptChunk
from baton.engine.rope import RopeTable

# Queries attend in blocks of this many rows, so that a long chunk neither computes the masked
# half of its scores nor needs a mask of its own length squared.
QUERY_BLOCK_ROWS: Final = 256


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


def plan_batch(
    chunks: Sequence[PromptChunk], rope: RopeTable, block_tokens: int, dtype: torch.dtype
) -> BatchPlan:
    """The plan of checked `chunks`; `dtype` is that of attention."""
    spans, pages, positions = [], [], []
    first_row = 0
    for chunk in chunks:
        own = torch.arange(chunk.first_position, chunk.end)
        used = -(-chunk.end // block_tokens)
        table = torch.tensor(chunk.page_table[:used], dtype=torch.int64)
        positions.append(own)
        pages.append(table[own // block_tokens])
        spans.append(
            ChunkSpan(
                first_row=first_row,
                end_row=first_row + len(own),
                end=chunk.end,
                table=table,
                masks=_causal_masks(chunk.first_position, chunk.end, dtype),
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
            [span.end_row - 1 for span in spans if span.wants_logits], dtype=torch.int64
        ),
    )


def _causal_masks(first_position: int, end: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """One additive mask per query block [rows, keys up to its last row]: 0 or minus infinity."""
    masks = []
    for first in range(first_position, end, QUERY_BLOCK_ROWS):
        last = min(first + QUERY_BLOCK_ROWS, end)
        rows = last - first
        mask = torch.zeros(rows, last, dtype=dtype)
        mask[:, first:] = torch.full((rows, rows), -torch.inf, dtype=dtype).triu(1)
        masks.append(mask)
    return tuple(masks)

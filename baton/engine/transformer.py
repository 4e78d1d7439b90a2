"""The reference forward pass: a Llama decoder in torch over paged KV.

Owns prefill by chunks and decode by batched single tokens. K (after RoPE, at its absolute position)
and V are written straight into the pages and read back through the page table; nothing is kept
between calls, so any worker with the pages continues any sequence. It never samples, never grants
pages and never touches a page that the table does not name.

Invariant: the residual stream, norms, RoPE, softmax and logits are float32; matrices, their inputs
and KV are of the compute type. A sequence's result depends on its batch only by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from baton.engine.kv_pages import KvPages
from baton.engine.label import torch_numeric_class
from baton.engine.rope import rotate
from baton.engine.weights import LayerWeights, ModelWeights
from baton.errors import Reason, ServiceError

# Queries attend in blocks of this many rows, so that a long chunk neither computes the masked
# half of its scores nor needs a mask of its own length squared.
QUERY_BLOCK_ROWS: Final = 256


class ComputeCancelled(Exception):
    """`should_cancel` said yes between two layers; pages of the chunk may be partly written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkPlan:
    """Where one chunk's tokens go and what they see; the same for every layer."""

    end: int
    token_pages: torch.Tensor
    token_slots: torch.Tensor
    table: torch.Tensor
    cosine: torch.Tensor
    sine: torch.Tensor
    masks: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepPlan:
    """Where each sequence's token goes and which pages it sees; the same for every layer."""

    lengths: tuple[int, ...]
    token_pages: torch.Tensor
    token_slots: torch.Tensor
    tables: tuple[torch.Tensor, ...]
    cosine: torch.Tensor
    sine: torch.Tensor


def set_threads(count: int) -> None:
    """How many threads torch uses inside one operation, for the whole process."""
    assert count >= 1
    torch.set_num_threads(count)


class Transformer:
    """One model over one set of pages. Not thread-safe: one thread calls it at a time."""

    def __init__(self, weights: ModelWeights, pages: KvPages) -> None:
        geometry = weights.config.kv_geometry(pages.geometry.block_tokens, weights.dtype.kv_dtype)
        if geometry != pages.geometry:
            raise ServiceError(
                Reason.COMPAT_MISMATCH,
                f"the pages are laid out as {pages.geometry}, the model needs {geometry}",
                field="kv_geometry",
            )
        self.weights = weights
        self.config = weights.config
        self.pages = pages
        self._dtype = weights.dtype.torch_dtype

    @property
    def max_context(self) -> int:
        """The most tokens a sequence may have."""
        return self.weights.max_context

    def numeric_class(self) -> str:
        """The numeric class text: stored weights, activations, accumulation, KV, invariance."""
        return torch_numeric_class(self.config, self.weights.dtype.kv_dtype).text

    @torch.inference_mode()
    def prefill_chunk(
        self,
        tokens: Sequence[int],
        first_position: int,
        page_table: Sequence[int],
        should_cancel: Callable[[], bool] | None = None,
    ) -> torch.Tensor:
        """Compute a chunk of one sequence and the logits after its last token.

        `tokens` stand at `first_position` and on; all earlier KV must be in the pages that
        `page_table` names (page i holds positions i * block_tokens and on). Returns float32
        [vocabulary]. Raises ServiceError INVALID_REQUEST naming the field, or ComputeCancelled.
        """
        last = self._run_chunk(tokens, first_position, page_table, should_cancel)
        last = self._feed_forward(self.weights.layers[-1], last)
        return self._logits(last)[0]

    @torch.inference_mode()
    def prefill_kv(
        self,
        tokens: Sequence[int],
        first_position: int,
        page_table: Sequence[int],
        should_cancel: Callable[[], bool] | None = None,
    ) -> None:
        """Compute a chunk's KV only: `prefill_chunk` without logits, for all but the last chunk."""
        self._run_chunk(tokens, first_position, page_table, should_cancel)

    @torch.inference_mode()
    def decode_step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        page_tables: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """One token for each of several sequences; returns float32 [batch, vocabulary].

        `tokens[i]` stands at `positions[i]` of the sequence whose pages are `page_tables[i]`.
        Raises ServiceError INVALID_REQUEST naming the field.
        """
        plan = self._plan_step(tokens, positions, page_tables)
        hidden = self._embed(tokens)
        for index, layer in enumerate(self.weights.layers):
            query = self._write_kv(layer, index, hidden, plan)
            attended = self._attend_step(index, query, plan)
            hidden = hidden + functional.linear(attended, layer.attention_output)
            hidden = self._feed_forward(layer, hidden)
        return self._logits(hidden)

    def _run_chunk(
        self,
        tokens: Sequence[int],
        first_position: int,
        page_table: Sequence[int],
        should_cancel: Callable[[], bool] | None,
    ) -> torch.Tensor:
        """All layers but the last one's feed-forward; returns its last row [1, hidden]."""
        plan = self._plan_chunk(tokens, first_position, page_table)
        hidden = self._embed(tokens)
        last_layer = self.config.layers - 1
        for index, layer in enumerate(self.weights.layers):
            if should_cancel is not None and should_cancel():
                raise ComputeCancelled
            query = self._write_kv(layer, index, hidden, plan)
            if index == last_layer:
                # Only the last token's state is read after the last layer.
                query, hidden = query[-1:], hidden[-1:]
            attended = self._attend_chunk(index, query, plan)
            hidden = hidden + functional.linear(attended, layer.attention_output)
            if index != last_layer:
                hidden = self._feed_forward(layer, hidden)
        return hidden

    def _embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.weights.embedding[torch.tensor(tokens, dtype=torch.int64)]

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self.config.rms_eps)

    def _write_kv(
        self, layer: LayerWeights, index: int, hidden: torch.Tensor, plan: _ChunkPlan | _StepPlan
    ) -> torch.Tensor:
        """Project, rotate, write K and V into the pages; returns Q [tokens, heads, head_dim]."""
        config = self.config
        states = self._norm(hidden, layer.attention_norm).to(self._dtype)
        projected = functional.linear(states, layer.query_key_value)
        projected = projected.view(-1, config.heads + 2 * config.kv_heads, config.head_dim)
        turned_heads = config.heads + config.kv_heads
        turned = rotate(projected[:, :turned_heads], plan.cosine, plan.sine).to(self._dtype)
        written = torch.stack((turned[:, config.heads :], projected[:, turned_heads:]), dim=1)
        self.pages.layer(index)[plan.token_pages, :, :, plan.token_slots] = written
        return turned[:, : config.heads]

    def _gather(self, index: int, table: torch.Tensor) -> torch.Tensor:
        """K and V of the table's pages, one after the other [2, kv_heads, tokens, head_dim]."""
        by_head = self.pages.layer(index).permute(1, 2, 0, 3, 4)
        return by_head.index_select(2, table).flatten(2, 3)

    def _attend_chunk(self, index: int, query: torch.Tensor, plan: _ChunkPlan) -> torch.Tensor:
        keys_values = self._gather(index, plan.table)
        rows = query.transpose(0, 1).unsqueeze(0)
        if query.shape[0] == 1:
            # The last row alone sees everything.
            blocks = [self._attend(rows, keys_values[:, :, : plan.end], None)]
        else:
            blocks = []
            for block, mask in enumerate(plan.masks):
                first = block * QUERY_BLOCK_ROWS
                some = rows[:, :, first : first + QUERY_BLOCK_ROWS]
                blocks.append(self._attend(some, keys_values[:, :, : mask.shape[1]], mask))
        joined = torch.cat(blocks, dim=2) if len(blocks) > 1 else blocks[0]
        return joined[0].transpose(0, 1).reshape(query.shape[0], self.config.query_width)

    def _attend(
        self, rows: torch.Tensor, keys_values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        keys, values = keys_values[0].unsqueeze(0), keys_values[1].unsqueeze(0)
        return functional.scaled_dot_product_attention(
            rows, keys, values, attn_mask=mask, enable_gqa=self.config.heads != self.config.kv_heads
        )

    def _attend_step(self, index: int, query: torch.Tensor, plan: _StepPlan) -> torch.Tensor:
        config = self.config
        group = config.heads // config.kv_heads
        # The query heads of one KV head become rows that share its keys: no mask, no copies.
        rows = query.view(-1, 1, config.kv_heads, group, config.head_dim)
        attended = []
        for i, (length, table) in enumerate(zip(plan.lengths, plan.tables, strict=True)):
            keys, values = self._gather(index, table)[:, :, :length].unsqueeze(1)
            attended.append(functional.scaled_dot_product_attention(rows[i], keys, values))
        return torch.cat(attended).view(-1, config.query_width)

    def _feed_forward(self, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        states = self._norm(hidden, layer.feed_forward_norm).to(self._dtype)
        gate, up = functional.linear(states, layer.gate_up).chunk(2, dim=-1)
        return hidden + functional.linear(functional.silu(gate) * up, layer.down)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(self._norm(hidden, self.weights.final_norm), self.weights.head)

    def _plan_chunk(
        self, tokens: Sequence[int], first_position: int, page_table: Sequence[int]
    ) -> _ChunkPlan:
        self._check_tokens(tokens)
        end = first_position + len(tokens)
        self._check_span(first_position, end, page_table)
        positions = torch.arange(first_position, end)
        block_tokens = self.pages.geometry.block_tokens
        used = -(-end // block_tokens)
        table = torch.tensor(page_table[:used], dtype=torch.int64)
        return _ChunkPlan(
            end=end,
            token_pages=table[positions // block_tokens],
            token_slots=positions % block_tokens,
            table=table,
            cosine=self.weights.rope.cosine[first_position:end].unsqueeze(1),
            sine=self.weights.rope.sine[first_position:end].unsqueeze(1),
            masks=_causal_masks(first_position, end, self._dtype),
        )

    def _plan_step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        page_tables: Sequence[Sequence[int]],
    ) -> _StepPlan:
        assert len(tokens) == len(positions) == len(page_tables)
        self._check_tokens(tokens)
        block_tokens = self.pages.geometry.block_tokens
        tables, pages = [], []
        for position, page_table in zip(positions, page_tables, strict=True):
            self._check_span(position, position + 1, page_table)
            used = position // block_tokens + 1
            tables.append(torch.tensor(page_table[:used], dtype=torch.int64))
            pages.append(page_table[used - 1])
        where = torch.tensor(positions, dtype=torch.int64)
        return _StepPlan(
            lengths=tuple(position + 1 for position in positions),
            token_pages=torch.tensor(pages, dtype=torch.int64),
            token_slots=where % block_tokens,
            tables=tuple(tables),
            cosine=self.weights.rope.cosine[where].unsqueeze(1),
            sine=self.weights.rope.sine[where].unsqueeze(1),
        )

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if not tokens or min(tokens) < 0 or max(tokens) >= self.config.vocabulary:
            raise ServiceError(
                Reason.INVALID_REQUEST,
                f"tokens must be at least one id, each below {self.config.vocabulary}",
                field="tokens",
            )

    def _check_span(self, first: int, end: int, page_table: Sequence[int]) -> None:
        if first < 0 or end > self.max_context:
            raise ServiceError(
                Reason.INVALID_REQUEST,
                f"positions {first} to {end - 1} leave the context of {self.max_context} tokens",
                field="first_position",
            )
        self.pages.check_table(page_table, end)


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

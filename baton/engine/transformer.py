"""The reference forward pass: a Llama decoder in torch over paged KV.

Owns prefill by chunks and decode by batched single tokens. K (after RoPE, at its absolute position)
and V are written straight into the pages and read back through the page table; nothing is kept
between calls, so any worker with the pages continues any sequence. It never samples, never grants
pages and never touches a page that the table does not name.

Invariant: the residual stream, norms, RoPE, softmax and logits are float32; matrices, their inputs
and KV are of the compute type (int8 KV becomes it between pages and attention). A sequence's result
depends on its batch only by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from baton.engine.kv_pages import KvPages
from baton.engine.label import torch_numeric_class
from baton.engine.packed_linear import linear
from baton.engine.prefill_plan import (
    QUERY_BLOCK_ROWS,
    BatchPlan,
    CausalMasks,
    ChunkSpan,
    plan_batch,
)
from baton.engine.prompt_chunk import PromptChunk
from baton.engine.rope import rotate
from baton.engine.weights import LayerWeights, ModelWeights
from baton.errors import Reason, ServiceError


class ComputeCancelled(Exception):
    """Every chunk's `should_cancel` said yes between two layers; pages may be partly written."""


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
        own, kept = weights.dtype.kv_dtype, pages.geometry.dtype
        kv = kept if kept.has_scales else own
        geometry = weights.config.kv_geometry(pages.geometry.block_tokens, kv)
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
        self._device = weights.embedding.device
        self._masks = CausalMasks(self._dtype, self._device)

    @property
    def max_context(self) -> int:
        """The most tokens a sequence may have."""
        return self.weights.max_context

    def numeric_class(self) -> str:
        """The numeric class text: stored weights, activations, accumulation, KV, invariance."""
        kept, own = self.pages.geometry.dtype, self.weights.dtype.kv_dtype
        return torch_numeric_class(self.config, kept, own).text

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
        logits = self.prefill_batch(
            [
                PromptChunk(
                    tokens=tokens,
                    first_position=first_position,
                    page_table=page_table,
                    wants_logits=True,
                    should_cancel=should_cancel,
                )
            ]
        )[0]
        assert logits is not None
        return logits

    @torch.inference_mode()
    def prefill_kv(
        self,
        tokens: Sequence[int],
        first_position: int,
        page_table: Sequence[int],
        should_cancel: Callable[[], bool] | None = None,
    ) -> None:
        """Compute a chunk's KV only: `prefill_chunk` without logits, for all but the last chunk."""
        self.prefill_batch(
            [
                PromptChunk(
                    tokens=tokens,
                    first_position=first_position,
                    page_table=page_table,
                    should_cancel=should_cancel,
                )
            ]
        )

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
            hidden = hidden + linear(attended, layer.attention_output)
            hidden = self._feed_forward(layer, hidden)
        return self._logits(hidden)

    @torch.inference_mode()
    def prefill_batch(self, chunks: Sequence[PromptChunk]) -> list[torch.Tensor | None]:
        """Compute chunks of different sequences in one pass, without padding.

        Returns, for each chunk, float32 [vocabulary] where it wants logits. ServiceError
        INVALID_REQUEST naming the field; ComputeCancelled once every chunk is cancelled: while one
        is not, all are computed.
        """
        assert chunks, "a pass has a chunk"
        rows = self._run_chunks(chunks)
        if rows is None:
            return [None] * len(chunks)
        rows = self._feed_forward(self.weights.layers[-1], rows)
        logits = iter(self._logits(rows))
        return [next(logits) if chunk.wants_logits else None for chunk in chunks]

    def _run_chunks(self, chunks: Sequence[PromptChunk]) -> torch.Tensor | None:
        """All layers but the last one's feed-forward: the rows whose logits are wanted [n, hidden];
        None when there are none.
        """
        for chunk in chunks:
            self._check_tokens(chunk.tokens)
            self._check_span(chunk.first_position, chunk.end, chunk.page_table)
        plan = plan_batch(chunks, self.weights.rope, self.pages.geometry.block_tokens, self._masks)
        hidden = self._embed([token for chunk in chunks for token in chunk.tokens])
        *earlier, last = self.weights.layers
        for index, layer in enumerate(earlier):
            _require_wanted(chunks)
            attended = self._attend_chunks(index, self._write_kv(layer, index, hidden, plan), plan)
            hidden = hidden + linear(attended, layer.attention_output)
            hidden = self._feed_forward(layer, hidden)
        _require_wanted(chunks)
        query = self._write_kv(last, len(earlier), hidden, plan)
        # After the last layer only the wanted rows are read.
        if len(plan.last_rows) == 0:
            return None
        attended = self._attend_last(len(earlier), query, plan)
        return hidden[plan.last_rows] + linear(attended, last.attention_output)

    def _embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.weights.embedding[self._numbers(tokens)]

    def _numbers(self, values: Sequence[int]) -> torch.Tensor:
        """int64, where the weights are."""
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self.config.rms_eps)

    def _write_kv(
        self, layer: LayerWeights, index: int, hidden: torch.Tensor, plan: BatchPlan | _StepPlan
    ) -> torch.Tensor:
        """Project, rotate, write K and V into the pages; returns Q [tokens, heads, head_dim]."""
        config = self.config
        states = self._norm(hidden, layer.attention_norm).to(self._dtype)
        projected = linear(states, layer.query_key_value, layer.query_key_value_bias)
        projected = projected.view(-1, config.heads + 2 * config.kv_heads, config.head_dim)
        turned_heads = config.heads + config.kv_heads
        queries_keys = projected[:, :turned_heads]
        if layer.head_norm is not None:
            whole = functional.rms_norm(
                queries_keys.float(), (config.head_dim,), eps=config.rms_eps
            )
            queries_keys = (whole * layer.head_norm).to(self._dtype)
        turned = rotate(queries_keys, plan.cosine, plan.sine).to(self._dtype)
        written = torch.stack((turned[:, config.heads :], projected[:, turned_heads:]), dim=1)
        self.pages.write(index, plan.token_pages, plan.token_slots, written)
        return turned[:, : config.heads]

    def _gather(self, index: int, table: torch.Tensor) -> torch.Tensor:
        """K and V of the table's pages, one after the other [2, kv_heads, tokens, head_dim]."""
        return self.pages.gather(index, table, self._dtype)

    def _attend_chunks(self, index: int, query: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """Every chunk's rows over its own pages [rows, query_width]."""
        attended = []
        for span in plan.spans:
            keys_values = self._gather(index, span.table)
            rows = query[span.first_row : span.end_row].transpose(0, 1).unsqueeze(0)
            attended += self._attend_blocks(rows, keys_values, span)
        joined = torch.cat(attended) if len(attended) > 1 else attended[0]
        return joined.reshape(-1, self.config.query_width)

    def _attend_blocks(
        self, rows: torch.Tensor, keys_values: torch.Tensor, span: ChunkSpan
    ) -> list[torch.Tensor]:
        """Blocks of one chunk's rows, one after the other, each [rows, heads, head_dim]."""
        blocks = []
        for block, mask in enumerate(span.masks):
            first = block * QUERY_BLOCK_ROWS
            some = rows[:, :, first : first + QUERY_BLOCK_ROWS]
            attended = self._attend(some, keys_values[:, :, : mask.shape[1]], mask)
            blocks.append(attended[0].transpose(0, 1))
        return blocks

    def _attend_last(self, index: int, query: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """The last row of each chunk that wants logits: it sees all of its chunk [n, width]."""
        attended = []
        for span in plan.spans:
            if span.wants_logits:
                keys_values = self._gather(index, span.table)[:, :, : span.end]
                row = query[span.end_row - 1 : span.end_row].transpose(0, 1).unsqueeze(0)
                attended.append(self._attend(row, keys_values, None))
        return torch.cat(attended).view(-1, self.config.query_width)

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
        gate, up = linear(states, layer.gate_up).chunk(2, dim=-1)
        return hidden + linear(functional.silu(gate) * up, layer.down)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(self._norm(hidden, self.weights.final_norm), self.weights.head)

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
            tables.append(self._numbers(page_table[:used]))
            pages.append(page_table[used - 1])
        where = self._numbers(positions)
        return _StepPlan(
            lengths=tuple(position + 1 for position in positions),
            token_pages=self._numbers(pages),
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


def _require_wanted(chunks: Sequence[PromptChunk]) -> None:
    """ComputeCancelled once every chunk is cancelled."""
    if all(chunk.should_cancel is not None and chunk.should_cancel() for chunk in chunks):
        raise ComputeCancelled

"""What reads a prompt in this benchmark: our engine, and the peers on the same weights.

A reader is called with a number of tokens and answers with milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from baton.engine.kv_pages import KvPages
from baton.engine.transformer import Transformer
from baton.engine.weights import ComputeDtype, load_weights

BLOCK_TOKENS: Final = 16
Reader = Callable[[int], float]


def prompt(context: int, seed: int) -> list[int]:
    """Tokens spread over the vocabulary."""
    return [(index * 7919 + seed * 104729) % 40000 + 100 for index in range(context)]


class Ours:
    """The torch forward of a prefill worker over pages of its own."""

    def __init__(self, path: Path, longest: int) -> None:
        weights = load_weights(path, ComputeDtype.BFLOAT16, max_context=longest)
        geometry = weights.config.kv_geometry(BLOCK_TOKENS, weights.dtype.kv_dtype)
        self._pages = -(-longest // BLOCK_TOKENS)
        self.transformer = Transformer(weights, KvPages.allocate(geometry, self._pages))

    def reader(self, chunk_tokens: int | None = None) -> Reader:
        """Reads prompts in chunks of so many tokens (None: whole)."""

        def read(context: int) -> float:
            tokens = prompt(context, context)
            size, table = chunk_tokens or context, range(self._pages)
            began = time.perf_counter()
            for first in range(0, context, size):
                chunk = tokens[first : first + size]
                if first + size < context:
                    self.transformer.prefill_kv(chunk, first, table)
                else:
                    self.transformer.prefill_chunk(chunk, first, table)
            return (time.perf_counter() - began) * 1e3

        return read

    def attention_ms(self, context: int, chunk_tokens: int) -> float:
        """The attention of all layers alone, over the same pages in the same chunks."""
        config = self.transformer.config
        dtype = self.transformer.weights.dtype.torch_dtype
        query = torch.randn(1, config.heads, chunk_tokens, config.head_dim).to(dtype)
        table = torch.arange(self._pages)
        spent = 0.0
        with torch.inference_mode():
            for end in range(chunk_tokens, context + 1, chunk_tokens):
                mask = torch.zeros(chunk_tokens, end, dtype=dtype)
                mask[:, end - chunk_tokens :].fill_(-torch.inf).triu_(1)
                used = table[: end // BLOCK_TOKENS]
                began = time.perf_counter()
                keys, values = self.transformer.pages.gather(0, used, dtype)
                torch.nn.functional.scaled_dot_product_attention(
                    query, keys[None], values[None], attn_mask=mask, enable_gqa=True
                )
                spent += time.perf_counter() - began
        return spent * 1e3 * config.layers


def transformers_reader(model: Any) -> Reader:
    """One forward with a cache and the last token's logits."""

    @torch.inference_mode()
    def read(context: int) -> float:
        tokens = torch.tensor([prompt(context, context)])
        began = time.perf_counter()
        model(input_ids=tokens, use_cache=True, logits_to_keep=1)
        return (time.perf_counter() - began) * 1e3

    return read

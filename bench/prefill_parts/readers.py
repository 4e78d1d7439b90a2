"""What reads a prompt in this benchmark: our engine, and the peers on the same weights.

Owns their start and end. A reader is called with a number of tokens and answers with milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from baton.arena.copying import checksum
from baton.engine.kv_pages import KvPages
from baton.engine.transformer import Transformer
from baton.engine.weights import ComputeDtype, load_weights
from bench.decode_parts.peers import LOAD_TIMEOUT_S, STEP_TIMEOUT_S, interpreter, read_answer

PROCESS: Final = Path(__file__).with_name("prompt_peer.py")
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
        self._page_bytes = geometry.page_bytes
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

    def checksum_ms(self, context: int) -> float:
        """Checksumming the pages of a prompt, as its commits do."""
        memory = bytearray(self._page_bytes)
        began = time.perf_counter()
        for _ in range(-(-context // BLOCK_TOKENS)):
            checksum(memoryview(memory))
        return (time.perf_counter() - began) * 1e3

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


@contextlib.contextmanager
def peer_reader(engine: str, path: Path, threads: int) -> Iterator[Reader | None]:
    """llama.cpp or vLLM until the block ends; None where it is not installed or does not start."""
    python = interpreter(engine)
    if python is None:
        print(f"bench: {engine} is not installed, so left out")
        yield None
        return
    command = [str(python), str(PROCESS), engine, str(path), "--threads", str(threads)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asks, answers = process.stdin, process.stdout

        def read(context: int) -> float:
            asks.write(json.dumps({"context": context}) + "\n")
            asks.flush()
            return float(read_answer(answers, STEP_TIMEOUT_S)["ms"])

        try:
            try:
                read_answer(answers, LOAD_TIMEOUT_S)
            except RuntimeError as problem:
                print(f"bench: {engine} is installed but does not start: {problem}")
                yield None
                return
            yield read
        finally:
            process.kill()

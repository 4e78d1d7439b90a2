"""What decode is compared with: a step of transformers, and of each running peer.

Owns the cases; the engines stand in `bench.peers`.
"""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np
import torch

from bench.decode_parts.cases import Case
from bench.peers.running import NAMES, Peer

PROMPT_TOKEN: Final = 500
LLAMA_STEPS: Final = 40


class TokenClock:
    """A streamer of `generate` that only notes when each token came."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, _: object) -> None:
        """Called with the prompt, then with every token."""
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        """Called after the last token."""


def transformers_case(model: Any, context: int, batch: int, tokens: int) -> Case:
    """`generate` in bfloat16: the median time between two tokens."""
    prompt = torch.full((batch, context), PROMPT_TOKEN)

    def step() -> float:
        clock = TokenClock()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
        )
        # The first time is the prompt's, the second the first token's, which prefill made.
        return float(np.median(np.diff(clock.times_s[1:]))) * 1e3

    return Case(name="transformers bf16 generate", context=context, batch=batch, step=step, steps=1)


def peer_case(peer: Peer, context: int, tokens: int) -> Case:
    """One sequence of `context` tokens."""
    is_stepwise = peer.engine == "llama.cpp"
    return Case(
        name=NAMES[peer.engine],
        context=context,
        batch=1,
        step=lambda: peer.step_ms(context, tokens),
        steps=LLAMA_STEPS if is_stepwise else 1,
        process_id=peer.process.pid,
        threads=peer.threads,
    )

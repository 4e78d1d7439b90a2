"""What a worker measures of itself before it serves: how fast it computes prompts.

Owns the one measurement. A store weighs loading KV against computing it, also for the first request
of a worker: that needs a rate before there was one.
"""

from __future__ import annotations

import time
from typing import Final

from baton.engine.kv_pages import KvPages
from baton.engine.transformer import Transformer

PROBE_TOKENS: Final = 64


def measured_prefill_rate(transformer: Transformer) -> float:
    """Prompt tokens a second of the torch forward, on pages of its own; more than 0.

    Called after the golden check, in the same thread: what is slow only the first time is over.
    """
    tokens = min(PROBE_TOKENS, transformer.max_context)
    geometry = transformer.pages.geometry
    count = -(-tokens // geometry.block_tokens)
    weights = transformer.weights
    probe = Transformer(weights, KvPages.allocate(geometry, count, weights.embedding.device))
    ids = [index % transformer.config.vocabulary for index in range(tokens)]
    began_s = time.monotonic()
    probe.prefill_kv(ids, 0, range(count))
    # What was asked of a device is done when a byte of it can be read.
    probe.pages.memory[0, 0].item()
    # A clock may stand still for as long as a tiny model takes.
    return tokens / max(time.monotonic() - began_s, 1e-6)

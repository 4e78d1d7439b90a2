"""Settings of the prefill worker.

Owns what is its own; the rest stands in `baton.worker.config`.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.config import setting
from baton.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """Settings of the prefill worker."""

    chunk_tokens: int = setting(
        "tokens computed and committed in one go, rounded up to whole pages",
        default=256,
        minimum=1,
        maximum=65536,
    )
    queue_depth_max: int = setting(
        "prompts that may wait beyond those being worked on", default=64, minimum=1, maximum=65536
    )
    interleave_max: int = setting(
        "prompts that take turns chunk by chunk; of every tenant at least one does",
        default=4,
        minimum=1,
        maximum=256,
    )
    batch_tokens: int = setting(
        "tokens of different prompts computed in one pass; a chunk that is longer has its own",
        default=512,
        minimum=1,
        maximum=65536,
    )

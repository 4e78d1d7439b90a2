"""Settings of the decode worker.

Owns what is its own; the rest stands in `baton.worker.config`.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.config import setting
from baton.worker.config import WorkerConfig
from baton.worker.kernel_choice import KernelChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """Settings of the decode worker."""

    active_sequences_max: int = setting(
        "sequences that may run at once", default=16, minimum=1, maximum=1024
    )
    kernel: KernelChoice = setting(
        "what computes steps: torch; native, the step kernel or no start; auto, it or torch",
        default=KernelChoice.AUTO,
    )
    chunk_tokens: int = setting(
        "tokens of a local prefill computed between two steps, rounded up to whole pages",
        default=256,
        minimum=1,
        maximum=65536,
    )

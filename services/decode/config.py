"""Settings of the decode worker.

Owns what is its own; the rest stands in `baton.worker.config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique
from pathlib import Path

from baton.config import setting
from baton.worker.config import WorkerConfig
from baton.worker.kernel_choice import KernelChoice


@unique
class DeviceKind(StrEnum):
    """Whose memory the device tier has: a CUDA device's, or ordinary memory in its stead."""

    CUDA = "cuda"
    STANDIN = "standin"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """Settings of the decode worker."""

    active_sequences_max: int = setting(
        "sequences that may run at once", default=16, minimum=1, maximum=1024
    )
    queue_max: int | None = setting(
        "sequences that may wait for a slot; further ones are refused. 4 for each slot unless set",
        default=None,
        minimum=0,
        maximum=16384,
    )
    step_tokens_max: int | None = setting(
        "most tokens of one step, of as many sequences; they take turns. No bound unless set",
        default=None,
        minimum=1,
        maximum=1024,
    )
    kernel: KernelChoice = setting(
        "what computes steps: torch; native, the step kernel or no start; auto, it or torch",
        default=KernelChoice.AUTO,
    )
    chunk_tokens: int | None = setting(
        "most tokens of a local prefill computed in one turn, rounded up to whole pages. What the "
        "chunk profile says unless set, else 256",
        default=None,
        minimum=1,
        maximum=65536,
    )
    chunk_profile: Path | None = setting(
        "file that `baton tune chunk` wrote; one of another model or machine is ignored with one "
        "line in the log that names the field",
        default=None,
    )
    local_prefill_gap: float = setting(
        "how many times as long a local prefill may make the gap between the others' tokens",
        default=2.0,
        minimum=1.1,
        maximum=1000.0,
    )
    device_bytes: int = setting(
        "bytes of device memory that the kvstore may place KV in; 0 turns it off",
        default=0,
        minimum=0,
    )
    device: DeviceKind = setting(
        "whose memory that is: cuda, or standin, ordinary memory for tests",
        default=DeviceKind.CUDA,
    )

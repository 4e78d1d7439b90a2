"""Settings of the prefill worker.

Owns what is its own; the rest stands in `baton.worker.config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique
from pathlib import Path

from baton.config import setting
from baton.worker.chunker import Chunking
from baton.worker.config import WorkerConfig


@unique
class DeviceKind(StrEnum):
    """What computes prompts."""

    CPU = "cpu"
    CUDA = "cuda"
    STANDIN = "standin"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """Settings of the prefill worker."""

    chunk_tokens: int | None = setting(
        "tokens computed and committed in one go, rounded up to whole pages. What the chunk "
        "profile says unless set, else 256",
        default=None,
        minimum=1,
        maximum=65536,
    )
    chunking: Chunking = setting(
        "where chunks end: fixed, at multiples of chunk_tokens; semantic, at the end of a "
        "sentence, a line or a block of Markdown or XML near that size",
        default=Chunking.FIXED,
    )
    chunk_profile: Path | None = setting(
        "file that `baton tune chunk` wrote; one of another model or machine is ignored with one "
        "line in the log that names the field",
        default=None,
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
    device: DeviceKind = setting(
        "what computes prompts: cpu, in the arena; cuda, in a device's memory, from where KV is "
        "copied to the arena; standin, the same in ordinary memory, for tests",
        default=DeviceKind.CPU,
    )
    device_bytes: int = setting(
        "bytes of the device's memory for KV: at least that of the longest prompt",
        default=0,
        minimum=0,
    )

    def validate(self) -> list[str]:
        """Faults between settings."""
        # The base's by name: in a slotted dataclass `super()` finds another class.
        faults = WorkerConfig.validate(self)
        if self.device is not DeviceKind.CPU and not self.device_bytes:
            faults.append(f"device_bytes: must be said where device is {self.device}")
        return faults

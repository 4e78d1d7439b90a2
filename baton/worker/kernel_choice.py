"""What computes decode steps, as configuration spells it; free of torch.

Owns the words. Never loads anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class KernelChoice(StrEnum):
    """What computes decode steps."""

    TORCH = "torch"
    NATIVE = "native"
    AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWish:
    """A worker's wish for a kernel. `batch_max` is the most sequences of one step;
    `is_float32`: the weights are not rounded, as the worker computes in float32.
    """

    choice: KernelChoice = KernelChoice.TORCH
    threads: int = 1
    batch_max: int = 16
    is_float32: bool = False

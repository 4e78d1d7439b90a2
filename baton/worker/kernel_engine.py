"""Decode by the native step kernel; prompts stay with the torch forward.

Owns the choice at start: a kernel that passes the golden check, or none; and the way back to torch
for one that fails it later. Never decides that it failed: a start does, or the golden watch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from baton.arena.mapping import MappedArena
from baton.engine.golden_check import GoldenCheck, GoldenReference
from baton.engine.kernel_golden import KernelPath
from baton.engine.kernel_weights import WeightMode
from baton.engine.kv_pages import KvPages
from baton.engine.step_kernel import KernelOptions, StepKernel, open_step_kernel
from baton.engine.transformer import Transformer
from baton.errors import StartupError
from baton.kv.layout import KvDtype, KvGeometry
from baton.kv.numeric import NumericClass
from baton.worker.kernel_choice import KernelChoice, KernelWish
from baton.worker.torch_engine import TorchEngine

_log = structlog.stdlib.get_logger("baton.worker")


@dataclass(frozen=True, slots=True)
class CheckedKernel:
    """A kernel that passed its golden check, and the check to repeat."""

    kernel: StepKernel
    check: GoldenCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedKernel:
    """What came of a wish. `checked` None: torch serves; `has_failed`: because a kernel that is
    there did not pass its check, so that the worker is degraded.
    """

    checked: CheckedKernel | None = None
    has_failed: bool = False


class KernelEngine(TorchEngine):
    """Implements `baton.worker.engine.Engine`: chunks by torch, steps by the kernel."""

    def __init__(
        self, transformer: Transformer, checked: CheckedKernel, check: GoldenCheck | None = None
    ) -> None:
        super().__init__(transformer, check)
        self._native: CheckedKernel | None = checked
        checked.kernel.pages = transformer.pages

    @property
    def steps_by(self) -> str:
        """What computes decode steps."""
        return super().steps_by if self._native is None else "native"

    @property
    def checks(self) -> tuple[GoldenCheck, ...]:
        """See `Engine.checks`."""
        own = () if self._native is None else (self._native.check,)
        return (*own, *super().checks)

    def fall_back(self) -> NumericClass:
        """See `Engine.fall_back`; the kernel's memory is freed."""
        if self._native is not None:
            self._native.kernel.close()
            self._native = None
        return super().fall_back()

    def remap(self, arena: MappedArena) -> None:
        """Compute over another arena's pages from now on; the old one is not referred to."""
        super().remap(arena)
        if self._native is not None:
            self._native.kernel.pages = self.transformer.pages

    def decode_step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        page_tables: Sequence[Sequence[int]],
    ) -> NDArray[np.float32]:
        """See `StepKernel.decode_step`; f32 [batch, vocabulary]."""
        if self._native is None:
            return super().decode_step(tokens, positions, page_tables)
        return self._native.kernel.decode_step(tokens, positions, page_tables)


def open_kernel(
    path: Path,
    geometry: KvGeometry,
    reference: GoldenReference,
    wish: KernelWish,
    max_context: int | None,
) -> OpenedKernel:
    """The kernel that the wish asks for, checked, over one page of its own.

    Raises StartupError when `native` was asked for and there is none that passes.
    """
    if wish.choice is KernelChoice.TORCH:
        return OpenedKernel()
    is_float32 = wish.is_float32 or geometry.dtype is KvDtype.F32
    options = KernelOptions(
        # Float32 KV is the exact class: its weights are not rounded either.
        weight_mode=WeightMode.FLOAT32 if is_float32 else None,
        threads=wish.threads,
        batch_max=wish.batch_max,
        max_context=max_context,
    )
    kernel = open_step_kernel(path, KvPages.allocate(geometry, 1), options)
    checked = None if kernel is None else _checked(kernel, reference)
    if checked is None and wish.choice is KernelChoice.NATIVE:
        raise StartupError(
            "no native step kernel serves this model here",
            hint="see the warning above; `--kernel auto` falls back to torch",
        )
    if checked is not None:
        _log.info(
            "step_kernel_ready",
            isa=checked.kernel.isa.value,
            numeric_class=checked.kernel.numeric_class(),
            threads=checked.kernel.threads,
            threads_by="configuration",
            cpus=len(os.sched_getaffinity(0)),
            advice="`baton doctor` measures one and two threads, alone and beside other work",
            weight_bytes=checked.kernel.memory.weight_bytes,
            buffer_bytes=checked.kernel.memory.buffer_bytes,
        )
    return OpenedKernel(checked=checked, has_failed=kernel is not None and checked is None)


def _checked(kernel: StepKernel, reference: GoldenReference) -> CheckedKernel | None:
    check = GoldenCheck(KernelPath(kernel, reference), reference)
    result = check.run()
    if result.is_passed:
        return CheckedKernel(kernel, check)
    _log.error(
        "step_kernel_failed_golden_check",
        relative_l2=result.relative_l2,
        bound=result.bound,
        serving="torch",
    )
    kernel.close()
    return None

"""Decode by the native step kernel; prompts stay with the torch forward.

Owns the choice at start: a kernel that passes the golden check, or none. Never decides for one that
failed: then torch serves under its own numeric class, and the log says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from baton.arena.mapping import MappedArena
from baton.engine import golden_check, kernel_golden
from baton.engine.kernel_weights import WeightMode
from baton.engine.kv_pages import KvPages
from baton.engine.step_kernel import KernelOptions, StepKernel, open_step_kernel
from baton.engine.transformer import Transformer
from baton.errors import StartupError
from baton.kv.layout import KvDtype, KvGeometry
from baton.worker.kernel_choice import KernelChoice, KernelWish
from baton.worker.torch_engine import TorchEngine

_log = structlog.stdlib.get_logger("baton.worker")


class KernelEngine(TorchEngine):
    """Implements `baton.worker.engine.Engine`: chunks by torch, steps by the kernel."""

    def __init__(self, transformer: Transformer, kernel: StepKernel) -> None:
        super().__init__(transformer)
        self._kernel = kernel
        kernel.pages = transformer.pages

    def remap(self, arena: MappedArena) -> None:
        """Compute over another arena's pages from now on; the old one is not referred to."""
        super().remap(arena)
        self._kernel.pages = self.transformer.pages

    def decode_step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        page_tables: Sequence[Sequence[int]],
    ) -> NDArray[np.float32]:
        """See `StepKernel.decode_step`; f32 [batch, vocabulary]."""
        return self._kernel.decode_step(tokens, positions, page_tables)


def open_kernel(
    path: Path,
    geometry: KvGeometry,
    weight_hashes: list[bytes],
    wish: KernelWish,
    max_context: int | None,
) -> StepKernel | None:
    """The kernel that the wish asks for, checked, over one page of its own; None: torch serves.

    Raises StartupError when `native` was asked for and there is none that passes.
    """
    if wish.choice is KernelChoice.TORCH:
        return None
    options = KernelOptions(
        # Float32 KV is the exact class: its weights are not rounded either.
        weight_mode=WeightMode.FLOAT32 if geometry.dtype is KvDtype.F32 else None,
        threads=wish.threads,
        batch_max=wish.batch_max,
        max_context=max_context,
    )
    kernel = open_step_kernel(path, KvPages.allocate(geometry, 1), options)
    if kernel is not None and not _is_golden(kernel, weight_hashes):
        kernel.close()
        kernel = None
    if kernel is None and wish.choice is KernelChoice.NATIVE:
        raise StartupError(
            "no native step kernel serves this model here",
            hint="see the warning above; `--kernel auto` falls back to torch",
        )
    if kernel is not None:
        _log.info(
            "step_kernel_ready",
            isa=kernel.isa.value,
            numeric_class=kernel.numeric_class(),
            threads=kernel.threads,
            weight_bytes=kernel.memory.weight_bytes,
            buffer_bytes=kernel.memory.buffer_bytes,
        )
    return kernel


def _is_golden(kernel: StepKernel, weight_hashes: list[bytes]) -> bool:
    reference = golden_check.find_reference(weight_hashes)
    if reference is None:
        return True
    result = kernel_golden.run(kernel, reference)
    if not result.is_passed:
        _log.error(
            "step_kernel_failed_golden_check",
            relative_l2=result.relative_l2,
            bound=result.bound,
            serving="torch",
        )
    return result.is_passed

"""The golden check of the step kernel: its live weights, on pages of its own.

Owns the bound of each weight mode and the running of a reference through single steps. It never
decides what to do about a failure: that is the worker's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from baton.engine.golden_check import (
    Floats,
    GoldenCheck,
    GoldenReference,
    GoldenResult,
    sketch,
)
from baton.engine.kernel_weights import WeightMode
from baton.engine.kv_pages import KvPages
from baton.engine.step_kernel import StepKernel
from baton.engine.step_kernel_abi import Activation
from baton.kv.layout import KvDtype

# The largest relative L2 distance that passes: the float32 promise, elsewhere at least twice what
# was measured on the bundled model (docs/step_kernel.md).
_EXACT_BOUND: Final = 1e-3
_BOUNDS: Final = {
    (WeightMode.FLOAT32, Activation.INT16): 4e-2,
    (WeightMode.BFLOAT16, Activation.INT16): 6e-2,
    (WeightMode.INT8, Activation.INT16): 2.7e-1,
    (WeightMode.PACKED, Activation.INT16): 3e-2,
    (WeightMode.INT8, Activation.INT8): 2.7e-1,
    (WeightMode.PACKED, Activation.INT8): 2.5e-1,
}
# The same with int8 KV.
_INT8_BOUNDS: Final = {
    (WeightMode.FLOAT32, Activation.INT16): 6e-2,
    (WeightMode.BFLOAT16, Activation.INT16): 8e-2,
    (WeightMode.INT8, Activation.INT16): 3.1e-1,
    (WeightMode.PACKED, Activation.INT16): 7e-2,
    (WeightMode.INT8, Activation.INT8): 4e-1,
    (WeightMode.PACKED, Activation.INT8): 3.1e-1,
}


def bound_of(kernel: StepKernel) -> float:
    """The largest distance that passes for this kernel's class."""
    mode = kernel.weight_mode
    if mode is WeightMode.FLOAT32 and kernel.pages.geometry.dtype is KvDtype.F32:
        return _EXACT_BOUND
    is_rounded = mode in (WeightMode.INT8, WeightMode.PACKED)
    bounds = _INT8_BOUNDS if kernel.pages.geometry.dtype.has_scales else _BOUNDS
    return bounds[mode, kernel.activation if is_rounded else Activation.INT16]


class KernelPath:
    """A step kernel, one token a slice, over pages of its own; its weights, buffers and threads are
    the live ones. The live pages are back after every slice.
    """

    name = "native"
    # Neither threads nor instructions change the order of its sums.
    drift_bound = 1e-6

    def __init__(self, kernel: StepKernel, reference: GoldenReference) -> None:
        self._kernel = kernel
        geometry = kernel.pages.geometry
        tokens = len(reference.prompt_ids) + len(reference.forced_ids)
        self._own = KvPages.allocate(geometry, -(-tokens // geometry.block_tokens))

    @property
    def bound(self) -> float:
        """See `GoldenPath`."""
        return bound_of(self._kernel)

    def numeric_class(self) -> str:
        """See `GoldenPath`."""
        return self._kernel.numeric_class()

    def weights_view(self) -> memoryview:
        """See `GoldenPath`."""
        return self._kernel.weight_bytes_view()

    def slices(self, reference: GoldenReference) -> Iterator[Floats | None]:
        """See `GoldenPath`. Call it between steps, from the thread that steps."""
        for position, token in enumerate((*reference.prompt_ids, *reference.forced_ids)):
            logits = self._step(token, position)
            yield sketch(logits) if position >= len(reference.prompt_ids) - 1 else None

    def _step(self, token: int, position: int) -> Floats:
        kernel, live = self._kernel, self._kernel.pages
        kernel.pages = self._own
        try:
            logits: Floats = kernel.decode_step([token], [position], [range(self._own.page_count)])
            return logits[:1].reshape(-1)
        finally:
            kernel.pages = live


def run(kernel: StepKernel, reference: GoldenReference) -> GoldenResult:
    """Compute the reference's prompt and forced tokens with this kernel, one step each."""
    return GoldenCheck(KernelPath(kernel, reference), reference).run()

"""The golden check of the step kernel: its live weights, on pages of its own.

Owns the bound of each weight mode and the running of a reference through single steps. It never
decides what to do about a failure: that is the worker's.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from baton.engine.golden_check import GoldenReference, GoldenResult, relative_l2, sketch
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


def bound_of(kernel: StepKernel) -> float:
    """The largest distance that passes for this kernel's class."""
    mode = kernel.weight_mode
    if mode is WeightMode.FLOAT32 and kernel.pages.geometry.dtype is KvDtype.F32:
        return _EXACT_BOUND
    is_rounded = mode in (WeightMode.INT8, WeightMode.PACKED)
    return _BOUNDS[mode, kernel.activation if is_rounded else Activation.INT16]


def run(kernel: StepKernel, reference: GoldenReference) -> GoldenResult:
    """Compute the reference's prompt and forced tokens with this kernel, one step each.

    The kernel's pages are put back afterwards, whatever happens. Call it between steps, from the
    thread that steps.
    """
    geometry = kernel.pages.geometry
    tokens = (*reference.prompt_ids, *reference.forced_ids)
    page_count = -(-len(tokens) // geometry.block_tokens)
    live = kernel.pages
    kernel.pages = KvPages.allocate(geometry, page_count)
    try:
        computed = []
        for position, token in enumerate(tokens):
            logits = kernel.decode_step([token], [position], [range(page_count)])
            if position >= len(reference.prompt_ids) - 1:
                computed.append(sketch(logits[0]))
    finally:
        kernel.pages = live
    distance, bound = relative_l2(np.stack(computed), reference.sketches), bound_of(kernel)
    return GoldenResult(
        is_passed=distance <= bound,
        relative_l2=distance,
        bound=bound,
        numeric_class=kernel.numeric_class(),
    )

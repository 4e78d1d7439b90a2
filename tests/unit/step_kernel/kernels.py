"""What the step kernel's tests share: a built library or a loud skip, models, filled pages."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch

from baton.engine.kernel_weights import WeightMode
from baton.engine.kv_pages import KvPages, quantise
from baton.engine.step_kernel import KernelOptions, StepKernel
from baton.engine.step_kernel_abi import Isa, is_supported, load
from baton.engine.step_kernel_build import BuildError, build, is_stale
from baton.engine.transformer import Transformer
from baton.engine.weights import ComputeDtype, ModelWeights, load_weights
from baton.errors import ServiceError
from baton.kv.layout import KvDtype

BLOCK_TOKENS: Final = 16
PAGES: Final = 96
# Anything but in order, so that a wrong page shows.
TABLE: Final = [7, 3, 19, 0, 11, 5, 23, 2, 17, 9, 1, 21]
OTHER_TABLE: Final = [4, 6, 8, 10, 12, 13, 14, 15, 16, 18, 20, 22]
VECTOR_ISAS: Final = (Isa.PORTABLE, Isa.AVX2, Isa.AVX512, Isa.AVX512_BF16, Isa.NEON)


def require_library() -> None:
    """Build the library when it is out of date; where that cannot be, say loudly what is lost."""
    try:
        if is_stale():
            build()
        load()
    except (BuildError, ServiceError) as error:
        pytest.skip(f"THE STEP KERNEL TESTS DID NOT RUN: {error}")


def require_isa(isa: Isa) -> None:
    """Skip a case for a CPU that is not here."""
    require_library()
    if not is_supported(isa):
        pytest.skip(f"this CPU has no {isa}")


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model file with its float32 weights for the torch path."""

    path: Path
    weights: ModelWeights

    def pages(self, dtype: KvDtype = KvDtype.F32, block_tokens: int = BLOCK_TOKENS) -> KvPages:
        """Zeroed pages of this model."""
        geometry = self.weights.config.kv_geometry(block_tokens, dtype)
        return KvPages.allocate(geometry, PAGES)

    def random_pages(self, dtype: KvDtype = KvDtype.F32, block_tokens: int = 16) -> KvPages:
        """Pages full of KV that no prompt made: fit for any context without computing one."""
        pages = self.pages(dtype, block_tokens)
        fill(pages, seed=5)
        return pages

    def transformer(self, pages: KvPages) -> Transformer:
        """The torch path over `pages`."""
        return Transformer(self.weights, pages)

    def kernel(self, pages: KvPages, **options) -> StepKernel:
        """A kernel over `pages`; float32 weights unless said otherwise."""
        return StepKernel(
            self.path, pages, KernelOptions(**({"weight_mode": WeightMode.FLOAT32} | options))
        )


def load_model(path: Path) -> Model:
    """The model at `path`."""
    return Model(path=path, weights=load_weights(path, ComputeDtype.FLOAT32))


def copy_of(pages: KvPages) -> KvPages:
    """Other pages with the same bytes."""
    same = KvPages.allocate(pages.geometry, pages.page_count)
    for layer in range(pages.geometry.layers):
        same.layer(layer).copy_(pages.layer(layer))
        if pages.geometry.dtype.has_scales:
            same.scales(layer).copy_(pages.scales(layer))
    return same


def fill(pages: KvPages, seed: int) -> None:
    """Random numbers in every slot, rounded to the type of the pages."""
    random = torch.Generator().manual_seed(seed)
    for layer in range(pages.geometry.layers):
        shape = pages.layer(layer).shape
        put(pages, layer, torch.randn(shape, generator=random))


def put(pages: KvPages, layer: int, numbers: torch.Tensor) -> None:
    """Numbers [pages, 2, kv_heads, block_tokens, head_dim] into a whole layer."""
    view = pages.layer(layer)
    if pages.geometry.dtype.has_scales:
        elements, scales = quantise(numbers)
        view.copy_(elements)
        pages.scales(layer).copy_(scales)
    else:
        view.copy_(numbers)


def numbers_of(pages: KvPages, layer: int) -> torch.Tensor:
    """What stands in a whole layer, scales applied [pages, 2, kv_heads, block_tokens, head_dim]."""
    numbers = pages.layer(layer).float()
    if pages.geometry.dtype.has_scales:
        numbers = numbers * pages.scales(layer).unsqueeze(-1)
    return numbers


def page_bytes(pages: KvPages, page: int) -> np.ndarray:
    """A copy of the bytes of one page slot."""
    slot = pages.geometry.slot_bytes
    address = pages.address + page * slot
    return np.frombuffer(ctypes.string_at(address, slot), dtype=np.uint8)


def all_bytes(pages: KvPages) -> bytes:
    """The bytes of every page slot."""
    return b"".join(page_bytes(pages, page).tobytes() for page in range(pages.page_count))


def distance(computed, expected) -> float:
    """The largest relative L2 distance of any row."""
    computed, expected = np.asarray(computed, np.float64), np.asarray(expected, np.float64)
    gap = np.linalg.norm(computed - expected, axis=-1)
    return float(np.max(gap / np.linalg.norm(expected, axis=-1)))


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids of the tiny models."""
    return np.random.default_rng(seed).integers(0, 256, count).tolist()

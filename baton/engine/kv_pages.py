"""KV pages as tensors: a strided window over an arena's page slots, and nothing copied.

Owns the mapping from (page, layer, K/V, head, slot) to the bytes of `baton.kv.layout`, for the
types torch computes in. It grants and frees no page: page numbers are the kvstore's business.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TypeAlias

import torch

from baton.errors import Reason, ServiceError
from baton.kv.layout import KvDtype, KvGeometry

WritableBuffer: TypeAlias = bytearray | memoryview | mmap.mmap

_TORCH_DTYPES = {
    KvDtype.F16: torch.float16,
    KvDtype.BF16: torch.bfloat16,
    KvDtype.F32: torch.float32,
}


class KvPages:
    """`page_count` page slots as one tensor [pages, layers, 2, kv_heads, block_tokens, head_dim].

    Writing the tensor writes the arena. The buffer stays mapped as long as this object lives, so
    drop every reference to it (and to tensors made from it) before detaching.
    """

    def __init__(self, view: torch.Tensor, geometry: KvGeometry) -> None:
        self._view = view
        self.geometry = geometry

    @classmethod
    def from_buffer(
        cls, buffer: WritableBuffer, geometry: KvGeometry, page_count: int, *, offset: int = 0
    ) -> KvPages:
        """A window over a writable `buffer` whose page slots of `slot_bytes` begin at `offset`.

        Raises ServiceError
        UNSUPPORTED for a KV type that torch cannot compute in, INVALID_REQUEST for a buffer that
        is read-only or too small.
        """
        flat = memoryview(buffer).cast("B")
        needed = offset + page_count * geometry.slot_bytes
        if flat.readonly or flat.nbytes < needed or page_count < 1 or offset < 0:
            raise ServiceError(
                Reason.INVALID_REQUEST,
                f"KV pages need a writable buffer of {needed} bytes, got {flat.nbytes}",
                field="buffer",
            )
        data = torch.frombuffer(
            flat, dtype=torch.uint8, count=page_count * geometry.slot_bytes, offset=offset
        )
        return cls(_page_tensor(data, geometry, page_count), geometry)

    @classmethod
    def allocate(cls, geometry: KvGeometry, page_count: int) -> KvPages:
        """Zeroed pages in this process's own memory, slots as wide as an arena's."""
        assert page_count >= 1
        data = torch.zeros(page_count * geometry.slot_bytes, dtype=torch.uint8)
        return cls(_page_tensor(data, geometry, page_count), geometry)

    @property
    def page_count(self) -> int:
        """How many page slots there are."""
        return self._view.shape[0]

    def layer(self, index: int) -> torch.Tensor:
        """One layer of every page [pages, 2, kv_heads, block_tokens, head_dim], writable."""
        return self._view[:, index]

    def check_table(self, page_table: Sequence[int], tokens: int) -> None:
        """Raise INVALID_REQUEST unless the table's pages exist and can hold `tokens` tokens."""
        needed = -(-tokens // self.geometry.block_tokens)
        if len(page_table) < needed:
            raise ServiceError(
                Reason.INVALID_REQUEST,
                f"{tokens} tokens need {needed} pages, the page table has {len(page_table)}",
                field="page_table",
            )
        used = page_table[:needed]
        if min(used) < 0 or max(used) >= self.page_count:
            raise ServiceError(
                Reason.INVALID_REQUEST,
                f"the page table names pages outside 0 to {self.page_count - 1}",
                field="page_table",
            )


def _page_tensor(data: torch.Tensor, geometry: KvGeometry, page_count: int) -> torch.Tensor:
    dtype = _TORCH_DTYPES.get(geometry.dtype)
    if dtype is None:
        raise ServiceError(
            Reason.UNSUPPORTED,
            f"KV type {geometry.dtype.text} is not computed by the torch path; use f32 or bf16",
            field="dtype",
        )
    assert geometry.head_dim == geometry.head_dim_v, "K and V of one width only"
    shape = (
        geometry.layers,
        2,
        geometry.kv_heads,
        geometry.block_tokens,
        geometry.head_dim,
    )
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    slot_items = geometry.slot_bytes // geometry.dtype.itemsize
    return data.view(dtype).as_strided((page_count, *shape), (slot_items, *strides))

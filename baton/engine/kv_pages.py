"""KV pages as tensors: a strided window over an arena's page slots, and nothing copied.

Owns the mapping from (page, layer, K/V, head, slot) to the bytes of `baton.kv.layout`, for the
types torch computes in and for int8, which is quantised as it is written and multiplied by its
scales as it is read. It grants and frees no page: page numbers are the kvstore's business.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TypeAlias

import torch

from baton.errors import Reason, ServiceError
from baton.kv.layout import SCALE_BYTES, KvDtype, KvGeometry

WritableBuffer: TypeAlias = bytearray | memoryview | mmap.mmap

_TORCH_DTYPES = {
    KvDtype.F16: torch.float16,
    KvDtype.BF16: torch.bfloat16,
    KvDtype.F32: torch.float32,
    KvDtype.INT8: torch.int8,
}
_INT8_MAX = 127.0


class KvPages:
    """`page_count` page slots as one tensor [pages, layers, 2, kv_heads, block_tokens, head_dim].

    Writing the tensor writes the arena. The buffer stays mapped as long as this object lives, so
    drop every reference to it (and to tensors made from it) before detaching.
    """

    def __init__(self, data: torch.Tensor, geometry: KvGeometry, page_count: int) -> None:
        self._data = data
        self._view = _page_tensor(data, geometry, page_count)
        self._scales = _scale_tensor(data, geometry, page_count)
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
        return cls(data, geometry, page_count)

    @classmethod
    def allocate(
        cls, geometry: KvGeometry, page_count: int, device: torch.device | str = "cpu"
    ) -> KvPages:
        """Zeroed pages in this process's own memory, or a device's, slots as wide as an arena's."""
        assert page_count >= 1
        data = torch.zeros(page_count * geometry.slot_bytes, dtype=torch.uint8, device=device)
        return cls(data, geometry, page_count)

    @property
    def page_count(self) -> int:
        """How many page slots there are."""
        return self._view.shape[0]

    @property
    def address(self) -> int:
        """Where page 0 begins in memory."""
        return self._data.data_ptr()

    @property
    def memory(self) -> torch.Tensor:
        """All slots as bytes [pages, slot_bytes], padding included, writable."""
        return self._data.view(self.page_count, self.geometry.slot_bytes)

    def layer(self, index: int) -> torch.Tensor:
        """One layer of every page [pages, 2, kv_heads, block_tokens, head_dim], writable; int8
        elements are without their scales.
        """
        return self._view[:, index]

    def scales(self, index: int) -> torch.Tensor:
        """The scales of one layer of every int8 page [pages, 2, kv_heads, block_tokens]."""
        assert self._scales is not None, f"{self.geometry.dtype.text} pages have no scales"
        return self._scales[:, index]

    def write(
        self, index: int, pages: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Write K and V of layer `index`: `rows` [tokens, 2, kv_heads, head_dim], token i into slot
        `slots[i]` of page `pages[i]`.
        """
        if self._scales is not None:
            rows, scales = quantise(rows)
            self.scales(index)[pages, :, :, slots] = scales
        self.layer(index)[pages, :, :, slots] = rows

    def gather(self, index: int, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """K and V of the table's pages one after the other, as `dtype`, which is that of the pages
        unless they are int8: [2, kv_heads, tokens, head_dim].
        """
        by_head = self.layer(index).permute(1, 2, 0, 3, 4)
        rows = by_head.index_select(2, table).flatten(2, 3)
        if self._scales is None:
            return rows
        scales = self.scales(index).permute(1, 2, 0, 3).index_select(2, table).flatten(2, 3)
        return (rows * scales.unsqueeze(-1)).to(dtype)

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


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (..., dim) as int8 and one float32 scale each (...), as `baton.kv.convert.quantise`."""
    numbers = rows.float()
    scales = numbers.abs().amax(dim=-1) / _INT8_MAX
    is_usable = (scales > 0).unsqueeze(-1)
    # A scale that underflowed stands for a row of zeros.
    divisor = torch.where(is_usable, scales.unsqueeze(-1), 1.0)
    steps = torch.where(is_usable, numbers, 0.0) / divisor
    return steps.round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int8), scales


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
    return data.view(dtype).as_strided(
        (page_count, *shape), (slot_items, *strides), geometry.block_tokens * geometry.scale_bytes
    )


def _scale_tensor(data: torch.Tensor, geometry: KvGeometry, page_count: int) -> torch.Tensor | None:
    """The scales at the head of each page [pages, layers, 2, kv_heads, block_tokens], if any."""
    if not geometry.dtype.has_scales:
        return None
    tokens, heads = geometry.block_tokens, geometry.kv_heads
    shape = (page_count, geometry.layers, 2, heads, tokens)
    strides = (geometry.slot_bytes // SCALE_BYTES, 2 * heads * tokens, heads * tokens, tokens, 1)
    return data.view(torch.float32).as_strided(shape, strides)

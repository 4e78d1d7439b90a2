"""Where every KV byte stands in a page, and how a partial page is packed.

Owns the page layout (number 1): layer, then K and V, then KV head, then token, then head_dim,
contiguous, little-endian; int8 pages begin with one float32 scale per (layer, K/V, head, token).
Never does I/O and never looks at a page slot's padding.

Invariants: a page of n tokens holds exactly n x token_bytes bytes, so a packed range of n tokens
has the layout of a page whose block_tokens is n; pages are cut at absolute multiples of
block_tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum, unique
from typing import Final

import numpy as np

from baton.errors import Reason, ServiceError
from baton.kv.crc import Buffer, ByteArray, as_bytes, crc32c

LAYOUT: Final = 1
"""The number of this page layout in headers, labels and digests."""

BLOCK_TOKENS_MIN: Final = 8
BLOCK_TOKENS_MAX: Final = 64
SLOT_ALIGNMENT_BYTES: Final = 4096
SCALE_BYTES: Final = 4
POSITIONS_MAX: Final = 1 << 32

_U16_MAX: Final = 0xFFFF


@unique
class KvDtype(Enum):
    """Element type of stored KV; the value is (name in digests and labels, wire code, itemsize)."""

    F16 = ("f16", 1, 2)
    BF16 = ("bf16", 2, 2)
    F32 = ("f32", 3, 4)
    INT8 = ("int8", 4, 1)

    @property
    def text(self) -> str:
        """Name in digests, labels and numeric classes."""
        return self.value[0]

    @property
    def wire_code(self) -> int:
        """Number in blob headers."""
        return self.value[1]

    @property
    def itemsize(self) -> int:
        """Bytes per element, scales not counted."""
        return self.value[2]

    @property
    def storage(self) -> np.dtype[np.generic]:
        """The numpy type of the stored bits; bf16 has none of its own and is held as uint16."""
        return _STORAGE[self]

    @property
    def has_scales(self) -> bool:
        """Whether pages begin with float32 scales."""
        return self is KvDtype.INT8

    @classmethod
    def from_wire(cls, code: int) -> KvDtype | None:
        """Return the type of a header's code, or None for a code this version does not read."""
        return next((dtype for dtype in cls if dtype.wire_code == code), None)

    @classmethod
    def from_text(cls, text: str) -> KvDtype:
        """Return the type named `text`; INVALID_REQUEST for another name."""
        for dtype in cls:
            if dtype.text == text:
                return dtype
        known = ", ".join(dtype.text for dtype in cls)
        raise ServiceError(
            Reason.INVALID_REQUEST, f"unknown KV dtype {text!r}; known: {known}", field="dtype"
        )


_STORAGE: Final[dict[KvDtype, np.dtype[np.generic]]] = {
    KvDtype.F16: np.dtype("<f2"),
    KvDtype.BF16: np.dtype("<u2"),
    KvDtype.F32: np.dtype("<f4"),
    KvDtype.INT8: np.dtype("i1"),
}


@unique
class Part(IntEnum):
    """Which half of a layer's KV."""

    K = 0
    V = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGeometry:
    """The shape of a page: everything that decides where a byte stands.

    `head_dim` is K's, `head_dim_v` is V's. Raises INVALID_REQUEST naming the field out of range.
    """

    layers: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    block_tokens: int
    dtype: KvDtype

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "head_dim_v"):
            _check_range(name, getattr(self, name), 1, _U16_MAX)
        _check_range("block_tokens", self.block_tokens, BLOCK_TOKENS_MIN, BLOCK_TOKENS_MAX)

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales per token: 0 but for int8."""
        return self.layers * 2 * self.kv_heads * SCALE_BYTES if self.dtype.has_scales else 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers and heads, scales included."""
        dims = self.head_dim + self.head_dim_v
        return self.layers * self.kv_heads * dims * self.dtype.itemsize + self.scale_bytes

    @property
    def page_bytes(self) -> int:
        """Payload bytes of a full page."""
        return self.block_tokens * self.token_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of an arena's page slot: `page_bytes` rounded up to 4 KiB."""
        return -(-self.page_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES

    def dims_of(self, part: Part) -> int:
        """Return head_dim of K or of V."""
        return self.head_dim if part is Part.K else self.head_dim_v

    def data_offset(self, layer: int, part: Part, head: int, token: int) -> int:
        """Return the byte offset in a full page of the first element of (layer, part, head, token).

        `token` counts inside the page.
        """
        self._assert_inside(layer, head, token)
        rows = self.kv_heads * self.block_tokens
        offset = self.block_tokens * self.scale_bytes
        offset += layer * rows * (self.head_dim + self.head_dim_v) * self.dtype.itemsize
        if part is Part.V:
            offset += rows * self.head_dim * self.dtype.itemsize
        row = head * self.block_tokens + token
        return offset + row * self.dims_of(part) * self.dtype.itemsize

    def scale_offset(self, layer: int, part: Part, head: int, token: int) -> int:
        """Return the byte offset in a full int8 page of the scale of (layer, part, head, token)."""
        assert self.dtype.has_scales, f"{self.dtype.text} pages have no scales"
        self._assert_inside(layer, head, token)
        row = (layer * 2 + int(part)) * self.kv_heads + head
        return (row * self.block_tokens + token) * SCALE_BYTES

    def _assert_inside(self, layer: int, head: int, token: int) -> None:
        assert 0 <= layer < self.layers, f"layer {layer} of {self.layers}"
        assert 0 <= head < self.kv_heads, f"head {head} of {self.kv_heads}"
        assert 0 <= token < self.block_tokens, f"token {token} of {self.block_tokens}"


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ServiceError(
            Reason.INVALID_REQUEST, f"{name} is {value}; must be {low} to {high}", field=name
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSpan:
    """The part of one block that a token range touches.

    `block_index` is the absolute block (position // block_tokens), `first_slot` the first token
    slot inside it, `tokens` how many slots follow.
    """

    block_index: int
    first_slot: int
    tokens: int

    def first_position(self, block_tokens: int) -> int:
        """Return the absolute position of the first token."""
        return self.block_index * block_tokens + self.first_slot

    def is_full(self, block_tokens: int) -> bool:
        """Whether the span is the whole block."""
        return self.tokens == block_tokens


def page_spans(block_tokens: int, first_position: int, total_tokens: int) -> Iterator[PageSpan]:
    """Yield the spans of [first_position, first_position + total_tokens), in order."""
    position, end = first_position, first_position + total_tokens
    while position < end:
        block_index, first_slot = divmod(position, block_tokens)
        tokens = min(block_tokens - first_slot, end - position)
        yield PageSpan(block_index=block_index, first_slot=first_slot, tokens=tokens)
        position += tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView:
    """Typed windows into the bytes of a page of `tokens` tokens; writing them writes the page.

    `k[layer]` is (kv_heads, tokens, head_dim), `v[layer]` is (kv_heads, tokens, head_dim_v), of
    `dtype.storage`. `scales` is (layers, 2, kv_heads, tokens) float32 for int8, else None.
    """

    tokens: int
    k: np.ndarray[tuple[int, int, int, int], np.dtype[np.generic]]
    v: np.ndarray[tuple[int, int, int, int], np.dtype[np.generic]]
    scales: np.ndarray[tuple[int, int, int, int], np.dtype[np.float32]] | None


def page_view(geometry: KvGeometry, page: Buffer, tokens: int | None = None) -> PageView:
    """Return typed windows into `page`, which holds `tokens` tokens (default: a full page).

    `page` may be longer (slot padding is ignored). Nothing is copied.
    """
    count = geometry.block_tokens if tokens is None else tokens
    content = as_bytes(page)[: count * geometry.token_bytes]
    assert content.size == count * geometry.token_bytes, "page shorter than its tokens"
    layers, heads, item = geometry.layers, geometry.kv_heads, geometry.dtype.itemsize
    scales = None
    scale_total = count * geometry.scale_bytes
    if geometry.dtype.has_scales:
        scales = content[:scale_total].view("<f4").reshape(layers, 2, heads, count)
    rows = content[scale_total:].view(geometry.dtype.storage).reshape(layers, -1)
    split = heads * count * geometry.head_dim
    assert rows.shape[1] * item * layers + scale_total == content.size
    k = rows[:, :split].reshape(layers, heads, count, geometry.head_dim)
    v = rows[:, split:].reshape(layers, heads, count, geometry.head_dim_v)
    return PageView(tokens=count, k=k, v=v, scales=scales)


def pack_slots(geometry: KvGeometry, page: Buffer, first_slot: int, tokens: int) -> ByteArray:
    """Return the content of slots [first_slot, first_slot + tokens) of a full page, packed.

    The result is (tokens x token_bytes) bytes in layout order, without padding. A whole page is
    returned as a view, anything less as a copy.
    """
    _assert_slots(geometry, first_slot, tokens)
    if tokens == geometry.block_tokens:
        return as_bytes(page)[: geometry.page_bytes]
    packed = np.empty(tokens * geometry.token_bytes, dtype=np.uint8)
    copy_slots(page_view(geometry, page), first_slot, page_view(geometry, packed, tokens), 0)
    return packed


def unpack_slots(
    geometry: KvGeometry, packed: Buffer, page: ByteArray, first_slot: int, tokens: int
) -> None:
    """Write packed content of `tokens` tokens into slots [first_slot, ...) of the full page `page`.

    Bytes of other slots are not touched.
    """
    _assert_slots(geometry, first_slot, tokens)
    source = page_view(geometry, packed, tokens)
    copy_slots(source, 0, page_view(geometry, page), first_slot, tokens)


def copy_slots(
    source: PageView,
    source_slot: int,
    target: PageView,
    target_slot: int,
    tokens: int | None = None,
) -> None:
    """Copy `tokens` slots (default: as many as the target holds) between two page views."""
    count = target.tokens if tokens is None else tokens
    taken = slice(source_slot, source_slot + count)
    given = slice(target_slot, target_slot + count)
    target.k[:, :, given] = source.k[:, :, taken]
    target.v[:, :, given] = source.v[:, :, taken]
    if target.scales is not None:
        assert source.scales is not None
        target.scales[:, :, :, given] = source.scales[:, :, :, taken]


def slot_content(geometry: KvGeometry, page: Buffer, slot: int) -> ByteArray:
    """Return one token's content in layout order (int8: scales first): what a slot CRC covers."""
    return pack_slots(geometry, page, slot, 1)


def slot_crc(geometry: KvGeometry, page: Buffer, slot: int) -> int:
    """Return the CRC-32C of one token slot's content."""
    return crc32c(slot_content(geometry, page, slot))


def slot_crcs(geometry: KvGeometry, page: Buffer, first_slot: int, tokens: int) -> tuple[int, ...]:
    """Return the CRC-32C of each of `tokens` slots from `first_slot` on."""
    return tuple(slot_crc(geometry, page, first_slot + index) for index in range(tokens))


def page_crc(geometry: KvGeometry, page: Buffer) -> int:
    """Return the CRC-32C of a full page's content, without the slot's padding."""
    return crc32c(as_bytes(page)[: geometry.page_bytes])


def _assert_slots(geometry: KvGeometry, first_slot: int, tokens: int) -> None:
    assert first_slot >= 0, first_slot
    assert 1 <= tokens <= geometry.block_tokens - first_slot, "slots outside the page"

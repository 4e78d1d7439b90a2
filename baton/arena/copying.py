"""Copying KV and taking its CRC-32C in one pass over the bytes.

Owns the choice between the native library (`native/copy/`) and Python, which give the same results:
without a compiler, or without cffi, Python serves in two passes over pieces that stay in the cache.
The native calls let other threads run. Never decides where anything goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from baton.engine.native_library import open_library
from baton.engine.step_kernel_build import COPY
from baton.kv.crc import Buffer, as_bytes, crc32c, extend_crc32c
from baton.kv.layout import SCALE_BYTES, KvGeometry, slot_crcs

ABI_VERSION: Final = 2
DECLARATIONS: Final = """
uint32_t bc_abi_version(void);
uint32_t bc_crc32c(uint32_t crc, const uint8_t* data, uint64_t size);
uint32_t bc_copy_crc32c(uint32_t crc, uint8_t* target, const uint8_t* source, uint64_t size);
int32_t bc_scatter(uint8_t* target, uint64_t target_bytes, const uint64_t* offsets, uint64_t count,
                   const uint8_t* source, uint64_t source_bytes, uint64_t piece_bytes,
                   uint32_t* crcs);
int32_t bc_crc32c_at(const uint8_t* data, uint64_t data_bytes, const uint64_t* offsets,
                     uint64_t count, uint64_t piece_bytes, uint32_t* crcs);
int32_t bc_slot_crcs(const uint8_t* page, uint64_t page_bytes, uint64_t block_tokens,
                     const uint64_t* rows, const uint64_t* row_bytes,
                     uint64_t group_count, uint64_t first_slot, uint64_t count,
                     uint32_t* crcs);
"""

_PIECE_BYTES: Final = 256 << 10

Offsets = Sequence[int] | npt.NDArray[np.uint64]


@cache
def opened_library() -> tuple[Any, Any] | None:
    """(ffi, library); None where it was not built, is another version's, or cffi is missing."""
    return open_library(COPY.file, DECLARATIONS, "bc_abi_version", ABI_VERSION)


def is_native() -> bool:
    """Whether the native library serves."""
    return opened_library() is not None


def checksum(buffer: Buffer, crc: int = 0) -> int:
    """The CRC-32C of (what `crc` was computed over) followed by `buffer`; other threads run
    meanwhile.
    """
    loaded = opened_library()
    if loaded is None:
        return extend_crc32c(crc, buffer)
    ffi, native = loaded
    content = as_bytes(buffer)
    return int(native.bc_crc32c(crc, ffi.from_buffer("uint8_t[]", content), content.size))


def copy_crc32c(target: Buffer, source: Buffer, crc: int = 0) -> int:
    """Copies `source` into `target`, which is as long; returns `crc` continued over the bytes.

    The two must not overlap.
    """
    loaded = opened_library()
    if loaded is None:
        return copy_in_python(target, source, crc)
    ffi, native = loaded
    into, content = as_bytes(target), as_bytes(source)
    assert into.size == content.size, (into.size, content.size)
    return int(
        native.bc_copy_crc32c(
            crc,
            ffi.from_buffer("uint8_t[]", into, require_writable=True),
            ffi.from_buffer("uint8_t[]", content),
            content.size,
        )
    )


def copy_in_python(target: Buffer, source: Buffer, crc: int = 0) -> int:
    """As `copy_crc32c`, in pieces."""
    into, content = as_bytes(target), as_bytes(source)
    assert into.size == content.size, (into.size, content.size)
    for start in range(0, content.size, _PIECE_BYTES):
        piece = content[start : start + _PIECE_BYTES]
        crc = extend_crc32c(crc, piece)
        into[start : start + piece.size] = piece
    return crc


def scatter(target: Buffer, offsets: Offsets, source: Buffer, piece_bytes: int) -> list[int]:
    """Cuts `source` into pieces, the last perhaps shorter, and copies piece i to byte `offsets[i]`
    of `target`; returns each piece's CRC-32C.

    IndexError for a place outside the target; then nothing was copied.
    """
    into, content = as_bytes(target), as_bytes(source)
    count = -(-content.size // piece_bytes)
    assert len(offsets) == count, (len(offsets), count)
    loaded = opened_library()
    if loaded is None:
        return _scatter_in_python(into, offsets, content, piece_bytes)
    ffi, native = loaded
    places = np.asarray(offsets, dtype=np.uint64)
    crcs = np.empty(count, dtype=np.uint32)
    status = native.bc_scatter(
        ffi.from_buffer("uint8_t[]", into, require_writable=True),
        into.size,
        ffi.from_buffer("uint64_t[]", places),
        count,
        ffi.from_buffer("uint8_t[]", content),
        content.size,
        piece_bytes,
        ffi.from_buffer("uint32_t[]", crcs),
    )
    if status:
        raise IndexError(f"a piece lies outside the {into.size} bytes of the target")
    found: list[int] = crcs.tolist()
    return found


def _scatter_in_python(
    into: npt.NDArray[np.uint8],
    offsets: Offsets,
    content: npt.NDArray[np.uint8],
    piece_bytes: int,
) -> list[int]:
    pieces = [content[at : at + piece_bytes] for at in range(0, content.size, piece_bytes)]
    places = [int(offset) for offset in offsets]
    if any(at + piece.size > into.size for at, piece in zip(places, pieces, strict=True)):
        raise IndexError(f"a piece lies outside the {into.size} bytes of the target")
    return [
        copy_in_python(into[at : at + piece.size], piece)
        for at, piece in zip(places, pieces, strict=True)
    ]


def checksums_at(data: Buffer, offsets: Offsets, piece_bytes: int) -> list[int]:
    """The CRC-32C of `piece_bytes` bytes at each of `offsets`; IndexError as `scatter`."""
    content = as_bytes(data)
    loaded = opened_library()
    if loaded is None:
        places = [int(offset) for offset in offsets]
        if any(at + piece_bytes > content.size for at in places):
            raise IndexError(f"a place lies outside the {content.size} bytes")
        return [crc32c(content[at : at + piece_bytes]) for at in places]
    ffi, native = loaded
    numbers = np.asarray(offsets, dtype=np.uint64)
    crcs = np.empty(len(numbers), dtype=np.uint32)
    status = native.bc_crc32c_at(
        ffi.from_buffer("uint8_t[]", content),
        content.size,
        ffi.from_buffer("uint64_t[]", numbers),
        len(numbers),
        piece_bytes,
        ffi.from_buffer("uint32_t[]", crcs),
    )
    if status:
        raise IndexError(f"a place lies outside the {content.size} bytes")
    found: list[int] = crcs.tolist()
    return found


def slot_checksums(
    geometry: KvGeometry, page: Buffer, first_slot: int, tokens: int
) -> tuple[int, ...]:
    """As `baton.kv.layout.slot_crcs`: the CRC-32C of each of `tokens` slots from `first_slot`."""
    loaded = opened_library()
    if loaded is None or not tokens:
        return slot_crcs(geometry, page, first_slot, tokens)
    assert first_slot >= 0, first_slot
    assert tokens <= geometry.block_tokens - first_slot, "slots outside the page"
    ffi, native = loaded
    content, (rows, row_bytes) = as_bytes(page), _groups(geometry)
    assert content.size >= geometry.page_bytes, "page shorter than its tokens"
    crcs = np.empty(tokens, dtype=np.uint32)
    status = native.bc_slot_crcs(
        ffi.from_buffer("uint8_t[]", content),
        geometry.page_bytes,
        geometry.block_tokens,
        ffi.from_buffer("uint64_t[]", rows),
        ffi.from_buffer("uint64_t[]", row_bytes),
        len(rows),
        first_slot,
        tokens,
        ffi.from_buffer("uint32_t[]", crcs),
    )
    assert status == 0, status
    return tuple(crcs.tolist())


@lru_cache(maxsize=64)
def _groups(geometry: KvGeometry) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """What a page is made of, in order: rows, and the bytes of one slot in each of them."""
    heads, item = geometry.kv_heads, geometry.dtype.itemsize
    groups = [(geometry.layers * 2 * heads, SCALE_BYTES)] if geometry.dtype.has_scales else []
    if geometry.head_dim == geometry.head_dim_v:
        groups.append((geometry.layers * 2 * heads, geometry.head_dim * item))
    else:
        layer = [(heads, geometry.head_dim * item), (heads, geometry.head_dim_v * item)]
        groups += layer * geometry.layers
    rows, row_bytes = zip(*groups, strict=True)
    return np.array(rows, dtype=np.uint64), np.array(row_bytes, dtype=np.uint64)

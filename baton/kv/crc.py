"""CRC-32C (Castagnoli) of buffers, without copying them, and the mask for stored header CRCs.

Owns the checksum arithmetic of pages, slots, blobs and records. Never does I/O, never copies a
buffer: `google_crc32c` refuses a memoryview, so buffers reach it as a numpy view.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

import google_crc32c
import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap.mmap | npt.NDArray[Any]
"""Anything contiguous that the KV code reads bytes from."""

ByteArray: TypeAlias = npt.NDArray[np.uint8]
"""A one-dimensional array of bytes."""

_MASK_DELTA: Final = 0xA282EAD8
_U32: Final = 0xFFFFFFFF
_POLYNOMIAL: Final = 0x82F63B78
_ONE: Final = 1 << 31
_X: Final = 1 << 30


def as_bytes(buffer: Buffer) -> ByteArray:
    """View a contiguous `buffer` as an array of bytes; nothing is copied."""
    return np.frombuffer(buffer, dtype=np.uint8)


def crc32c(buffer: Buffer) -> int:
    """Return the CRC-32C of a contiguous buffer; the CRC of nothing is 0."""
    # `bytes` need no view; records are checked by the thousand.
    return int(google_crc32c.value(buffer if type(buffer) is bytes else as_bytes(buffer)))


def extend_crc32c(crc: int, buffer: Buffer) -> int:
    """Return the CRC-32C of (what `crc` was computed over) followed by `buffer`."""
    return int(google_crc32c.extend(crc, as_bytes(buffer)))


def combine_crc32c(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32C of two buffers one after the other, from that of each.

    `second_bytes` is the length of the second; neither is read again.
    """
    return _product(_power_of_x(8 * second_bytes), first) ^ second


@lru_cache(maxsize=1024)
def _power_of_x(exponent: int) -> int:
    """x to the `exponent` modulo the CRC's polynomial, bits reflected."""
    result, base = _ONE, _X
    while exponent:
        if exponent & 1:
            result = _product(base, result)
        base = _product(base, base)
        exponent >>= 1
    return result


def _product(one: int, other: int) -> int:
    """The product of two polynomials modulo the CRC's, bits reflected."""
    total, bit = 0, _ONE
    while one:
        if one & bit:
            total ^= other
            one ^= bit
        other = (other >> 1) ^ (_POLYNOMIAL if other & 1 else 0)
        bit >>= 1
    return total


def mask_crc(crc: int) -> int:
    """Mask a CRC that is stored beside the bytes it covers: rotate right by 15, add a constant.

    A CRC taken over bytes that hold their own CRC is weak; masked, such bytes are ordinary again.
    """
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & _U32


def unmask_crc(masked: int) -> int:
    """Undo `mask_crc`."""
    rotated = (masked - _MASK_DELTA) & _U32
    return ((rotated >> 17) | (rotated << 15)) & _U32


def slot_list_crc(slot_crcs: Sequence[int]) -> int:
    """Return the one CRC that stands for a partial page: CRC-32C over its slots' CRCs as u32 LE."""
    return crc32c(struct.pack(f"<{len(slot_crcs)}I", *slot_crcs))

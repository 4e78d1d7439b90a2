"""CRC-32C against an implementation from its definition; the size formula."""

from __future__ import annotations

import mmap
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv import sizing
from baton.kv.crc import as_bytes, crc32c, extend_crc32c, mask_crc, slot_list_crc, unmask_crc
from baton.kv.layout import KvDtype, KvGeometry


def crc32c_by_bits(data: bytes) -> int:
    """The definition: reflected polynomial 0x82F63B78, start and end inverted."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@given(st.binary(max_size=200), st.binary(max_size=50))
def test_crc_is_castagnoli(data: bytes, more: bytes) -> None:
    """Another language finds the same value from the polynomial alone."""
    assert crc32c(data) == crc32c_by_bits(data)
    assert extend_crc32c(crc32c(data), more) == crc32c_by_bits(data + more)


def test_crc_accepts_every_buffer_kind() -> None:
    """The arena is an mmap, messages are bytes, pages are arrays: none may need a copy."""
    data = b"123456789"
    mapped = mmap.mmap(-1, 4096)
    mapped[:9] = data
    buffers = (data, bytearray(data), memoryview(data), np.frombuffer(data, np.uint8))
    assert {crc32c(item) for item in buffers} == {0xE3069283}
    assert crc32c(memoryview(mapped)[:9]) == 0xE3069283
    view = as_bytes(bytearray(data))
    assert np.shares_memory(view, as_bytes(view))


@given(st.integers(0, 0xFFFFFFFF))
def test_mask_is_a_bijection(crc: int) -> None:
    """A masked CRC loses nothing."""
    assert unmask_crc(mask_crc(crc)) == crc
    rotated = ((crc >> 15) | (crc << 17)) & 0xFFFFFFFF
    assert mask_crc(crc) == (rotated + 0xA282EAD8) % (1 << 32)


def test_slot_list_crc_is_over_little_endian_values() -> None:
    """The stand-in CRC of a partial page."""
    assert slot_list_crc([1, 2]) == crc32c(struct.pack("<II", 1, 2))


def test_kv_bytes_formula() -> None:
    """2 x layers x kv_heads x head_dim x tokens x element bytes."""
    smol = {"layers": 30, "kv_heads": 3, "head_dim": 64}
    assert sizing.kv_bytes(**smol, tokens=1, element_bytes=2) == 23040
    assert sizing.kv_bytes(**smol, tokens=8192, element_bytes=2) == 188_743_680


@pytest.mark.parametrize(
    ("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (1500, 94)]
)
def test_pages_for(tokens: int, pages: int) -> None:
    """Exactly one block, one more and one less."""
    assert sizing.pages_for(tokens, 16) == pages


def test_pages_touched_and_arena_bytes() -> None:
    """A range inside one block touches one page; an arena holds whole slots."""
    geometry = KvGeometry(
        layers=30, kv_heads=3, head_dim=64, head_dim_v=64, block_tokens=16, dtype=KvDtype.BF16
    )
    assert sizing.pages_touched(5, 5, 16) == 0
    assert sizing.pages_touched(5, 16, 16) == 1
    assert sizing.pages_touched(5, 17, 16) == 2
    assert sizing.pages_touched(16, 32, 16) == 1
    assert sizing.content_bytes(geometry, 3) == 69120
    assert sizing.arena_bytes(geometry, 17) == 2 * geometry.slot_bytes
    assert sizing.tokens_in(geometry, 3 * geometry.slot_bytes - 1) == 32

"""The golden int8 page, read from docs/formats.md alone: scales, elements, checksums."""

from __future__ import annotations

import struct
from pathlib import Path

from baton.kv import blob
from baton.kv.crc import crc32c
from baton.kv.layout import page_crc, slot_crc

ROOT = Path(__file__).parents[3]
FORMATS = ROOT / "docs" / "formats.md"
BLOB = ROOT / "tests" / "data" / "kv" / "blob_int8.bin"
# The example's shape: layers, KV heads, dimensions of K and V, tokens of a page.
LAYERS, HEADS, DIM_K, DIM_V, TOKENS = 2, 2, 4, 6, 8
SLOT = 3


def full_page() -> bytes:
    """Block 1, positions 8 to 15: behind the header and a partial page of three tokens."""
    token_bytes = LAYERS * HEADS * (DIM_K + DIM_V) + LAYERS * 2 * HEADS * 4
    start = 128 + 3 * token_bytes
    return BLOB.read_bytes()[start : start + TOKENS * token_bytes]


def slot_of(page: bytes) -> bytes:
    """The packed content of one slot: its scales, then its rows, by the formulas."""
    scales, rows = b"", b""
    elements = TOKENS * LAYERS * 2 * HEADS * 4
    for layer in range(LAYERS):
        for part, dim in ((0, DIM_K), (1, DIM_V)):
            for head in range(HEADS):
                at = (((layer * 2 + part) * HEADS + head) * TOKENS + SLOT) * 4
                scales += page[at : at + 4]
                base = elements + layer * HEADS * TOKENS * (DIM_K + DIM_V)
                base += part * HEADS * TOKENS * DIM_K
                begin = base + (head * TOKENS + SLOT) * dim
                rows += page[begin : begin + dim]
    return scales + rows


def test_the_document_quotes_the_checksums_of_an_int8_page() -> None:
    """What a reader in another language tests itself with; a slot's covers its scales first."""
    page, text = full_page(), FORMATS.read_text("utf-8")
    decoded = blob.decode_blob(BLOB.read_bytes())
    geometry, parsed = decoded.header.geometry, list(decoded.pages)[1]
    assert crc32c(page) == page_crc(geometry, parsed)
    assert crc32c(slot_of(page)) == slot_crc(geometry, parsed, SLOT)
    for crc in (crc32c(page), crc32c(slot_of(page))):
        assert f"of the int8 example = `{crc:08x}`" in text


def test_values_are_elements_times_their_tokens_scale() -> None:
    """Each within half a step of the example's formula."""
    slot = slot_of(full_page())
    scales = struct.unpack(f"<{LAYERS * 2 * HEADS}f", slot[: LAYERS * 2 * HEADS * 4])
    rows, row = slot[LAYERS * 2 * HEADS * 4 :], 0
    for layer in range(LAYERS):
        for part, dim in ((0, DIM_K), (1, DIM_V)):
            for head in range(HEADS):
                scale = scales[row]
                for index in range(dim):
                    exact = (((layer * 2 + part) * 31 + head * 17 + 11 * 7 + index * 3) % 61) - 30
                    found = struct.unpack_from("b", rows, index)[0] * scale
                    assert abs(found - exact / 8) <= scale / 2 * 1.001
                rows, row = rows[dim:], row + 1

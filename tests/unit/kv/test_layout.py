"""The page layout: offsets, packing and slots agree with one another for any geometry."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import Reason, ServiceError
from baton.kv.crc import crc32c
from baton.kv.layout import (
    KvDtype,
    KvGeometry,
    Part,
    pack_slots,
    page_crc,
    page_spans,
    page_view,
    slot_content,
    slot_crc,
    slot_crcs,
    unpack_slots,
)


@st.composite
def geometries(draw: st.DrawFn) -> KvGeometry:
    return KvGeometry(
        layers=draw(st.integers(1, 3)),
        kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 6)),
        head_dim_v=draw(st.integers(1, 6)),
        block_tokens=draw(st.integers(8, 20)),
        dtype=draw(st.sampled_from(list(KvDtype))),
    )


def random_page(geometry: KvGeometry, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, geometry.slot_bytes, dtype=np.uint8)


SMOL = KvGeometry(
    layers=30, kv_heads=3, head_dim=64, head_dim_v=64, block_tokens=16, dtype=KvDtype.BF16
)


def test_bundled_model_takes_23040_bytes_per_token() -> None:
    """The number the documents promise for SmolLM2 in bf16."""
    assert SMOL.token_bytes == 23040
    assert SMOL.page_bytes == 16 * 23040
    assert SMOL.slot_bytes == SMOL.page_bytes  # 368,640 is 90 x 4 KiB


def test_page_slot_is_rounded_up_to_4_kib() -> None:
    """Direct I/O needs it; the wire never sees it."""
    geometry = KvGeometry(
        layers=1, kv_heads=1, head_dim=1, head_dim_v=1, block_tokens=8, dtype=KvDtype.F32
    )
    assert geometry.page_bytes == 64
    assert geometry.slot_bytes == 4096


def test_int8_scales_stand_at_the_head_of_the_page() -> None:
    """One float32 for each (layer, K/V, head, token), before any element."""
    geometry = KvGeometry(
        layers=2, kv_heads=3, head_dim=4, head_dim_v=5, block_tokens=8, dtype=KvDtype.INT8
    )
    assert geometry.scale_offset(0, Part.K, 0, 0) == 0
    assert geometry.scale_offset(1, Part.V, 2, 7) == (2 * 2 * 3 * 8 - 1) * 4
    assert geometry.data_offset(0, Part.K, 0, 0) == 2 * 2 * 3 * 8 * 4
    assert geometry.token_bytes == 2 * 3 * (4 + 5) + 2 * 2 * 3 * 4


@pytest.mark.parametrize(
    ("field", "value"),
    [("layers", 0), ("kv_heads", 65536), ("head_dim", -1), ("block_tokens", 7)],
)
def test_geometry_out_of_range_is_refused_naming_the_field(field: str, value: int) -> None:
    """A geometry may come from a peer: it must never reach an allocation."""
    shape = {"layers": 1, "kv_heads": 1, "head_dim": 1, "head_dim_v": 1, "block_tokens": 8}
    with pytest.raises(ServiceError) as caught:
        KvGeometry(**{**shape, field: value}, dtype=KvDtype.F16)
    assert caught.value.reason is Reason.INVALID_REQUEST
    assert caught.value.field == field


@settings(max_examples=60, deadline=None)
@given(geometry=geometries(), seed=st.integers(0, 1000), data=st.data())
def test_offsets_and_views_name_the_same_bytes(
    geometry: KvGeometry, seed: int, data: st.DataObject
) -> None:
    """The scalar formula is what other languages implement; the views are what we use."""
    page = random_page(geometry, seed)
    view = page_view(geometry, page)
    layer = data.draw(st.integers(0, geometry.layers - 1))
    head = data.draw(st.integers(0, geometry.kv_heads - 1))
    token = data.draw(st.integers(0, geometry.block_tokens - 1))
    part = data.draw(st.sampled_from(list(Part)))
    row = (view.k if part is Part.K else view.v)[layer, head, token]
    offset = geometry.data_offset(layer, part, head, token)
    assert page[offset : offset + row.nbytes].tobytes() == row.tobytes()
    if view.scales is not None:
        at = geometry.scale_offset(layer, part, head, token)
        assert page[at : at + 4].tobytes() == view.scales[layer, int(part), head, token].tobytes()


@settings(max_examples=60, deadline=None)
@given(geometry=geometries(), seed=st.integers(0, 1000), data=st.data())
def test_packed_slots_survive_a_round_trip_and_touch_no_other(
    geometry: KvGeometry, seed: int, data: st.DataObject
) -> None:
    """Each slot is written once: unpacking must not rewrite acknowledged neighbours."""
    first = data.draw(st.integers(0, geometry.block_tokens - 1))
    tokens = data.draw(st.integers(1, geometry.block_tokens - first))
    page, other = random_page(geometry, seed), random_page(geometry, seed + 1)
    packed = pack_slots(geometry, page, first, tokens)
    assert packed.size == tokens * geometry.token_bytes
    target = other.copy()
    unpack_slots(geometry, packed, target, first, tokens)
    for slot in range(geometry.block_tokens):
        source = page if first <= slot < first + tokens else other
        expected = slot_content(geometry, source, slot).tobytes()
        assert slot_content(geometry, target, slot).tobytes() == expected
    assert target[geometry.page_bytes :].tobytes() == other[geometry.page_bytes :].tobytes()


@settings(max_examples=40, deadline=None)
@given(geometry=geometries(), seed=st.integers(0, 1000))
def test_slot_crcs_see_exactly_their_slot(geometry: KvGeometry, seed: int) -> None:
    """A flipped byte of the page's content changes exactly one slot's CRC; padding changes none."""
    page = random_page(geometry, seed)
    before = slot_crcs(geometry, page, 0, geometry.block_tokens)
    whole = page_crc(geometry, page)
    rng = np.random.default_rng(seed)
    page[int(rng.integers(0, geometry.page_bytes))] ^= 1 << int(rng.integers(0, 8))
    after = slot_crcs(geometry, page, 0, geometry.block_tokens)
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 1
    assert page_crc(geometry, page) != whole
    if geometry.slot_bytes > geometry.page_bytes:
        changed = page_crc(geometry, page)
        page[geometry.page_bytes :] ^= 0xFF
        assert page_crc(geometry, page) == changed
        assert slot_crcs(geometry, page, 0, geometry.block_tokens) == after


def test_slot_crc_is_over_the_content_in_layout_order() -> None:
    """The rule of docs/formats.md, spelt with offsets only."""
    geometry = KvGeometry(
        layers=2, kv_heads=2, head_dim=3, head_dim_v=2, block_tokens=8, dtype=KvDtype.INT8
    )
    page = random_page(geometry, 5)
    content = b""
    for offset_of, size_of in (
        (geometry.scale_offset, lambda part: 4),
        (geometry.data_offset, geometry.dims_of),
    ):
        for layer in range(2):
            for part in Part:
                for head in range(2):
                    at = offset_of(layer, part, head, 6)
                    content += page[at : at + size_of(part)].tobytes()
    assert slot_crc(geometry, page, 6) == crc32c(content)


@settings(max_examples=100, deadline=None)
@given(block_tokens=st.integers(8, 64), first=st.integers(0, 300), total=st.integers(0, 300))
def test_spans_cover_a_range_without_gap_and_cut_at_multiples(
    block_tokens: int, first: int, total: int
) -> None:
    """Pages are cut at absolute multiples, wherever a range begins."""
    position = first
    for span in page_spans(block_tokens, first, total):
        assert span.first_position(block_tokens) == position
        assert 1 <= span.tokens <= block_tokens - span.first_slot
        position += span.tokens
        assert position == first + total or position % block_tokens == 0
    assert position == first + total

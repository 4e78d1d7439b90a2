"""Conversion: re-paging and slicing change no value, casts round as IEEE says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import Reason, ServiceError
from baton.kv import convert
from baton.kv.layout import KvDtype, KvGeometry, page_spans


def random_arrays(dtype: KvDtype, tokens: int, seed: int = 0) -> convert.KvArrays:
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((3, 2, tokens, 4), dtype=np.float32)
    v = rng.standard_normal((3, 2, tokens, 6), dtype=np.float32)
    return convert.cast(convert.KvArrays(dtype=KvDtype.F32, k=k, v=v), dtype)


def assert_same(one: convert.KvArrays, other: convert.KvArrays) -> None:
    assert one.dtype is other.dtype
    assert one.k.tobytes() == other.k.tobytes()
    assert one.v.tobytes() == other.v.tobytes()
    if one.scales is not None:
        assert other.scales is not None
        assert one.scales.tobytes() == other.scales.tobytes()


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(list(KvDtype)),
    first=st.integers(0, 40),
    tokens=st.integers(1, 40),
    blocks=st.tuples(st.integers(8, 20), st.integers(8, 20)),
)
def test_repaging_there_and_back_changes_no_byte(
    dtype: KvDtype, first: int, tokens: int, blocks: tuple[int, int]
) -> None:
    """Any block_tokens to any other, from any first position."""
    arrays = random_arrays(dtype, tokens)
    one, two = blocks
    pages = convert.scatter(arrays, one, first)
    moved = convert.repage(arrays.geometry(one), first, tokens, pages, two)
    assert len(moved) == len(list(page_spans(two, first, tokens)))
    assert_same(convert.gather(arrays.geometry(two), first, tokens, moved), arrays)
    back = convert.repage(arrays.geometry(two), first, tokens, moved, one)
    assert [page.tobytes() for page in back] == [page.tobytes() for page in pages]


@pytest.mark.parametrize("dtype", list(KvDtype))
def test_layer_and_head_ranges_join_again(dtype: KvDtype) -> None:
    """Sharding and unsharding is lossless, scales included."""
    arrays = random_arrays(dtype, 11)
    layers = [convert.take_layers(arrays, 0, 1), convert.take_layers(arrays, 1, 2)]
    assert_same(convert.join_layers(layers), arrays)
    heads = [convert.take_heads(arrays, 0, 1), convert.take_heads(arrays, 1, 1)]
    assert_same(convert.join_heads(heads), arrays)


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 0), (0, 4), (3, 1), (2, 2)])
def test_range_outside_is_refused(first: int, count: int) -> None:
    """numpy would silently give fewer layers."""
    with pytest.raises(ServiceError) as caught:
        convert.take_layers(random_arrays(KvDtype.F16, 3), first, count)
    assert caught.value.field == "layers"


def test_parts_that_do_not_fit_are_refused() -> None:
    """Another dtype or token count cannot stand beside."""
    arrays = random_arrays(KvDtype.F16, 3)
    for other in (random_arrays(KvDtype.BF16, 3), random_arrays(KvDtype.F16, 4)):
        with pytest.raises(ServiceError) as caught:
            convert.join_heads([arrays, other])
        assert caught.value.field == "kv_heads"


def test_every_bf16_value_survives_f32() -> None:
    """All 65,536 bit patterns; NaN stays NaN."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = convert.bf16_to_f32(bits)
    back = convert.f32_to_bf16(wide)
    is_nan = np.isnan(wide)
    assert np.array_equal(back[~is_nan], bits[~is_nan])
    assert np.isnan(convert.bf16_to_f32(back)[is_nan]).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=30))
def test_bf16_rounds_as_torch_does(values: list[float]) -> None:
    """To nearest even, ties and subnormals included."""
    data = np.array(values, dtype=np.float32)
    ties = (data.view(np.uint32) & np.uint32(0xFFFF0000) | np.uint32(0x8000)).view(np.float32)
    for sample in (data, ties[np.isfinite(ties)]):
        expected = torch.from_numpy(sample.copy()).to(torch.bfloat16).view(torch.int16).numpy()
        assert np.array_equal(convert.f32_to_bf16(sample).view(np.int16), expected)


@pytest.mark.parametrize("narrow", [KvDtype.F16, KvDtype.BF16])
def test_narrow_types_survive_f32(narrow: KvDtype) -> None:
    """Widening is exact, so there and back is the identity."""
    arrays = random_arrays(narrow, 9)
    assert_same(convert.cast(convert.cast(arrays, KvDtype.F32), narrow), arrays)


def test_bf16_to_f16_rounds_once() -> None:
    """Through float32, which holds both exactly."""
    arrays = random_arrays(KvDtype.BF16, 9)
    half = convert.cast(arrays, KvDtype.F16)
    expected = convert.bf16_to_f32(arrays.k).astype(np.float16)
    assert half.k.tobytes() == expected.tobytes()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.floats(1e-20, 1e20))
def test_int8_error_is_at_most_half_a_step(seed: int, size: float) -> None:
    """One scale per token, head, layer and half: error <= scale / 2, plus float32 rounding."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((3, 5, 16)) * size).astype(np.float32)
    quantised, scales = convert.quantise(values)
    restored = convert.dequantise(quantised, scales)
    assert (np.abs(restored - values) <= scales[..., None] * 0.5001).all()
    again, same_scales = convert.quantise(restored)
    assert np.array_equal(again, quantised)
    assert np.allclose(same_scales, scales, rtol=1e-6)


def test_int8_of_zero_and_tiny_rows_is_zero() -> None:
    """No division by zero, no NaN."""
    rows = np.array([[0.0] * 4, [1e-45] * 4], dtype=np.float32)
    quantised, scales = convert.quantise(rows)
    assert quantised.tolist() == [[0] * 4] * 2
    assert scales.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_int8_refuses_what_it_cannot_hold(value: float) -> None:
    """A silent infinity would become a wrong token."""
    arrays = convert.KvArrays(
        dtype=KvDtype.F32,
        k=np.full((1, 1, 1, 2), value, np.float32),
        v=np.zeros((1, 1, 1, 2), np.float32),
    )
    with pytest.raises(ServiceError) as caught:
        convert.cast(arrays, KvDtype.INT8)
    assert caught.value.reason is Reason.UNSUPPORTED


@pytest.mark.parametrize(("dtype", "value"), [(KvDtype.F16, 7e4), (KvDtype.BF16, 3.4e38)])
def test_overflow_of_a_cast_is_refused(dtype: KvDtype, value: float) -> None:
    """Finite in, infinite out is refused; infinite in is kept."""
    arrays = convert.KvArrays(
        dtype=KvDtype.F32,
        k=np.full((1, 1, 1, 2), value, np.float32),
        v=np.zeros((1, 1, 1, 2), np.float32),
    )
    with pytest.raises(ServiceError) as caught:
        convert.cast(arrays, dtype)
    assert caught.value.field == "dtype"
    infinite = convert.KvArrays(dtype=KvDtype.F32, k=arrays.k * np.float32("inf"), v=arrays.v)
    kept, _ = convert.to_f32(convert.cast(infinite, dtype))
    assert np.isinf(kept).all()


def test_convert_pages_casts_and_repages_but_does_not_reshape() -> None:
    """An import that asked to convert; another shape is refused naming the field."""
    arrays = random_arrays(KvDtype.F32, 21)
    source = arrays.geometry(8)
    target = KvGeometry(
        layers=3, kv_heads=2, head_dim=4, head_dim_v=6, block_tokens=16, dtype=KvDtype.BF16
    )
    pages = convert.convert_pages(source, target, 5, 21, convert.scatter(arrays, 8, 5))
    assert_same(convert.gather(target, 5, 21, pages), convert.cast(arrays, KvDtype.BF16))
    other = KvGeometry(
        layers=3, kv_heads=1, head_dim=4, head_dim_v=6, block_tokens=16, dtype=KvDtype.BF16
    )
    with pytest.raises(ServiceError) as caught:
        convert.convert_pages(source, other, 5, 21, convert.scatter(arrays, 8, 5))
    assert caught.value.field == "kv_heads"

"""Conversion of KV between page sizes, layer and head ranges, and element types.

Owns the arithmetic of casts: bf16 by bit manipulation, every narrowing cast rounds to nearest even,
int8 has one scale per (layer, K/V, head, token). Pure numpy. Never decides whether a conversion is
allowed: an import must have asked for it.

Invariant: re-paging and slicing move bytes and change none; only `cast` changes values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from baton.errors import Reason, ServiceError
from baton.kv.crc import Buffer, ByteArray
from baton.kv.layout import KvDtype, KvGeometry, PageView, page_spans, page_view

Elements: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float32]

_INT8_MAX: Final = 127.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvArrays:
    """KV of a token range without pages.

    `k` is (layers, kv_heads, tokens, head_dim) and `v` (layers, kv_heads, tokens, head_dim_v), both
    of `dtype.storage`; `scales` is (layers, 2, kv_heads, tokens) float32 for int8, else None.
    """

    dtype: KvDtype
    k: Elements
    v: Elements
    scales: Floats | None = None

    @property
    def tokens(self) -> int:
        """How many tokens the range has."""
        return int(self.k.shape[2])

    def geometry(self, block_tokens: int) -> KvGeometry:
        """Return the geometry of pages of `block_tokens` that hold these arrays."""
        layers, kv_heads, _, head_dim = self.k.shape
        return KvGeometry(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            head_dim_v=self.v.shape[3],
            block_tokens=block_tokens,
            dtype=self.dtype,
        )


def gather(
    geometry: KvGeometry, first_position: int, total_tokens: int, pages: Sequence[Buffer]
) -> KvArrays:
    """Collect packed pages (one per span of the range, as in a blob) into arrays; copies."""
    spans = list(page_spans(geometry.block_tokens, first_position, total_tokens))
    assert len(spans) == len(pages), f"{len(spans)} spans, {len(pages)} pages"
    views = [
        page_view(geometry, page, span.tokens) for span, page in zip(spans, pages, strict=True)
    ]
    scales = [view.scales for view in views if view.scales is not None]
    return KvArrays(
        dtype=geometry.dtype,
        k=np.concatenate([view.k for view in views], axis=2),
        v=np.concatenate([view.v for view in views], axis=2),
        scales=np.concatenate(scales, axis=3) if scales else None,
    )


def scatter(arrays: KvArrays, block_tokens: int, first_position: int) -> list[ByteArray]:
    """Cut arrays into packed pages at absolute multiples of `block_tokens`."""
    geometry = arrays.geometry(block_tokens)
    pages: list[ByteArray] = []
    start = 0
    for span in page_spans(block_tokens, first_position, arrays.tokens):
        page = np.empty(span.tokens * geometry.token_bytes, dtype=np.uint8)
        _fill(page_view(geometry, page, span.tokens), arrays, start)
        pages.append(page)
        start += span.tokens
    return pages


def _fill(view: PageView, arrays: KvArrays, start: int) -> None:
    taken = slice(start, start + view.tokens)
    view.k[...] = arrays.k[:, :, taken]
    view.v[...] = arrays.v[:, :, taken]
    if view.scales is not None:
        assert arrays.scales is not None, "int8 arrays carry scales"
        view.scales[...] = arrays.scales[:, :, :, taken]


def repage(
    geometry: KvGeometry,
    first_position: int,
    total_tokens: int,
    pages: Sequence[Buffer],
    block_tokens: int,
) -> list[ByteArray]:
    """Cut the same KV into packed pages of another `block_tokens`."""
    return scatter(
        gather(geometry, first_position, total_tokens, pages), block_tokens, first_position
    )


def take_layers(arrays: KvArrays, first: int, count: int) -> KvArrays:
    """Return layers [first, first + count); INVALID_REQUEST for a range outside."""
    _check_range("layers", first, count, arrays.k.shape[0])
    taken = slice(first, first + count)
    return _map(arrays, lambda data: data[taken])


def take_heads(arrays: KvArrays, first: int, count: int) -> KvArrays:
    """Return KV heads [first, first + count) of every layer; INVALID_REQUEST for one outside."""
    _check_range("kv_heads", first, count, arrays.k.shape[1])
    taken = slice(first, first + count)
    return KvArrays(
        dtype=arrays.dtype,
        k=arrays.k[:, taken],
        v=arrays.v[:, taken],
        scales=None if arrays.scales is None else arrays.scales[:, :, taken],
    )


def _check_range(name: str, first: int, count: int, total: int) -> None:
    if not (0 <= first < total and 1 <= count <= total - first):
        raise ServiceError(
            Reason.INVALID_REQUEST,
            f"{name} [{first}, {first + count}) is not inside 0 to {total}",
            field=name,
        )


def _map(arrays: KvArrays, change: Callable[[Elements], Elements]) -> KvArrays:
    scales = None if arrays.scales is None else change(arrays.scales)
    return replace(arrays, k=change(arrays.k), v=change(arrays.v), scales=scales)


def join_layers(parts: Sequence[KvArrays]) -> KvArrays:
    """Stack layer ranges of the same tokens; INVALID_REQUEST where they do not fit together."""
    return _join(parts, axis=0, scale_axis=0, name="layers")


def join_heads(parts: Sequence[KvArrays]) -> KvArrays:
    """Put KV head ranges of the same layers side by side; INVALID_REQUEST where they do not fit."""
    return _join(parts, axis=1, scale_axis=2, name="kv_heads")


def _join(parts: Sequence[KvArrays], *, axis: int, scale_axis: int, name: str) -> KvArrays:
    shapes = {
        (part.dtype, *(size for at, size in enumerate(part.k.shape) if at != axis), part.v.shape[3])
        for part in parts
    }
    if len(shapes) != 1:
        raise ServiceError(
            Reason.INVALID_REQUEST,
            f"{name}: parts differ in dtype, tokens or the other dimensions",
            field=name,
        )
    scales = [part.scales for part in parts if part.scales is not None]
    return KvArrays(
        dtype=parts[0].dtype,
        k=np.concatenate([part.k for part in parts], axis=axis),
        v=np.concatenate([part.v for part in parts], axis=axis),
        scales=np.concatenate(scales, axis=scale_axis) if scales else None,
    )


def bf16_to_f32(bits: npt.NDArray[np.uint16]) -> Floats:
    """Widen bf16 bits to float32; exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """Narrow float32 to bf16 bits, to nearest even; NaN stays NaN, overflow becomes infinity."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    high = (bits >> np.uint32(16)).astype(np.uint16)
    rounded = ((bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> 16).astype(
        np.uint16
    )
    quiet = high | np.uint16(0x0040)
    return np.where(np.isnan(values), quiet, rounded)


def quantise(values: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """Quantise (..., dim) to int8 with one scale per row: scale = max |x| / 127, round to even.

    Returns (int8 of the same shape, scales of shape (...)). A row of zeros has scale 0. Raises
    UNSUPPORTED (field `dtype`) for infinities and NaN.
    """
    peak = np.abs(values).max(axis=-1)
    if not np.isfinite(peak).all():
        raise _unsupported("KV with infinities or NaN cannot become int8")
    scales = (peak / np.float32(_INT8_MAX)).astype(np.float32)
    # A scale that underflowed to 0 would turn the row into a division by zero: store zeros.
    divisor = np.where(scales > 0, scales, np.float32(1))
    steps = np.where(scales[..., None] > 0, values, np.float32(0)) / divisor[..., None]
    clipped = np.clip(np.rint(steps), -_INT8_MAX, _INT8_MAX)
    return clipped.astype(np.int8), scales


def dequantise(values: npt.NDArray[np.int8], scales: Floats) -> Floats:
    """Return int8 (..., dim) times its row's scale (...) as float32."""
    return values.astype(np.float32) * scales[..., None]


def _unsupported(why: str) -> ServiceError:
    return ServiceError(
        Reason.UNSUPPORTED, f"{why}; import it as bf16 or f32 instead", field="dtype"
    )


def to_f32(arrays: KvArrays) -> tuple[Floats, Floats]:
    """Return K and V as float32; exact for every type (int8: value times scale, rounded once)."""
    if arrays.dtype is KvDtype.BF16:
        return bf16_to_f32(arrays.k), bf16_to_f32(arrays.v)
    if arrays.dtype is KvDtype.INT8:
        assert arrays.scales is not None, "int8 arrays carry scales"
        k = dequantise(arrays.k, arrays.scales[:, 0])
        return k, dequantise(arrays.v, arrays.scales[:, 1])
    return arrays.k.astype(np.float32), arrays.v.astype(np.float32)


def cast(arrays: KvArrays, dtype: KvDtype) -> KvArrays:
    """Return the arrays in another element type, rounded once from float32, to nearest even.

    The same type returns the argument. Raises UNSUPPORTED (field `dtype`) where a finite value does
    not fit the target or int8 cannot hold it.
    """
    if dtype is arrays.dtype:
        return arrays
    k, v = to_f32(arrays)
    if dtype is KvDtype.INT8:
        (k8, k_scales), (v8, v_scales) = quantise(k), quantise(v)
        scales = np.stack([k_scales, v_scales], axis=1)
        return KvArrays(dtype=dtype, k=k8, v=v8, scales=scales)
    return KvArrays(dtype=dtype, k=_narrow(k, dtype), v=_narrow(v, dtype))


def _narrow(values: Floats, dtype: KvDtype) -> Elements:
    if dtype is KvDtype.F32:
        return values
    if dtype is KvDtype.BF16:
        narrowed = f32_to_bf16(values)
        is_lost = np.isinf(bf16_to_f32(narrowed)) & np.isfinite(values)
    else:
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        is_lost = np.isinf(half) & np.isfinite(values)
        narrowed = half.view(np.uint16)
    if is_lost.any():
        raise _unsupported(f"KV holds values beyond the range of {dtype.text}")
    return narrowed if dtype is KvDtype.BF16 else narrowed.view(np.float16)


def convert_pages(
    source: KvGeometry,
    target: KvGeometry,
    first_position: int,
    total_tokens: int,
    pages: Sequence[Buffer],
) -> list[ByteArray]:
    """Re-page and cast packed pages of `source` into packed pages of `target`.

    Raises INVALID_REQUEST naming the field where layers, heads or dims differ: ranges of those are
    taken with `take_layers` and `take_heads`. UNSUPPORTED as `cast`.
    """
    for name in ("layers", "kv_heads", "head_dim", "head_dim_v"):
        ours, theirs = getattr(target, name), getattr(source, name)
        if ours != theirs:
            raise ServiceError(
                Reason.INVALID_REQUEST, f"{name} differs: {theirs} to {ours}", field=name
            )
    arrays = gather(source, first_position, total_tokens, pages)
    return scatter(cast(arrays, target.dtype), target.block_tokens, first_position)

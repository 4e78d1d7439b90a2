"""Blobs: round trips, and every kind of damage refused with its reason before any allocation."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import Reason, ServiceError
from baton.kv import blob
from baton.kv.crc import crc32c, mask_crc
from baton.kv.layout import KvDtype, KvGeometry, page_spans

TOKENIZER = b"tokenhsh"


def make_header(geometry: KvGeometry, first: int, total: int) -> blob.BlobHeader:
    return blob.BlobHeader(
        tokenizer_hash=TOKENIZER,
        dtype=geometry.dtype,
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        head_dim_v=geometry.head_dim_v,
        block_tokens=geometry.block_tokens,
        first_position=first,
        total_tokens=total,
        generation=7,
        model_digest=b"m" * 16,
        kv_digest=b"k" * 16,
        log_id=b"l" * 16,
        numeric_class_id=0x01020304,
        layers_total=geometry.layers + 2,
        kv_heads_total=geometry.kv_heads + 1,
        first_layer=1,
        first_kv_head=1,
    )


def make_pages(geometry: KvGeometry, first: int, total: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 256, span.tokens * geometry.token_bytes, dtype=np.uint8)
        for span in page_spans(geometry.block_tokens, first, total)
    ]


def make_blob(payload_offset: int = 128, first: int = 5, total: int = 14) -> bytes:
    geometry = KvGeometry(
        layers=2, kv_heads=1, head_dim=4, head_dim_v=4, block_tokens=8, dtype=KvDtype.BF16
    )
    header = replace(make_header(geometry, first, total), payload_offset=payload_offset)
    pages = make_pages(geometry, first, total)
    _, parts = blob.encode_blob(header, pages, list(range(total)))
    return b"".join(parts)


def rewrite(data: bytes, **fields: int) -> bytes:
    """Change header fields and fix the header's CRC: a liar, not a broken disk."""
    out = bytearray(data)
    formats = {"payload_bytes": "<Q", "total_tokens": "<I", "first_position": "<I", "flags": "<I"}
    formats["payload_offset"] = "<I"
    for name, value in fields.items():
        struct.pack_into(formats.get(name, "<H"), out, blob.FIELD_OFFSETS[name], value)
    struct.pack_into("<I", out, 124, mask_crc(crc32c(bytes(out[:124]))))
    return bytes(out)


@settings(max_examples=50, deadline=None)
@given(
    dtype=st.sampled_from(list(KvDtype)),
    first=st.integers(0, 40),
    total=st.integers(1, 40),
    block_tokens=st.integers(8, 17),
    payload_offset=st.sampled_from([128, 4096]),
)
def test_any_range_survives_a_round_trip(
    dtype: KvDtype, first: int, total: int, block_tokens: int, payload_offset: int
) -> None:
    """Partial first and last pages, every dtype, wire and file."""
    geometry = KvGeometry(
        layers=2, kv_heads=2, head_dim=3, head_dim_v=5, block_tokens=block_tokens, dtype=dtype
    )
    pages = make_pages(geometry, first, total, seed=first)
    ids = [position * 3 for position in range(total)]
    header = replace(make_header(geometry, first, total), payload_offset=payload_offset)
    sealed, parts = blob.encode_blob(header, pages, ids)
    data = b"".join(parts)
    assert len(data) == sealed.blob_bytes
    decoded = blob.decode_blob(data, blob.BlobExpectation(tokenizer_hash=TOKENIZER))
    assert decoded.header == sealed
    assert decoded.token_ids.tolist() == ids
    for given_page, read_page in zip(pages, decoded.pages, strict=True):
        assert given_page.tobytes() == read_page.tobytes()


def test_decoding_copies_no_page() -> None:
    """Pages of a decoded blob are windows into the buffer that arrived."""
    data = np.frombuffer(make_blob(), np.uint8)
    decoded = blob.decode_blob(data)
    assert all(np.shares_memory(data, page) for page in decoded.pages)


def test_every_bit_flip_of_the_header_is_refused() -> None:
    """All 1,024 of them, none taken for another blob."""
    data = make_blob()
    for bit in range(8 * blob.HEADER_BYTES):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ServiceError) as caught:
            blob.decode_header(bytes(flipped), tokenizer_hash=TOKENIZER)
        expected = Reason.CHECKSUM_MISMATCH
        if bit < 32:
            expected = Reason.BLOB_INVALID
        elif bit < 96:
            expected = Reason.TOKENIZER_MISMATCH
        assert caught.value.reason is expected, bit


@pytest.mark.parametrize("payload_offset", [128, 4096])
def test_truncation_at_every_byte_is_blob_invalid(payload_offset: int) -> None:
    """Whatever was cut, the reader says so with the offset where the bytes end."""
    data = make_blob(payload_offset)
    for length in [*range(0, 300), *range(300, len(data), 7), len(data) - 1]:
        with pytest.raises(ServiceError) as caught:
            blob.decode_blob(data[:length])
        assert caught.value.reason is Reason.BLOB_INVALID
        assert caught.value.metadata["offset"] == str(length)
        assert caught.value.metadata["field"] in ("header", "payload")


def test_bytes_after_the_end_are_refused() -> None:
    """A blob is exactly its bytes."""
    with pytest.raises(ServiceError) as caught:
        blob.decode_blob(make_blob() + b"\0")
    assert caught.value.reason is Reason.BLOB_INVALID


def test_every_payload_bit_flip_is_a_checksum_mismatch() -> None:
    """Pages and token ids are covered."""
    data = make_blob(total=3)
    for at in range(128, len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        with pytest.raises(ServiceError) as caught:
            blob.decode_blob(bytes(flipped))
        assert caught.value.reason is Reason.CHECKSUM_MISMATCH
        assert caught.value.field == "payload_crc"


def test_gap_before_a_file_payload_must_be_zero() -> None:
    """Nothing hides between header and payload."""
    data = bytearray(make_blob(4096))
    data[2000] = 1
    with pytest.raises(ServiceError) as caught:
        blob.decode_blob(bytes(data))
    assert caught.value.metadata["field"] == "padding"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"version": 2}, "version"),
        ({"dtype": 5}, "dtype"),
        ({"dtype": 0}, "dtype"),
        ({"flags": 1}, "flags"),
        ({"layout": 2}, "layout"),
        ({"layers": 0}, "layers"),
        ({"layers": 9}, "layers_total"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim_v": 0}, "head_dim_v"),
        ({"block_tokens": 7}, "block_tokens"),
        ({"block_tokens": 65}, "block_tokens"),
        ({"total_tokens": 0}, "total_tokens"),
        ({"total_tokens": 0xFFFFFFFF}, "total_tokens"),
        ({"first_position": 0xFFFFFFFF}, "total_tokens"),
        ({"total_tokens": 15}, "payload_bytes"),
        ({"payload_bytes": 1 << 60}, "payload_bytes"),
        ({"payload_bytes": 0}, "payload_bytes"),
        ({"payload_offset": 129}, "payload_offset"),
        ({"first_layer": 3}, "layers_total"),
        ({"first_kv_head": 2}, "kv_heads_total"),
    ],
)
def test_lying_header_is_refused_before_allocation(fields: dict[str, int], named: str) -> None:
    """The header CRC is right, so only the cross-checks stand between a size and memory."""
    data = rewrite(make_blob(), **fields)
    tracemalloc.start()
    with pytest.raises(ServiceError) as caught:
        blob.decode_blob(data)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.reason is Reason.BLOB_INVALID
    assert caught.value.field == named
    assert caught.value.metadata["offset"] == str(blob.FIELD_OFFSETS[named])
    assert peak_bytes < 1 << 20


def test_sizes_that_agree_but_are_not_present_are_refused_before_allocation() -> None:
    """A consistent header of 60 MB over a few hundred bytes."""
    geometry = KvGeometry(
        layers=30, kv_heads=3, head_dim=64, head_dim_v=64, block_tokens=16, dtype=KvDtype.BF16
    )
    tokens = 2600
    header = replace(
        make_header(geometry, 0, tokens),
        payload_bytes=blob.payload_bytes_for(geometry, tokens),
    )
    tracemalloc.start()
    with pytest.raises(ServiceError) as caught:
        blob.decode_blob(blob.encode_header(header) + bytes(400))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.reason is Reason.BLOB_INVALID
    assert caught.value.metadata == {"field": "payload", "offset": "528"}
    assert peak_bytes < 1 << 20


def test_blob_over_64_mib_is_refused_and_ranges_are_split_to_fit() -> None:
    """The bound holds on both sides: the writer splits, the reader refuses."""
    geometry = KvGeometry(
        layers=30, kv_heads=3, head_dim=64, head_dim_v=64, block_tokens=16, dtype=KvDtype.BF16
    )
    tokens = (64 << 20) // geometry.token_bytes + 16
    header = replace(
        make_header(geometry, 0, tokens), payload_bytes=blob.payload_bytes_for(geometry, tokens)
    )
    with pytest.raises(ServiceError) as caught:
        blob.encode_header(header)
    assert caught.value.field == "payload_bytes"
    ranges = blob.split_range(geometry, 5, 10_000)
    assert ranges[0][0] == 5
    assert ranges[-1][1] == 10_000
    for (first, end), (after, _) in zip(ranges, [*ranges[1:], (10_000, 0)], strict=True):
        assert end == after
        assert end % 16 == 0 or end == 10_000
        assert 4096 + blob.payload_bytes_for(geometry, end - first) <= 64 << 20


def test_one_page_over_the_bound_is_refused() -> None:
    """There is no way to cut it at a page boundary."""
    geometry = KvGeometry(
        layers=200, kv_heads=64, head_dim=256, head_dim_v=256, block_tokens=64, dtype=KvDtype.F32
    )
    with pytest.raises(ServiceError) as caught:
        blob.split_range(geometry, 0, 64)
    assert caught.value.reason is Reason.BLOB_INVALID


@pytest.mark.parametrize(
    ("expected", "reason", "field"),
    [
        ({"tokenizer_hash": b"another!"}, Reason.TOKENIZER_MISMATCH, "tokenizer_hash"),
        ({"model_digest": b"n" * 16}, Reason.COMPAT_MISMATCH, "model_digest"),
        ({"dtype": KvDtype.F16}, Reason.COMPAT_MISMATCH, "dtype"),
        ({"block_tokens": 16}, Reason.COMPAT_MISMATCH, "block_tokens"),
        ({"kv_digest": b"j" * 16}, Reason.COMPAT_MISMATCH, "kv_digest"),
        ({"numeric_class_ids": frozenset({1, 2})}, Reason.COMPAT_MISMATCH, "numeric_class"),
    ],
)
def test_label_mismatch_names_field_ours_and_theirs(
    expected: dict[str, object], reason: Reason, field: str
) -> None:
    """The caller must be able to tell which side to change."""
    with pytest.raises(ServiceError) as caught:
        # A table of cases.
        blob.decode_blob(make_blob(), blob.BlobExpectation(**expected))  # type: ignore[arg-type]
    assert caught.value.reason is reason
    assert caught.value.metadata["field"] == field
    assert caught.value.metadata["ours"] != caught.value.metadata["theirs"]


def test_tokenizer_is_compared_before_the_rest_of_the_header() -> None:
    """A wrong tokenizer is named even when the header is damaged behind it."""
    data = bytearray(make_blob())
    data[60] ^= 0xFF
    with pytest.raises(ServiceError) as caught:
        blob.decode_blob(bytes(data), blob.BlobExpectation(tokenizer_hash=b"another!"))
    assert caught.value.reason is Reason.TOKENIZER_MISMATCH


def test_pages_that_do_not_fit_the_header_are_refused_when_encoding() -> None:
    """A writer's mistake must not become a blob."""
    geometry = KvGeometry(
        layers=1, kv_heads=1, head_dim=2, head_dim_v=2, block_tokens=8, dtype=KvDtype.F16
    )
    header = make_header(geometry, 0, 9)
    pages = make_pages(geometry, 0, 9)
    for wrong_pages, ids in (
        (pages[:1], range(9)),
        (pages, range(8)),
        ([pages[0], pages[0]], range(9)),
    ):
        with pytest.raises(ServiceError) as caught:
            blob.encode_blob(header, wrong_pages, list(ids))
        assert caught.value.reason is Reason.BLOB_INVALID


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=600))
def test_no_bytes_make_the_reader_crash(data: bytes) -> None:
    """Only ServiceError comes out of the decoder."""
    with pytest.raises(ServiceError):
        blob.decode_blob(b"BKV1" + data)

"""The KV blob, wire and file: a 128-byte header, packed pages, the range's token ids.

Owns encoding and the checks of a blob that arrives from anywhere. Never reads files, never converts
(see convert.py), and never allocates for a size it has not compared with the bytes present.

Order of the checks: length of the header, magic, tokenizer hash (when one is expected), header CRC,
each field, sizes against each other, sizes against the bytes present, label, payload CRC.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from baton.errors import Reason, ServiceError
from baton.kv.crc import (
    Buffer,
    ByteArray,
    as_bytes,
    combine_crc32c,
    crc32c,
    extend_crc32c,
    mask_crc,
)
from baton.kv.digests import TokenIds, ids_bytes
from baton.kv.label import mismatch
from baton.kv.layout import (
    BLOCK_TOKENS_MAX,
    BLOCK_TOKENS_MIN,
    LAYOUT,
    POSITIONS_MAX,
    KvDtype,
    KvGeometry,
    PageSpan,
    page_spans,
)

MAGIC: Final = b"BKV1"
VERSION: Final = 1
HEADER_BYTES: Final = 128
PAYLOAD_OFFSET_WIRE: Final = 128
PAYLOAD_OFFSET_FILE: Final = 4096
BLOB_BYTES_MAX: Final = 64 << 20
TOKEN_ID_BYTES: Final = 4

_HEADER: Final = struct.Struct("<4s8sHHHHHHIIIHHQQ16s16s16sIIHHIHHI")
_HEADER_CRC_OFFSET: Final = 124
assert _HEADER.size == HEADER_BYTES

FIELD_OFFSETS: Final = {
    "magic": 0,
    "tokenizer_hash": 4,
    "version": 12,
    "dtype": 14,
    "layers": 16,
    "kv_heads": 18,
    "head_dim": 20,
    "block_tokens": 22,
    "total_tokens": 24,
    "flags": 28,
    "first_position": 32,
    "layout": 36,
    "head_dim_v": 38,
    "generation": 40,
    "payload_bytes": 48,
    "model_digest": 56,
    "kv_digest": 72,
    "log_id": 88,
    "payload_offset": 104,
    "payload_crc": 108,
    "first_layer": 112,
    "first_kv_head": 114,
    "numeric_class_id": 116,
    "layers_total": 120,
    "kv_heads_total": 122,
    "header_crc": 124,
}
"""Byte offset of each header field, in order."""

_BYTE_FIELDS: Final = {
    "tokenizer_hash": 8,
    "model_digest": 16,
    "kv_digest": 16,
    "log_id": 16,
}
_U16_FIELDS: Final = (
    "layers",
    "kv_heads",
    "head_dim",
    "block_tokens",
    "layout",
    "head_dim_v",
    "first_layer",
    "first_kv_head",
    "layers_total",
    "kv_heads_total",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobHeader:
    """Every field of a blob header but the magic and the CRC of the header itself.

    Positions and tokens count from 0 at the log's start; sizes are bytes; `payload_crc` covers
    pages and token ids.
    """

    tokenizer_hash: bytes
    dtype: KvDtype
    layers: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    block_tokens: int
    first_position: int
    total_tokens: int
    generation: int
    model_digest: bytes
    kv_digest: bytes
    log_id: bytes
    numeric_class_id: int
    layers_total: int
    kv_heads_total: int
    first_layer: int = 0
    first_kv_head: int = 0
    payload_bytes: int = 0
    payload_crc: int = 0
    payload_offset: int = PAYLOAD_OFFSET_WIRE
    layout: int = LAYOUT
    flags: int = 0
    version: int = VERSION

    @property
    def geometry(self) -> KvGeometry:
        """The layout of this blob's pages (its own layers and heads, not the model's)."""
        return KvGeometry(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            block_tokens=self.block_tokens,
            dtype=self.dtype,
        )

    @property
    def end_position(self) -> int:
        """The position after the last token."""
        return self.first_position + self.total_tokens

    @property
    def blob_bytes(self) -> int:
        """Bytes of the whole blob, header and any gap included."""
        return self.payload_offset + self.payload_bytes

    def spans(self) -> Iterator[PageSpan]:
        """Yield the page spans of the payload, in order."""
        return page_spans(self.block_tokens, self.first_position, self.total_tokens)


def payload_bytes_for(geometry: KvGeometry, tokens: int) -> int:
    """Return the payload bytes of `tokens` tokens: packed KV and u32 token ids."""
    return tokens * (geometry.token_bytes + TOKEN_ID_BYTES)


def split_range(
    geometry: KvGeometry,
    first_position: int,
    end_position: int,
    *,
    blob_bytes_max: int = BLOB_BYTES_MAX,
) -> list[tuple[int, int]]:
    """Cut [first, end) at page boundaries into ranges whose blobs fit into `blob_bytes_max`.

    Raises BLOB_INVALID (field `payload_bytes`) where even one page does not fit.
    """
    room = blob_bytes_max - PAYLOAD_OFFSET_FILE
    blocks = room // payload_bytes_for(geometry, geometry.block_tokens)
    if blocks < 1:
        raise invalid("payload_bytes", "one page does not fit into a blob; use fewer layers")
    ranges = []
    first = first_position
    while first < end_position:
        cut = (first // geometry.block_tokens + blocks) * geometry.block_tokens
        end = min(cut, end_position)
        ranges.append((first, end))
        first = end
    return ranges


def invalid(field: str, why: str, *, offset: int | None = None) -> ServiceError:
    """Return BLOB_INVALID for a header field, with metadata field and (byte) offset."""
    at = FIELD_OFFSETS.get(field, 0) if offset is None else offset
    return ServiceError(
        Reason.BLOB_INVALID,
        f"blob {field} at byte {at}: {why}",
        field=field,
        metadata={"field": field, "offset": str(at)},
    )


def checksum_mismatch(field: str) -> ServiceError:
    """Return CHECKSUM_MISMATCH for `header_crc` or `payload_crc`."""
    offset = FIELD_OFFSETS[field]
    return ServiceError(
        Reason.CHECKSUM_MISMATCH,
        f"blob {field} does not match the bytes; discard the blob and fetch or compute it again",
        field=field,
        metadata={"field": field, "offset": str(offset)},
    )


def encode_header(header: BlobHeader) -> bytes:
    """Return the 128 header bytes; raises BLOB_INVALID for a header that no reader would accept."""
    check_header(header)
    body = _HEADER.pack(
        MAGIC,
        header.tokenizer_hash,
        header.version,
        header.dtype.wire_code,
        header.layers,
        header.kv_heads,
        header.head_dim,
        header.block_tokens,
        header.total_tokens,
        header.flags,
        header.first_position,
        header.layout,
        header.head_dim_v,
        header.generation,
        header.payload_bytes,
        header.model_digest,
        header.kv_digest,
        header.log_id,
        header.payload_offset,
        header.payload_crc,
        header.first_layer,
        header.first_kv_head,
        header.numeric_class_id,
        header.layers_total,
        header.kv_heads_total,
        0,
    )[:_HEADER_CRC_OFFSET]
    return body + struct.pack("<I", mask_crc(crc32c(body)))


def decode_header(data: Buffer, *, tokenizer_hash: bytes | None = None) -> BlobHeader:
    """Decode and check the header at the start of `data`.

    With `tokenizer_hash` a different one is refused before anything else is read. Raises
    BLOB_INVALID (metadata offset and field), TOKENIZER_MISMATCH, or CHECKSUM_MISMATCH for the
    header's CRC. Sizes are checked against each other, not against the bytes present: that is
    `check_present`.
    """
    content = as_bytes(data)
    if content.size < HEADER_BYTES:
        raise invalid(
            "header",
            f"{content.size} bytes present, the header has {HEADER_BYTES}",
            offset=content.size,
        )
    raw = content[:HEADER_BYTES].tobytes()
    if raw[:4] != MAGIC:
        raise invalid("magic", f"is not {MAGIC.decode()}; this is no KV blob")
    if tokenizer_hash is not None and raw[4:12] != tokenizer_hash:
        raise mismatch("tokenizer_hash", tokenizer_hash.hex(), raw[4:12].hex())
    stored = int.from_bytes(raw[_HEADER_CRC_OFFSET:], "little")
    if mask_crc(crc32c(raw[:_HEADER_CRC_OFFSET])) != stored:
        raise checksum_mismatch("header_crc")
    header = _header_of(_HEADER.unpack(raw))
    check_header(header)
    return header


def _header_of(values: tuple[Any, ...]) -> BlobHeader:
    names = list(FIELD_OFFSETS)[1:-1]
    fields = dict(zip(names, values[1:-1], strict=True))
    code = fields["dtype"]
    dtype = KvDtype.from_wire(code)
    if dtype is None:
        raise invalid("dtype", f"code {code} is unknown; known: 1 f16, 2 bf16, 3 f32, 4 int8")
    return BlobHeader(**{**fields, "dtype": dtype})


def check_header(header: BlobHeader) -> None:
    """Check every field and the sizes against each other; raises BLOB_INVALID naming the field."""
    for name, size in _BYTE_FIELDS.items():
        if len(getattr(header, name)) != size:
            raise invalid(name, f"must be {size} bytes")
    for name in _U16_FIELDS:
        _check_bits(header, name, 16)
    for name in ("total_tokens", "first_position", "payload_crc", "numeric_class_id"):
        _check_bits(header, name, 32)
    for name in ("generation", "payload_bytes"):
        _check_bits(header, name, 64)
    if header.version != VERSION:
        raise invalid("version", f"{header.version} is unknown; this reader knows {VERSION}")
    if header.flags != 0:
        raise invalid("flags", f"unknown bits {header.flags:#x}")
    if header.layout != LAYOUT:
        raise invalid("layout", f"{header.layout} is unknown; this reader knows {LAYOUT}")
    _check_shape(header)
    _check_sizes(header)


def _check_bits(header: BlobHeader, name: str, bits: int) -> None:
    value: int = getattr(header, name)
    if not 0 <= value < 1 << bits:
        raise invalid(name, f"{value} does not fit into {bits} bits")


def _check_shape(header: BlobHeader) -> None:
    for name in ("layers", "kv_heads", "head_dim", "head_dim_v", "total_tokens"):
        if getattr(header, name) == 0:
            raise invalid(name, "is 0")
    if not BLOCK_TOKENS_MIN <= header.block_tokens <= BLOCK_TOKENS_MAX:
        bounds = f"{BLOCK_TOKENS_MIN} to {BLOCK_TOKENS_MAX}"
        raise invalid("block_tokens", f"{header.block_tokens} is not {bounds}")
    if header.first_layer + header.layers > header.layers_total:
        raise invalid("layers_total", "is less than first_layer + layers")
    if header.first_kv_head + header.kv_heads > header.kv_heads_total:
        raise invalid("kv_heads_total", "is less than first_kv_head + kv_heads")
    if header.end_position > POSITIONS_MAX:
        raise invalid("total_tokens", "runs past the last position")


def _check_sizes(header: BlobHeader) -> None:
    if header.payload_offset not in (PAYLOAD_OFFSET_WIRE, PAYLOAD_OFFSET_FILE):
        raise invalid("payload_offset", f"{header.payload_offset} is neither 128 nor 4096")
    if header.blob_bytes > BLOB_BYTES_MAX:
        raise invalid("payload_bytes", f"blob exceeds {BLOB_BYTES_MAX} bytes; split the range")
    expected = payload_bytes_for(header.geometry, header.total_tokens)
    if header.payload_bytes != expected:
        raise invalid("payload_bytes", f"is {header.payload_bytes}, the shape needs {expected}")


def check_present(header: BlobHeader, present_bytes: int) -> None:
    """Refuse a blob of which not exactly `header.blob_bytes` bytes are present (BLOB_INVALID)."""
    if present_bytes < header.blob_bytes:
        raise invalid(
            "payload",
            f"ends early, the header promises {header.blob_bytes} bytes",
            offset=present_bytes,
        )
    if present_bytes > header.blob_bytes:
        raise invalid("payload", "bytes follow the blob's end", offset=header.blob_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobExpectation:
    """What a reader requires of a blob; None: not checked.

    `numeric_class_ids` are the writer classes that the reader's policy accepts.
    """

    tokenizer_hash: bytes | None = None
    model_digest: bytes | None = None
    dtype: KvDtype | None = None
    block_tokens: int | None = None
    kv_digest: bytes | None = None
    numeric_class_ids: frozenset[int] | None = None


def check_label(header: BlobHeader, expected: BlobExpectation) -> None:
    """Refuse a blob that the reader cannot use.

    Raises TOKENIZER_MISMATCH or COMPAT_MISMATCH with metadata field, ours, theirs: the first field
    of tokenizer hash, model digest, dtype, block_tokens, KV digest, numeric class.
    """
    for name in ("tokenizer_hash", "model_digest", "dtype", "block_tokens", "kv_digest"):
        ours, theirs = getattr(expected, name), getattr(header, name)
        if ours is not None and ours != theirs:
            raise mismatch(name, _as_text(ours), _as_text(theirs))
    accepted = expected.numeric_class_ids
    if accepted is not None and header.numeric_class_id not in accepted:
        ours_text = ",".join(f"{item:08x}" for item in sorted(accepted))
        raise mismatch("numeric_class", ours_text, f"{header.numeric_class_id:08x}")


def _as_text(value: bytes | KvDtype | int) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return value.text if isinstance(value, KvDtype) else str(value)


def seal_header(
    header: BlobHeader,
    pages: Sequence[Buffer],
    token_ids: TokenIds,
    *,
    page_crcs: Sequence[int] | None = None,
) -> BlobHeader:
    """Return `header` with payload_bytes and payload_crc of these packed pages and ids.

    `pages` are the packed contents of `header.spans()`; with their CRCs given they are not read.
    Raises BLOB_INVALID where they do not fit the header.
    """
    spans = list(header.spans())
    if len(spans) != len(pages):
        raise invalid("total_tokens", f"needs {len(spans)} pages, {len(pages)} given")
    if len(token_ids) != header.total_tokens:
        raise invalid("total_tokens", f"{len(token_ids)} token ids given")
    token_bytes = header.geometry.token_bytes
    crc = 0
    for index, (span, page) in enumerate(zip(spans, pages, strict=True)):
        if as_bytes(page).size != span.tokens * token_bytes:
            raise invalid("payload", f"page {index} is not {span.tokens * token_bytes} bytes")
        if page_crcs is None:
            crc = extend_crc32c(crc, page)
        else:
            crc = combine_crc32c(crc, page_crcs[index], as_bytes(page).size)
    crc = extend_crc32c(crc, ids_bytes(token_ids))
    size = payload_bytes_for(header.geometry, header.total_tokens)
    return replace(header, payload_bytes=size, payload_crc=crc)


def encode_blob(
    header: BlobHeader, pages: Sequence[Buffer], token_ids: TokenIds
) -> tuple[BlobHeader, list[memoryview]]:
    """Return the finished header and the blob as buffers to send or write one after the other.

    Pages are not copied. `header.payload_bytes` and `payload_crc` are computed here, whatever the
    argument says. Raises BLOB_INVALID as `seal_header` and `check_header`.
    """
    sealed = seal_header(header, pages, token_ids)
    parts = [memoryview(encode_header(sealed))]
    gap = sealed.payload_offset - HEADER_BYTES
    if gap:
        parts.append(memoryview(bytes(gap)))
    parts += [as_bytes(page).data for page in pages]
    parts.append(memoryview(ids_bytes(token_ids)))
    return sealed, parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A verified blob: packed pages (views of the buffer given), one per span, and token ids."""

    header: BlobHeader
    pages: tuple[ByteArray, ...]
    token_ids: npt.NDArray[np.uint32]


def decode_blob(data: Buffer, expected: BlobExpectation | None = None) -> Blob:
    """Check a whole blob and return views into `data`; nothing is copied.

    Raises BLOB_INVALID, TOKENIZER_MISMATCH, COMPAT_MISMATCH or CHECKSUM_MISMATCH, in the order of
    the module docstring.
    """
    wanted = expected or BlobExpectation()
    content = as_bytes(data)
    header = decode_header(content, tokenizer_hash=wanted.tokenizer_hash)
    check_present(header, content.size)
    check_label(header, wanted)
    if content[HEADER_BYTES : header.payload_offset].any():
        raise invalid("padding", "bytes before the payload are not zero", offset=HEADER_BYTES)
    payload = content[header.payload_offset :]
    if crc32c(payload) != header.payload_crc:
        raise checksum_mismatch("payload_crc")
    return split_payload(header, payload)


def split_payload(header: BlobHeader, payload: ByteArray) -> Blob:
    """Cut a payload, whose size and CRC are already checked, into pages and token ids (views)."""
    assert payload.size == header.payload_bytes, "the caller checks the size first"
    token_bytes = header.geometry.token_bytes
    pages: list[ByteArray] = []
    offset = 0
    for span in header.spans():
        size = span.tokens * token_bytes
        pages.append(payload[offset : offset + size])
        offset += size
    return Blob(header=header, pages=tuple(pages), token_ids=payload[offset:].view("<u4"))

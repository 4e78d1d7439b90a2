"""Blob headers, proto <-> dataclass.

Owns the mirror: `KvBlobDescriptor` carries every header field, and the header that it describes is
checked by the same code that reads the 128 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.api.common.v1 import common_pb2
from baton.errors import Reason, ServiceError
from baton.kv.blob import BlobHeader, check_header, encode_header
from baton.kv.layout import KvDtype
from baton.wire.label import dtype_to_proto

_SAME_NAME = (
    "tokenizer_hash",
    "version",
    "layers",
    "kv_heads",
    "head_dim",
    "block_tokens",
    "total_tokens",
    "flags",
    "first_position",
    "layout",
    "head_dim_v",
    "generation",
    "payload_bytes",
    "model_digest",
    "kv_digest",
    "log_id",
    "payload_offset",
    "first_layer",
    "first_kv_head",
    "numeric_class_id",
    "layers_total",
    "kv_heads_total",
)


def header_crc(header: BlobHeader) -> int:
    """The masked CRC-32C that the header's own bytes end with."""
    return int.from_bytes(encode_header(header)[124:128], "little")


def descriptor_from_header(
    header: BlobHeader, page_crcs: Sequence[int]
) -> common_pb2.KvBlobDescriptor:
    """The descriptor of a finished header; `page_crcs` has one CRC-32C per page span."""
    descriptor = common_pb2.KvBlobDescriptor(
        dtype=dtype_to_proto(header.dtype),
        payload_crc32c=header.payload_crc,
        header_crc32c=header_crc(header),
        **{name: getattr(header, name) for name in _SAME_NAME},
    )
    token_bytes = header.geometry.token_bytes
    offset = 0
    for span, crc in zip(header.spans(), page_crcs, strict=True):
        size = span.tokens * token_bytes
        descriptor.pages.add(
            first_position=span.first_position(header.block_tokens),
            tokens=span.tokens,
            offset_bytes=offset,
            size_bytes=size,
            crc32c=crc,
        )
        offset += size
    return descriptor


def header_from_descriptor(descriptor: common_pb2.KvBlobDescriptor) -> BlobHeader:
    """The header that a descriptor describes, checked in full before anything is allocated.

    Raises BLOB_INVALID naming the field, also when `header_crc32c` or the list of pages does not
    follow from the other fields.
    """
    dtype = KvDtype.from_wire(descriptor.dtype)
    if dtype is None:
        raise _invalid("dtype", f"has the unknown value {descriptor.dtype}")
    header = BlobHeader(
        dtype=dtype,
        payload_crc=descriptor.payload_crc32c,
        **{name: getattr(descriptor, name) for name in _SAME_NAME},
    )
    check_header(header)
    if header_crc(header) != descriptor.header_crc32c:
        raise _invalid("header_crc32c", "does not follow from the other fields")
    spans = list(header.spans())
    if len(descriptor.pages) != len(spans):
        raise _invalid("pages", f"lists {len(descriptor.pages)} pages, the range has {len(spans)}")
    expected = descriptor_from_header(header, [page.crc32c for page in descriptor.pages])
    for index, (ours, theirs) in enumerate(zip(expected.pages, descriptor.pages, strict=True)):
        if ours != theirs:
            raise _invalid(f"pages[{index}]", "does not follow from the range and the geometry")
    return header


def _invalid(field: str, why: str) -> ServiceError:
    return ServiceError(
        Reason.BLOB_INVALID,
        f"blob {field}: {why}; send the descriptor that belongs to the bytes",
        field=field,
        metadata={"field": field},
    )

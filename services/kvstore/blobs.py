"""Blobs that come in whole before they go into pages: checked, converted, written.

Owns what a blob must be to become a log here, and the byte work of those whose dtype or page size
is not the arena's; those that need no conversion go straight into pages (`blob_sink`). Blocking:
runs in the page thread. Never decides who may; never trusts a size that was not compared with the
header first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.errors import Reason, ServiceError
from baton.kv import convert
from baton.kv.blob import (
    BlobHeader,
    checksum_mismatch,
    invalid,
    split_payload,
)
from baton.kv.crc import ByteArray, crc32c
from baton.kv.layout import (
    KvGeometry,
    page_crc,
    page_spans,
    slot_crcs,
    unpack_slots,
)
from services.kvstore.arena import Arena
from services.kvstore.state import PageRow


def check_payload(header: BlobHeader, payload: bytearray, page_crcs: Sequence[int]) -> list[int]:
    """Compares every CRC; returns the token ids. CHECKSUM_MISMATCH names what is wrong."""
    content = np.frombuffer(payload, dtype=np.uint8)
    if crc32c(content) != header.payload_crc:
        raise checksum_mismatch("payload_crc")
    blob = split_payload(header, content)
    for index, (page, crc) in enumerate(zip(blob.pages, page_crcs, strict=True)):
        if crc32c(page) != crc:
            raise ServiceError(
                Reason.CHECKSUM_MISMATCH,
                f"blob page {index} does not match its CRC; send the blob again",
                field=f"pages[{index}].crc32c",
            )
    return [int(token_id) for token_id in blob.token_ids]


def unpack_payload(
    arena: Arena, header: BlobHeader, payload: bytearray, rows: Sequence[PageRow]
) -> None:
    """Writes a checked payload into fresh, zeroed pages and fills in the rows' CRCs."""
    geometry = arena.geometry
    content = np.frombuffer(payload, dtype=np.uint8)
    pages: Sequence[ByteArray] = split_payload(header, content).pages
    if header.geometry != geometry:
        pages = _converted(header, pages, geometry)
    spans = page_spans(geometry.block_tokens, header.first_position, header.total_tokens)
    for span, packed, row in zip(spans, pages, rows, strict=True):
        page = arena.page(row.page)
        unpack_slots(geometry, packed, page, span.first_slot, span.tokens)
        if row.tokens == geometry.block_tokens:
            row.crc = page_crc(geometry, page)
        else:
            row.slot_crcs = list(slot_crcs(geometry, page, 0, row.tokens))


def _converted(
    header: BlobHeader, pages: Sequence[ByteArray], geometry: KvGeometry
) -> list[ByteArray]:
    arrays = convert.gather(
        header.geometry, header.first_position, header.total_tokens, list(pages)
    )
    if arrays.dtype is not geometry.dtype:
        arrays = convert.cast(arrays, geometry.dtype)
    return convert.scatter(arrays, geometry.block_tokens, header.first_position)


def require_whole(header: BlobHeader) -> None:
    """What this store takes as a new log: position 0 on, all layers, all heads."""
    if header.first_position != 0:
        raise _unsupported("first_position", "put the range that starts at position 0")
    if header.first_layer or header.layers != header.layers_total:
        raise _unsupported("first_layer", "join the layer ranges first")
    if header.first_kv_head or header.kv_heads != header.kv_heads_total:
        raise _unsupported("first_kv_head", "join the head ranges first")


def _unsupported(field: str, remedy: str) -> ServiceError:
    return ServiceError(
        Reason.UNSUPPORTED, f"a blob with this {field} cannot become a log; {remedy}", field=field
    )


def require_shape(header: BlobHeader, geometry: KvGeometry, *, may_convert: bool) -> None:
    """The blob's shape must be the arena's; dtype and page size may differ when converting."""
    for name in ("layers", "kv_heads", "head_dim", "head_dim_v"):
        if getattr(header, name) != getattr(geometry, name):
            raise invalid(name, f"is not the model's {getattr(geometry, name)}")
    if may_convert:
        return
    if header.block_tokens != geometry.block_tokens:
        raise _needs_convert("block_tokens", str(geometry.block_tokens), str(header.block_tokens))
    if header.dtype is not geometry.dtype:
        raise _needs_convert("dtype", geometry.dtype.text, header.dtype.text)


def _needs_convert(name: str, ours: str, theirs: str) -> ServiceError:
    return ServiceError(
        Reason.COMPAT_MISMATCH,
        f"{name} differs: ours {ours}, theirs {theirs}; ask to convert",
        field=name,
        metadata={"field": name, "ours": ours, "theirs": theirs},
    )

"""Segments of existing logs, and the manifest that says how they become one sequence.

Owns the data and its canonical bytes. Never decides whether segments join (that is splice.py) and
never grants anything: a manifest is a proposal, which OPEN validates.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from baton.errors import Reason, ServiceError
from baton.kv.crc import Buffer, as_bytes
from baton.kv.digests import DIGEST_BYTES, HASH_BYTES, TOKENIZER_HASH_BYTES, canonical
from baton.kv.layout import BLOCK_TOKENS_MAX, BLOCK_TOKENS_MIN, POSITIONS_MAX, page_spans

MAGIC: Final = b"BMF1"
VERSION: Final = 1
SEGMENTS_MAX: Final = 1024
LOG_ID_BYTES: Final = 16

_HEAD: Final = struct.Struct("<4sHHHHI16s8s")
_SEGMENT: Final = struct.Struct("<16sQIIII32s32s32s32s")
_HAS_HASHES: Final = 1

MANIFEST_BYTES_MAX: Final = _HEAD.size + SEGMENTS_MAX * _SEGMENT.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Positions [from_position, to_position) of a sealed log, offered for a splice.

    `history_start` and `history_end` are the history digests (32 bytes) at both ends. `text_hash`
    and `ids_hash` (32 bytes each, both or neither) belong to a published prefix.
    """

    log_id: bytes
    generation: int
    from_position: int
    to_position: int
    history_start: bytes
    history_end: bytes
    kv_digest: bytes
    tokenizer_hash: bytes
    block_tokens: int
    numeric_class_id: int
    text_hash: bytes | None = None
    ids_hash: bytes | None = None

    @property
    def tokens(self) -> int:
        """How many tokens the segment has."""
        return self.to_position - self.from_position

    @property
    def pages_shared(self) -> int:
        """How many blocks it holds whole: the new log refers to their pages. All its other tokens
        are copied.
        """
        first_whole = -(-self.from_position // self.block_tokens)
        return max(self.to_position // self.block_tokens - first_whole, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSource:
    """A run of slots of one block that comes from one segment."""

    segment_index: int
    first_slot: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlan:
    """Where one block of the spliced sequence comes from."""

    block_index: int
    sources: tuple[PageSource, ...]
    is_shared: bool
    """True: the new log refers to the source's full page. False: the slots are copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Segments that join into positions [0, total_tokens) of a new log.

    Only `splice.splice` and `decode_manifest` make one; `segments` is never empty.
    """

    segments: tuple[Segment, ...]

    @property
    def total_tokens(self) -> int:
        """How many tokens the spliced sequence has."""
        return self.segments[-1].to_position

    @property
    def kv_digest(self) -> bytes:
        """The KV digest (16 bytes) of all segments."""
        return self.segments[0].kv_digest

    @property
    def tokenizer_hash(self) -> bytes:
        """The tokenizer hash (8 bytes) of all segments."""
        return self.segments[0].tokenizer_hash

    @property
    def block_tokens(self) -> int:
        """Tokens per block of all segments."""
        return self.segments[0].block_tokens

    @property
    def history_end(self) -> bytes:
        """The history digest (32 bytes) at the end."""
        return self.segments[-1].history_end

    def pages(self) -> list[PagePlan]:
        """Return the plan of each block: shared where one segment holds it whole, else copied."""
        sources: dict[int, list[PageSource]] = {}
        for index, segment in enumerate(self.segments):
            for span in page_spans(self.block_tokens, segment.from_position, segment.tokens):
                source = PageSource(
                    segment_index=index, first_slot=span.first_slot, tokens=span.tokens
                )
                sources.setdefault(span.block_index, []).append(source)
        return [
            PagePlan(
                block_index=block,
                sources=tuple(parts),
                is_shared=len(parts) == 1 and parts[0].tokens == self.block_tokens,
            )
            for block, parts in sorted(sources.items())
        ]

    def canonical_bytes(self) -> bytes:
        """Return the one encoding of this manifest, as OPEN records carry it."""
        head = _HEAD.pack(
            MAGIC,
            VERSION,
            len(self.segments),
            self.block_tokens,
            0,
            self.total_tokens,
            self.kv_digest,
            self.tokenizer_hash,
        )
        return head + b"".join(_encode_segment(segment) for segment in self.segments)

    def digest(self) -> bytes:
        """Return the manifest digest (32 bytes)."""
        return blake3(canonical("baton.manifest.v1", self.canonical_bytes())).digest()


def _encode_segment(segment: Segment) -> bytes:
    has_hashes = segment.text_hash is not None and segment.ids_hash is not None
    return _SEGMENT.pack(
        segment.log_id,
        segment.generation,
        segment.from_position,
        segment.to_position,
        segment.numeric_class_id,
        _HAS_HASHES if has_hashes else 0,
        segment.history_start,
        segment.history_end,
        segment.text_hash or bytes(HASH_BYTES),
        segment.ids_hash or bytes(HASH_BYTES),
    )


def refuse(field: str, why: str, *, index: int | None = None) -> ServiceError:
    """Return INVALID_REQUEST naming a manifest's field and, where one is at fault, its segment."""
    path = field if index is None else f"segments[{index}].{field}"
    metadata = {"field": field} if index is None else {"field": field, "segment": str(index)}
    return ServiceError(Reason.INVALID_REQUEST, f"{path}: {why}", field=path, metadata=metadata)


def check_segment(segment: Segment, index: int) -> None:
    """Check one segment by itself; raises INVALID_REQUEST naming segment and field."""
    sizes = (
        ("log_id", LOG_ID_BYTES),
        ("history_start", HASH_BYTES),
        ("history_end", HASH_BYTES),
        ("kv_digest", DIGEST_BYTES),
        ("tokenizer_hash", TOKENIZER_HASH_BYTES),
        ("text_hash", HASH_BYTES),
        ("ids_hash", HASH_BYTES),
    )
    for name, size in sizes:
        value: bytes | None = getattr(segment, name)
        if value is not None and len(value) != size:
            raise refuse(name, f"must be {size} bytes", index=index)
    if (segment.text_hash is None) != (segment.ids_hash is None):
        missing = "text_hash" if segment.text_hash is None else "ids_hash"
        raise refuse(missing, "give both hashes of a published prefix or neither", index=index)
    if not BLOCK_TOKENS_MIN <= segment.block_tokens <= BLOCK_TOKENS_MAX:
        raise refuse("block_tokens", "must be 8 to 64", index=index)
    for name, bits in (("generation", 64), ("numeric_class_id", 32), ("from_position", 32)):
        if not 0 <= getattr(segment, name) < 1 << bits:
            raise refuse(name, f"must fit into {bits} bits", index=index)
    if not segment.from_position < segment.to_position < POSITIONS_MAX:
        raise refuse("to_position", "must lie behind from_position", index=index)


def decode_segments(data: Buffer) -> tuple[Segment, ...]:
    """Decode a manifest's canonical bytes into its segments, each checked by itself only.

    Raises INVALID_REQUEST naming the field. `splice.decode_manifest` also checks that they join.
    """
    content = as_bytes(data)
    if not _HEAD.size <= content.size <= MANIFEST_BYTES_MAX:
        raise refuse("manifest", f"{content.size} bytes are no manifest")
    raw = content.tobytes()
    magic, version, count, block_tokens, reserved, total, kv, tokenizer = _HEAD.unpack_from(raw)
    if magic != MAGIC or version != VERSION or reserved != 0:
        raise refuse("manifest", "unknown magic, version or reserved bits")
    if not 1 <= count <= SEGMENTS_MAX or len(raw) != _HEAD.size + count * _SEGMENT.size:
        raise refuse("segments", f"{count} segments do not fit the bytes present")
    segments = tuple(
        _decode_segment(values, index, (kv, tokenizer, block_tokens))
        for index, values in enumerate(_SEGMENT.iter_unpack(raw[_HEAD.size :]))
    )
    if segments[-1].to_position != total:
        raise refuse("total_tokens", "is not the end of the last segment")
    return segments


def _decode_segment(
    values: tuple[bytes, int, int, int, int, int, bytes, bytes, bytes, bytes],
    index: int,
    shared: tuple[bytes, bytes, int],
) -> Segment:
    log_id, generation, first, end, numeric, flags, history_start, history_end, text, ids = values
    kv, tokenizer, block_tokens = shared
    if flags not in (0, _HAS_HASHES):
        raise refuse("flags", f"unknown bits {flags:#x}", index=index)
    if flags == 0 and (any(text) or any(ids)):
        raise refuse("text_hash", "hashes without their flag", index=index)
    segment = Segment(
        log_id=log_id,
        generation=generation,
        from_position=first,
        to_position=end,
        history_start=history_start,
        history_end=history_end,
        kv_digest=kv,
        tokenizer_hash=tokenizer,
        block_tokens=block_tokens,
        numeric_class_id=numeric,
        text_hash=text if flags else None,
        ids_hash=ids if flags else None,
    )
    check_segment(segment, index)
    return segment

"""Splices on raw protobuf bytes, for requests of the usual shape that are in order.

Owns the reading and writing of that shape by hand. It never refuses: whatever it does not know, or
would have to refuse, is None, and the generated code answers. What it answers is, byte for byte,
what the generated code would: `tests/unit/merger/test_quick_wire.py` compares them.

The usual shape is what serialising a `SpliceRequest` gives whose segments carry no prefix id and no
token ids: fields in the order of their numbers, none twice, none that is unknown, every varint as
short as can be. A segment of that shape stands in the answer as it stood in the request, so its
bytes are copied and never built again.
"""

from __future__ import annotations

import hmac
import re
import struct
from functools import lru_cache
from typing import Final

from blake3 import blake3

from baton.kv.digests import HASH_BYTES, canonical, history_start
from baton.kv.layout import BLOCK_TOKENS_MAX, BLOCK_TOKENS_MIN, POSITIONS_MAX
from baton.kv.manifest import MAGIC, SEGMENTS_MAX, VERSION
from baton.kv.numeric import DEFAULT_POLICY

_U32: Final = rb"([\x80-\xff]{0,3}[\x01-\x7f]|[\x80-\xff]{4}[\x01-\x0f])"
_U63: Final = rb"([\x80-\xff]{0,8}[\x01-\x7f])"
_LENGTH: Final = rb"([\x80-\xff]?[\x01-\x7f])"

_SEGMENT: Final = re.compile(
    # The field's tag and length; the log: id, generation, position.
    rb"\x12" + _LENGTH + rb"\x0a(.)\x0a\x10(.{16})(?:\x10" + _U63 + rb")?\x18" + _U32
    # First position; history at both ends, KV digest, tokenizer, numeric class.
    + rb"(?:\x10" + _U32 + rb")?\x1a\x20(.{32})\x22\x20(.{32})\x2a\x10(.{16})\x32\x08(.{8})"
    + rb"(?:\x38" + _U32 + rb")?"
    # Both hashes of a published prefix or neither; tokens of a block.
    + rb"(?:\x42\x20(.{32})\x4a\x20(.{32}))?\x60(.)",
    re.DOTALL,
)  # fmt: skip
_SIZE: Final = re.compile(rb"[\x80-\xff]{0,3}[\x01-\x7f]|\x00")
_BATCH_ID: Final = re.compile(rb"\x08" + _U63)

_LOG_BYTES: Final = 19
"""Of a log's message beside its two numbers: tag, length and id, and the tag of the position."""

_NO_HASH: Final = bytes(HASH_BYTES)
_LABEL: Final = canonical("baton.manifest.v1")
_HEAD: Final = struct.Struct("<I4sHHHHI16s8s")
"""The length of a manifest's canonical bytes, and their head."""

_PACKED: Final = struct.Struct("<16sQIIII32s32s32s32s")
"""A segment in a manifest's canonical bytes."""


@lru_cache(maxsize=4096)
def _number(raw: bytes) -> int:
    """The value of a varint."""
    value = 0
    for byte in reversed(raw):
        value = value << 7 | byte & 0x7F
    return value


@lru_cache(maxsize=4096)
def varint(value: int) -> bytes:
    """A varint of a value that is not negative."""
    raw = bytearray()
    while value >= 0x80:
        raw.append(value & 0x7F | 0x80)
        value >>= 7
    raw.append(value)
    return bytes(raw)


@lru_cache(maxsize=4096)
def _counts(shared: int, copied: int) -> bytes:
    """A part's fields behind its segment; zeros are not written."""
    pages = b"\x10" + varint(shared) if shared else b""
    return pages + b"\x18" + varint(copied) if copied else pages


_history_start: Final = lru_cache(maxsize=256)(history_start)


def outcome_of(data: bytes, at: int, end: int) -> bytes | None:
    """The answer to the `SpliceRequest` in data[at:end]: the bytes of a `SpliceOutcome`, which are
    those of a `SpliceResponse`, with a manifest; None where the generated code has to see to it.
    """
    at = _behind_request_id(data, at, end)
    parts: list[bytes] = []
    packed: list[bytes] = []
    generations: dict[bytes, int] = {}
    texts = ids = b""
    label: tuple[bytes, bytes, bytes] | None = None
    block = position = first_class = 0
    meets: bytes = b""
    before: bytes | None = None
    match, pack = _SEGMENT.match, _PACKED.pack
    while at < end and data[at] == 0x12:
        found = match(data, at, end)
        if found is None:
            return None
        (
            size, log_size, log_id, raw_generation, raw_end, raw_start, history, history_end,
            kv, tokenizer, raw_class, text_hash, ids_hash, raw_block,
        ) = found.groups()  # fmt: skip
        start, position = position, _number(raw_end)
        generation = _number(raw_generation) if raw_generation else 0
        numeric_class = _number(raw_class) if raw_class else 0
        if label is None:
            label, first_class, block = (kv, tokenizer, raw_block), numeric_class, raw_block[0]
            meets = _history_start(kv)
        after = found.end()
        log_bytes = _LOG_BYTES + len(raw_end) + (len(raw_generation) + 1 if raw_generation else 0)
        if (
            log_size[0] != log_bytes
            or _number(size) != after - at - 1 - len(size)
            or (kv, tokenizer, raw_block) != label
            # The first begins at 0, which is not written.
            or raw_start != before
            or history != meets
            or not start < position < POSITIONS_MAX
            or generations.setdefault(log_id, generation) != generation
            or (numeric_class != first_class and not _is_readable(numeric_class, first_class))
        ):
            return None
        packed.append(
            pack(
                *(log_id, generation, start, position, numeric_class, text_hash is not None),
                *(history, history_end, text_hash or _NO_HASH, ids_hash or _NO_HASH),
            )
        )
        if text_hash:
            texts += b"\x22\x20" + text_hash
            ids += b"\x2a\x20" + ids_hash
        shared = max(position // block - -(-start // block), 0) if block else 0
        counts = _counts(shared, position - start - shared * block)
        # The segment with its length, behind another tag.
        segment = data[at + 1 : after]
        parts += (b"\x0a", varint(1 + len(segment) + len(counts)), b"\x0a", segment, counts)
        before, meets, at = raw_end, history_end, after
    # The request ends with the block size and the hashes that its segments have.
    if label is None or not hmac.compare_digest(data[at:end], b"\x18" + label[2] + texts + ids):
        return None
    if not BLOCK_TOKENS_MIN <= block <= BLOCK_TOKENS_MAX or len(packed) > SEGMENTS_MAX:
        return None
    return _manifest(parts, _digest(packed, label, position), (position, meets, block))


def _behind_request_id(data: bytes, at: int, end: int) -> int:
    """Where the segments begin; where a request id is not usual, no segment does."""
    if at + 2 > end or data[at] != 0x0A:
        return at
    behind = at + 2 + data[at + 1]
    is_usual = 0 < data[at + 1] < 0x80 and behind <= end and data[at + 2 : behind].isascii()
    return behind if is_usual else at


def _is_readable(writer: int, reader: int) -> bool:
    return DEFAULT_POLICY.is_readable(writer=writer, reader=reader)


def _digest(packed: list[bytes], label: tuple[bytes, bytes, bytes], total: int) -> bytes:
    """The manifest digest (32 bytes) of packed segments."""
    kv, tokenizer, raw_block = label
    size = _HEAD.size - 4 + _PACKED.size * len(packed)
    head = _HEAD.pack(size, MAGIC, VERSION, len(packed), raw_block[0], 0, total, kv, tokenizer)
    return blake3(b"".join((_LABEL, head, *packed))).digest()


def _manifest(parts: list[bytes], digest: bytes, whole: tuple[int, bytes, int]) -> bytes:
    """The outcome's one field."""
    total, history_end, block = whole
    parts += (b"\x10", varint(total), b"\x1a\x20", history_end, b"\x20", varint(block))
    parts += (b"\x2a\x20", digest)
    body = b"".join(parts)
    return b"\x0a" + varint(len(body)) + body


def batch_id(data: bytes) -> bytes:
    """A stream message's batch id as it stands there, tag included; nothing where it is 0."""
    found = _BATCH_ID.match(data)
    return b"" if found is None else found[0]


def spans(data: bytes, at: int, tag: int) -> list[tuple[int, int]] | None:
    """Where each splice of data[at:] stands; None where anything else stands there too."""
    found: list[tuple[int, int]] = []
    end = len(data)
    while at < end:
        size = _SIZE.match(data, at + 1)
        if data[at] != tag or size is None:
            return None
        first = size.end()
        at = first + _number(size[0])
        found.append((first, at))
    return found if at == end else None

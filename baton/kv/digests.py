"""Every digest of the format: BLAKE3 over one canonical, length-prefixed byte string.

Owns the canonical encoding and what each digest covers. Never reads files: callers hand in content
hashes or chunks. docs/formats.md states each string, and tests/data/kv/digests.json golden values.

Invariant: two different sequences of fields never encode to the same bytes, because each field is
preceded by its length; digests with a label as their first field cannot meet one another.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from baton.kv.crc import Buffer, as_bytes
from baton.kv.layout import LAYOUT, KvDtype

HASH_BYTES: Final = 32
DIGEST_BYTES: Final = 16
TOKENIZER_HASH_BYTES: Final = 8
TOKEN_ID_MAX: Final = 0xFFFFFFFF
_SIZE: Final = struct.Struct("<I")
_HASH_SIZE: Final = _SIZE.pack(HASH_BYTES)

ConfigValue: TypeAlias = str | int | float | bool | None
"""A value of a configuration that enters a digest."""

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.uint32]
"""Token ids, each 0 to 2**32 - 1."""


def canonical(*parts: Buffer | str) -> bytes:
    """Encode fields in order, each as a u32 little-endian length and its bytes (text: UTF-8)."""
    pieces: list[bytes] = []
    for part in parts:
        data = part.encode() if isinstance(part, str) else bytes(as_bytes(part))
        pieces.append(struct.pack("<I", len(data)))
        pieces.append(data)
    return b"".join(pieces)


def canonical_config(config: Mapping[str, ConfigValue]) -> bytes:
    """Encode a flat configuration: key and value fields, sorted by the key's UTF-8 bytes.

    A value is tagged text: `s:` string, `i:` decimal integer, `b:true`/`b:false`, `n:` null, `f:`
    and 16 hex digits, the little-endian bytes of a float64.
    """
    fields: list[str] = []
    for key in sorted(config, key=lambda name: name.encode()):
        fields += [key, _tagged(config[key])]
    return canonical(*fields)


def _tagged(value: ConfigValue) -> str:
    if value is None:
        return "n:"
    if isinstance(value, bool):
        return f"b:{'true' if value else 'false'}"
    if isinstance(value, int):
        return f"i:{value}"
    if isinstance(value, float):
        return f"f:{struct.pack('<d', value).hex()}"
    return f"s:{value}"


def ids_bytes(ids: TokenIds) -> bytes:
    """Return token ids as u32 little-endian, one after the other."""
    if isinstance(ids, np.ndarray):
        assert ids.dtype.kind in "ui", ids.dtype
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() <= TOKEN_ID_MAX), "no token id"
        return ids.astype("<u4").tobytes()
    if isinstance(ids, array) and ids.typecode == "I" and sys.byteorder == "little":
        return ids.tobytes()
    return struct.pack(f"<{len(ids)}I", *ids)


def _hash(data: bytes, length: int = HASH_BYTES) -> bytes:
    return blake3(data).digest(length)


def content_hash(chunks: Iterable[Buffer]) -> bytes:
    """Return BLAKE3 (32 bytes) of a file's bytes as stored, read in any chunks."""
    hasher = blake3()
    for chunk in chunks:
        hasher.update(as_bytes(chunk).data)
    return hasher.digest()


def model_digest(config: Mapping[str, ConfigValue], weight_hashes: Sequence[bytes]) -> bytes:
    """Return the model digest (16 bytes): configuration and the weight files as stored.

    `weight_hashes` holds `content_hash` of each weight file, ordered by file name.
    """
    assert all(len(item) == HASH_BYTES for item in weight_hashes)
    return _hash(
        canonical("baton.model.v1", canonical_config(config), *weight_hashes), DIGEST_BYTES
    )


def tokenizer_hash(
    kind: str,
    tokens: Sequence[str | bytes],
    merges: Sequence[str],
    special_ids: Sequence[int],
    settings: Mapping[str, ConfigValue],
) -> bytes:
    """Return the tokenizer hash (8 bytes) of a tokenizer's canonical definition.

    `tokens` in id order, `merges` in rank order, `special_ids` ascending, `settings` whatever else
    decides ids (pre-tokeniser, normaliser, added begin or end tokens).
    """
    definition = canonical(
        "baton.tokenizer.v1",
        kind,
        canonical(*tokens),
        canonical(*merges),
        ids_bytes(sorted(special_ids)),
        canonical_config(settings),
    )
    return _hash(definition, TOKENIZER_HASH_BYTES)


def template_digest(template: str) -> bytes:
    """Return the chat template digest (16 bytes)."""
    return _hash(canonical("baton.template.v1", template), DIGEST_BYTES)


def rope_digest(rope: Mapping[str, ConfigValue]) -> bytes:
    """Return the digest (16 bytes) of the RoPE parameters a worker fixed at load."""
    return _hash(canonical("baton.rope.v1", canonical_config(rope)), DIGEST_BYTES)


def kv_digest(
    *,
    model: bytes,
    rope: bytes,
    dtype: KvDtype,
    block_tokens: int,
    adapter: bytes | None = None,
    layout: int = LAYOUT,
) -> bytes:
    """Return the KV digest (16 bytes): all that decides what KV bytes mean, but for the tokens.

    `model` is the model digest, `rope` the RoPE digest, `adapter` an adapter's digest (16 bytes) or
    None.
    """
    assert len(model) == len(rope) == DIGEST_BYTES
    assert adapter is None or len(adapter) == DIGEST_BYTES
    numbers = struct.pack("<HH", layout, block_tokens)
    return _hash(
        canonical("baton.kv.v1", model, adapter or b"", rope, dtype.text, numbers), DIGEST_BYTES
    )


def ids_hash(ids: TokenIds) -> bytes:
    """Return BLAKE3 (32 bytes) of token ids: one of the two hashes of a published prefix."""
    return _hash(canonical("baton.ids.v1", ids_bytes(ids)))


def text_hash(rendered: bytes) -> bytes:
    """Return BLAKE3 (32 bytes) of a rendered prompt's UTF-8 bytes: the other hash of a prefix."""
    return _hash(canonical("baton.text.v1", rendered))


def body_hash(body: bytes) -> bytes:
    """Return BLAKE3 (32 bytes) of a request body, for idempotency."""
    return _hash(canonical("baton.body.v1", body))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPage:
    """One page's part in a chunk list: where its tokens stand and the CRC of their content.

    `crc` is the page CRC of a full page, else `crc.slot_list_crc` of the slots.
    """

    first_position: int
    tokens: int
    crc: int


def chunk_list_digest(kv: bytes, chunks: Iterable[Sequence[ChunkPage]]) -> bytes:
    """Return the digest (32 bytes) of the chunks a log had when it was sealed, in order.

    It covers positions and content CRCs, not places, so that it holds for a copy on another node.
    """
    fields = [
        b"".join(struct.pack("<III", page.first_position, page.tokens, page.crc) for page in chunk)
        for chunk in chunks
    ]
    return _hash(canonical("baton.chunks.v1", kv, *fields))


def history_start(kv: bytes) -> bytes:
    """Return H_0, the history digest (32 bytes) at position 0 of any log of this KV digest."""
    assert len(kv) == DIGEST_BYTES
    return _hash(canonical(kv))


def history_step(previous: bytes, ids: TokenIds) -> bytes:
    """Return the digest after the next block, or inside it when `ids` are only its first tokens."""
    assert len(previous) == HASH_BYTES
    assert len(ids) > 0
    return _history_step(previous, ids_bytes(ids))


def _history_step(previous: bytes, data: bytes) -> bytes:
    # canonical(previous, data), without the detours: it runs once for each block of a prompt.
    return blake3(_HASH_SIZE + previous + _SIZE.pack(len(data)) + data).digest()


class HistoryDigest:
    """The history digest of a growing sequence; remembers the open block's ids only.

    Feed it tokens in order with `extend`; `digest()` is the digest at `position`.
    """

    __slots__ = ("_block_bytes", "_boundary", "_open", "position")

    def __init__(self, kv: bytes, block_tokens: int) -> None:
        self._block_bytes = 4 * block_tokens
        self._boundary = history_start(kv)
        # The ids since the last block's end, as bytes.
        self._open = b""
        self.position = 0

    def extend(self, ids: Iterable[int]) -> None:
        """Feed the next token ids."""
        added = ids_bytes(ids if isinstance(ids, Sequence | np.ndarray) else list(ids))
        self.position += len(added) // 4
        data, size = self._open + added, self._block_bytes
        full = len(data) // size * size
        for first in range(0, full, size):
            self._boundary = _history_step(self._boundary, data[first : first + size])
        self._open = data[full:]

    def digest(self) -> bytes:
        """Return the history digest (32 bytes) at `position`."""
        return _history_step(self._boundary, self._open) if self._open else self._boundary


def history_at(kv: bytes, block_tokens: int, ids: TokenIds) -> bytes:
    """Return the history digest (32 bytes) at the position after `ids`, which start at 0."""
    history = HistoryDigest(kv, block_tokens)
    history.extend(ids)
    return history.digest()

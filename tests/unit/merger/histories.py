"""Segments of one made-up history, and splice requests in order and out of it."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any, Final

from baton.api.merger.v1 import merger_pb2
from baton.kv.digests import history_at, ids_hash, text_hash
from baton.kv.manifest import Segment
from baton.kv.numeric import NATIVE_Q4_1, TORCH_BF16, TORCH_F32
from baton.wire.segments import segment_to_proto

KV: Final = b"k" * 16
BLOCK: Final = 8
IDS: Final = list(range(100, 400))
TEXT: Final = b"a rendered system prompt"


@cache
def _digest_at(position: int) -> bytes:
    return history_at(KV, BLOCK, IDS[:position])


def segment(start: int, end: int, *, is_published: bool = False, **changes: Any) -> Segment:
    """Positions [start, end) of the history, in a log of its own."""
    one = Segment(
        log_id=bytes(14) + (start + 1).to_bytes(2, "big"),
        generation=1,
        from_position=start,
        to_position=end,
        history_start=_digest_at(start),
        history_end=_digest_at(end),
        kv_digest=KV,
        tokenizer_hash=b"t" * 8,
        block_tokens=BLOCK,
        numeric_class_id=7,
        text_hash=text_hash(TEXT) if is_published else None,
        ids_hash=ids_hash(IDS[:end]) if is_published else None,
    )
    return replace(one, **changes)


def request(*segments: Segment, **more: Any) -> merger_pb2.SpliceRequest:
    """The request to splice them, with the hashes that they have."""
    fields: dict[str, Any] = {
        "segments": [segment_to_proto(one) for one in segments],
        "block_tokens": BLOCK,
        "expected_text_hashes": [one.text_hash for one in segments if one.text_hash],
        "expected_ids_hashes": [one.ids_hash for one in segments if one.ids_hash],
    }
    return merger_pb2.SpliceRequest(**fields | more)


_CHANGES: Final[tuple[dict[str, Any], ...]] = (
    {"history_start": b"x" * 32},
    {"history_end": b"x" * 31},
    {"from_position": 1},
    {"to_position": 0},
    {"log_id": b"short"},
    {"kv_digest": b"K" * 16},
    {"tokenizer_hash": b"T" * 8},
    {"numeric_class_id": TORCH_F32.id},
    {"block_tokens": 16},
    {"block_tokens": 7},
    {"generation": (1 << 64) - 1},
    {"text_hash": b"x" * 32},
    {"ids_hash": None},
)


def drawn_request(draw: random.Random) -> merger_pb2.SpliceRequest:
    """Mostly a request in order; else one with something about it."""
    cuts = sorted(draw.sample(range(1, 299), draw.randrange(4)))
    generations = (0, *range(1, 20), 127, 128, 70_000, 1 << 62, 1 << 63)
    parts = [
        segment(
            *(start, end),
            is_published=draw.random() < 0.3,
            generation=draw.choice(generations),
            numeric_class_id=draw.choice((TORCH_BF16.id, TORCH_BF16.id, NATIVE_Q4_1.id)),
        )
        for start, end in zip([0, *cuts], [*cuts, draw.randrange(299, 301)], strict=True)
    ]
    if draw.random() < 0.15:
        at = draw.randrange(len(parts))
        parts[at] = replace(parts[at], **draw.choice(_CHANGES))
    if draw.random() < 0.1:
        parts = [replace(one, log_id=b"l" * 16) for one in parts]
    made = request(*parts, request_id=draw.choice(("", "r-1", "r" * 127, "r" * 128, "größe")))
    for spoil, chance in _SPOILS:
        if draw.random() < chance:
            spoil(made)
    return made


def _longer_hashes(made: merger_pb2.SpliceRequest) -> None:
    made.expected_ids_hashes.append(b"h" * 32)


def _other_hash(made: merger_pb2.SpliceRequest) -> None:
    for at in range(len(made.expected_text_hashes)):
        made.expected_text_hashes[at] = b"h" * 32


def _prefix_id(made: merger_pb2.SpliceRequest) -> None:
    made.segments[0].prefix_id = "pfx-1"


def _token_ids(made: merger_pb2.SpliceRequest) -> None:
    made.segments[-1].token_ids.extend([1, 2, 300])


def _no_block(made: merger_pb2.SpliceRequest) -> None:
    made.block_tokens = 0


def _no_segments(made: merger_pb2.SpliceRequest) -> None:
    del made.segments[:]


_SPOILS: Final = tuple(
    (spoil, 0.02)
    for spoil in (_longer_hashes, _other_hash, _prefix_id, _token_ids, _no_block, _no_segments)
)

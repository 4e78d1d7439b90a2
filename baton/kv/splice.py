"""Splice: segments in, one manifest out, or a refusal that names the segment and the field.

Owns the rule under which segments join. Pure: the merger and the gateway call the same function.

Invariants of a result: segments cover [0, total_tokens) without gap or overlap; the history digest
at each joint is the same on both sides, so that the KV behind a joint was computed over exactly the
tokens before it; all segments have one KV digest, tokenizer and block_tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import Reason, ServiceError
from baton.kv.crc import Buffer
from baton.kv.digests import history_start
from baton.kv.manifest import (
    SEGMENTS_MAX,
    Manifest,
    Segment,
    check_segment,
    decode_segments,
    refuse,
)
from baton.kv.numeric import DEFAULT_POLICY, CompatPolicy


def splice(segments: Sequence[Segment], policy: CompatPolicy = DEFAULT_POLICY) -> Manifest:
    """Join segments into one manifest.

    Raises INVALID_REQUEST, COMPAT_MISMATCH, TOKENIZER_MISMATCH or STALE_GENERATION with metadata
    segment and field (and ours, theirs for the latter three). Of generations only this is known
    here: of two segments of one log with different ones, one is stale. Rights, and the generation
    that a log has now, are checked by OPEN.
    """
    joined = _joined(segments, policy)
    _check_generations(segments)
    return joined


def _joined(segments: Sequence[Segment], policy: CompatPolicy) -> Manifest:
    if not 1 <= len(segments) <= SEGMENTS_MAX:
        raise refuse("segments", f"give 1 to {SEGMENTS_MAX} segments")
    for index, segment in enumerate(segments):
        check_segment(segment, index)
        _check_same_label(segments[0], segment, index, policy)
        before = segments[index - 1] if index else None
        _check_joint(before, segment, index)
    return Manifest(segments=tuple(segments))


def decode_manifest(data: Buffer, policy: CompatPolicy = DEFAULT_POLICY) -> Manifest:
    """Decode canonical bytes of a manifest and check that its segments join.

    Raises INVALID_REQUEST naming the field, or what `splice` raises; generations are those of the
    time when it was written.
    """
    return _joined(decode_segments(data), policy)


def check_generation(segment: Segment, index: int, current: int) -> None:
    """STALE_GENERATION naming the segment unless its log's generation is still the one it names; 0
    names none.
    """
    if segment.generation in (0, current):
        return
    theirs = segment.generation
    if theirs > current:
        raise refuse("generation", f"the log's generation is {current}", index=index)
    raise ServiceError(
        Reason.STALE_GENERATION,
        f"segments[{index}].generation is {theirs}, the log's is {current}; take the segment from "
        "the log as it is now",
        field=f"segments[{index}].generation",
        metadata={
            "segment": str(index),
            "field": "generation",
            "ours": str(current),
            "theirs": str(theirs),
            "log_id": segment.log_id.hex(),
        },
    )


def _check_generations(segments: Sequence[Segment]) -> None:
    """A log that is named twice is named at its newest generation both times."""
    newest: dict[bytes, int] = {}
    for segment in segments:
        known = newest.get(segment.log_id, 0)
        newest[segment.log_id] = max(known, segment.generation)
    for index, segment in enumerate(segments):
        check_generation(segment, index, newest[segment.log_id])


def _check_same_label(first: Segment, segment: Segment, index: int, policy: CompatPolicy) -> None:
    for name in ("kv_digest", "block_tokens", "tokenizer_hash"):
        ours, theirs = getattr(first, name), getattr(segment, name)
        if ours != theirs:
            raise _mismatch(name, index, _as_text(ours), _as_text(theirs))
    writer, reader = segment.numeric_class_id, first.numeric_class_id
    if not policy.is_readable(writer=writer, reader=reader):
        raise _mismatch("numeric_class", index, f"{reader:08x}", f"{writer:08x}")


def _check_joint(before: Segment | None, segment: Segment, index: int) -> None:
    start = 0 if before is None else before.to_position
    if segment.from_position != start:
        raise refuse("from_position", f"must be {start}: segments follow one another", index=index)
    meets = history_start(segment.kv_digest) if before is None else before.history_end
    if segment.history_start != meets:
        where = "an empty history" if before is None else "where the segment before it ends"
        raise refuse("history_start", f"the history digest does not meet {where}", index=index)


def _as_text(value: bytes | int) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _mismatch(name: str, index: int, ours: str, theirs: str) -> ServiceError:
    is_tokenizer = name == "tokenizer_hash"
    return ServiceError(
        Reason.TOKENIZER_MISMATCH if is_tokenizer else Reason.COMPAT_MISMATCH,
        f"segments[{index}].{name} differs from segments[0]; splice segments of one label only",
        field=f"segments[{index}].{name}",
        metadata={"segment": str(index), "field": name, "ours": ours, "theirs": theirs},
    )

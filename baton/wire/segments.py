"""Segments and manifests, proto <-> dataclass.

Owns the translation. A manifest from the wire is spliced again from its segments, so that whatever
the sender claimed about it beyond them is checked and never believed.
"""

from __future__ import annotations

from baton.api.common.v1 import common_pb2
from baton.errors import Reason, ServiceError
from baton.kv.manifest import Manifest, Segment
from baton.kv.splice import splice


def segment_to_proto(segment: Segment) -> common_pb2.Segment:
    """The segment as a message."""
    return common_pb2.Segment(
        log=common_pb2.LogPosition(
            log_id=segment.log_id, generation=segment.generation, position=segment.to_position
        ),
        from_position=segment.from_position,
        history_start=segment.history_start,
        history_end=segment.history_end,
        kv_digest=segment.kv_digest,
        tokenizer_hash=segment.tokenizer_hash,
        numeric_class_id=segment.numeric_class_id,
        block_tokens=segment.block_tokens,
        text_hash=segment.text_hash or b"",
        ids_hash=segment.ids_hash or b"",
    )


def segment_from_proto(message: common_pb2.Segment) -> Segment:
    """The segment; sizes are checked by `splice`, which every user of it calls."""
    return Segment(
        log_id=message.log.log_id,
        generation=message.log.generation,
        from_position=message.from_position,
        to_position=message.log.position,
        history_start=message.history_start,
        history_end=message.history_end,
        kv_digest=message.kv_digest,
        tokenizer_hash=message.tokenizer_hash,
        block_tokens=message.block_tokens,
        numeric_class_id=message.numeric_class_id,
        text_hash=message.text_hash or None,
        ids_hash=message.ids_hash or None,
    )


def manifest_to_proto(manifest: Manifest) -> common_pb2.Manifest:
    """The manifest with, per part, how many pages are shared and how many tokens are copied."""
    parts = [
        common_pb2.ManifestPart(
            segment=segment_to_proto(segment),
            pages_shared=segment.pages_shared,
            tokens_copied=segment.tokens - segment.pages_shared * segment.block_tokens,
        )
        for segment in manifest.segments
    ]
    return common_pb2.Manifest(
        parts=parts,
        total_tokens=manifest.total_tokens,
        history_end=manifest.history_end,
        block_tokens=manifest.block_tokens,
        digest=manifest.digest(),
    )


def manifest_from_proto(message: common_pb2.Manifest) -> Manifest:
    """The manifest, spliced again from its segments.

    Raises what `splice` raises, and INVALID_REQUEST naming `manifest.digest` when the digest does
    not follow from the segments.
    """
    manifest = splice([segment_from_proto(part.segment) for part in message.parts])
    if message.digest != manifest.digest():
        raise ServiceError(
            Reason.INVALID_REQUEST,
            "manifest.digest does not follow from its segments; splice them again",
            field="manifest.digest",
        )
    return manifest

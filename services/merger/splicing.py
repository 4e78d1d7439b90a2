"""One splice of a request: the hashes the caller expects, then the pure splice.

Owns the comparison of expected hashes. Pure; the rule of joining stands in `baton.kv.splice`.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import Reason, ServiceError
from baton.kv.manifest import Manifest, Segment
from baton.kv.splice import splice


@dataclass(frozen=True, slots=True, kw_only=True)
class SpliceOrder:
    """Segments in position order, with the hashes that the caller computed over its own prompt.

    The n-th expected hash belongs to the n-th segment that carries hashes.
    """

    segments: tuple[Segment, ...]
    block_tokens: int
    expected_text_hashes: tuple[bytes, ...] = ()
    expected_ids_hashes: tuple[bytes, ...] = ()


def carry_out(order: SpliceOrder) -> Manifest:
    """The manifest; raises INVALID_REQUEST or a mismatch naming segment and field."""
    if not order.segments:
        raise _refused("segments", "must hold at least one segment")
    first = order.segments[0].block_tokens
    if order.block_tokens != first:
        raise ServiceError(
            Reason.COMPAT_MISMATCH,
            f"block_tokens differs: asked for {order.block_tokens}, the segments have {first}",
            field="block_tokens",
            metadata={
                "field": "block_tokens",
                "ours": str(order.block_tokens),
                "theirs": str(first),
            },
        )
    _check_hashes(order)
    return splice(order.segments)


def _check_hashes(order: SpliceOrder) -> None:
    hashed = [
        (index, segment)
        for index, segment in enumerate(order.segments)
        if segment.text_hash is not None or segment.ids_hash is not None
    ]
    for name in ("text_hash", "ids_hash"):
        given: Sequence[bytes] = getattr(order, f"expected_{name}es")
        # A published prefix is used only by who has computed both hashes over the prompt itself.
        if len(given) != len(hashed):
            raise _refused(
                f"expected_{name}es", f"must hold {len(hashed)} hashes, one per published segment"
            )
        for expected, (index, segment) in zip(given, hashed, strict=True):
            if not hmac.compare_digest(expected, getattr(segment, name) or b""):
                field = f"segments[{index}].{name}"
                raise ServiceError(
                    Reason.COMPAT_MISMATCH,
                    f"{field} is not that of the prompt; this prefix does not begin it",
                    field=field,
                    metadata={"segment": str(index), "field": name},
                )


def _refused(field: str, remedy: str) -> ServiceError:
    return ServiceError(
        Reason.INVALID_REQUEST, f"{field} {remedy}", field=field, metadata={"field": field}
    )

"""What a log that began from others starts with: tokens and KV rows of a parent or a manifest.

Owns the resolution of an OPEN's base against the fold as it is at that record. Pure. A base that is
not there, or whose tokens are not those the manifest's digests say, is unresolved: the log has its
tokens only once a SNAPSHOT states them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from baton.kv.digests import HistoryDigest
from baton.kv.manifest import Manifest, PagePlan
from services.kvstore.log.folded import Doubt, Folded
from services.kvstore.log.kv_rows import KvRows
from services.kvstore.log.state import Parent
from services.kvstore.rows import PageRow
from services.kvstore.state import TOKEN_TYPECODE, LogState, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a segment's positions stand."""

    tokens: array[int] | Tokens
    kv: KvRows
    doubts: tuple[Doubt, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Tokens and KV that a log begins with. `kv` None: none of it. `source`: a parent's state."""

    tokens: array[int]
    kv: KvRows | None = None
    doubts: tuple[Doubt, ...] = ()
    source: LogState | None = None
    is_resolved: bool = False


def parent_base(folded: Folded, parent: Parent, cached: int | None, *, is_fork: bool) -> Base:
    """Positions [0, parent.position) of a log; `cached` of them with their KV.

    A fork shares the partial last page until a writer takes it. Any other child has that page's
    slots in a copy, which a later record names.
    """
    state = folded.state
    if folded.is_unresolved or state.position < parent.position:
        return Base(tokens=array(TOKEN_TYPECODE, bytes(4 * parent.position)))
    kept = min(cached or 0, folded.kv.committed, parent.position)
    kv = folded.kv.head(kept)
    if not is_fork and kept % kv.block_tokens:
        kv.replace_tail(None)
    return Base(
        tokens=state.tokens[: parent.position],
        kv=kv,
        doubts=tuple(folded.doubts),
        source=state,
        is_resolved=True,
    )


def manifest_base(
    manifest: Manifest, sources: Sequence[Source | None], arena_id: bytes | None
) -> Base:
    """The spliced history. Blocks in one segment share its page; a copied one is stated later."""
    tokens = array(TOKEN_TYPECODE)
    history = HistoryDigest(manifest.kv_digest, manifest.block_tokens)
    doubts: list[Doubt] = []
    found: list[Source] = []
    for segment, source in zip(manifest.segments, sources, strict=True):
        if source is None:
            return _unresolved(manifest)
        part = source.tokens[segment.from_position : segment.to_position]
        history.extend(part)
        if history.digest() != segment.history_end:
            return _unresolved(manifest)
        tokens.extend(part)
        doubts.extend(source.doubts)
        found.append(source)
    kv = KvRows(manifest.block_tokens, arena_id)
    kv.committed = manifest.total_tokens
    if arena_id is not None:
        kv.rows = [_shared_row(plan, found) for plan in manifest.pages()]
    return Base(tokens=tokens, kv=kv, doubts=tuple(doubts), is_resolved=True)


def _unresolved(manifest: Manifest) -> Base:
    return Base(tokens=array(TOKEN_TYPECODE, bytes(4 * manifest.total_tokens)))


def _shared_row(plan: PagePlan, sources: Sequence[Source]) -> PageRow | None:
    if not plan.is_shared:
        return None
    rows = sources[plan.sources[0].segment_index].kv.rows
    row = rows[plan.block_index] if plan.block_index < len(rows) else None
    return row if row is not None and row.crc is not None else None

"""What a new log starts from: a cached prefix, a parent, or a manifest, as rows of a page table.

Owns the resolution and validation of a base and the plan of its pages: which are shared, which are
copied into fresh pages. Pure. It changes nothing; the store pins and builds. What lookups find is
`lookup`'s.

Invariants: a base is the tenant's own or granted to it; a base never covers the whole prompt (the
last prompt token is always computed); only sealed logs serve (O2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from baton.errors import Reason, ServiceError
from baton.kv.digests import HistoryDigest
from baton.kv.manifest import Manifest, Segment, refuse
from baton.kv.splice import check_generation
from services.kvstore.chains import ScopeChains
from services.kvstore.core import Core, invalid, log_not_found
from services.kvstore.home import Event, require_allowed, require_same_tokens
from services.kvstore.log.state import Parent
from services.kvstore.lookup import AnyHit, Asker, Found, Lookups
from services.kvstore.nodes import Node
from services.kvstore.prefixes import Prefix
from services.kvstore.rows import cut_row
from services.kvstore.state import LogState, Rows, SlotSource


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """One block of a base: its sources cover slots 0.. without a gap."""

    sources: tuple[SlotSource, ...]
    tokens: int

    def is_shared(self, block_tokens: int) -> bool:
        """Whether the new log refers to the source's full page instead of copying."""
        return len(self.sources) == 1 and self.tokens == block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BasePlan:
    """The KV a log starts with: `tokens` positions of one writer class.

    `rows` are the first blocks, full pages that are shared; `blocks` are those behind them. `node`
    is one in the tree, `node_depth` blocks deep, of which the first `node_blocks` are the plan's;
    the tree has the first `indexed_blocks` of them for the asker, and the first `foreign_blocks`
    are another tenant's published ones. `is_prefix`: the base is a manifest that names a published
    prefix and nothing else. `is_looked_up`: found by the prompt's tokens, whatever base was named.
    """

    tokens: int = 0
    rows: Rows = field(default_factory=Rows)
    blocks: tuple[BlockPlan, ...] = ()
    numeric_class_id: int | None = None
    prefix: Prefix | None = None
    node: Node | None = None
    node_depth: int = 0
    node_blocks: int = 0
    indexed_blocks: int = 0
    foreign_blocks: int = 0
    is_prefix: bool = False
    is_looked_up: bool = False

    def copies(self, block_tokens: int) -> int:
        """How many fresh pages the copied blocks need."""
        return sum(not block.is_shared(block_tokens) for block in self.blocks)

    def shared(self, block_tokens: int) -> int:
        """How many pages are the base's own."""
        return len(self.rows) + len(self.blocks) - self.copies(block_tokens)


class HistoryFinder:
    """Resolves bases against one store's tables."""

    def __init__(self, core: Core, chains: ScopeChains) -> None:
        self._core = core
        self._chains = chains
        self._lookups = Lookups(core, chains)

    def cached(self, asker: Asker, tokens: Sequence[int]) -> BasePlan:
        """The most tokens that are on the host, at most n - 1, in what the asker may look into."""
        found = self._lookups.find(asker, tokens, with_cold=False)
        return BasePlan() if found is None else self._plan_of(found, asker)

    def anywhere(self, asker: Asker, tokens: Sequence[int]) -> AnyHit | None:
        """The most tokens that are on the host or on NVMe; what a promotion is worth."""
        return self._lookups.anywhere(asker, tokens)

    def _plan_of(self, found: Found, asker: Asker) -> BasePlan:
        rows = Rows(place.row for place in found.places if place.row is not None)
        assert len(rows) == len(found.places), "a lookup on the host has found what is not there"
        blocks: tuple[BlockPlan, ...] = ()
        if found.near is not None:
            row, tokens = found.near.place.row, found.near.tokens
            assert row is not None
            source = SlotSource(row=cut_row(row, tokens), first_slot=0, tokens=tokens)
            blocks = (BlockPlan(sources=(source,), tokens=tokens),)
        scope, prefix_id = found.published_scope, found.prefix_id
        is_foreign = scope is not None and scope.owner != asker.tenant
        return BasePlan(
            tokens=found.tokens,
            rows=rows,
            blocks=blocks,
            numeric_class_id=found.numeric_class_id,
            prefix=None if prefix_id is None else self._core.prefixes.get(prefix_id),
            node=found.node,
            node_depth=len(rows),
            node_blocks=len(rows),
            indexed_blocks=len(rows),
            foreign_blocks=found.published if is_foreign else 0,
            is_looked_up=True,
        )

    def parent(self, asker: Asker, parent: Parent, tokens: Sequence[int]) -> BasePlan:
        """Positions [0, parent.position) of another log of the tenant, as far as it has KV."""
        log = self._readable_log(parent.log_id, asker.tenant)
        # An older generation is fine: that the tokens are the same is what is checked.
        if parent.generation > log.generation:
            raise invalid("parent.generation", f"the log's generation is {log.generation}")
        require_allowed(log, Event.FORK)
        require_same_tokens(self._core.limits, log)
        if parent.position > log.position:
            raise invalid("parent.position", f"the log has {log.position} tokens")
        if not log.tokens.begins_with(tokens, parent.position):
            raise invalid("prompt_token_ids", "do not begin with the parent's tokens")
        if not self._is_readable(log.numeric_class_id, asker) or not self._is_readable(
            log.base_class_id, asker
        ):
            return BasePlan()
        usable = min(parent.position, log.committed, len(tokens) - 1)
        plan = plan_of_rows(log.rows, usable, self._core.block_tokens, log.numeric_class_id)
        full = len(plan.rows)
        plan = replace(plan, foreign_blocks=min(log.foreign_blocks, full))
        if log.scope != asker.scope:
            return plan
        return replace(
            plan,
            node=log.node,
            node_depth=log.node_depth,
            node_blocks=min(log.node_blocks, full),
            indexed_blocks=min(log.indexed_blocks, full),
        )

    def _is_readable(self, writer: int, asker: Asker) -> bool:
        return self._core.limits.policy.is_readable(writer=writer, reader=asker.numeric_class.id)

    def _readable_log(self, log_id: bytes, tenant: str) -> LogState:
        log = self._core.find(log_id)
        # Another tenant's log and none at all look the same.
        if log.tenant != tenant:
            raise log_not_found(log_id)
        return log

    def manifest(self, asker: Asker, manifest: Manifest, tokens: Sequence[int]) -> BasePlan:
        """A spliced history: rights, labels, digests, generations and KV of every segment."""
        limits = self._core.limits
        for name, ours in (
            ("kv_digest", limits.kv_digest),
            ("tokenizer_hash", limits.tokenizer_hash),
            ("block_tokens", limits.block_tokens),
        ):
            theirs = getattr(manifest, name)
            if theirs != ours:
                raise _segment_mismatch(name, _shown(ours), _shown(theirs))
        if manifest.total_tokens > len(tokens):
            raise refuse("total_tokens", "the manifest is longer than the prompt")
        history = HistoryDigest(limits.kv_digest, limits.block_tokens)
        rows: list[Rows] = []
        prefixes: list[Prefix | None] = []
        for index, segment in enumerate(manifest.segments):
            history.extend(tokens[segment.from_position : segment.to_position])
            if history.digest() != segment.history_end:
                raise refuse("history_end", "is not that of the prompt's tokens", index=index)
            if not self._is_readable(segment.numeric_class_id, asker):
                ours_id, theirs_id = asker.numeric_class.id, segment.numeric_class_id
                raise _segment_mismatch(
                    "numeric_class", f"{ours_id:08x}", f"{theirs_id:08x}", index
                )
            found, used = self._segment_rows(asker, segment, index)
            rows.append(found)
            prefixes.append(used)
        usable = min(manifest.total_tokens, len(tokens) - 1)
        plan = self._spliced(manifest, rows, usable)
        plan = replace(
            plan,
            prefix=next((prefix for prefix in prefixes if prefix is not None), None),
            is_prefix=len(prefixes) == 1 and prefixes[0] is not None,
        )
        return self._behind_prefixes(asker, manifest, plan, prefixes)

    def _behind_prefixes(
        self,
        asker: Asker,
        manifest: Manifest,
        plan: BasePlan,
        prefixes: Sequence[Prefix | None],
    ) -> BasePlan:
        """Blocks of other tenants' prefixes are never found as the asker's own: its chain goes on
        behind the published one, or, where they do not come first, is not offered at all.
        """
        foreign = [one is not None and one.owner_tenant != asker.tenant for one in prefixes]
        if not any(foreign):
            return plan
        blocks = plan.shared(self._core.block_tokens)
        first = prefixes[0]
        if first is None or any(foreign[1:]):
            return replace(plan, foreign_blocks=blocks)
        end = min(manifest.segments[0].to_position, plan.tokens)
        path = self._chains.published_path(first, end // self._core.block_tokens)
        return replace(
            plan,
            node=path[-1] if path else None,
            node_depth=len(path),
            node_blocks=len(path),
            indexed_blocks=len(path),
            foreign_blocks=end // self._core.block_tokens,
        )

    def _segment_rows(
        self, asker: Asker, segment: Segment, index: int
    ) -> tuple[Rows, Prefix | None]:
        """The rows a segment's positions stand in, from a granted prefix or an own log."""
        prefix = self._core.prefixes.granting(segment.log_id, asker.tenant, segment.to_position)
        if prefix is not None:
            ours, theirs = self._core.limits.tokenizer_hash, prefix.tokenizer_hash
            if theirs != ours:
                raise _segment_mismatch("tokenizer_hash", _shown(ours), _shown(theirs), index)
            _check_history(segment, prefix.token_ids, self._core, index)
            rows = Rows(prefix.rows)
            if rows.tokens < segment.to_position:
                raise _not_found(segment, index, "stands on NVMe only, and was not loaded")
            return rows, prefix
        log = self._core.logs.get(segment.log_id)
        if log is None or log.tenant != asker.tenant:
            raise _not_found(segment, index, "is not here, was revoked, or is not granted")
        check_generation(segment, index, log.generation)
        try:
            require_allowed(log, Event.FORK)
        except ServiceError as error:
            raise refuse("log_id", error.message, index=index) from error
        require_same_tokens(self._core.limits, log)
        if log.committed < segment.to_position:
            raise _not_found(segment, index, f"has KV for {log.committed} positions only")
        _check_history(segment, log.tokens, self._core, index)
        return log.rows, None

    def _spliced(
        self,
        manifest: Manifest,
        rows: list[Rows],
        usable: int,
    ) -> BasePlan:
        block_tokens = self._core.block_tokens
        class_id = manifest.segments[0].numeric_class_id
        if len(manifest.segments) == 1:
            return plan_of_rows(rows[0], usable, block_tokens, class_id)
        blocks: list[BlockPlan] = []
        for page in manifest.pages():
            room = usable - page.block_index * block_tokens
            sources: list[SlotSource] = []
            for part in page.sources:
                taken = min(part.tokens, room - part.first_slot)
                if taken > 0:
                    row = rows[part.segment_index][page.block_index]
                    # The last row of a log that is being written goes on changing.
                    row = cut_row(row, row.tokens)
                    sources.append(SlotSource(row=row, first_slot=part.first_slot, tokens=taken))
            if sources:
                covered = sum(source.tokens for source in sources)
                blocks.append(BlockPlan(sources=tuple(sources), tokens=covered))
        return BasePlan(
            tokens=usable,
            blocks=tuple(blocks),
            numeric_class_id=class_id,
        )


def plan_of_rows(rows: Rows, tokens: int, block_tokens: int, numeric_class_id: int) -> BasePlan:
    """The first `tokens` positions of a page table: full pages shared, the rest copied."""
    full, rest = divmod(tokens, block_tokens)
    blocks: tuple[BlockPlan, ...] = ()
    if rest:
        source = SlotSource(row=cut_row(rows[full], rest), first_slot=0, tokens=rest)
        blocks = (BlockPlan(sources=(source,), tokens=rest),)
    return BasePlan(
        tokens=tokens,
        rows=rows.head(full * block_tokens, block_tokens),
        blocks=blocks,
        numeric_class_id=numeric_class_id,
    )


def _check_history(segment: Segment, ids: Sequence[int], core: Core, index: int) -> None:
    """The source's own tokens must hash to what the segment says, at both ends."""
    history = HistoryDigest(core.limits.kv_digest, core.block_tokens)
    history.extend(ids[: segment.from_position])
    if history.digest() != segment.history_start:
        raise refuse("history_start", "is not that of the log", index=index)
    history.extend(ids[segment.from_position : segment.to_position])
    if history.position != segment.to_position or history.digest() != segment.history_end:
        raise refuse("history_end", "is not that of the log", index=index)


def _not_found(segment: Segment, index: int, why: str) -> ServiceError:
    return ServiceError(
        Reason.BLOCK_NOT_FOUND,
        f"segments[{index}]: log {segment.log_id.hex()} {why}; compute its tokens again",
        field=f"manifest.parts[{index}]",
        metadata={"segment": str(index), "log_id": segment.log_id.hex()},
    )


def _shown(value: bytes | int) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _segment_mismatch(name: str, ours: str, theirs: str, index: int = 0) -> ServiceError:
    is_tokenizer = name == "tokenizer_hash"
    return ServiceError(
        Reason.TOKENIZER_MISMATCH if is_tokenizer else Reason.COMPAT_MISMATCH,
        f"segments[{index}].{name} is {theirs}, and this store serves {ours} to this reader; "
        "compute its tokens again",
        field=f"segments[{index}].{name}",
        metadata={"segment": str(index), "field": name, "ours": ours, "theirs": theirs},
    )

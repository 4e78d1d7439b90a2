"""What a new log starts from: a cached prefix, a parent, or a manifest, as rows of a page table.

Owns the resolution and validation of a base and the plan of its pages: which are shared, which are
copied into fresh pages. Pure. It changes nothing but prefix hit counts; the store pins and builds.

Invariants: a base is the tenant's own or granted to it; a base never covers the whole prompt (the
last prompt token is always computed); only sealed logs serve (O2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from baton.errors import Reason, ServiceError
from baton.kv.blocks import BlockChain, Scope
from baton.kv.digests import HistoryDigest, ids_bytes
from baton.kv.manifest import Manifest, Segment, refuse
from baton.kv.numeric import NumericClass
from services.kvstore.core import Core, invalid, log_not_found
from services.kvstore.home import Event, copy_row, require_allowed
from services.kvstore.log.state import Parent
from services.kvstore.prefixes import Prefix
from services.kvstore.state import LogState, PageRow, SlotSource

SecretOf: TypeAlias = Callable[[Scope], bytes]
SCOPES_MAX: Final = 4096


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
    """The KV a log starts with: `tokens` positions in `blocks`, of one writer class."""

    tokens: int = 0
    blocks: tuple[BlockPlan, ...] = ()
    numeric_class_id: int | None = None
    prefix: Prefix | None = None

    def copies(self, block_tokens: int) -> int:
        """How many fresh pages the copied blocks need."""
        return sum(not block.is_shared(block_tokens) for block in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Who wants a base, and what it can read."""

    tenant: str
    scope: Scope
    numeric_class: NumericClass


class HistoryFinder:
    """Resolves bases against one store's tables."""

    def __init__(self, core: Core, chains: ScopeChains) -> None:
        self._core = core
        self._chains = chains

    def cached(self, asker: Asker, tokens: Sequence[int]) -> BasePlan:
        """The longest usable prefix of full blocks in the asker's own scope, cut to n - 1."""
        block_tokens = self._core.block_tokens
        blocks = len(tokens) // block_tokens
        if blocks == 0 or len(self._core.index) == 0:
            return BasePlan()
        keys = list(self._chains.chain(asker.scope).keys(tokens[: blocks * block_tokens]))
        ids = [
            ids_bytes(tokens[first : first + block_tokens])
            for first in range(0, blocks * block_tokens, block_tokens)
        ]
        hit = self._core.index.longest(keys, ids, self._classes(asker))
        if hit is None:
            return BasePlan()
        tokens_found = min(len(hit.rows) * block_tokens, len(tokens) - 1)
        return plan_of_rows(hit.rows, tokens_found, block_tokens, hit.numeric_class_id)

    def _classes(self, asker: Asker) -> list[int]:
        own = asker.numeric_class.id
        others = self._core.limits.policy.writers_for(own) - {own}
        return [own, *sorted(others)]

    def parent(self, asker: Asker, parent: Parent, tokens: Sequence[int]) -> BasePlan:
        """Positions [0, parent.position) of another log of the tenant, as far as it has KV."""
        log = self._readable_log(parent.log_id, asker.tenant)
        # An older generation is fine: that the tokens are the same is what is checked.
        if parent.generation > log.generation:
            raise invalid("parent.generation", f"the log's generation is {log.generation}")
        require_allowed(log, Event.FORK)
        if parent.position > log.position:
            raise invalid("parent.position", f"the log has {log.position} tokens")
        if list(tokens[: parent.position]) != list(log.tokens[: parent.position]):
            raise invalid("prompt_token_ids", "do not begin with the parent's tokens")
        if not self._is_readable(log.numeric_class_id, asker) or not self._is_readable(
            log.base_class_id, asker
        ):
            return BasePlan()
        usable = min(parent.position, log.committed, len(tokens) - 1)
        return plan_of_rows(log.rows, usable, self._core.block_tokens, log.numeric_class_id)

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
            if getattr(manifest, name) != ours:
                raise _segment_mismatch(name)
        if manifest.total_tokens > len(tokens):
            raise refuse("total_tokens", "the manifest is longer than the prompt")
        history = HistoryDigest(limits.kv_digest, limits.block_tokens)
        rows: list[Sequence[PageRow]] = []
        prefix: Prefix | None = None
        for index, segment in enumerate(manifest.segments):
            history.extend(tokens[segment.from_position : segment.to_position])
            if history.digest() != segment.history_end:
                raise refuse("history_end", "is not that of the prompt's tokens", index=index)
            if not self._is_readable(segment.numeric_class_id, asker):
                raise _segment_mismatch("numeric_class", index)
            found, used = self._segment_rows(asker, segment, index)
            rows.append(found)
            prefix = prefix or used
        usable = min(manifest.total_tokens, len(tokens) - 1)
        return self._spliced(manifest, rows, usable, prefix)

    def _segment_rows(
        self, asker: Asker, segment: Segment, index: int
    ) -> tuple[Sequence[PageRow], Prefix | None]:
        """The rows a segment's positions stand in, from a granted prefix or an own log."""
        prefix = self._core.prefixes.granting(segment.log_id, asker.tenant, segment.to_position)
        if prefix is not None:
            prefix.hits += 1
            _check_history(segment, prefix.token_ids, self._core, index)
            return prefix.rows, prefix
        log = self._core.logs.get(segment.log_id)
        if log is None or log.tenant != asker.tenant:
            raise _not_found(segment, index, "is not here, was revoked, or is not granted")
        if segment.generation not in (0, log.generation):
            raise _not_found(segment, index, f"has generation {log.generation} now")
        require_allowed(log, Event.FORK)
        if log.committed < segment.to_position:
            raise _not_found(segment, index, f"has KV for {log.committed} positions only")
        _check_history(segment, log.tokens, self._core, index)
        return log.rows, None

    def _spliced(
        self,
        manifest: Manifest,
        rows: list[Sequence[PageRow]],
        usable: int,
        prefix: Prefix | None,
    ) -> BasePlan:
        block_tokens = self._core.block_tokens
        blocks: list[BlockPlan] = []
        for page in manifest.pages():
            room = usable - page.block_index * block_tokens
            sources: list[SlotSource] = []
            for part in page.sources:
                taken = min(part.tokens, room - part.first_slot)
                if taken > 0:
                    row = copy_row(rows[part.segment_index][page.block_index])
                    sources.append(SlotSource(row=row, first_slot=part.first_slot, tokens=taken))
            if sources:
                covered = sum(source.tokens for source in sources)
                blocks.append(BlockPlan(sources=tuple(sources), tokens=covered))
        return BasePlan(
            tokens=usable,
            blocks=tuple(blocks),
            numeric_class_id=manifest.segments[0].numeric_class_id,
            prefix=prefix,
        )


class ScopeChains:
    """Block chains by scope; the secret is derived once per scope and kept, bounded."""

    def __init__(self, core: Core, secret_of: SecretOf) -> None:
        self._core = core
        self._secret_of = secret_of
        self._chains: dict[Scope, BlockChain] = {}

    def chain(self, scope: Scope) -> BlockChain:
        """The chain that keys a scope's blocks."""
        known = self._chains.get(scope)
        if known is None:
            if len(self._chains) >= SCOPES_MAX:
                self._chains.clear()
            known = self._chains[scope] = BlockChain(
                secret=self._secret_of(scope),
                scope=scope,
                kv=self._core.limits.kv_digest,
                block_tokens=self._core.block_tokens,
            )
        return known

    def offer(self, log: LogState) -> None:
        """Puts the log's full blocks that are not in the index yet into it."""
        core, block_tokens = self._core, self._core.block_tokens
        full = log.committed // block_tokens
        if not log.is_cacheable or full <= log.indexed_blocks:
            return
        parent = log.block_keys[log.indexed_blocks - 1] if log.indexed_blocks else None
        ids = log.tokens[log.indexed_blocks * block_tokens : full * block_tokens]
        keys = self.chain(log.scope).keys(ids, parent=parent)
        for index, key in enumerate(keys, start=log.indexed_blocks):
            del log.block_keys[index:]
            log.block_keys.append(key)
            is_base = (index + 1) * block_tokens <= log.cached_tokens
            class_id = log.base_class_id if is_base else log.numeric_class_id
            first = index * block_tokens
            block_ids = ids_bytes(log.tokens[first : first + block_tokens])
            core.index.offer(key, class_id, log.rows[index], block_ids)
        log.indexed_blocks = full


def plan_of_rows(
    rows: Sequence[PageRow], tokens: int, block_tokens: int, numeric_class_id: int
) -> BasePlan:
    """The first `tokens` positions of a page table."""
    blocks: list[BlockPlan] = []
    for index in range(-(-tokens // block_tokens)):
        count = min(block_tokens, tokens - index * block_tokens)
        source = SlotSource(row=copy_row(rows[index]), first_slot=0, tokens=count)
        blocks.append(BlockPlan(sources=(source,), tokens=count))
    return BasePlan(tokens=tokens, blocks=tuple(blocks), numeric_class_id=numeric_class_id)


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


def _segment_mismatch(name: str, index: int = 0) -> ServiceError:
    is_tokenizer = name == "tokenizer_hash"
    return ServiceError(
        Reason.TOKENIZER_MISMATCH if is_tokenizer else Reason.COMPAT_MISMATCH,
        f"segments[{index}].{name} is not what this store serves to this reader",
        field=f"segments[{index}].{name}",
        metadata={"segment": str(index), "field": name},
    )

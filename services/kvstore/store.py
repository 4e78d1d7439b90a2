"""The store's core: open, fork, truncate, cancel, close, and what the clock does to logs.

Owns the life of logs from OPEN to CLOSE and composes the other cores (home, history, keeper,
prefixes). Pure: time is passed in. What happened is in `core.journal` (records, in order) and
 `core.take_work()` (page work, in order); the runtime makes both real before it answers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import Reason, ServiceError
from baton.kv.blocks import Scope
from baton.kv.manifest import Manifest
from baton.kv.numeric import NumericClass
from baton.kv.sizing import pages_for
from baton.sampling_parameters import SamplingParameters
from services.kvstore.core import Core, invalid
from services.kvstore.history import (
    Asker,
    BasePlan,
    HistoryFinder,
    ScopeChains,
    SecretOf,
    plan_of_rows,
)
from services.kvstore.home import (
    Event,
    Home,
    copy_row,
    granted_pages,
    known_slot_crcs,
    require_allowed,
)
from services.kvstore.keeper import Keeper
from services.kvstore.log.state import Parent
from services.kvstore.pages import pages_exhausted
from services.kvstore.publishing import PrefixKeeper
from services.kvstore.state import (
    TOKEN_TYPECODE,
    AckLevel,
    FillPage,
    LogState,
    OpenAnswer,
    PageRow,
    Phase,
    Writer,
)
from services.kvstore.store_rows import cut_row
from services.kvstore.writes import SealEnd, Writes

FIRST_GENERATION = 1
OUTPUT_PAGES_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOrder:
    """A checked request to open a log. `base` None: look for the longest usable prefix."""

    request_id: str
    body_hash: bytes
    log_id: bytes
    tenant: str
    scope: Scope
    tokens: Sequence[int]
    sampling: SamplingParameters
    numeric_class: NumericClass
    label_digest: bytes
    base: Parent | Manifest | None
    is_cacheable: bool
    output_pages: int
    ttl_s: float | None
    drop_at_end: bool
    ack_level: AckLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """Both clocks: durations by the monotonic one, TTLs by wall time."""

    monotonic_s: float
    wall_s: float


class Store:
    """One kvstore's logs. Every method is atomic: it raises and changes nothing, or is done."""

    def __init__(self, core: Core, secret_of: SecretOf) -> None:
        self.core = core
        self.chains = ScopeChains(core, secret_of)
        self.keeper = Keeper(core, self.chains)
        self.home = Home(core, self.keeper.make_room)
        self.keeper.bind(self.home)
        self.writes = Writes(core)
        self.prefix_keeper = PrefixKeeper(core)
        self.history = HistoryFinder(core, self.chains)
        self.is_draining = False

    # --- open -------------------------------------------------------------------------------

    def open(self, order: OpenOrder, writer: Writer, now: Now) -> OpenAnswer:
        """Creates a log in one step: base found, pinned, forked, pages granted.

        The same request id and body for the same log get the same answer; another body is
        ALREADY_EXISTS. PAGES_EXHAUSTED changes nothing but which kept logs still have KV.
        """
        known = self.core.logs.get(order.log_id)
        if known is not None:
            return _answer_again(known, order)
        self._check_order(order)
        plan = self._plan(order)
        block_tokens = self.core.block_tokens
        shared = sum(block.is_shared(block_tokens) for block in plan.blocks)
        pages = pages_for(len(order.tokens), block_tokens) + order.output_pages - shared
        pins = self._pin_and_make_room(plan, pages)
        log = _new_log(order, now)
        log.ttl_s = self._ttl(order.ttl_s)
        self.core.logs[log.log_id] = log
        self._build(log, plan, order.numeric_class)
        for page in pins:
            self.core.pool.drop(page)
        self.core.drain_freed()
        log.writer = writer
        self.core.leases.renew(log.log_id, now.monotonic_s)
        granted = self.core.pool.grant(pages - plan.copies(block_tokens))
        for page in granted:
            log.granted[page] = self.core.pool.generation(page)
        self.core.journal.opened(log, order.base)
        self.core.journal.granted(log, granted)
        if order.base is not None:
            self.core.journal.snapshot(log)
        return OpenAnswer(
            generation=log.generation,
            cached_tokens=log.cached_tokens,
            granted=granted_pages(log, granted),
            prefix_id=None if plan.prefix is None else plan.prefix.prefix_id,
        )

    def _check_order(self, order: OpenOrder) -> None:
        limits = self.core.limits
        if self.is_draining:
            raise ServiceError(
                Reason.DRAINING, "the kvstore is draining; open the log at another", field="log_id"
            )
        if order.log_id in self.core.tombstones:
            raise ServiceError(
                Reason.ALREADY_EXISTS, "log_id was used before; draw a new one", field="log_id"
            )
        if len(self.core.logs) >= limits.logs_max:
            raise ServiceError(
                Reason.QUOTA_EXCEEDED,
                f"the kvstore has {limits.logs_max} logs, its most; retry later",
                retry_after_s=1.0,
            )
        if not 1 <= len(order.tokens) <= limits.tokens_max:
            raise invalid("prompt_token_ids", f"give 1 to {limits.tokens_max} token ids")
        size = limits.vocabulary_size
        if size is not None and max(order.tokens) >= size:
            raise invalid("prompt_token_ids", f"an id is not in the vocabulary of {size} tokens")
        if not 0 <= order.output_pages <= OUTPUT_PAGES_MAX:
            raise invalid("output_pages", f"must be at most {OUTPUT_PAGES_MAX}")
        capacity = self.core.pool.page_count
        needed = pages_for(len(order.tokens), limits.block_tokens) + order.output_pages
        if needed > capacity:
            raise ServiceError(
                Reason.PROMPT_TOO_LONG,
                f"the request needs {needed} pages, the arena has {capacity}; shorten the prompt "
                "or start the kvstore with more --arena-bytes",
                field="prompt_token_ids",
                metadata={"needed": str(needed), "pages": str(capacity)},
            )

    def _plan(self, order: OpenOrder) -> BasePlan:
        asker = Asker(tenant=order.tenant, scope=order.scope, numeric_class=order.numeric_class)
        match order.base:
            case None:
                if not order.is_cacheable:
                    return BasePlan()
                return self.history.cached(asker, order.tokens)
            case Manifest() as manifest:
                return self.history.manifest(asker, manifest, order.tokens)
            case Parent() as parent:
                return self.history.parent(asker, parent, order.tokens)

    def _pin_and_make_room(self, plan: BasePlan, pages: int) -> list[int]:
        """Room for `pages`, or PAGES_EXHAUSTED. The base is pinned meanwhile, so that it is not
        what is evicted; the pages returned are to be dropped once the log holds its own.
        """
        if pages <= self.core.pool.free_count:
            return []
        pinned = [source.row.page for block in plan.blocks for source in block.sources]
        for page in pinned:
            self.core.pool.hold(page)
        self.keeper.make_room(pages)
        free = self.core.pool.free_count
        if free < pages:
            for page in pinned:
                self.core.pool.drop(page)
            self.core.drain_freed()
            raise pages_exhausted(pages, free)
        return pinned

    def _build(self, log: LogState, plan: BasePlan, own: NumericClass) -> None:
        """Rows of the base: full pages shared, everything else copied into fresh pages."""
        core, block_tokens = self.core, self.core.block_tokens
        adopted: list[int] = []
        for index, block in enumerate(plan.blocks):
            if block.is_shared(block_tokens):
                adopted.append(index)
                row = copy_row(block.sources[0].row)
                core.pool.hold(row.page)
            else:
                (page,) = core.pool.grant(1)
                core.pool.commit(page)
                row = PageRow(
                    page=page,
                    page_generation=core.pool.generation(page),
                    tokens=block.tokens,
                    # Filled in with the copy; nobody is told of the page before.
                    crc=0 if block.tokens == block_tokens else None,
                    slot_crcs=known_slot_crcs(block.sources),
                )
                core.work.append(
                    FillPage(
                        log_id=log.log_id,
                        generation=log.generation,
                        block_index=index,
                        target=row,
                        sources=block.sources,
                    )
                )
            log.rows.append(row)
        self.home.check_pages(log, adopted)
        log.committed = log.cached_tokens = plan.tokens
        log.base_class_id = own.id if plan.numeric_class_id is None else plan.numeric_class_id

    def _ttl(self, ttl_s: float | None) -> float:
        limits = self.core.limits
        return limits.ttl_default_s if ttl_s is None else min(ttl_s, limits.ttl_max_s)

    def seal(
        self, log_id: bytes, generation: int, digest: bytes, end: SealEnd, now_s: float
    ) -> LogState:
        """Ends prefill (see `Writes.seal`); the prompt's full blocks become findable."""
        self.writes.seal(log_id, generation, digest, end, now_s)
        log = self.core.logs[log_id]
        self.chains.offer(log)
        return log

    # --- fork and truncate ------------------------------------------------------------------

    def fork(
        self,
        parent: Parent,
        order: ForkOrder,
        writer: Writer | None,
        now: Now,
    ) -> LogState:
        """A new log from [0, position) of a sealed one: full pages shared, its tail copied when
        a writer takes it.
        """
        source = self.core.find(parent.log_id)
        if parent.generation > source.generation:
            raise invalid("parent.generation", f"the log's generation is {source.generation}")
        require_allowed(source, Event.FORK)
        if not 1 <= parent.position <= source.position:
            raise invalid("parent.position", f"must be 1 to {source.position}")
        if order.log_id in self.core.logs or order.log_id in self.core.tombstones:
            raise ServiceError(
                Reason.ALREADY_EXISTS, "log_id is in use; draw a new one", field="log_id"
            )
        kept = min(source.committed, parent.position - 1)
        has_tail = bool(kept % self.core.block_tokens)
        if writer is not None and has_tail:
            self.home.require_room(1)
        log = _forked(source, parent.position, order, now)
        self.core.logs[log.log_id] = log
        self._share_rows(source, log, kept)
        if writer is not None:
            self.home.install(log, writer, 0, now.monotonic_s)
        else:
            log.expires_wall_s = now.wall_s + log.ttl_s
        self.core.journal.opened(log, parent)
        self.core.journal.snapshot(log)
        return log

    def _share_rows(self, source: LogState, log: LogState, kept: int) -> None:
        block_tokens = self.core.block_tokens
        plan = plan_of_rows(source.rows, kept, block_tokens, source.numeric_class_id)
        for block in plan.blocks:
            row = block.sources[0].row
            cut_row(row, block.tokens)
            self.core.pool.hold(row.page)
            log.rows.append(row)
        log.committed = log.cached_tokens = kept

    def truncate(self, log_id: bytes, generation: int, position: int, now: Now) -> LogState:
        """Cuts a log back to `position` tokens under a new generation; nobody writes it then."""
        log = self.core.current(log_id, generation)
        require_allowed(log, Event.TRUNCATE)
        if not 1 <= position <= log.position:
            raise invalid("position", f"must be 1 to {log.position}")
        previous = log.generation
        self.home.fence(log)
        outputs = max(position - log.prompt_tokens, 0)
        del log.tokens[position:]
        del log.logprobs[outputs:]
        log.prompt_tokens = min(log.prompt_tokens, position)
        self.cut_kv(log, min(log.committed, position - 1))
        log.phase = Phase.DECODE
        log.finish_reason = None
        log.expires_wall_s = now.wall_s + log.ttl_s
        self.core.journal.truncated(log, previous)
        return log

    def cut_kv(self, log: LogState, committed: int) -> None:
        """Keeps the KV of the first `committed` positions."""
        block_tokens = self.core.block_tokens
        count = -(-committed // block_tokens)
        for row in reversed(log.rows[count:]):
            self.core.pool.drop(row.page)
        del log.rows[count:]
        if log.rows:
            cut_row(log.rows[-1], committed - (count - 1) * block_tokens)
        log.committed = committed
        log.cached_tokens = min(log.cached_tokens, committed)
        log.indexed_blocks = min(log.indexed_blocks, committed // block_tokens)
        del log.block_keys[log.indexed_blocks :]
        self.core.drain_freed()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """What a fork has of its own."""

    log_id: bytes
    request_id: str
    scope: Scope
    sampling: SamplingParameters | None


def _answer_again(log: LogState, order: OpenOrder) -> OpenAnswer:
    same = log.request_id == order.request_id and log.body_hash == order.body_hash
    if not same or log.tenant != order.tenant or log.writer is None:
        raise ServiceError(
            Reason.ALREADY_EXISTS,
            "log_id is in use by another request; draw a new one",
            field="log_id",
        )
    return OpenAnswer(
        generation=log.generation,
        cached_tokens=log.cached_tokens,
        granted=granted_pages(log, list(log.granted)),
        prefix_id=None,
    )


def _new_log(order: OpenOrder, now: Now) -> LogState:
    return LogState(
        log_id=order.log_id,
        tenant=order.tenant,
        scope=order.scope,
        tokens=array(TOKEN_TYPECODE, order.tokens),
        prompt_tokens=len(order.tokens),
        numeric_class=order.numeric_class.text,
        numeric_class_id=order.numeric_class.id,
        sampling=order.sampling,
        generation=FIRST_GENERATION,
        is_cacheable=order.is_cacheable,
        drop_at_end=order.drop_at_end,
        ack_level=order.ack_level,
        last_used_s=now.monotonic_s,
        request_id=order.request_id,
        body_hash=order.body_hash,
        label_digest=order.label_digest,
        opened_wall_s=now.wall_s,
    )


def _forked(source: LogState, position: int, order: ForkOrder, now: Now) -> LogState:
    prompt_tokens = min(source.prompt_tokens, position)
    return LogState(
        log_id=order.log_id,
        tenant=source.tenant,
        scope=order.scope,
        tokens=source.tokens[:position],
        prompt_tokens=prompt_tokens,
        numeric_class=source.numeric_class,
        numeric_class_id=source.numeric_class_id,
        base_class_id=source.numeric_class_id,
        base_numeric_class=source.numeric_class,
        sampling=source.sampling if order.sampling is None else order.sampling,
        generation=FIRST_GENERATION,
        phase=Phase.DECODE,
        logprobs=source.logprobs[: position - prompt_tokens],
        is_cacheable=source.is_cacheable,
        drop_at_end=source.drop_at_end,
        ack_level=source.ack_level,
        ttl_s=source.ttl_s,
        chunk_list_digest=source.chunk_list_digest,
        last_used_s=now.monotonic_s,
        request_id=order.request_id,
        label_digest=source.label_digest,
        opened_wall_s=now.wall_s,
    )

"""The store's core: open, fork, truncate, cancel, close, and what the clock does to logs.

Owns the life of logs from OPEN to CLOSE and composes the other cores (home, history, keeper,
prefixes). Pure: time is passed in. What happened is in `core.journal` (records, in order) and
 `core.take_work()` (page work, in order); the runtime makes both real before it answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from baton.errors import Reason, ServiceError
from baton.kv.blocks import Scope
from baton.kv.manifest import Manifest
from baton.kv.numeric import NumericClass
from baton.kv.sizing import pages_for
from baton.sampling_parameters import SamplingParameters
from services.kvstore.chains import ScopeChains, SecretOf
from services.kvstore.core import Core, invalid, stale
from services.kvstore.history import BasePlan, HistoryFinder
from services.kvstore.home import (
    Event,
    Home,
    add_granted,
    granted_pages,
    known_slot_crcs,
    require_allowed,
    require_grantable,
    require_same_tokens,
)
from services.kvstore.keeper import Keeper
from services.kvstore.log.state import Parent
from services.kvstore.lookup import Asker
from services.kvstore.publishing import PrefixKeeper
from services.kvstore.session_keeper import SessionKeeper
from services.kvstore.state import (
    AckLevel,
    FillPage,
    LogState,
    OpenAnswer,
    PageRow,
    Phase,
    Tokens,
    Writer,
    token_array,
)
from services.kvstore.tiers.placement import Placement
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
        self.prefix_keeper = PrefixKeeper(core, self.chains)
        self.session_keeper = SessionKeeper(core)
        self.history = HistoryFinder(core, self.chains)
        self.placement = Placement(core, self.chains, self.home.require_room, self.home.give_up_kv)
        self.is_draining = False

    # --- open -------------------------------------------------------------------------------

    def open(self, order: OpenOrder, writer: Writer, now: Now) -> OpenAnswer:
        """Creates a log in one step: base found, pinned, forked, pages granted.

        The same request id and body for the same log get the same answer; another body is
        ALREADY_EXISTS. PAGES_EXHAUSTED changes nothing but which kept logs still have KV.
        """
        known = self.core.logs.get(order.log_id)
        if known is not None:
            return _answer_again(known, order, writer)
        order = replace(order, tokens=token_array(order.tokens))
        self._check_order(order)
        plan = self._plan(order)
        block_tokens = self.core.block_tokens
        pages = pages_for(len(order.tokens), block_tokens) + order.output_pages
        pages -= plan.shared(block_tokens)
        pins = self._pin_and_make_room(plan, pages, order.tenant)
        log = _new_log(order, self._tokens(order), now)
        if isinstance(order.base, Parent):
            log.parent_id, log.parent_position = order.base.log_id, order.base.position
        log.ttl_s = self._ttl(order.ttl_s)
        log.writer = writer
        self.core.logs[log.log_id] = log
        self._build(log, plan, order.numeric_class)
        for page in pins:
            self.core.pool.drop(page)
        self.core.drain_freed()
        self.core.leases.renew(log.log_id, now.monotonic_s)
        granted = self.core.pool.grant(pages - plan.copies(block_tokens), log.tenant)
        add_granted(log, self.core.pool, granted)
        self._journal_open(log, order.base, granted, is_looked_up=plan.is_looked_up)
        return OpenAnswer(
            generation=log.generation,
            cached_tokens=log.cached_tokens,
            granted=granted_pages(log, granted),
            prefix_id=None if plan.prefix is None else plan.prefix.prefix_id,
        )

    def _tokens(self, order: OpenOrder) -> Tokens:
        """The prompt's ids, the pieces of a parent's shared: they were compared with it."""
        if not isinstance(order.base, Parent):
            return Tokens(order.tokens)
        tokens = self.core.logs[order.base.log_id].tokens.head(order.base.position)
        tokens.extend(order.tokens[order.base.position :])
        return tokens

    def _journal_open(
        self,
        log: LogState,
        base: Parent | Manifest | None,
        granted: list[int],
        *,
        is_looked_up: bool,
    ) -> None:
        journal, block_tokens = self.core.journal, self.core.block_tokens
        journal.opened(log, base, is_looked_up=is_looked_up)
        if is_looked_up and not isinstance(base, Manifest):
            # A tail is stated once its CRCs are known: here, or when it is copied (`filled`).
            full = log.rows.known() * block_tokens
            if full:
                journal.adopted(log, 0, min(full, log.committed))
        # The copied tail is the writer's to go on with.
        tail = [log.rows[-1].page] if log.committed % block_tokens else []
        journal.granted(log, [*tail, *granted])
        if isinstance(base, Manifest):
            journal.snapshot(log)

    def require_not_draining(self) -> None:
        """DRAINING once no new logs are taken."""
        if self.is_draining:
            raise ServiceError(
                Reason.DRAINING, "the kvstore is draining; open the log at another", field="log_id"
            )

    def require_log_room(self) -> None:
        """QUOTA_EXCEEDED when there are as many logs as there may be."""
        most = self.core.limits.logs_max
        if len(self.core.logs) >= most:
            raise ServiceError(
                Reason.QUOTA_EXCEEDED,
                f"the kvstore has {most} logs, its most; retry later",
                retry_after_s=1.0,
            )

    def _check_order(self, order: OpenOrder) -> None:
        limits = self.core.limits
        self.require_not_draining()
        if order.log_id in self.core.tombstones:
            raise ServiceError(
                Reason.ALREADY_EXISTS, "log_id was used before; draw a new one", field="log_id"
            )
        self.require_log_room()
        if not 1 <= len(order.tokens) <= limits.tokens_max:
            raise invalid("prompt_token_ids", f"give 1 to {limits.tokens_max} token ids")
        size = limits.vocabulary_size
        # A parent's ids were checked when it came in, and are compared with it.
        own = order.tokens
        if isinstance(order.base, Parent):
            own = own[order.base.position :]
        if size is not None and len(own) and highest_token(own) >= size:
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
                plan = self.history.manifest(asker, manifest, order.tokens)
                return self._longer(asker, order, plan) if plan.is_prefix else plan
            case Parent() as parent:
                return self._longer(asker, order, self.history.parent(asker, parent, order.tokens))

    def _longer(self, asker: Asker, order: OpenOrder, plan: BasePlan) -> BasePlan:
        """Behind a manifest of just a published prefix, and where a parent's KV ends (evicted, or
        the prompt goes on as another log does): what else is known of the prompt.
        """
        if not order.is_cacheable:
            return plan
        found = self.history.cached(asker, order.tokens)
        if found.tokens <= plan.tokens:
            return plan
        return replace(found, prefix=found.prefix or plan.prefix)

    def _pin_and_make_room(self, plan: BasePlan, pages: int, tenant: str) -> list[int]:
        """Room for `pages`, or PAGES_EXHAUSTED, or QUOTA_EXCEEDED. The base is pinned meanwhile, so
        that it is not what is evicted; the pages returned are to be dropped once the log holds its
        own.
        """
        pool, charges = self.core.pool, self.core.pool.charges
        if charges is not None:
            charges.require(tenant, pages)
        if pages <= pool.free_count and (charges is None or charges.may_grant(tenant, pages)):
            return []
        pinned = [source.row.page for block in plan.blocks for source in block.sources]
        pinned += plan.rows.pages().tolist()
        for page in pinned:
            pool.hold(page)
        self.keeper.make_room(pages, tenant)
        try:
            require_grantable(pool, pages, tenant)
        except ServiceError:
            for page in pinned:
                pool.drop(page)
            self.core.drain_freed()
            raise
        return pinned

    def _build(self, log: LogState, plan: BasePlan, own: NumericClass) -> None:
        """Rows of the base: full pages shared, everything else copied into fresh pages."""
        core, block_tokens = self.core, self.core.block_tokens
        log.rows = plan.rows
        core.pool.hold_many(log.rows.pages())
        log.node, log.node_depth = plan.node, plan.node_depth
        log.node_blocks = plan.node_blocks
        log.indexed_blocks, log.foreign_blocks = plan.indexed_blocks, plan.foreign_blocks
        if plan.prefix is not None:
            plan.prefix.hits += 1
        first = len(log.rows)
        adopted: list[int] = []
        for index, block in enumerate(plan.blocks, start=first):
            is_filling = False
            if block.is_shared(block_tokens):
                adopted.append(index)
                row = block.sources[0].row
                core.pool.hold(row.page)
            else:
                is_filling = block.tokens == block_tokens
                (page,) = core.pool.grant(1, log.tenant)
                core.pool.commit(page)
                row = PageRow(
                    page=page,
                    page_generation=core.pool.generation(page),
                    tokens=block.tokens,
                    # CRCs come with the copy; nobody is told of the page before.
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
            log.rows.append(row, is_filling=is_filling)
        if adopted:
            self.home.check_pages(log, adopted[-1] + 1, (*range(first), *adopted))
        else:
            self.home.check_pages(log, first)
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
        require_same_tokens(self.core.limits, source)
        if not 1 <= parent.position <= source.position:
            raise invalid("parent.position", f"must be 1 to {source.position}")
        if order.log_id in self.core.logs or order.log_id in self.core.tombstones:
            raise ServiceError(
                Reason.ALREADY_EXISTS, "log_id is in use; draw a new one", field="log_id"
            )
        self.require_log_room()
        block_tokens = self.core.block_tokens
        if writer is not None and min(source.committed, parent.position - 1) % block_tokens:
            # What is evicted for it may be the source's own KV.
            self.home.require_room(1, source.tenant)
        kept = min(source.committed, parent.position - 1)
        log = _forked(source, parent.position, order, now)
        log.parent_id, log.parent_position = parent.log_id, parent.position
        log.rows = source.rows.head(kept, block_tokens)
        log.committed = log.cached_tokens = kept
        common = parent.position // block_tokens
        log.foreign_blocks = min(source.foreign_blocks, common)
        if log.scope == source.scope:
            log.indexed_blocks = min(source.indexed_blocks, kept // block_tokens)
            log.node, log.node_depth = source.node, source.node_depth
            log.node_blocks = min(source.node_blocks, common)
        self.core.pool.hold_many(log.rows.pages())
        self.core.logs[log.log_id] = log
        self.core.journal.opened(log, parent, is_fork=True)
        self.placement.share_copies(log, source, parent.position - 1)
        if writer is not None:
            own = order.numeric_class
            if own is not None:
                log.numeric_class, log.numeric_class_id = own.text, own.id
            self._hand_over(log, writer, now)
        return log

    def _hand_over(self, log: LogState, writer: Writer, now: Now) -> None:
        """A fork gets its first writer, as by a TAKE; the room was made before."""
        previous = log.generation
        self.home.fence(log)
        self.home.install(log, writer, 0, now.monotonic_s)
        self.home.check_pages(log, log.committed // self.core.block_tokens)
        self.core.journal.taken(log, previous)
        self.home.journal_grants(log, ())

    def truncate(self, log_id: bytes, generation: int, position: int, now: Now) -> LogState:
        """Cuts a log back to `position` tokens under a new generation; nobody writes it then."""
        log = self.core.current(log_id, generation)
        require_allowed(log, Event.TRUNCATE)
        if not 1 <= position <= log.position:
            raise invalid("position", f"must be 1 to {log.position}")
        self.session_keeper.require_spared(log_id, position)
        previous = log.generation
        self.home.fence(log)
        outputs = max(position - log.prompt_tokens, 0)
        del log.tokens[position:]
        del log.logprobs[outputs:]
        log.prompt_tokens = min(log.prompt_tokens, position)
        common = position // self.core.block_tokens
        log.node_blocks = min(log.node_blocks, common)
        log.foreign_blocks = min(log.foreign_blocks, common)
        self.home.cut_kv(log, min(log.committed, position - 1))
        self.core.cut_copies(log, position - 1)
        log.phase = Phase.DECODE
        log.finish_reason = None
        log.expires_wall_s = now.wall_s + log.ttl_s
        self.core.idle(log)
        self.core.journal.truncated(log, previous)
        return log


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """What a fork has of its own; `numeric_class` is its first writer's, None: the parent's."""

    log_id: bytes
    request_id: str
    scope: Scope
    sampling: SamplingParameters | None
    numeric_class: NumericClass | None = None


def highest_token(tokens: Sequence[int]) -> int:
    """The largest id; there is one."""
    return int(np.frombuffer(token_array(tokens), dtype=np.uint32).max())


def _answer_again(log: LogState, order: OpenOrder, writer: Writer) -> OpenAnswer:
    """The state of a log that was opened by this very request, as long as its worker writes it.

    Once it was fenced or taken another owner exists: STALE_GENERATION.
    """
    same = log.request_id == order.request_id and log.body_hash == order.body_hash
    if not same or log.tenant != order.tenant:
        raise ServiceError(
            Reason.ALREADY_EXISTS,
            "log_id is in use by another request; draw a new one",
            field="log_id",
        )
    is_written = log.writer is not None and log.writer.worker_id == writer.worker_id
    if not is_written or log.phase is not Phase.PREFILL:
        raise stale(log.log_id, FIRST_GENERATION, log.generation)
    return OpenAnswer(
        generation=log.generation,
        cached_tokens=log.cached_tokens,
        granted=granted_pages(log, list(log.granted)),
        prefix_id=None,
    )


def _new_log(order: OpenOrder, tokens: Tokens, now: Now) -> LogState:
    return LogState(
        log_id=order.log_id,
        tenant=order.tenant,
        scope=order.scope,
        tokens=tokens,
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
        tokens=source.tokens.head(position),
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
        expires_wall_s=now.wall_s + source.ttl_s,
    )

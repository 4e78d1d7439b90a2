"""Lookups of what lies on NVMe: where each block is, and whose, so that it can be promoted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.kv.blocks import Scope
from baton.kv.numeric import TORCH_F32
from baton.kv.splice import splice
from services.kvstore.log.store_records import CloseReason
from services.kvstore.lookup import AnyHit, Asker
from services.kvstore.prefixes import Prefix
from services.kvstore.state import LogState
from services.kvstore.store import Store
from services.kvstore.tiers.wants import wants_of_open
from tests.unit.kvstore.cores import BLOCK, NOW, SCOPE, fill_work, open_log, order
from tests.unit.kvstore.test_store import segment
from tests.unit.kvstore.test_tier_order import copy, publish, store_of

PAGES = 64
PROMPT = [(7 * index) % 50 + 1 for index in range(5 * BLOCK + 3)]
GUEST: dict[str, Any] = {"tenant": "guest", "scope": Scope(tenant="guest")}


def kept(store: Store, tokens: Sequence[int], **fields: Any) -> LogState:
    """A finished log."""
    log = open_log(store, list(tokens), **fields).prefill(finish="stop")
    store.keeper.close(log.log_id, is_dropped=False, wall_s=NOW.wall_s)
    return log


def evict(store: Store, log: LogState) -> None:
    """Copied, and its host pages go."""
    copy(store, log)
    store.home.give_up_kv(log, 0)
    fill_work(store)


def anywhere(store: Store, tokens: Sequence[int], scope: Scope = SCOPE) -> AnyHit | None:
    """What a promotion would be worth to this scope."""
    asker = Asker(tenant=scope.tenant, scope=scope, numeric_class=TORCH_F32)
    return store.history.anywhere(asker, list(tokens))


def load(store: Store, owner: LogState | Prefix, tokens: int) -> None:
    """Promotes."""
    placement = store.placement
    while (load_order := placement.begin_load(owner, tokens, len(owner.rows), 8)) is not None:
        placement.finish_load(load_order, (None,) * len(load_order.copies), 1.0)
        if len(owner.rows) * BLOCK >= tokens:
            break


def test_a_cold_log_is_found_to_the_token_and_loaded_it_is_hot() -> None:
    """At every position where a prompt leaves it; on the host nothing is found meanwhile."""
    store = store_of(PAGES, PAGES)
    log = kept(store, PROMPT)
    evict(store, log)
    for shared in range(1, len(PROMPT) + 1):
        hit = anywhere(store, [*PROMPT[:shared], 60])
        assert hit is not None
        assert hit.tokens == shared
        assert hit.wants(BLOCK) == [(log.log_id, shared)]
        assert all(block.row is None and block.cold is not None for block in hit.blocks)
    assert open_log(store, [*PROMPT, 60]).log.cached_tokens == 0
    load(store, log, len(PROMPT))
    assert open_log(store, [*PROMPT, 60]).log.cached_tokens == len(PROMPT)
    hit = anywhere(store, [*PROMPT, 60])
    assert hit is not None
    assert hit.wants(BLOCK) == []
    store.core.check_invariants()


def test_nobody_else_finds_a_copy() -> None:
    """Not by tenant, team or salt; and nothing at all without its slot."""
    store = store_of(PAGES, PAGES)
    log = kept(store, PROMPT)
    evict(store, log)
    for scope in (
        Scope(tenant="other"),
        Scope(tenant="acme", team="blue"),
        Scope(tenant="acme", cache_salt="s"),
    ):
        assert anywhere(store, PROMPT, scope) is None
    store.placement.slot_damaged(log.cold[2].page)
    hit = anywhere(store, PROMPT)
    assert hit is not None
    assert hit.tokens == 2 * BLOCK
    store.keeper.drop(log, CloseReason.EXPIRED)
    fill_work(store)
    assert anywhere(store, PROMPT) is None
    store.core.check_invariants()


def test_a_chain_over_a_cold_prefix_and_a_cold_log_names_both() -> None:
    """A guest's turn behind a published prefix, all of it on NVMe: the prefix first, then the log;
    by lookup, and where the gateway names the prefix.
    """
    store = store_of(PAGES, PAGES)
    source = kept(store, PROMPT)
    publish(store, source, 3 * BLOCK + 2)
    (prefix,) = store.core.prefixes.all()
    chat = kept(store, [*PROMPT[: 3 * BLOCK + 2], *range(51, 60), *range(51, 58)], **GUEST)
    assert chat.cached_tokens == 3 * BLOCK + 2
    while (copies := store.placement.begin_copy(prefix, 4)) is not None:
        store.placement.finish_copy(copies, (None,) * len(copies.copies))
    evict(store, source)
    evict(store, chat)
    store.keeper.make_room(PAGES)
    fill_work(store)
    history = list(chat.tokens)
    asked = [*history, 60]
    hit = anywhere(store, asked, GUEST["scope"])
    assert hit is not None
    assert hit.tokens == len(history) - 1
    wants = hit.wants(BLOCK)
    assert [owner for owner, _ in wants] == [prefix.prefix_id, chat.log_id]
    assert wants == [(prefix.prefix_id, 3 * BLOCK), (chat.log_id, len(history) - 1)]
    base = splice([segment(store, source.log_id, 0, 3 * BLOCK + 2, PROMPT)])
    named = wants_of_open(store, order(asked, base=base, **GUEST))
    assert [want.owner for want in named] == [prefix, chat]
    load(store, prefix, 3 * BLOCK)
    load(store, chat, len(history) - 1)
    again = open_log(store, asked, **GUEST).log
    assert again.cached_tokens == len(history) - 1
    store.prefix_keeper.revoke(prefix.prefix_id, "acme", NOW.wall_s)
    assert anywhere(store, asked, GUEST["scope"]) is None
    store.core.check_invariants()

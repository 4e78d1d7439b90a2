"""Lists of logs: order, pages, filters; trees of forks; who has which pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.errors import Reason, ServiceError
from services.kvstore.listing import (
    Lineage,
    Listing,
    TenantPages,
    Wanted,
    covered_tokens,
    host_pages,
    page_token,
    parse_page_token,
    share_of,
    slices,
)
from services.kvstore.log.state import Parent
from services.kvstore.state import LogState, Phase
from services.kvstore.store import ForkOrder, Now, Store
from tests.unit.kvstore.cores import (
    BLOCK,
    NOW,
    PREFILL,
    SCOPE,
    WorkerModel,
    build_store,
    new_id,
    order,
)


def opened(store: Store, second: float, tenant: str = "acme", request: str = "r") -> bytes:
    """A log opened at a wall time."""
    one = order([1, 2, 3], tenant=tenant, request_id=request, scope=replace(SCOPE, tenant=tenant))
    now = Now(monotonic_s=NOW.monotonic_s, wall_s=NOW.wall_s + second)
    store.open(one, PREFILL, now)
    return one.log_id


def page(store: Store, wanted: Wanted, size: int, token: str = "") -> tuple[list[bytes], str, int]:
    """One page of a list: ids, the next token, how many there are."""
    listing = Listing(wanted, parse_page_token(token), size)
    for logs in slices(store.core):
        listing.add(logs)
    return [log_id for _, log_id in listing.page()], listing.next_token(), listing.total


def test_pages_hold_every_log_once_in_the_order_of_opening_while_logs_come_and_go() -> None:
    """A log that is dropped between two pages moves no other one; one that comes is at the end."""
    store = build_store(400)
    ids = [opened(store, float(second)) for second in (5, 1, 4, 2, 3)]
    in_order = [ids[1], ids[3], ids[4], ids[2], ids[0]]
    first, token, total = page(store, Wanted(), 2)
    assert (first, total) == (in_order[:2], 5)
    store.keeper.cancel(in_order[0], NOW.wall_s)
    newest = opened(store, 9.0)
    second, token, total = page(store, Wanted(), 2, token)
    assert (second, total) == (in_order[2:4], 5)
    third, token, _ = page(store, Wanted(), 2, token)
    assert (third, token) == ([in_order[4], newest], "")


def test_logs_opened_at_one_moment_are_not_lost_between_pages() -> None:
    """Their ids order them."""
    store = build_store(400)
    ids = sorted(opened(store, 1.0) for _ in range(7))
    seen: list[bytes] = []
    token = ""
    while True:
        found, token, _ = page(store, Wanted(), 3, token)
        seen += found
        if not token:
            break
    assert seen == ids


def test_filters_narrow_a_list_and_what_it_counts() -> None:
    """Tenant, phase, request, first digits of the id."""
    store = build_store(400)
    a = opened(store, 1.0, "acme", "one")
    b = opened(store, 2.0, "東京", "two")
    WorkerModel(store, b, PREFILL).prefill()
    assert page(store, Wanted(tenant="東京"), 9)[0::2] == ([b], 1)
    assert page(store, Wanted(phase=Phase.PREFILL), 9)[0] == [a]
    assert page(store, Wanted(request_id="two"), 9)[0] == [b]
    assert page(store, Wanted(id_prefix=a.hex()[:5]), 9)[0] == [a]
    assert page(store, Wanted(tenant="acme", phase=Phase.KEPT), 9)[0::2] == ([], 0)


@pytest.mark.parametrize("text", ["zz", "00", "0" * 47, "é"])
def test_a_token_that_no_list_gave_is_refused(text: str) -> None:
    """Naming the field."""
    with pytest.raises(ServiceError) as refused:
        parse_page_token(text)
    assert refused.value.reason is Reason.INVALID_REQUEST
    assert refused.value.field == "page_token"
    assert parse_page_token(page_token((1.5, bytes(16)))) == (1.5, bytes(16))


def forked(store: Store, parent: bytes, position: int, second: float) -> bytes:
    """A fork."""
    log_id = new_id()
    store.fork(
        Parent(log_id=parent, generation=1, position=position),
        ForkOrder(log_id=log_id, request_id="f", scope=SCOPE, sampling=None),
        None,
        Now(monotonic_s=NOW.monotonic_s, wall_s=NOW.wall_s + second),
    )
    return log_id


def lineage_of(store: Store) -> Lineage:
    """All there is."""
    lineage = Lineage()
    for logs in slices(store.core):
        lineage.add(logs)
    return lineage


class CountingLogs(dict[bytes, LogState]):
    """A table of logs that counts how often one is looked up."""

    looks = 0

    def get(self, key: bytes, default: Any = None) -> Any:
        self.looks += 1
        return super().get(key, default)


def test_the_roots_of_a_long_chain_are_found_without_walking_it_for_each_of_its_logs() -> None:
    """A conversation is a chain of forks: ten thousand turns must not hold the loop up."""
    store = build_store(400)
    root = opened(store, 0.0)
    WorkerModel(store, root, PREFILL).prefill()
    last = root
    for turn in range(1, 200):
        last = forked(store, last, 2, float(turn))
    lineage = lineage_of(store)
    looked = CountingLogs(lineage._logs)
    lineage._logs = looked
    assert lineage.roots(None) == [root]
    assert looked.looks < 2 * len(looked)


def test_a_tree_lists_parents_before_children_the_oldest_first() -> None:
    """And names a root that is gone as long as somebody stems from it."""
    store = build_store(400)
    root = opened(store, 0.0)
    WorkerModel(store, root, PREFILL).prefill()
    left, right = forked(store, root, 3, 1.0), forked(store, root, 2, 2.0)
    leaf = forked(store, left, 2, 3.0)
    alone = opened(store, 4.0)
    lineage = lineage_of(store)
    assert [(i, d) for i, _, d in lineage.tree(root)] == [
        (root, 0),
        (left, 1),
        (leaf, 2),
        (right, 1),
    ]
    assert lineage.root_of(leaf) == root
    assert lineage.roots(None) == [root]
    assert lineage.roots("nobody") == []
    assert [i for i, _, _ in lineage.tree(lineage.root_of(alone))] == [alone]
    store.keeper.close(root, is_dropped=True, wall_s=NOW.wall_s)
    lineage = lineage_of(store)
    assert lineage.root_of(leaf) == root
    assert [log is None for _, log, _ in lineage.tree(root)] == [True, False, False, False]


def test_pages_count_once_for_whom_they_are_met_with_first() -> None:
    """What two logs share is not there twice."""
    store = build_store(400)
    tokens = list(range(10, 10 + 2 * BLOCK + 3))
    one = order(tokens)
    store.open(one, PREFILL, NOW)
    WorkerModel(store, one.log_id, PREFILL).prefill()
    fork = forked(store, one.log_id, len(tokens), 1.0)
    pages = TenantPages(store.core.pool, host_pages)
    pages.add(store.core.logs.values())
    pool = store.core.pool
    assert sum(pages.pages.values()) == pool.page_count - pool.free_count
    share = share_of(store.core.logs[fork].rows, pool, BLOCK)
    assert (share.own_pages, share.shared_pages) == (0, 3)
    assert share.tokens == covered_tokens(store.core.logs[fork].rows, BLOCK) == len(tokens) - 1

"""Every way in which a log begins keeps to the store's bounds: opened, forked, or put whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.errors import Reason, ServiceError
from services.kvstore.importing import Importer, ImportOrder
from services.kvstore.log.state import Parent
from services.kvstore.state import PageRow
from services.kvstore.store import ForkOrder
from tests.unit.kvstore.cores import (
    BLOCK,
    NOW,
    PREFILL,
    SCOPE,
    build_store,
    new_id,
    open_log,
    order,
)

PROMPT = list(range(1, BLOCK + 1))


def reason_of(call: Callable[[], object]) -> Reason:
    """Why it was refused."""
    with pytest.raises(ServiceError) as caught:
        call()
    return caught.value.reason


def import_order(log_id: bytes) -> ImportOrder:
    """What a put log is."""
    return ImportOrder(
        log_id=log_id,
        request_id="put",
        body_hash=bytes(32),
        tenant="acme",
        scope=SCOPE,
        label_digest=bytes(16),
        numeric_class="class",
        numeric_class_id=1,
        ttl_s=None,
    )


def reserved(importer: Importer, log_id: bytes) -> list[PageRow]:
    """The one page of a put log, its bytes there already."""
    (row,) = importer.reserve(log_id, BLOCK, "acme")
    row.crc = 7
    return [row]


def test_no_log_begins_beyond_the_most_that_the_store_has() -> None:
    """A fork takes no page and a put log's may be evicted: only their number bounds them."""
    store = build_store(logs_max=2)
    importer = Importer(store)
    worker = open_log(store, PROMPT)
    worker.prefill()
    parent = Parent(log_id=worker.log_id, generation=0, position=BLOCK)
    late = import_order(new_id())
    rows = reserved(importer, late.log_id)
    fork = ForkOrder(log_id=new_id(), request_id="f", scope=SCOPE, sampling=None)
    store.fork(parent, fork, None, NOW)
    free = store.core.pool.free_count
    another = ForkOrder(log_id=new_id(), request_id="g", scope=SCOPE, sampling=None)
    assert reason_of(lambda: store.open(order(PROMPT), PREFILL, NOW)) is Reason.QUOTA_EXCEEDED
    assert reason_of(lambda: store.fork(parent, another, None, NOW)) is Reason.QUOTA_EXCEEDED
    assert reason_of(lambda: importer.reserve(new_id(), 1, "acme")) is Reason.QUOTA_EXCEEDED
    adopted = reason_of(lambda: importer.adopt(late, rows, PROMPT, NOW))
    assert adopted is Reason.QUOTA_EXCEEDED, "another began while its bytes came"
    assert store.core.pool.free_count == free
    assert len(store.core.logs) == 2
    importer.abandon(rows)
    store.core.check_invariants()


def test_a_draining_store_takes_no_log_that_is_put() -> None:
    """It is about to go; what was on its way when that began still becomes a log."""
    store = build_store()
    importer = Importer(store)
    late = import_order(new_id())
    rows = reserved(importer, late.log_id)
    store.is_draining = True
    assert reason_of(lambda: importer.reserve(new_id(), BLOCK, "acme")) is Reason.DRAINING
    assert importer.adopt(late, rows, PROMPT, NOW).committed == BLOCK
    store.core.check_invariants()


def test_an_id_that_came_and_went_while_the_bytes_came_is_not_used_again() -> None:
    """Whoever was told of the first log must never meet another one under its id."""
    store = build_store()
    importer = Importer(store)
    slow = import_order(new_id())
    rows, quick = reserved(importer, slow.log_id), reserved(importer, slow.log_id)
    importer.adopt(slow, quick, PROMPT, NOW)
    store.keeper.close(slow.log_id, is_dropped=True, wall_s=NOW.wall_s)
    assert reason_of(lambda: importer.adopt(slow, rows, PROMPT, NOW)) is Reason.ALREADY_EXISTS
    importer.abandon(rows)
    store.core.check_invariants()

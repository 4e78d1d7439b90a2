"""KV that a worker does not vouch for any more: who loses it, and that tokens stay."""

from __future__ import annotations

import pytest

from baton.errors import Reason, ServiceError
from services.kvstore.distrust import Distrust
from services.kvstore.publishing import PublishOrder
from tests.unit.kvstore.cores import (
    BLOCK,
    DECODE,
    NOW,
    ListSink,
    build_store,
    fill_work,
    open_log,
    recovered_from,
    take,
)
from tests.unit.kvstore.test_places import copy, tiered_store

PROMPT = [3 + index for index in range(4 * BLOCK)]


def kept_log(store, tokens=PROMPT):
    worker = open_log(store, tokens)
    worker.prefill(finish="stop")
    store.keeper.close(worker.log_id, is_dropped=False, wall_s=NOW.wall_s)
    return worker


def test_a_log_keeps_its_tokens_and_the_kv_before_the_position():
    """Whole blocks before the one that holds the position stay; the rest is computed again."""
    store = build_store()
    log = kept_log(store).log
    given = Distrust(store).logs({log.log_id: 2 * BLOCK + 3}, NOW.wall_s)
    assert (given.logs, given.pages) == (1, 2)
    assert log.committed == 2 * BLOCK
    assert list(log.tokens[: len(PROMPT)]) == PROMPT
    store.core.check_invariants()


def test_lookups_find_the_believed_blocks_only():
    """A new log of the same prompt starts from what is left."""
    store = build_store()
    log = kept_log(store).log
    Distrust(store).logs({log.log_id: BLOCK}, NOW.wall_s)
    assert open_log(store, PROMPT).log.cached_tokens == BLOCK


def test_a_log_that_shares_the_pages_loses_them_too():
    """Another log began from the cached pages: what it computed on them is as doubtful."""
    store = build_store()
    source = kept_log(store).log
    other = open_log(store, [*PROMPT, 1, 2, 3, 4])
    assert other.log.cached_tokens >= 3 * BLOCK
    other.prefill(finish="stop")
    given = Distrust(store).logs({source.log_id: BLOCK}, NOW.wall_s)
    assert given.logs == 2
    assert other.log.committed == BLOCK
    assert other.log.cached_tokens == BLOCK
    store.core.check_invariants()


def test_a_log_that_is_written_is_fenced_first():
    """Its writer read the pages; its next append must not count. The fence names who it was."""
    store = build_store()
    worker = open_log(store, PROMPT)
    worker.prefill()
    decode = take(store, worker.log_id)
    decode.append(9)
    before, late = decode.generation, decode.item(4)
    given = Distrust(store).logs({worker.log_id: 0}, NOW.wall_s)
    assert given.fenced == {worker.log_id: (DECODE, before)}
    log = store.core.logs[worker.log_id]
    assert (log.writer, log.committed, log.generation) == (None, 0, before + 1)
    with pytest.raises(ServiceError) as caught:
        store.writes.append(late, DECODE.worker_id, NOW.monotonic_s)
    assert caught.value.reason is Reason.STALE_GENERATION
    store.core.check_invariants()


def test_a_published_prefix_of_them_is_withdrawn():
    """It holds its pages whatever became of its log."""
    store = build_store()
    log = kept_log(store).log
    order = PublishOrder(
        prefix_id="p1",
        name="system",
        tenant="acme",
        tenants=("*",),
        log_id=log.log_id,
        position=2 * BLOCK,
        text_hash=b"",
        ids_hash=b"",
        history_end=b"",
        text_bytes=0,
        template_digest=b"",
        model="tiny",
        expire_wall_s=None,
    )
    store.prefix_keeper.publish(order, NOW.wall_s)
    assert Distrust(store).logs({log.log_id: 2 * BLOCK}, NOW.wall_s).prefixes == 0
    assert Distrust(store).logs({log.log_id: BLOCK}, NOW.wall_s).prefixes == 1
    assert len(store.core.prefixes) == 0
    store.core.check_invariants()


def test_a_restart_knows_what_was_given_up():
    """The records say so: the pages are not taken for KV of the log again."""
    sink = ListSink()
    store = build_store(sink=sink)
    log = kept_log(store).log
    fill_work(store)
    Distrust(store).logs({log.log_id: BLOCK}, NOW.wall_s)
    found = recovered_from(sink.records, bytes(16)).logs[log.log_id]
    assert found.committed == BLOCK
    assert list(found.tokens[: len(PROMPT)]) == PROMPT


def test_unknown_logs_and_no_logs_change_nothing():
    """A log that ended in the meantime has no KV to give up."""
    store = build_store()
    log = kept_log(store).log
    assert Distrust(store).logs({bytes(16): 0}, NOW.wall_s).logs == 0
    assert Distrust(store).pages((), NOW.wall_s).pages == 0
    assert log.committed > 0


def test_copies_on_nvme_go_too():
    """A copy holds the same bytes: what is loaded from it later would be as wrong."""
    store = tiered_store(ListSink())
    log = kept_log(store).log
    fill_work(store)
    copy(store, log, len(log.rows), (None,) * len(log.rows))
    assert log.cold.tokens >= 4 * BLOCK
    Distrust(store).logs({log.log_id: 2 * BLOCK}, NOW.wall_s)
    assert log.committed == 2 * BLOCK
    assert log.cold.tokens == 2 * BLOCK
    store.core.check_invariants()


def test_copies_of_kv_that_left_the_host_go_too():
    """Nothing of it stands in the arena any more, and its slots are named by the log alone."""
    store = tiered_store(ListSink())
    log = kept_log(store).log
    fill_work(store)
    copy(store, log, len(log.rows), (None,) * len(log.rows))
    store.home.give_up_kv(log, 0)
    Distrust(store).logs({log.log_id: 0}, NOW.wall_s)
    assert log.cold.tokens == 0
    assert list(log.tokens[: len(PROMPT)]) == PROMPT
    store.core.check_invariants()

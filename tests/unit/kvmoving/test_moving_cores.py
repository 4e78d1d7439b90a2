"""The two halves of a move, as pure cores: who may write, who holds pages, what repeats."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.errors import Reason, ServiceError
from services.kvstore.core import Core
from services.kvstore.log.state import Parent
from services.kvstore.moving.arrival import Stage
from services.kvstore.state import Phase
from services.kvstore.store import ForkOrder
from tests.unit.kvmoving.sites import (
    TENANT,
    HomeSite,
    fetch,
    full_rows,
    home_site,
    move,
    sealed_log,
    told,
)
from tests.unit.kvstore.cores import (
    BLOCK,
    DECODE,
    NOW,
    SCOPE,
    new_id,
    open_log,
    recovered_from,
    take,
)

NOW_S = NOW.monotonic_s


def refusal(call: Callable[[], object]) -> Reason:
    """The reason that the call is refused with."""
    with pytest.raises(ServiceError) as caught:
        call()
    return caught.value.reason


def writable(core: Core, log_id: bytes) -> bool:
    """Whether this store would accept a writer for the log."""
    log = core.logs.get(log_id)
    return log is not None and log.phase is not Phase.MOVED


def pair() -> tuple[HomeSite, HomeSite]:
    """An old and a new home."""
    return home_site("a:1"), home_site("b:1")


def test_a_moved_log_has_its_home_and_pages_at_the_new_store_only() -> None:
    """After the whole exchange the old store has neither the log nor a page of it."""
    old, new = pair()
    model = sealed_log(old)
    log = move(old, new, model.log_id, 1)
    assert (log.generation, log.committed, log.position) == (2, 3 * BLOCK + 2, 3 * BLOCK + 3)
    assert list(log.tokens) == [*range(1, 3 * BLOCK + 3), 5]
    assert old.departures.done(model.log_id, 2)
    new.arrivals.confirmed(model.log_id)
    assert model.log_id not in old.store.core.logs
    counts = old.store.core.pool.counts()
    # The prefill worker may still write what it was granted and the partial tail: quarantined.
    assert counts.live == counts.shared == counts.granted == 0
    assert counts.quarantined == 2
    assert new.store.core.pool.counts().live == 4
    old.check()
    new.check()


def test_the_old_home_refuses_every_write_once_moved_and_still_forks() -> None:
    """MOVED fences: no append, checkpoint, take, truncate or grant; a fork goes on."""
    old, new = pair()
    model = sealed_log(old)
    taken = take(old.store, model.log_id)
    old.departures.move(model.log_id, 2, new.name, NOW_S)
    stale = Reason.STALE_GENERATION
    assert refusal(lambda: taken.append(9)) is stale
    assert refusal(lambda: take(old.store, model.log_id)) is stale
    assert refusal(lambda: old.store.home.grant(model.log_id, 3, "decode-0", 1)) is stale
    assert refusal(lambda: old.store.truncate(model.log_id, 3, 4, NOW)) is stale
    fork = ForkOrder(log_id=new_id(), request_id="f", scope=SCOPE, sampling=None)
    parent = Parent(log_id=model.log_id, generation=3, position=model.log.position)
    assert old.store.fork(parent, fork, DECODE, NOW).committed == model.log.committed
    old.check()


def test_moving_again_to_the_same_home_gives_the_same_answer() -> None:
    """A lost answer costs nothing; another home is refused for good."""
    old, new = pair()
    model = sealed_log(old)
    first = old.departures.answer(old.departures.move(model.log_id, 1, new.name, NOW_S))
    records = len(old.sink.records)
    for generation in (1, 2):
        again = old.departures.move(model.log_id, generation, new.name, NOW_S)
        assert old.departures.answer(again) == first
    assert len(old.sink.records) == records
    assert (
        refusal(lambda: old.departures.move(model.log_id, 1, "c:1", NOW_S))
        is Reason.STALE_GENERATION
    )


def test_an_unsealed_log_does_not_move() -> None:
    """Its chunks serve nobody but the next generation at its own home (O2)."""
    old, new = pair()
    model = open_log(old.store, list(range(1, BLOCK + 2)))
    reason = refusal(lambda: old.departures.move(model.log_id, 1, new.name, NOW_S))
    assert reason is Reason.INVALID_REQUEST
    assert model.log.generation == 1


def test_a_replica_copies_committed_pages_before_the_move_and_only_the_rest_after() -> None:
    """What came early is not fetched again, and serves no lookup meanwhile."""
    old, new = pair()
    model = open_log(old.store, list(range(1, 3 * BLOCK + 3)))
    model.checkpoint(2 * BLOCK)
    arrival = new.arrivals.follow(model.log_id, TENANT, old.name, NOW_S)
    early = new.arrivals.announced(arrival, 0, full_rows(model.log))
    assert early == [0, 1]
    fetch(new, arrival, early)
    assert new.arrivals.announced(arrival, 0, full_rows(model.log)) == []
    assert len(new.store.core.tree) == 0
    assert not new.store.core.logs
    model.checkpoint(3 * BLOCK + 2)
    model.seal()
    moved = old.departures.move(model.log_id, 1, new.name, NOW_S)
    rest = told(new, old.departures.answer(moved), arrival)
    assert rest == [2, 3]
    fetch(new, arrival, rest)
    assert arrival.early_pages() == 2
    new.arrivals.open(arrival, NOW)
    new.check()


def test_an_opened_log_goes_on_at_its_new_home() -> None:
    """Take, append, end: as if it had been opened there."""
    old, new = pair()
    model = sealed_log(old)
    move(old, new, model.log_id, 1)
    taken = take(new.store, model.log_id)
    assert taken.generation == 3
    for token in range(2 * BLOCK):
        taken.append(token)
    assert taken.append(9, finish="stop").phase is Phase.ENDED
    new.check()


def test_an_abandoned_arrival_leaves_no_page_even_under_a_write() -> None:
    """A page that is being written is given back when the write ends, not before."""
    old, new = pair()
    model = sealed_log(old)
    arrival = new.arrivals.follow(model.log_id, TENANT, old.name, NOW_S)
    blocks = new.arrivals.announced(arrival, 0, full_rows(model.log))
    new.arrivals.writing(arrival, blocks)
    assert new.arrivals.expire(NOW_S + 10.0) == [model.log_id]
    assert new.store.core.pool.counts().granted == len(blocks)
    new.arrivals.written(arrival, blocks)
    assert new.store.core.pool.counts().free == new.store.core.pool.page_count
    new.check()


def test_after_an_abandoned_move_the_same_new_home_may_try_again() -> None:
    """The old home answers again; nothing was lost."""
    old, new = pair()
    model = sealed_log(old)
    arrival = new.arrivals.follow(model.log_id, TENANT, old.name, NOW_S)
    told(new, old.departures.answer(_move(old, new, model.log_id)), arrival)
    new.arrivals.abandon(model.log_id)
    new.check()
    assert move(old, new, model.log_id, 1).generation == 2
    new.check()


def _move(old: HomeSite, new: HomeSite, log_id: bytes) -> object:
    return old.departures.move(log_id, 1, new.name, NOW_S)


def test_a_damaged_page_costs_kv_not_tokens() -> None:
    """The log opens with the KV before the damage; the rest is computed from its tokens."""
    old, new = pair()
    model = sealed_log(old)
    arrival = new.arrivals.follow(model.log_id, TENANT, old.name, NOW_S)
    departed = old.departures.answer(old.departures.move(model.log_id, 1, new.name, NOW_S))
    assert told(new, departed, arrival) == [0, 1, 2, 3]
    fetch(new, arrival, [0, 2, 3])
    new.arrivals.damaged(arrival, 1)
    log = new.arrivals.open(arrival, NOW)
    assert (log.committed, log.position) == (BLOCK, 3 * BLOCK + 3)
    new.check()


def test_a_page_table_that_does_not_hash_to_its_digest_is_refused() -> None:
    """And nothing is opened."""
    old, new = pair()
    model = sealed_log(old)
    arrival = new.arrivals.follow(model.log_id, TENANT, old.name, NOW_S)
    departed = old.departures.answer(old.departures.move(model.log_id, 1, new.name, NOW_S))
    reason = refusal(
        lambda: new.arrivals.moved(arrival, departed.generation, departed.snapshot, bytes(32))
    )
    assert reason is Reason.CHECKSUM_MISMATCH
    assert arrival.stage is Stage.FOLLOWING


def test_another_tenants_log_is_not_taken_in() -> None:
    """The tenant of the capability is compared with the log's."""
    old, new = pair()
    model = sealed_log(old)
    arrival = new.arrivals.follow(model.log_id, "other", old.name, NOW_S)
    departed = old.departures.answer(old.departures.move(model.log_id, 1, new.name, NOW_S))
    assert refusal(lambda: told(new, departed, arrival)) is Reason.PERMISSION_DENIED


def test_a_log_may_come_back_and_a_late_confirmation_of_the_first_move_hits_nothing() -> None:
    """There and back: one home at each time, and the old copy's pages are not held twice."""
    old, new = pair()
    model = sealed_log(old)
    move(old, new, model.log_id, 1)
    new.arrivals.confirmed(model.log_id)
    assert not writable(old.store.core, model.log_id)
    back = move(new, old, model.log_id, 2)
    assert back.generation == 3
    assert writable(old.store.core, model.log_id)
    assert not writable(new.store.core, model.log_id)
    assert not old.departures.done(model.log_id, 2)
    assert new.departures.done(model.log_id, 3)
    old.check()
    new.check()
    assert old.store.core.pool.counts().live == 4


def test_without_room_the_new_home_refuses_before_the_old_one_is_asked() -> None:
    """A move that cannot be held is not begun."""
    old, new = home_site("a:1"), home_site("b:1", pages=2)
    model = sealed_log(old)
    arrival = new.arrivals.follow(model.log_id, TENANT, old.name, NOW_S)
    reason = refusal(lambda: new.arrivals.make_room(arrival, model.log.position))
    assert reason is Reason.PAGES_EXHAUSTED


def test_the_new_home_is_asked_when_its_word_is_missing() -> None:
    """A lost confirmation does not keep pages for ever."""
    old, new = pair()
    model = sealed_log(old)
    move(old, new, model.log_id, 1)
    assert old.departures.to_ask(NOW_S) == []
    (log,) = old.departures.to_ask(NOW_S + 5.0)
    assert old.departures.to_ask(NOW_S + 5.0) == []
    assert new.arrivals.has_opened(log.log_id, log.generation)
    assert not new.arrivals.has_opened(log.log_id, log.generation + 1)


def test_an_arrival_is_recovered_from_its_own_records() -> None:
    """OPEN with the snapshot is enough by itself."""
    old, new = pair()
    model = sealed_log(old)
    move(old, new, model.log_id, 1)
    log = recovered_from(new.sink.records).logs[model.log_id]
    assert (log.generation, log.phase) == (2, Phase.DECODE)
    assert list(log.tokens) == [*range(1, 3 * BLOCK + 3), 5]


@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_restarted_old_home_does_not_take_its_log_back(is_compacted: bool) -> None:
    """MOVED survives, also behind a compaction; it answers again, and drops when told."""
    old, new = pair()
    model = sealed_log(old)
    old.departures.move(model.log_id, 1, new.name, NOW_S)
    if is_compacted:
        old.store.core.journal.snapshot(model.log)
    recovered = recovered_from(old.sink.records)
    found = recovered.moved[model.log_id]
    assert (found.to_home, found.generation) == (new.name, 2)
    assert recovered.logs[model.log_id].generation == 2


def test_a_log_that_came_left_and_comes_again_is_taken_in_again() -> None:
    """The first arrival was never confirmed; what stands of it is not the second one (O1)."""
    old, new = home_site("a"), home_site("b")
    model = sealed_log(old)
    move(old, new, model.log_id, model.generation)
    log = new.store.core.logs[model.log_id]
    back = move(new, old, model.log_id, log.generation)
    generation = back.generation
    assert new.departures.done(model.log_id, generation)
    again = move(old, new, model.log_id, generation)
    assert again.generation == generation + 1
    assert new.store.core.logs[model.log_id] is again
    for site in (old, new):
        site.check()

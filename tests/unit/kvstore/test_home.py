"""One log's writer: generations, the rules of checkpoint, seal and append, take-overs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.errors import Reason, ServiceError
from baton.kv.numeric import NATIVE_Q4_1, TORCH_BF16, TORCH_F32
from services.kvstore.state import FillPage, Phase, Writer
from services.kvstore.writes import SealEnd
from tests.unit.kvstore.cores import (
    BLOCK,
    DECODE,
    NOW,
    PREFILL,
    ListSink,
    WorkerModel,
    build_store,
    fill_work,
    open_log,
    order,
    take,
)


def refusal(call: Callable[..., object], *args: object, **kwargs: object) -> ServiceError:
    """The ServiceError that the call raises."""
    with pytest.raises(ServiceError) as caught:
        call(*args, **kwargs)
    return caught.value


def test_open_grants_pages_for_the_prompt_and_the_first_output() -> None:
    """Admission reserves the prompt's pages and one page of output."""
    store = build_store()
    answer = store.open(order(list(range(BLOCK + 1))), PREFILL, NOW)
    assert len(answer.granted) == 3
    assert answer.cached_tokens == 0
    store.core.check_invariants()


def test_open_again_with_the_same_body_gets_the_same_answer() -> None:
    """A retry after a lost answer must not open a second log or grant twice."""
    store = build_store()
    wanted = order([1, 2, 3])
    first = store.open(wanted, PREFILL, NOW)
    assert store.open(wanted, PREFILL, NOW) == first
    error = refusal(store.open, replace(wanted, body_hash=b"x" * 32), PREFILL, NOW)
    assert error.reason is Reason.ALREADY_EXISTS


def test_stale_generation_is_refused_before_anything_else_and_changes_nothing() -> None:
    """Fencing: an old writer is told that another owner exists, whatever it sends."""
    store = build_store()
    worker = open_log(store, list(range(20)))
    worker.prefill()
    old = worker.item(9)
    take(store, worker.log_id)
    before = (worker.log.position, worker.log.committed, store.core.pool.counts())
    for call in (
        lambda: store.writes.append(old, PREFILL.worker_id, 0.0),
        lambda: store.writes.checkpoint(worker.log_id, 1, (0, 1), [], 0.0),
        lambda: store.seal(worker.log_id, 1, b"", SealEnd(token_id=1), 0.0),
        lambda: store.home.grant(worker.log_id, 1, PREFILL.worker_id, 1),
        lambda: store.truncate(worker.log_id, 1, 3, NOW),
    ):
        assert refusal(call).reason is Reason.STALE_GENERATION
    assert (worker.log.position, worker.log.committed, store.core.pool.counts()) == before
    assert store.core.stale_refused == 5


def test_append_by_another_worker_at_the_right_generation_is_stale() -> None:
    """Knowing the number is not owning the log."""
    store = build_store()
    worker = open_log(store, [1, 2, 3])
    worker.prefill()
    decode = take(store, worker.log_id)
    error = refusal(store.writes.append, decode.item(4), "decode-9", 0.0)
    assert error.reason is Reason.STALE_GENERATION


def test_append_is_accepted_at_the_next_position_only_and_its_repetition_is_a_no_op() -> None:
    """A lost ack is repeated; a gap or another token is a bug of the sender."""
    store = build_store()
    worker = open_log(store, [1, 2, 3])
    worker.prefill(token=5)
    decode = take(store, worker.log_id)
    item = decode.item(6)
    decode.append(6)
    store.writes.append(item, DECODE.worker_id, 0.0)
    assert list(decode.log.tokens) == [1, 2, 3, 5, 6]
    other = replace(item, token_id=7)
    assert refusal(store.writes.append, other, DECODE.worker_id, 0.0).field == "position"
    gap = replace(decode.item(7), position=9)
    assert refusal(store.writes.append, gap, DECODE.worker_id, 0.0).field == "position"


def test_append_into_a_page_that_was_not_granted_is_refused() -> None:
    """A writer that mixed up its pages must not make another log's page part of this one."""
    store = build_store()
    worker = open_log(store, list(range(BLOCK)))
    worker.prefill()
    decode = take(store, worker.log_id)
    wrong = replace(decode.item(4), page=60, page_generation=1)
    assert refusal(store.writes.append, wrong, DECODE.worker_id, 0.0).field == "page"


def test_last_slot_of_a_page_needs_the_page_crc() -> None:
    """From then on the page is verified by one CRC; without it it never could be."""
    store = build_store()
    worker = open_log(store, list(range(BLOCK - 1)))
    worker.prefill()
    decode = take(store, worker.log_id)
    missing = replace(decode.item(4), page_crc=None)
    assert refusal(store.writes.append, missing, DECODE.worker_id, 0.0).field == "page_crc32c"


@pytest.mark.parametrize(
    ("span", "field"),
    [((1, 5), "from_position"), ((0, 0), "to_position"), ((0, 99), "to_position")],
)
def test_checkpoint_must_continue_and_stay_inside_the_prompt(
    span: tuple[int, int], field: str
) -> None:
    """Chunks are contiguous; KV beyond the prompt does not exist yet."""
    store = build_store()
    worker = open_log(store, list(range(20)))
    error = refusal(store.writes.checkpoint, worker.log_id, 1, span, [], 0.0)
    assert error.field == field


def test_checkpoint_rewriting_a_committed_slot_is_refused() -> None:
    """Each slot is written once (O7)."""
    store = build_store()
    worker = open_log(store, list(range(6)))
    worker.checkpoint(3)
    row = replace(worker.log.rows[0], tokens=6, slot_crcs=[7, 8, 7, 7, 7, 7])
    error = refusal(store.writes.checkpoint, worker.log_id, 1, (3, 6), [row], 0.0)
    assert error.field == "pages[0].slot_crc32c"


def test_repeated_checkpoint_and_seal_are_harmless() -> None:
    """Unary calls may be retried after a lost answer."""
    sink = ListSink()
    store = build_store(sink=sink)
    worker = open_log(store, list(range(10)))
    worker.checkpoint(10)
    rows = worker.log.rows
    assert store.writes.checkpoint(worker.log_id, 1, (0, 10), rows, 0.0) == 10
    worker.seal(token=4)
    records = len(sink.records)
    worker.seal(token=4)
    assert len(sink.records) == records


def test_seal_with_another_chunk_list_is_refused_and_leaves_the_log_unsealed() -> None:
    """Sealing is all or nothing: what is not what was committed serves nobody."""
    store = build_store()
    worker = open_log(store, list(range(10)))
    worker.checkpoint(10)
    worker.chunks = worker.chunks[:-1]
    assert refusal(worker.seal).reason is Reason.CHECKSUM_MISMATCH
    assert worker.log.phase is Phase.PREFILL


def test_seal_before_all_kv_is_committed_is_refused() -> None:
    """A gap in the KV would be served as a prefix."""
    store = build_store()
    worker = open_log(store, list(range(10)))
    worker.checkpoint(9)
    assert refusal(worker.seal).reason is Reason.INVALID_REQUEST


def test_take_copies_the_partial_tail_into_a_page_of_the_new_generation() -> None:
    """The old writer may still write the old tail page; the new one must never share it (O7)."""
    store = build_store()
    worker = open_log(store, list(range(BLOCK + 3)))
    worker.prefill()
    old_tail = worker.log.rows[-1].page
    generation = worker.log.generation
    store.home.take(worker.log_id, generation, DECODE, TORCH_F32, pages=1, now_s=0.0)
    work = store.core.take_work()
    fills = [item for item in work if isinstance(item, FillPage)]
    assert [fill.sources[0].row.page for fill in fills] == [old_tail]
    assert worker.log.rows[-1].page != old_tail
    assert store.core.pool.counts().quarantined == 2
    store.core.check_invariants()


def test_finished_log_releases_its_writers_pages_at_once() -> None:
    """The end is named by the writer itself, so that nothing has to wait for its lock."""
    store = build_store()
    worker = open_log(store, [1, 2, 3])
    worker.prefill(finish="stop")
    assert worker.log.phase is Phase.ENDED
    assert store.core.pool.counts().granted == 0
    assert store.core.pool.counts().quarantined == 0
    assert len(store.core.leases) == 0
    store.core.check_invariants()


def test_take_by_a_class_that_may_not_read_the_kv_is_refused_and_keeps_the_writer() -> None:
    """KV of one numeric class is continued by another only as policy allows."""
    store = build_store()
    worker = open_log(store, [1, 2, 3], numeric_class=TORCH_BF16)
    worker.prefill()
    error = refusal(take, store, worker.log_id, numeric_class=TORCH_F32)
    assert error.reason is Reason.COMPAT_MISMATCH
    assert worker.log.writer == PREFILL
    take(store, worker.log_id, numeric_class=NATIVE_Q4_1)


def test_take_without_room_changes_nothing() -> None:
    """PAGES_EXHAUSTED must not fence a writer that goes on."""
    store = build_store(pages=4)
    worker = open_log(store, list(range(10)))
    worker.prefill()
    error = refusal(take, store, worker.log_id, pages=9)
    assert error.reason is Reason.PAGES_EXHAUSTED
    assert worker.log.generation == 1
    assert worker.log.writer == PREFILL


def test_unsealed_log_is_adopted_by_the_next_writer_with_its_committed_chunks() -> None:
    """The next attempt goes on where the dead one stopped; its digest covers its own chunks."""
    store = build_store()
    first = open_log(store, list(range(20)))
    first.checkpoint(10)
    second = take(store, first.log_id, Writer(worker_id="p-1", slot=5, incarnation=1), pages=3)
    assert second.log.committed == 10
    second.prefill()
    assert second.log.is_sealed
    store.core.check_invariants()


def test_log_without_kv_catches_up_by_checkpoints_before_it_appends() -> None:
    """After a restart or an eviction tokens are there and KV is computed again."""
    store = build_store()
    worker = open_log(store, list(range(10)))
    worker.prefill()
    store.home.give_up_kv(worker.log, 0)
    decode = take(store, worker.log_id, pages=3)
    early = replace(decode.item(4), position=decode.log.position)
    assert refusal(store.writes.append, early, DECODE.worker_id, 0.0).field == "position"
    decode.checkpoint(10)
    decode.append(4)
    assert decode.log.position == 12
    store.core.check_invariants()


def test_damaged_tail_is_given_up_and_its_block_is_computed_again() -> None:
    """A copy whose source does not verify costs time, never a wrong token."""
    store = build_store()
    worker = open_log(store, list(range(BLOCK + 3)))
    worker.prefill()
    store.home.take(worker.log_id, 1, DECODE, TORCH_F32, pages=1, now_s=0.0)
    fill = next(item for item in store.core.take_work() if isinstance(item, FillPage))
    store.home.discard_tail(fill)
    fill_work(store)
    decode = WorkerModel(store, worker.log_id, DECODE)
    assert decode.log.committed == BLOCK
    decode.checkpoint(BLOCK + 3)
    decode.append(8)
    store.core.check_invariants()

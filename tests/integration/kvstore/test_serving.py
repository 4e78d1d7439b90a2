"""The contract over a real socket, with a worker that maps the arena and writes pages."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable
from dataclasses import replace

import pytest

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.arena.replay import HeldLog
from baton.capability import Right
from baton.errors import Reason, ServiceError
from baton.ids import new_log_id, new_request_id
from baton.kv.digests import history_at
from baton.kv.splice import splice
from baton.wire.segments import manifest_to_proto, segment_from_proto
from tests.integration.kvstore.harness import (
    BLOCK,
    FakeLog,
    Site,
    capability,
    kv_value,
    worker_capability,
)

PROMPT = [3 + index % 200 for index in range(2 * BLOCK + 5)]
_firsts = itertools.count(3)


def fresh_prompt() -> list[int]:
    """As long as PROMPT, and never seen by the store before."""
    return [next(_firsts), 250, *PROMPT[2:]]


async def refused(call: Awaitable[object]) -> ServiceError:
    """The error a call is answered with."""
    with pytest.raises(ServiceError) as caught:
        await call
    return caught.value


async def finished(site: Site, tokens: list[int] = PROMPT, **fields: object) -> FakeLog:
    """A log of tenant acme that was answered with one token and closed."""
    worker = site.workers[0] if site.workers else await site.attach()
    log = await site.open(worker, tokens, **fields)
    await worker.prefill(log, 5, "stop")
    await site.close(log)
    return log


async def test_prompt_is_handed_from_prefill_to_decode_in_place(site: Site) -> None:
    """What prefill wrote decode reads from the same pages; the tail alone is copied."""
    prefill, decode = await site.attach("prefill-a"), await site.attach("decode-a")
    log = await site.open(prefill, PROMPT)
    await prefill.prefill(log, token=7)
    before = await prefill.view(log)
    taken = await decode.take(log)
    after = await decode.view(taken)
    assert [row.page for row in after.rows[:2]] == [row.page for row in before.rows[:2]]
    assert after.rows[2].page != before.rows[2].page
    for position, token in enumerate(PROMPT):
        assert decode.read(after, position) == kv_value(token, position)
    for token in range(10, 10 + 2 * BLOCK):
        await decode.append(taken, token)
    await decode.append(taken, 2, "stop")
    view = await decode.view(taken)
    assert list(view.token_ids) == [*PROMPT, 7, *range(10, 10 + 2 * BLOCK), 2]
    assert view.head.finish_reason == "stop"
    for position in range(view.head.committed_position):
        assert decode.read(view, position) == kv_value(view.token_ids[position], position)
    await site.close(taken, drop=True)


async def test_local_prefill_goes_on_appending_at_the_same_generation(site: Site) -> None:
    """A decode worker that prefilled itself is already the writer."""
    worker = await site.attach()
    log = await site.open(worker, PROMPT)
    await worker.prefill(log, token=7)
    for token in (8, 9):
        await worker.append(log, token)
    assert (await worker.view(log)).output_ids == (7, 8, 9)
    await site.close(log, drop=True)


async def test_stale_writer_is_refused_and_nothing_changes(site: Site) -> None:
    """Fencing over the wire, on every write call; a good entry beside a stale one is taken."""
    one, two = await site.attach("one"), await site.attach("two")
    stale = await site.open(one, PROMPT)
    await one.prefill(stale)
    entry = one.entry(stale, 9)
    good = await site.open(one, [4] * (BLOCK - 1))
    await one.prefill(good)
    fresh = await two.take(stale)
    outcomes = await one.send([entry, one.entry(good, 6)])
    assert outcomes[0].error is not None
    assert outcomes[0].error.reason is Reason.STALE_GENERATION
    assert outcomes[1].error is None
    for call in (
        one.store.commit_checkpoint(stale.held, (0, 1), [], stale.capability),
        one.store.grant(stale.log_id, stale.generation, 1, new_request_id()),
        one.store.take(stale.held, stale.capability, pages=1, request_id=new_request_id()),
        one.store.replay(stale.log_id, stale.capability, BLOCK, generation=stale.generation),
        one.seal(stale, 4),
    ):
        assert (await refused(call)).reason is Reason.STALE_GENERATION
    assert (await two.view(fresh)).output_ids == (5,)
    await two.append(fresh, 6)
    for log in (fresh, good):
        await site.close(log, drop=True)


async def test_wrong_capability_scope_or_tenant_is_refused(site: Site) -> None:
    """Every call is checked; another tenant's log looks as if it was not there."""
    log = await finished(site)
    worker = site.workers[0]
    other = capability(log.log_id, tenant="mallory")
    replay = kvstore_pb2.ReplayLogRequest(log_id=log.log_id)
    cases = {
        "": Reason.UNAUTHENTICATED,
        capability(log.log_id)[:-2] + "xx": Reason.UNAUTHENTICATED,
        capability(log.log_id, key=b"k" * 32): Reason.UNAUTHENTICATED,
        capability(new_log_id()): Reason.PERMISSION_DENIED,
        capability(log.log_id, rights=frozenset({Right.OPEN})): Reason.PERMISSION_DENIED,
        other: Reason.LOG_NOT_FOUND,
        worker_capability(): Reason.PERMISSION_DENIED,
    }
    for text, reason in cases.items():
        error = await refused(worker.store.replay(replay.log_id, text, BLOCK))
        assert error.reason is reason, text
    for call in (
        site.stub.Close(kvstore_pb2.CloseRequest(log_id=log.log_id, capability=other)),
        site.stub.Cancel(kvstore_pb2.CancelRequest(log_id=log.log_id, capability=other)),
        site.stub.DescribeLog(kvstore_pb2.DescribeLogRequest(log_id=log.log_id, capability=other)),
        site.stub.DescribeBlob(
            kvstore_pb2.DescribeBlobRequest(log_id=log.log_id, capability=other)
        ),
        site.stub.Truncate(
            kvstore_pb2.TruncateRequest(
                log_id=log.log_id, generation=1, position=2, capability=other, request_id="t"
            )
        ),
    ):
        assert (await refused(call)).reason is Reason.LOG_NOT_FOUND
    request = site.open_request(worker, PROMPT, capability=worker_capability())
    assert (await refused(site.stub.Open(request))).reason is Reason.PERMISSION_DENIED


async def test_cached_prefix_is_found_in_the_own_scope_only(site: Site) -> None:
    """Same prompt, other tenant, team or salt: nothing is found."""
    first = await finished(site, [9, *PROMPT])
    worker = site.workers[0]
    request = site.open_request(worker, [9, *PROMPT[: 2 * BLOCK], 1])
    assert (await site.stub.Open(request)).cached_tokens == 2 * BLOCK + 1
    log = await worker.follow(request.log_id, 1, request.capability)
    view = await worker.view(log)
    assert worker.read(view, 3) == kv_value(first.tokens[3], 3)
    for fields in (
        {"capability": capability(tenant="mallory")},
        {"capability": capability(scope="blue")},
        {"cache_salt": "pepper"},
        {"cache_mode": common_pb2.CACHE_MODE_OFF},
    ):
        again = site.open_request(worker, [9, *PROMPT], **fields)
        assert (await site.stub.Open(again)).cached_tokens == 0, fields


async def test_open_is_idempotent_by_request_and_body(site: Site) -> None:
    """A retried Open gets its first answer; the same id with another body is refused."""
    worker = await site.attach()
    request = site.open_request(worker, PROMPT)
    first = await site.stub.Open(request)
    assert await site.stub.Open(request) == first
    request.body_hash = bytes(32)
    assert (await refused(site.stub.Open(request))).reason is Reason.ALREADY_EXISTS


async def test_open_refuses_what_it_cannot_serve_naming_the_field(site: Site) -> None:
    """Sizes, ids, labels and workers are checked before anything is allocated."""
    worker = await site.attach()
    free = (await site.counts()).pages_free
    for ids in ([], [10**6]):
        request = site.open_request(worker, ids)
        assert (await refused(site.stub.Open(request))).field == "prompt_token_ids"
    for fields, field in (
        ({"log_id": b"short"}, "log_id"),
        ({"request_id": ""}, "request_id"),
        ({"body_hash": b""}, "body_hash"),
        ({"writer_worker_id": "nobody"}, "worker_id"),
    ):
        request = site.open_request(worker, PROMPT)
        request.capability = capability()
        for name, value in fields.items():
            setattr(request, name, value)
        assert (await refused(site.stub.Open(request))).field == field
    request = site.open_request(worker, PROMPT)
    request.label.tokenizer_hash = bytes(8)
    assert (await refused(site.stub.Open(request))).reason is Reason.TOKENIZER_MISMATCH
    assert (await site.counts()).pages_free == free


async def test_worker_of_another_label_cannot_attach(site: Site) -> None:
    """A mismatch is refused naming the field, before any page could be touched."""
    for changes, reason, field in (
        ({"tokenizer": bytes(8)}, Reason.TOKENIZER_MISMATCH, "tokenizer"),
        ({"model": bytes(16)}, Reason.COMPAT_MISMATCH, "model"),
        ({"rope": bytes(16)}, Reason.COMPAT_MISMATCH, "rope"),
    ):
        label = replace(site.model.label, **changes)
        error = await refused(site.attach(label=label))
        assert (error.reason, error.field) == (reason, field)


async def test_dead_workers_pages_come_back_and_its_log_can_be_taken(site: Site) -> None:
    """The lock is gone with the mapping; committed chunks are adopted by the next writer."""
    prompt = fresh_prompt()
    start = await site.until("start", pages_quarantined=0, pages_granted=0)
    free, live = start.pages_free, start.pages_live
    dead, heir = await site.attach("dead"), await site.attach("heir")
    log = await site.open(dead, prompt)
    await dead.commit(log, BLOCK + 3)
    dead.leave()
    site.workers.remove(dead)
    await site.until("fenced", leases=0, pages_granted=0, pages_quarantined=0, pages_live=live + 2)
    log.generation += 1
    taken = await heir.take(log, pages=3)
    assert taken.committed == BLOCK + 3
    await heir.prefill(taken)
    view = await heir.view(taken)
    assert all(heir.read(view, p) == kv_value(t, p) for p, t in enumerate(prompt))
    await site.close(taken, drop=True)
    await heir.store.renew_leases(heir.incarnation, [], 1)
    await heir.store.renew_leases(heir.incarnation, [], 2)
    assert (await site.until("freed", pages_quarantined=0)).pages_free == free


async def test_released_pages_are_zeroed_before_they_are_granted_again(site: Site) -> None:
    """No log ever sees what another left (O7)."""
    worker = await site.attach()
    capacity = (await site.counts()).arena.page_count
    secret = await site.open(worker, [7] * (4 * BLOCK))
    await worker.prefill(secret, 5, "stop")
    used = {row.page for row in (await worker.view(secret)).rows}
    await site.close(secret, drop=True)
    free = (await site.counts()).pages_free
    log = await site.open(worker, [1])
    pages = await worker.store.grant(log.log_id, 1, free - 3, new_request_id())
    assert used & {page.page for page in pages}
    assert len(pages) < capacity
    assert not any(any(worker.attached.arena.page(page.page)) for page in pages)
    await site.close(log, drop=True)


async def test_lease_without_progress_is_lost_and_pages_wait_for_their_worker(site: Site) -> None:
    """Renewals need progress; a live worker that lost a log is told, then lets its pages go."""
    prompt = fresh_prompt()
    worker = await site.attach("slow")
    log = await site.open(worker, prompt)
    await worker.commit(log, 3)
    assert await worker.store.renew_leases(worker.incarnation, [log.held], 1) == frozenset()
    await site.until("expired", leases=0)
    assert (await site.counts()).pages_quarantined == 3
    error = await refused(worker.commit(log, 4))
    assert error.reason is Reason.STALE_GENERATION
    lost = await worker.store.renew_leases(worker.incarnation, [log.held], 2)
    assert lost == {log.log_id}
    assert (await site.counts()).pages_quarantined == 3
    await worker.store.renew_leases(worker.incarnation, [], 3)
    await worker.store.renew_leases(worker.incarnation, [], 4)
    await site.until("released", pages_quarantined=0)
    await site.stub.Cancel(kvstore_pb2.CancelRequest(log_id=log.log_id, capability=log.capability))


async def test_cancel_fences_and_frees(site: Site) -> None:
    """A cancelled log is gone for its writer at once."""
    prompt = fresh_prompt()
    worker = await site.attach()
    log = await site.open(worker, prompt)
    cancel = kvstore_pb2.CancelRequest(log_id=log.log_id, capability=log.capability)
    generation = (await site.stub.Cancel(cancel)).generation
    assert generation == 2
    assert (await site.stub.Cancel(cancel)).generation == generation
    assert (await refused(worker.commit(log, 3))).reason is Reason.STALE_GENERATION


async def test_reattaching_worker_keeps_its_logs_under_new_generations(site: Site) -> None:
    """A worker that lost its connection goes on; what it does not name stays with its lease."""
    worker = await site.attach("again")
    log = await site.open(worker, PROMPT)
    await worker.prefill(log)
    worker.leave()
    site.workers.remove(worker)
    second = await site.attach("again", held=[log.held])
    kept = second.attached.held
    # The first mapping may have been seen gone before: then the log is fenced and taken anew.
    if kept:
        assert kept == (HeldLog(log_id=log.log_id, generation=log.generation + 1),)
    log.generation += 1
    resumed = (
        await second.follow(log.log_id, log.generation, log.capability)
        if kept
        else await second.take(log)
    )
    await second.store.grant(log.log_id, resumed.generation, 2, new_request_id())
    resumed = await second.follow(log.log_id, resumed.generation, log.capability)
    await second.append(resumed, 6)
    await site.close(resumed, drop=True)


async def test_fork_and_truncate_continue_from_any_position(site: Site) -> None:
    """Branches share full pages; an edit gives a new generation."""
    log = await finished(site)
    worker = site.workers[0]
    child_id = new_log_id()
    fork = kvstore_pb2.ForkRequest(
        parent=common_pb2.LogPosition(log_id=log.log_id, position=BLOCK + 4),
        log_id=child_id,
        capability=capability(child_id),
        writer_worker_id=worker.worker_id,
        request_id=new_request_id(),
    )
    answer = await site.stub.Fork(fork)
    assert answer.cached_tokens == BLOCK + 3
    assert await site.stub.Fork(fork) == answer
    child = await worker.follow(child_id, answer.generation, fork.capability)
    await worker.store.grant(child_id, answer.generation, 1, new_request_id())
    await worker.append(child, 11)
    view = await worker.view(child)
    assert list(view.token_ids) == [*PROMPT[: BLOCK + 4], 11]
    assert worker.read(view, BLOCK + 1) == kv_value(PROMPT[BLOCK + 1], BLOCK + 1)
    cut = await site.stub.Truncate(
        kvstore_pb2.TruncateRequest(
            log_id=log.log_id,
            generation=log.generation,
            position=6,
            capability=log.capability,
            request_id=new_request_id(),
        )
    )
    log.generation = cut.generation
    edited = await worker.take(log)
    await worker.append(edited, 12)
    edited_view = await worker.view(edited)
    assert list(edited_view.token_ids) == [*PROMPT[:6], 12]
    assert worker.read(edited_view, 5) == kv_value(PROMPT[5], 5)


async def test_published_prefix_is_listed_spliced_and_revoked(site: Site) -> None:
    """A guest uses it by manifest; after Revoke nobody finds it."""
    prompt = [77, *PROMPT]
    log = await finished(site, prompt)
    published = await site.stub.Publish(
        kvstore_pb2.PublishRequest(
            prefix=kvstore_pb2.PublishedPrefix(
                name=f"system-{new_request_id()}",
                log=common_pb2.LogPosition(log_id=log.log_id, position=2 * BLOCK),
                segment=common_pb2.Segment(text_hash=b"t" * 32),
                tenants=["guest"],
                text_bytes=99,
            ),
            capability=log.capability,
            request_id=new_request_id(),
        )
    )
    prefix = published.prefix
    assert prefix.owner_tenant == "acme"
    operator = capability(tenant=None, rights=frozenset({Right.READ, Right.ADMIN}))
    listed = await site.stub.ListPrefixes(kvstore_pb2.ListPrefixesRequest(capability=operator))
    # The store is shared with other tests; theirs are none of this one's business.
    (own,) = [item for item in listed.prefixes if item.prefix_id == prefix.prefix_id]
    assert list(prefix.segment.token_ids) == prompt[: 2 * BLOCK]
    assert not own.segment.token_ids
    again = await site.stub.ListPrefixes(
        kvstore_pb2.ListPrefixesRequest(capability=operator, known_version=listed.version)
    )
    assert again.unchanged
    manifest = manifest_to_proto(splice([segment_from_proto(own.segment)]))
    worker = site.workers[0]

    def guest_request() -> kvstore_pb2.OpenRequest:
        log_id = new_log_id()
        return site.open_request(
            worker,
            [*prompt, 1],
            log_id=log_id,
            capability=capability(log_id, tenant="guest"),
            manifest=manifest,
        )

    answer = await site.stub.Open(guest_request())
    assert answer.cached_tokens == 2 * BLOCK
    assert answer.prefix_id == prefix.prefix_id
    revoke = kvstore_pb2.RevokeRequest(
        prefix_id=prefix.prefix_id, capability=capability(tenant="guest")
    )
    assert (await refused(site.stub.Revoke(revoke))).reason is Reason.PREFIX_NOT_FOUND
    revoke.capability = capability()
    await site.stub.Revoke(revoke)
    assert (await refused(site.stub.Open(guest_request()))).reason is Reason.BLOCK_NOT_FOUND
    assert (await refused(site.stub.Revoke(revoke))).reason is Reason.PREFIX_NOT_FOUND


async def test_describe_log_tells_where_it_stands(site: Site) -> None:
    """The history digest is that of the committed tokens."""
    log = await finished(site)
    answer = await site.stub.DescribeLog(
        kvstore_pb2.DescribeLogRequest(log_id=log.log_id, capability=log.capability)
    )
    assert answer.closed
    assert answer.head.committed_position == len(PROMPT)
    label = site.model.label
    assert answer.history_end == history_at(label.kv_digest(), BLOCK, PROMPT)


async def test_arena_out_of_pages_says_so_and_when_to_come_back(site: Site) -> None:
    """RESOURCE_EXHAUSTED with a hint; a prompt larger than the arena is refused for good."""
    worker = await site.attach()
    pages = (await site.counts()).arena.page_count
    log = await site.open(worker, [1])
    error = await refused(worker.store.grant(log.log_id, 1, pages, new_request_id()))
    assert error.reason is Reason.PAGES_EXHAUSTED
    assert error.retry_after_s is not None
    await site.close(log, drop=True)


async def test_a_move_to_what_is_no_address_changes_nothing(site: Site) -> None:
    """No record holds one of any length: the log was given away, and nothing said so."""
    log = await finished(site, fresh_prompt())
    head = kvstore_pb2.ReplayLogRequest(log_id=log.log_id, capability=capability(log.log_id))
    first, *_ = [piece async for piece in site.stub.ReplayLog(head)]
    for address in ("", "x" * 1025):
        move = kvstore_pb2.MoveRequest(
            log_id=log.log_id,
            generation=first.head.generation,
            to_kvstore_address=address,
            capability=capability(log.log_id, rights=frozenset({Right.MOVE})),
        )
        error = await refused(site.stub.Move(move))
        assert (error.reason, error.field) == (Reason.INVALID_REQUEST, "to_kvstore_address")
    parent = common_pb2.LogPosition(log_id=log.log_id, position=2 * BLOCK)
    fork = kvstore_pb2.ForkRequest(
        log_id=new_log_id(), request_id=new_request_id(), parent=parent, capability=capability()
    )
    await site.stub.Fork(fork)
    found = await site.stub.DescribeBlob(
        kvstore_pb2.DescribeBlobRequest(log_id=log.log_id, capability=capability(log.log_id))
    )
    assert found.descriptor.log_id == log.log_id

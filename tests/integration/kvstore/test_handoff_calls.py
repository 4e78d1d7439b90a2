"""The two calls of a hand-off: a seal that brings the last chunk, a take that tells the log."""

from __future__ import annotations

from typing import Any

import pytest

from baton.api.common.v1 import common_pb2
from baton.arena.checksums import chunk_pages, commit_rows
from baton.arena.client import Checkpoint
from baton.capability import Right
from baton.engine.sampling import SampledToken
from baton.errors import Reason, ServiceError
from baton.ids import new_request_id
from baton.kv.digests import chunk_list_digest
from tests.integration.kvstore.harness import BLOCK, FakeLog, FakeWorker, Site, capability

PROMPT = [11 + index % 100 for index in range(2 * BLOCK + 5)]


async def opened(site: Site) -> tuple[FakeWorker, FakeLog]:
    """A log whose prompt is not computed."""
    worker = await site.attach()
    return worker, await site.open(worker, PROMPT, cache_mode=common_pb2.CACHE_MODE_OFF)


def last_chunk(worker: FakeWorker, log: FakeLog) -> tuple[Checkpoint, bytes]:
    """What is not committed of the prompt, written; and the digest of all chunks."""
    first, end = log.committed, log.prompt_tokens
    worker.write(log, first, end)
    rows = commit_rows(worker.attached.arena, log.table, first, end)
    chunks = [*log.chunks, chunk_pages(rows, first, BLOCK)]
    digest = chunk_list_digest(worker.model.label.kv_digest(), chunks)
    return Checkpoint(first=first, end=end, rows=rows), digest


async def seal(worker: FakeWorker, log: FakeLog, last: Checkpoint, digest: bytes) -> int:
    """Commit and seal in one call."""
    return await worker.store.seal(
        log.held,
        digest,
        log.capability,
        first_token=SampledToken(token_id=7),
        finish_reason=None,
        last=last,
    )


@pytest.mark.parametrize("committed", [0, BLOCK])
async def test_the_last_chunk_comes_with_the_seal(site: Site, committed: int) -> None:
    """The log is as after two calls, whether or not other chunks went before; once more is
    harmless.
    """
    worker, log = await opened(site)
    if committed:
        await worker.commit(log, committed)
    last, digest = last_chunk(worker, log)
    for _ in range(2):
        assert await seal(worker, log, last, digest) == len(PROMPT) + 1
    view = await worker.view(log)
    assert view.head.is_sealed
    assert view.head.committed_position == len(PROMPT)
    assert list(view.token_ids) == [*PROMPT, 7]
    assert [row.crc32c for row in view.rows][-len(last.rows) :] == [r.crc32c for r in last.rows]
    assert await seal(worker, log, last, digest) == len(PROMPT) + 1


async def test_a_chunk_that_does_not_fit_is_refused_and_nothing_is_sealed(site: Site) -> None:
    """It names the field; the log goes on from where it was."""
    worker, log = await opened(site)
    last, digest = last_chunk(worker, log)
    ahead = Checkpoint(first=BLOCK, end=last.end, rows=last.rows[1:])
    with pytest.raises(ServiceError) as refused:
        await seal(worker, log, ahead, digest)
    assert refused.value.reason is Reason.INVALID_REQUEST
    assert refused.value.field == "from_position"
    assert not (await worker.view(log)).head.is_sealed
    assert await seal(worker, log, last, digest) == len(PROMPT) + 1


async def test_who_may_seal_but_not_write_brings_no_chunk(site: Site) -> None:
    """The right to commit is asked for as in a call of its own."""
    worker, log = await opened(site)
    last, digest = last_chunk(worker, log)
    whole = log.capability
    log.capability = capability(rights=frozenset({Right.SEAL, Right.READ}), log_id=log.log_id)
    with pytest.raises(ServiceError) as refused:
        await seal(worker, log, last, digest)
    assert refused.value.reason is Reason.PERMISSION_DENIED
    log.capability = whole
    assert (await worker.view(log)).head.committed_position == 0


async def test_a_take_tells_the_log_as_a_replay_does(site: Site) -> None:
    """Under the new generation, with the pages that were granted with it; also when repeated."""
    worker, log = await opened(site)
    await worker.prefill(log)
    asked: dict[str, Any] = {"pages": 2, "request_id": new_request_id(), "block_tokens": BLOCK}
    taken = await worker.store.take(log.held, log.capability, **asked)
    again = await worker.store.take(log.held, log.capability, **asked)
    replayed = await worker.store.replay(
        log.log_id, log.capability, BLOCK, generation=taken.generation
    )
    assert taken.view == again.view == replayed
    assert taken.view is not None
    assert taken.view.head.generation == taken.generation
    assert {page.page for page in taken.pages} <= {
        page.page for page in taken.view.head.granted_pages
    }
    plain = await worker.store.take(
        replayed.head.held, log.capability, pages=1, request_id=new_request_id()
    )
    assert plain.view is None


async def test_who_may_take_but_not_read_is_told_no_log(site: Site) -> None:
    """Refused before the log has another owner."""
    worker, log = await opened(site)
    await worker.prefill(log)
    take_only = capability(rights=frozenset({Right.TAKE}), log_id=log.log_id)
    with pytest.raises(ServiceError) as refused:
        await worker.store.take(
            log.held, take_only, pages=1, request_id=new_request_id(), block_tokens=BLOCK
        )
    assert refused.value.reason is Reason.PERMISSION_DENIED
    view = await worker.view(log)
    assert view.head.generation == log.generation

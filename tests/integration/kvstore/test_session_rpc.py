"""Sessions at a real kvstore: kept over crashes and full disks, their heads dropped by nobody."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import sessions_pb2, sessions_pb2_grpc
from baton.clock import SystemClock
from baton.errors import Reason, ServiceError
from baton.ids import new_request_id
from tests.integration.kvstore.harness import (
    FakeLog,
    FakeWorker,
    Model,
    Site,
    StoreProcess,
    capability,
    connected,
    running_store,
)
from tests.integration.kvstore.test_full_disk import LIMIT_BYTES, limit_files

PROMPT = [*range(3, 40)]
CHANGES_MAX = 600
PATIENCE_S = 15.0


@pytest.fixture
def own_store(model: Model, tmp_path: Path) -> Iterator[StoreProcess]:
    """A kvstore for one test alone."""
    with running_store(model, tmp_path) as store:
        yield store


@dataclass(slots=True)
class Names:
    """A gateway's side of one store's sessions."""

    site: Site

    @property
    def stub(self) -> Any:
        """The service."""
        return sessions_pb2_grpc.SessionServiceStub(self.site.channel)

    async def set(
        self, session_id: str, log: FakeLog, expected: int = 0, request_id: str | None = None
    ) -> sessions_pb2.StoredSession:
        """Compare-and-set to a log's end."""
        request = sessions_pb2.SetSessionRequest(
            capability=capability(),
            request_id=request_id or new_request_id(),
            session_id=session_id,
            expected_generation=expected,
            head=common_pb2.LogPosition(log_id=log.log_id, position=len(log.tokens)),
        )
        answer: sessions_pb2.SetSessionResponse = await self.stub.SetSession(request, timeout=10.0)
        return answer.session

    async def changed_until_refused(
        self, session_id: str, logs: Sequence[FakeLog], acked: int
    ) -> tuple[int, ServiceError]:
        """Changed from generation to generation, each of which names one log of two; the last that
        was acked, and the refusal.
        """
        for _ in range(CHANGES_MAX):
            try:
                changed = await self.set(session_id, logs[(acked + 1) % 2], expected=acked)
            except ServiceError as error:
                return acked, error
            acked = changed.generation
        pytest.fail("the log was never full")

    async def get(self, session_id: str) -> sessions_pb2.StoredSession:
        """As it is now."""
        request = sessions_pb2.GetSessionRequest(capability=capability(), session_id=session_id)
        answer: sessions_pb2.GetSessionResponse = await self.stub.GetSession(request, timeout=10.0)
        return answer.session


async def kept(site: Site, worker: FakeWorker, tokens: list[int]) -> FakeLog:
    """A sealed log that has ended."""
    log = await site.open(worker, tokens)
    await worker.prefill(log, finish="stop")
    await site.close(log)
    return log


async def test_a_log_that_a_session_names_is_dropped_by_nobody(own_store: StoreProcess) -> None:
    """Whoever names a log and does not hear of it gives it up: the name stands all the same."""
    async with connected(own_store) as site:
        worker, names = await site.attach(), Names(site)
        log = await kept(site, worker, PROMPT)
        await names.set("s", log)
        await site.close(log, drop=True)
        view = await worker.view(log)
        assert list(view.token_ids) == log.tokens
        # Without the name it goes.
        request = sessions_pb2.DeleteSessionRequest(
            capability=capability(), request_id=new_request_id(), session_id="s"
        )
        await names.stub.DeleteSession(request, timeout=5.0)
        await site.close(log, drop=True)
        with pytest.raises(ServiceError) as caught:
            await worker.view(log)
        # The generation of a log that is gone is remembered.
        assert caught.value.reason is Reason.STALE_GENERATION


async def test_the_same_change_again_is_answered_and_another_is_stale(
    own_store: StoreProcess,
) -> None:
    """A repetition whose first answer was lost; behind a restart it is STALE_GENERATION, and the
    session says by its head that it was done.
    """
    async with connected(own_store) as site:
        worker, names = await site.attach(), Names(site)
        one, two = [await kept(site, worker, [*PROMPT, more]) for more in (1, 2)]
        await names.set("s", one)
        request_id = new_request_id()
        first = await names.set("s", two, expected=1, request_id=request_id)
        assert await names.set("s", two, expected=1, request_id=request_id) == first
        with pytest.raises(ServiceError) as caught:
            await names.set("s", one, expected=1)
        assert caught.value.reason is Reason.STALE_GENERATION
        await site.restart()
    async with connected(own_store) as site:
        names = Names(site)
        with pytest.raises(ServiceError) as caught:
            await names.set("s", two, expected=1, request_id=request_id)
        assert caught.value.reason is Reason.STALE_GENERATION
        found = await names.get("s")
        assert (found.generation, found.head.log_id) == (2, two.log_id)


async def test_an_answer_is_found_where_it_ended(own_store: StoreProcess) -> None:
    """Attempts that were given up have the same request's id, and be they newer; so has what went
    on elsewhere after a loss.
    """
    async with connected(own_store) as site:
        worker, names = await site.attach(), Names(site)

        async def attempt(request_id: str, finish: str | None) -> FakeLog:
            request = site.open_request(worker, PROMPT)
            request.request_id = request_id
            answer = await site.stub.Open(request)
            log = await worker.follow(request.log_id, answer.generation, request.capability)
            await worker.prefill(log, finish=finish)
            await site.close(log)
            return log

        async def found(request_id: str) -> tuple[bytes, bool]:
            request = sessions_pb2.FindAnswerRequest(capability=capability(), request_id=request_id)
            answer = await names.stub.FindAnswer(request, timeout=5.0)
            return answer.head.log_id, answer.complete

        first = await attempt("req1", None)
        assert await found("req1") == (first.log_id, False)
        ended = await attempt("req1-again-2", "stop")
        await attempt("req1.2", None)
        other = await attempt("req12", "stop")
        assert await found("req1") == (ended.log_id, True)
        assert await found("req12") == (other.log_id, True)
        with pytest.raises(ServiceError) as caught:
            await found("req")
        assert caught.value.reason is Reason.NOT_FOUND


async def test_on_a_full_disk_a_session_keeps_its_old_head_or_has_the_new_one(
    own_store: StoreProcess,
) -> None:
    """The change is refused with a reason; what was acked is there behind a kill and a restart."""
    store = own_store
    async with connected(store) as site:
        worker, names = await site.attach(), Names(site)
        logs = [await kept(site, worker, [*PROMPT, more]) for more in (1, 2)]
        acked = (await names.set("s", logs[1])).generation
        assert store.process is not None
        limit_files(store.process.pid, LIMIT_BYTES)
        acked, refused = await names.changed_until_refused("s", logs, acked)
        assert refused.reason is Reason.QUEUE_FULL
        assert refused.retry_after_s
        shown = await names.get("s")
        assert shown.generation in (acked, acked + 1)
        assert shown.head.log_id == _head_of(shown.generation, logs)
    store.kill()
    await asyncio.to_thread(store.start)
    async with connected(store) as site:
        names = Names(site)
        found = await names.get("s")
        assert found.generation in (acked, acked + 1)
        assert found.head.log_id == _head_of(found.generation, logs)
        again = await names.set("s", logs[0], expected=found.generation)
        assert again.generation == found.generation + 1


def _head_of(generation: int, logs: list[FakeLog]) -> bytes:
    """The head of a generation: the first names the second log, then they take turns."""
    return logs[generation % 2].log_id


async def test_a_full_disk_that_has_room_again_takes_changes(own_store: StoreProcess) -> None:
    """Nothing has to be restarted."""
    async with connected(own_store) as site:
        worker, names = await site.attach(), Names(site)
        log = await kept(site, worker, PROMPT)
        acked = (await names.set("s", log)).generation
        assert own_store.process is not None
        limit_files(own_store.process.pid, LIMIT_BYTES)
        acked, _ = await names.changed_until_refused("s", [log, log], acked)
        limit_files(own_store.process.pid, resource.RLIM_INFINITY)
        deadline_s = SystemClock().monotonic_s() + PATIENCE_S
        changed: sessions_pb2.StoredSession | None = None
        while changed is None:
            assert SystemClock().monotonic_s() < deadline_s, "no room ever again"
            current = (await names.get("s")).generation
            assert current in (acked, acked + 1)
            try:
                changed = await names.set("s", log, expected=current)
            except ServiceError as error:
                # The writer tries again by itself, a moment later.
                if error.reason is not Reason.QUEUE_FULL:
                    raise
            else:
                assert changed.generation == current + 1


async def test_a_parent_without_kv_is_no_reason_to_compute_what_another_log_has(
    own_store: StoreProcess,
) -> None:
    """A fork's KV was never its own, its first log's is: Open with the fork finds that."""
    async with connected(own_store) as site:
        worker = await site.attach()
        log = await kept(site, worker, PROMPT)
        other = await kept(site, worker, [*PROMPT[:20], 77])
        head = common_pb2.LogPosition(log_id=other.log_id, position=20)
        request = site.open_request(
            worker,
            [*PROMPT, 41, 42],
            parent=head,
            cache_mode=common_pb2.CACHE_MODE_READ_WRITE,
        )
        request.capability = capability()
        answer = await site.stub.Open(request)
        assert answer.cached_tokens == len(log.tokens) - 1
        follow = await worker.follow(request.log_id, answer.generation, request.capability)
        view = await worker.view(follow)
        for position in (0, 19, 20, len(PROMPT) - 1):
            expected = float(PROMPT[position] * 1000 + position)
            assert worker.read(view, position) == expected, position
        await site.close(follow, drop=True)


async def test_another_team_of_the_tenant_finds_no_session_and_no_answer(
    own_store: StoreProcess,
) -> None:
    """Nor may it name a log of another team, whose tokens it would then read."""
    async with connected(own_store) as site:
        worker, names = await site.attach(), Names(site)
        log = await kept(site, worker, PROMPT)
        await names.set("s", log)
        blue = capability(scope="blue")
        listed = await names.stub.ListSessions(
            sessions_pb2.ListSessionsRequest(capability=blue), timeout=10.0
        )
        assert not listed.sessions
        for call in (
            names.stub.GetSession(
                sessions_pb2.GetSessionRequest(capability=blue, session_id="s"), timeout=10.0
            ),
            names.stub.DeleteSession(
                sessions_pb2.DeleteSessionRequest(
                    capability=blue, request_id=new_request_id(), session_id="s"
                ),
                timeout=10.0,
            ),
            names.stub.SetSession(
                sessions_pb2.SetSessionRequest(
                    capability=blue,
                    request_id=new_request_id(),
                    session_id="t",
                    head=common_pb2.LogPosition(log_id=log.log_id, position=len(log.tokens)),
                ),
                timeout=10.0,
            ),
        ):
            with pytest.raises(ServiceError) as caught:
                await call
            assert caught.value.reason in (Reason.NOT_FOUND, Reason.LOG_NOT_FOUND)
        assert (await names.get("s")).head.log_id == log.log_id

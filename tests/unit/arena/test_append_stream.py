"""The append stream: one batch in flight, acks matched, given up whole when anything is odd."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from baton.arena.append import AppendEntry, AppendOutcome
from baton.arena.append_stream import AppendLimits, AppendStream
from baton.arena.checksums import SlotChecksum
from baton.arena.client import AppendCallFactory
from baton.arena.replay import GrantedPage
from baton.clock import SystemClock
from baton.engine.sampling import SampledToken
from baton.errors import Reason, ServiceError

LIMITS = AppendLimits(ack_timeout_s=5.0, give_up_s=1.0, retry_pause_s=0.001)
Answer = Callable[[int, int], tuple[int, int]]


def entry(log: int = 1, position: int = 5) -> AppendEntry:
    """One token of one log."""
    return AppendEntry(
        log_id=bytes([log]) * 16,
        generation=1,
        position=position,
        sampled=SampledToken(token_id=7),
        page=GrantedPage(page=0, page_generation=1),
        checksum=SlotChecksum(slot_crc32c=1, page_crc32c=None),
    )


class FakeCall:
    """A kvstore's side of one stream. `answer` maps (batch id, entries) to what is acked."""

    def __init__(self, answer: Answer) -> None:
        self.sent: list[tuple[int, int, tuple[str, str] | None]] = []
        self.is_cancelled = False
        self._answer = answer
        self._last = (0, 0)

    async def send(
        self, batch_id: int, entries: Sequence[AppendEntry], *, introduction: tuple[str, str] | None
    ) -> None:
        """Take a batch."""
        self.sent.append((batch_id, len(entries), introduction))
        self._last = (batch_id, len(entries))

    async def receive(self) -> tuple[int, tuple[AppendOutcome, ...]]:
        """Ack it as told."""
        batch_id, count = self._answer(*self._last)
        return batch_id, tuple(AppendOutcome(error=None) for _ in range(count))

    def cancel(self) -> None:
        """The client gave up."""
        self.is_cancelled = True


def faithful(batch_id: int, count: int) -> tuple[int, int]:
    """Ack what was sent."""
    return batch_id, count


def lost(_batch_id: int, _count: int) -> tuple[int, int]:
    """The stream breaks."""
    raise ServiceError(Reason.WORKER_LOST, "gone")


class Store:
    """Opens calls, one answer after the other; the last answer is repeated."""

    def __init__(self, *answers: Answer) -> None:
        self.calls: list[FakeCall] = []
        self._answers = answers

    def open(self) -> FakeCall:
        """Another stream."""
        call = FakeCall(self._answers[min(len(self.calls), len(self._answers) - 1)])
        self.calls.append(call)
        return call


def stream_to(store: Store, limits: AppendLimits = LIMITS) -> AppendStream:
    """A stream whose calls the fake store answers."""
    introduction = ("decode-0", "capability")
    return AppendStream(cast(AppendCallFactory, store.open), introduction, SystemClock(), limits)


async def test_the_worker_is_introduced_once_per_stream() -> None:
    """The capability binds the stream; entries then carry log and generation alone."""
    store = Store(faithful)
    stream = stream_to(store)
    await stream.append([entry()])
    await stream.append([entry(1), entry(2)])
    assert store.calls[0].sent == [(1, 1, ("decode-0", "capability")), (2, 2, None)]


async def test_appends_queue_behind_one_another() -> None:
    """One batch in flight: concurrent callers are served in order, each with its own outcomes."""
    store = Store(faithful)
    stream = stream_to(store)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(stream.append([entry(1), entry(2)]))
        second = group.create_task(stream.append([entry(3)]))
    assert (len(first.result()), len(second.result())) == (2, 1)
    assert [batch for batch, _, _ in store.calls[0].sent] == [1, 2]


async def test_a_broken_stream_is_reopened_and_the_batch_resent() -> None:
    """The store takes the same token at the same position again without effect."""
    store = Store(lost, faithful)
    outcomes = await stream_to(store).append([entry()])
    assert len(outcomes) == 1
    assert store.calls[0].is_cancelled
    assert [call.sent[0][1] for call in store.calls] == [1, 1]
    assert store.calls[1].sent[0][2] == ("decode-0", "capability")


async def test_a_store_that_stays_away_is_given_up() -> None:
    """A worker without its kvstore stops: the error says which peer was lost."""
    limits = AppendLimits(ack_timeout_s=1.0, give_up_s=0.02, retry_pause_s=0.005)
    with pytest.raises(ServiceError) as caught:
        await stream_to(Store(lost), limits).append([entry()])
    assert caught.value.reason is Reason.WORKER_LOST


async def test_a_refusal_of_the_stream_is_not_retried() -> None:
    """UNAUTHENTICATED does not pass by itself."""

    def refused(_batch_id: int, _count: int) -> tuple[int, int]:
        raise ServiceError(Reason.UNAUTHENTICATED, "no")

    store = Store(refused)
    with pytest.raises(ServiceError) as caught:
        await stream_to(store).append([entry()])
    assert caught.value.reason is Reason.UNAUTHENTICATED
    assert len(store.calls) == 1


@pytest.mark.parametrize(
    "answer", [lambda batch, count: (batch + 1, count), lambda batch, count: (batch, count + 1)]
)
async def test_an_ack_that_does_not_match_ends_the_stream(answer: Answer) -> None:
    """Reading on would give one batch's outcomes to another."""
    store = Store(answer)
    with pytest.raises(ServiceError) as caught:
        await stream_to(store).append([entry()])
    assert caught.value.reason is Reason.INTERNAL
    assert store.calls[0].is_cancelled


async def test_a_cancelled_append_gives_its_stream_up() -> None:
    """Its ack would otherwise answer the next batch."""
    waiting = asyncio.Event()

    class Silent(FakeCall):
        async def receive(self) -> tuple[int, tuple[AppendOutcome, ...]]:
            waiting.set()
            await asyncio.Event().wait()
            raise AssertionError

    silent = Silent(faithful)
    calls = iter([silent, FakeCall(faithful)])
    open_call = cast(AppendCallFactory, lambda: next(calls))
    stream = AppendStream(open_call, ("d", "c"), SystemClock(), LIMITS)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(stream.append([entry()]))
        await waiting.wait()
        task.cancel()
    assert silent.is_cancelled
    assert len(await stream.append([entry()])) == 1


async def test_silence_is_a_timeout_with_a_reason() -> None:
    """Every wait has a deadline."""

    class Silent(FakeCall):
        async def receive(self) -> tuple[int, tuple[AppendOutcome, ...]]:
            await asyncio.Event().wait()
            raise AssertionError

    limits = AppendLimits(ack_timeout_s=0.01, give_up_s=0.0, retry_pause_s=0.001)
    open_call = cast(AppendCallFactory, lambda: Silent(faithful))
    stream = AppendStream(open_call, ("d", "c"), SystemClock(), limits)
    with pytest.raises(ServiceError) as caught:
        await stream.append([entry()])
    assert caught.value.reason is Reason.TRANSFER_TIMEOUT

"""A gateway's outbox: batches, bound, and the end of a half-closed stream."""

from __future__ import annotations

import asyncio

from baton.engine.sampling import SampledToken
from baton.errors import Reason, ServiceError
from baton.worker.output import OutputToken
from services.decode.events import Failed, Produced, SequenceEvent
from services.decode.outbox import EVENTS_PER_MESSAGE_MAX, Outbox


def token(request_id: str, index: int = 0, finish: str | None = None) -> SequenceEvent:
    """A token event."""
    produced = OutputToken(
        index=index, sampled=SampledToken(token_id=1), text="a", finish_reason=finish
    )
    return SequenceEvent(request_id=request_id, what=Produced(token=produced))


async def one_turn() -> None:
    """Let every other task run once."""
    await asyncio.sleep(0)  # noqa: TID251 - yields, waits for nothing


def is_closed(outbox: Outbox) -> bool:
    """A function, because the checker believes a property until it is assigned."""
    return outbox.is_closed


async def test_events_of_many_sequences_are_taken_together() -> None:
    """One message a step, however many sequences have a token."""
    outbox = Outbox("g")
    for name in ("a", "b", "c"):
        outbox.post(token(name))
    assert [event.request_id for event in await outbox.take()] == ["a", "b", "c"]


async def test_take_waits_for_news() -> None:
    """No polling, no empty messages."""
    outbox = Outbox("g")
    async with asyncio.TaskGroup() as group:
        taking = group.create_task(outbox.take())
        await one_turn()
        assert not taking.done()
        outbox.post(token("a"))
    assert len(taking.result()) == 1


async def test_a_message_is_bounded() -> None:
    """A gateway that was away gets its backlog in pieces that fit."""
    outbox = Outbox("g")
    for index in range(EVENTS_PER_MESSAGE_MAX + 1):
        outbox.post(token("a", index))
    assert len(await outbox.take()) == EVENTS_PER_MESSAGE_MAX
    assert len(await outbox.take()) == 1


async def test_a_gateway_that_does_not_read_is_given_up() -> None:
    """The bound is reached: the stream is closed, nothing grows any more."""
    outbox = Outbox("g", events_max=2)
    for index in range(2):
        outbox.post(token("a", index))
    assert not is_closed(outbox)
    outbox.post(token("a", 2))
    assert is_closed(outbox)
    assert len(await outbox.take()) == 2
    assert await outbox.take() == []


async def test_a_half_closed_stream_ends_after_the_last_answer() -> None:
    """Who sends its commands and closes its side still gets every event."""
    outbox = Outbox("g")
    outbox.expect("a")
    outbox.expect("b")
    outbox.close_when_told()
    outbox.post(token("a", 0, "stop"))
    assert not is_closed(outbox)
    outbox.post(
        SequenceEvent(request_id="b", what=Failed(error=ServiceError(Reason.CANCELLED, "x")))
    )
    assert is_closed(outbox)
    assert len(await outbox.take()) == 2
    assert await outbox.take() == []


async def test_a_half_closed_stream_without_sequences_ends_at_once() -> None:
    """There is nothing to wait for."""
    outbox = Outbox("g")
    outbox.close_when_told()
    assert is_closed(outbox)

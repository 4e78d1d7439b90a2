"""Prompts take turns: bounded, in order, and a short one passes a huge one."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import Reason, ServiceError
from services.prefill.scheduler import PromptScheduler
from services.prefill.turns import Turns


async def one_turn() -> None:
    """Let every other task run once."""
    await asyncio.sleep(0)  # noqa: TID251 - yields, waits for nothing


def scheduler(queue: int = 2, interleave: int = 2) -> PromptScheduler:
    """A small one."""
    return PromptScheduler(queue_depth_max=queue, interleave_max=interleave)


def entered(prompts: PromptScheduler, *names: str) -> None:
    """Prompts that ask at once."""
    for name in names:
        prompts.enter(name, token_rate=0.0)
        prompts.ask(name)


def test_prompts_alternate_chunk_by_chunk() -> None:
    """The one whose last turn is longest ago goes next."""
    prompts = scheduler()
    entered(prompts, "huge", "short")
    order = []
    for _ in range(4):
        chosen = prompts.next_turn()
        assert chosen is not None
        order.append(chosen)
        prompts.end_turn(chosen)
        prompts.ask(chosen)
    assert order == ["huge", "short", "huge", "short"]


def test_only_one_prompt_holds_the_turn() -> None:
    """There is one compute thread."""
    prompts = scheduler()
    entered(prompts, "a", "b")
    assert prompts.next_turn() == "a"
    assert prompts.next_turn() is None
    prompts.end_turn("a")
    assert prompts.next_turn() == "b"


def test_prompts_beyond_the_sharing_ones_wait_for_one_to_leave() -> None:
    """A few share the thread; the rest keep their order."""
    prompts = scheduler()
    entered(prompts, "a", "b", "c")
    assert prompts.queued == 1
    for name in ("a", "b"):
        assert prompts.next_turn() == name
        prompts.end_turn(name)
    assert prompts.next_turn() is None
    prompts.leave("a")
    assert prompts.next_turn() == "c"


def test_a_full_queue_says_when_to_come_back() -> None:
    """At the limit everything is taken, one past it is QUEUE_FULL with a measured wait."""
    prompts = scheduler(queue=1, interleave=1)
    entered(prompts, "a", "b")
    prompts.set_tokens("a", 4000)
    with pytest.raises(ServiceError) as caught:
        prompts.enter("c", token_rate=1000.0)
    assert caught.value.reason is Reason.QUEUE_FULL
    assert caught.value.retry_after_s == pytest.approx(2.0)
    prompts.leave("b")
    prompts.enter("c", token_rate=0.0)


def test_an_unmeasured_worker_still_names_a_wait() -> None:
    """Before the first prompt the rate is unknown; the answer is then the least wait."""
    prompts = scheduler(queue=1, interleave=1)
    entered(prompts, "a", "b")
    with pytest.raises(ServiceError) as caught:
        prompts.enter("c", token_rate=0.0)
    assert caught.value.retry_after_s == 0.5


def test_the_same_request_does_not_run_twice() -> None:
    """A second run would write the same pages."""
    prompts = scheduler()
    entered(prompts, "a")
    with pytest.raises(ServiceError) as caught:
        prompts.enter("a", token_rate=0.0)
    assert caught.value.reason is Reason.ALREADY_EXISTS


def test_pending_tokens_are_those_of_entered_prompts() -> None:
    """The router divides them by the measured rate."""
    prompts = scheduler()
    entered(prompts, "a", "b")
    prompts.set_tokens("a", 100)
    prompts.set_tokens("b", 20)
    assert prompts.pending_tokens == 120
    prompts.leave("a")
    assert prompts.pending_tokens == 20


@given(st.lists(st.tuples(st.sampled_from("eawnl"), st.integers(0, 5)), max_size=200))
def test_no_sequence_of_events_breaks_the_invariants(events: list[tuple[str, int]]) -> None:
    """Any mix of entering, asking, withdrawing, turns and leaving keeps the bounds."""
    prompts = scheduler()
    inside: set[str] = set()
    for kind, number in events:
        name = str(number)
        if kind == "e" and name not in inside and len(prompts) < 4:
            prompts.enter(name, token_rate=0.0)
            inside.add(name)
        elif kind == "a" and name in inside and prompts.holder != name:
            prompts.ask(name)
        elif kind == "w" and name in inside:
            prompts.withdraw(name)
        elif kind == "n":
            if prompts.holder is not None:
                prompts.end_turn(prompts.holder)
            prompts.next_turn()
        elif kind == "l" and name in inside and prompts.holder != name:
            prompts.leave(name)
            inside.discard(name)
        prompts.check_invariants()


async def test_turns_wake_the_next_prompt() -> None:
    """The asyncio side hands the turn over as soon as it ends."""
    turns = Turns(scheduler())
    order: list[str] = []

    async def run(name: str, chunks: int) -> None:
        with turns.entered(name, token_rate=0.0) as mine:
            for _ in range(chunks):
                async with mine.turn():
                    order.append(name)
                    await one_turn()

    async with asyncio.TaskGroup() as group:
        group.create_task(run("a", 3))
        group.create_task(run("b", 2))
    assert order == ["a", "b", "a", "b", "a"]
    assert await turns.wait_empty(1.0)


async def test_a_waiting_prompt_can_be_refused() -> None:
    """Cancel reaches prompts that wait, not only those that compute."""
    turns = Turns(scheduler())
    with turns.entered("a", token_rate=0.0) as first, turns.entered("b", token_rate=0.0) as second:
        async with first.turn(), asyncio.TaskGroup() as group:

            async def wait() -> None:
                with pytest.raises(ServiceError) as caught:
                    async with second.turn():
                        raise AssertionError("no turn was free")
                assert caught.value.reason is Reason.CANCELLED

            group.create_task(wait())
            await one_turn()
            turns.refuse("b", ServiceError(Reason.CANCELLED, "enough"))
        async with second.turn():
            pass


async def test_a_cancelled_waiter_does_not_swallow_the_turn() -> None:
    """Granted and cancelled in the same moment: the turn goes on to the next."""
    turns = Turns(scheduler(interleave=3))
    with (
        turns.entered("a", token_rate=0.0) as first,
        turns.entered("b", token_rate=0.0) as second,
        turns.entered("c", token_rate=0.0) as third,
    ):

        async def hold() -> None:
            async with second.turn():
                await asyncio.Event().wait()

        async with first.turn(), asyncio.TaskGroup() as group:
            waiting = group.create_task(hold())
            await one_turn()
            waiting.cancel()
        async with asyncio.timeout(1.0), third.turn():
            pass

        async def late() -> None:
            async with second.turn():
                raise AssertionError("cancelled before it ran")

        async with asyncio.TaskGroup() as group:
            async with first.turn():
                waiting_granted = group.create_task(late())
                await one_turn()
            # The turn was passed to the waiter, which has not run yet.
            waiting_granted.cancel()
        async with asyncio.timeout(1.0), third.turn():
            pass


async def test_waiting_for_an_empty_worker_has_a_deadline() -> None:
    """Drain reports what was left instead of waiting for ever."""
    turns = Turns(scheduler())
    with turns.entered("a", token_rate=0.0):
        assert not await turns.wait_empty(0.001)

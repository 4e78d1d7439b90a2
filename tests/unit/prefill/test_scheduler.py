"""Prompts share passes: bounded, fair between tenants, and a short one passes a huge one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import Reason, ServiceError
from baton.scheduling.claims import Claim, ServiceClass
from services.prefill.scheduler import PromptScheduler

CHUNK = 256


def of(
    name: str,
    tenant: str = "t",
    *,
    service_class: ServiceClass = ServiceClass.INTERACTIVE,
    weight: int = 1,
) -> Claim:
    """A prompt of a tenant."""
    return Claim(request_id=name, tenant=tenant, service_class=service_class, weight=weight)


def scheduler(queue: int = 2, interleave: int = 2, batch: int = CHUNK) -> PromptScheduler:
    """A small one, of one full chunk a pass."""
    return PromptScheduler(queue_depth_max=queue, interleave_max=interleave, batch_tokens=batch)


def entered(prompts: PromptScheduler, *names: str, tenant: str = "t", chunk: int = CHUNK) -> None:
    """Prompts that ask at once."""
    for name in names:
        prompts.enter(of(name, tenant), token_rate=0.0)
        prompts.ask(name, chunk)


def batches(prompts: PromptScheduler, count: int, chunk: int = CHUNK) -> list[tuple[str, ...]]:
    """So many passes, after which everybody asks again."""
    found = []
    for _ in range(count):
        found.append(prompts.next_batch())
        prompts.end_batch()
        for name in found[-1]:
            prompts.ask(name, chunk)
    return found


def test_prompts_alternate_chunk_by_chunk() -> None:
    """Where one chunk fills a pass, the prompt served longest ago goes next: no huge one starves a
    short one.
    """
    prompts = scheduler()
    entered(prompts, "huge", "short")
    assert batches(prompts, 4) == [("huge",), ("short",), ("huge",), ("short",)]


def test_short_chunks_go_together_and_a_long_one_waits_for_its_own_pass() -> None:
    """A pass takes what its tokens hold, also from behind one that does not fit."""
    prompts = scheduler(interleave=8)
    entered(prompts, "a", "b", chunk=100)
    entered(prompts, "long", chunk=200)
    entered(prompts, "c", chunk=56)
    assert prompts.next_batch() == ("a", "b", "c")
    prompts.end_batch()
    assert prompts.next_batch() == ("long",)


def test_a_chunk_beyond_the_budget_has_a_pass_of_its_own() -> None:
    """The budget bounds company, not chunks."""
    prompts = scheduler(batch=64)
    entered(prompts, "big", "small")
    assert prompts.next_batch() == ("big",)


def test_one_batch_at_a_time() -> None:
    """There is one compute thread."""
    prompts = scheduler()
    entered(prompts, "a", "b")
    assert prompts.next_batch() == ("a",)
    assert prompts.next_batch() == ()
    prompts.end_batch()
    assert prompts.next_batch() == ("b",)


def test_prompts_beyond_the_sharing_ones_wait_for_one_to_leave() -> None:
    """A few of one tenant share the thread; the rest keep their order."""
    prompts = scheduler()
    entered(prompts, "a", "b", "c")
    assert prompts.queued == 1
    for name in ("a", "b"):
        assert prompts.next_batch() == (name,)
        prompts.end_batch()
    assert prompts.next_batch() == ()
    prompts.leave("a")
    assert prompts.next_batch() == ("c",)


def test_a_hundred_long_prompts_of_one_tenant_do_not_hold_up_anothers_first() -> None:
    """It comes in through a full queue and is in the very next pass."""
    prompts = scheduler(queue=96, interleave=4, batch=2 * CHUNK)
    entered(prompts, *(f"long{index}" for index in range(100)), tenant="greedy")
    with pytest.raises(ServiceError) as caught:
        prompts.enter(of("one more", "greedy"), token_rate=0.0)
    assert caught.value.reason is Reason.QUEUE_FULL
    batches(prompts, 3)
    running = prompts.next_batch()
    entered(prompts, "first", tenant="modest", chunk=60)
    prompts.end_batch()
    for name in running:
        prompts.ask(name, CHUNK)
    assert prompts.next_batch()[0] == "first"


def test_tenants_take_turns_whatever_they_have() -> None:
    """Three prompts get a tenant no more passes than one."""
    prompts = scheduler(queue=8, interleave=8)
    entered(prompts, "a1", "a2", "a3", tenant="a")
    entered(prompts, "b1", tenant="b")
    assert batches(prompts, 6) == [("a1",), ("b1",), ("a2",), ("b1",), ("a3",), ("b1",)]


def test_a_heavier_tenant_computes_more_tokens() -> None:
    """Whatever their chunks are: tokens are as the weights."""
    prompts = scheduler(queue=8, interleave=8)
    tokens = {"heavy": 96, "light": 256}
    for name, weight in (("heavy", 3), ("light", 1)):
        prompts.enter(of(name, name, weight=weight), token_rate=0.0)
        prompts.ask(name, tokens[name])
    computed: Counter[str] = Counter()
    for _ in range(200):
        batch = prompts.next_batch()
        prompts.end_batch()
        for name in batch:
            computed[name] += tokens[name]
            prompts.ask(name, tokens[name])
    assert computed["heavy"] / computed["light"] == pytest.approx(3.0, rel=0.1)


def test_batch_prompts_wait_while_an_interactive_one_asks() -> None:
    """Also within one tenant; where there is room in the pass they go along."""
    prompts = scheduler(queue=8, interleave=1)
    batch = ServiceClass.BATCH
    for name, tenant in (("b0", "t"), ("b1", "u")):
        prompts.enter(of(name, tenant, service_class=batch), token_rate=0.0)
        prompts.ask(name, CHUNK)
    assert batches(prompts, 1) == [("b0",)]
    entered(prompts, "now", chunk=CHUNK - 16)
    for _ in range(3):
        assert prompts.next_batch() == ("now",)
        prompts.end_batch()
        prompts.ask("now", CHUNK - 16)
    prompts.leave("now")
    assert batches(prompts, 1) == [("b1",)], "the other tenant computed more meanwhile"
    prompts.leave("b1")
    assert batches(prompts, 1) == [("b0",)]


def test_a_full_queue_says_when_to_come_back() -> None:
    """At the limit everything is taken, one past it is QUEUE_FULL with a measured wait."""
    prompts = scheduler(queue=1, interleave=1)
    entered(prompts, "a", "b")
    prompts.set_tokens("a", 4000)
    with pytest.raises(ServiceError) as caught:
        prompts.enter(of("c", "t"), token_rate=1000.0)
    assert caught.value.reason is Reason.QUEUE_FULL
    assert caught.value.retry_after_s == pytest.approx(2.0)
    prompts.leave("b")
    prompts.enter(of("c", "t"), token_rate=0.0)


def test_the_room_for_other_tenants_has_a_bound() -> None:
    """Each finds room for one prompt, but not any number of them."""
    prompts = scheduler(queue=2, interleave=1)
    entered(prompts, "a", "b", "c", tenant="greedy")
    entered(prompts, "d", tenant="first")
    entered(prompts, "e", tenant="second")
    with pytest.raises(ServiceError) as caught:
        prompts.enter(of("f", "third"), token_rate=0.0)
    assert caught.value.reason is Reason.QUEUE_FULL
    prompts.check_invariants()


def test_an_unmeasured_worker_still_names_a_wait() -> None:
    """Where the rate is unknown the answer is the least wait."""
    prompts = scheduler(queue=1, interleave=1)
    entered(prompts, "a", "b")
    with pytest.raises(ServiceError) as caught:
        prompts.enter(of("c", "t"), token_rate=0.0)
    assert caught.value.retry_after_s == 0.5


def test_the_same_request_does_not_run_twice() -> None:
    """A second run would write the same pages."""
    prompts = scheduler()
    entered(prompts, "a")
    with pytest.raises(ServiceError) as caught:
        prompts.enter(of("a", ""), token_rate=0.0)
    assert caught.value.reason is Reason.ALREADY_EXISTS


def test_pending_tokens_are_those_of_entered_prompts() -> None:
    """Heartbeats tell them; the router divides them by the measured rate."""
    prompts = scheduler()
    entered(prompts, "a", "b")
    prompts.set_tokens("a", 100)
    prompts.set_tokens("b", 20)
    assert prompts.pending_tokens == 120
    prompts.leave("a")
    assert prompts.pending_tokens == 20


@given(
    st.lists(
        st.tuples(st.sampled_from("eawnl"), st.integers(0, 8), st.integers(1, 400)), max_size=200
    )
)
def test_no_sequence_of_events_breaks_the_invariants(events: list[tuple[str, int, int]]) -> None:
    """Any mix of entering, asking, withdrawing, passes and leaving keeps the bounds."""
    prompts = scheduler()
    chunks: dict[str, int | None] = {}
    for kind, number, tokens in events:
        name = str(number)
        if kind == "e" and name not in chunks and len(prompts) < 4:
            prompts.enter(of(name, str(number % 3)), token_rate=0.0)
            chunks[name] = None
        elif kind == "a" and name in chunks and name not in prompts.batch:
            prompts.ask(name, tokens)
            chunks[name] = tokens
        elif kind == "w" and name in chunks:
            prompts.withdraw(name)
            chunks[name] = None
        elif kind == "n":
            if prompts.batch:
                prompts.end_batch()
            batch = prompts.next_batch()
            together = sum(chunks[one] or 0 for one in batch)
            assert len(batch) <= 1 or together <= CHUNK
            assert all(chunks[one] is not None for one in batch)
            chunks.update(dict.fromkeys(batch))
        elif kind == "l" and name in chunks and name not in prompts.batch:
            prompts.leave(name)
            del chunks[name]
        prompts.check_invariants()
        assert 0 <= prompts.queued <= len(prompts)

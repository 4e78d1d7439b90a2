"""Asking for pages: what becomes of an answer that comes too late."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.arena.replay import HeldLog
from baton.clock import SystemClock
from baton.errors import Reason, ServiceError
from services.decode.feeding import Feeder


class RefusingStore:
    """A store whose pages are all taken; it answers when it is told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answers = asyncio.Event()

    async def grant(self, *_asked: object) -> list[int]:
        """Refuses."""
        self.asked.set()
        await self.answers.wait()
        raise ServiceError(Reason.PAGES_EXHAUSTED, "no page is free", retry_after_s=1.0)


class OneMemberQueue:
    """Knows its member until it left; counts who had to give way."""

    def __init__(self) -> None:
        self.is_here = True
        self.asked_to_make_way = 0

    def has(self, _member: object) -> bool:
        """Whether it is still here."""
        return self.is_here

    def make_way(self, _member: object, *, is_tenants: bool) -> bool:
        """Somebody gives way."""
        assert self.is_here, "the scheduler does not know it any more"
        self.asked_to_make_way += 1
        return True


@pytest.mark.parametrize("is_here", [True, False])
async def test_a_refusal_that_comes_after_the_end_asks_nobody_to_give_way(is_here: bool) -> None:
    """A cancelled sequence's last refusal once ended the whole worker."""
    store, queue = RefusingStore(), OneMemberQueue()
    feeder = Feeder(cast(Any, SimpleNamespace(store=store)), cast(Any, queue), SystemClock())
    sequence = SimpleNamespace(
        log=HeldLog(log_id=bytes(16), generation=1),
        request_id="r",
        tokens=3,
        missing_pages=lambda: 1,
    )
    member = SimpleNamespace(sequence=sequence, request_id="r", starved_s=None, is_granting=False)
    async with asyncio.TaskGroup() as tasks:
        feeder.feed(cast(Any, member), cast(Any, sequence), tasks.create_task)
        await store.asked.wait()
        queue.is_here = is_here
        store.answers.set()
    assert queue.asked_to_make_way == int(is_here)
    assert not member.is_granting

"""Capped and cut links between two kvstores: how long a move takes, and that it never hangs."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any, Final

import pytest

from baton.api.kvstore.v1 import kvstore_pb2
from baton.errors import Reason, ServiceError
from tests.integration.kvstore.harness import BLOCK, FakeLog, Site, connected
from tests.netns.lab import Network, NodeStore
from tests.netns.moves import (
    CLOCK,
    FIRST_TOKEN,
    adopt_request,
    check_kv,
    expect,
    head,
    is_taker_refused,
    outcome,
    prefill,
    prompt_of,
    take,
    until_empty,
)

pytestmark = [pytest.mark.more, pytest.mark.timeout(180)]

_log = logging.getLogger("netns")
TOKENS: Final = 1000
CHUNK_S: Final = 0.3
"""What a chunk of 256 tokens takes to compute here: about 850 tokens a second."""

Stores = tuple[NodeStore, NodeStore]


@pytest.mark.parametrize("rate", ["1gbit", "100mbit"])
@pytest.mark.parametrize("is_followed", [True, False], ids=["followed", "at_once"])
async def test_a_capped_link_moves_a_log_and_says_what_was_hidden(
    stores: Stores, lab: Network, rate: str, is_followed: bool
) -> None:
    """1,000 tokens, 12.3 MB of KV: with the replica the move waits for the rest only."""
    old, new = stores
    prompt = prompt_of(TOKENS)
    lab.cap(rate)
    try:
        async with connected(old) as a, connected(new) as b:
            writer, reader = await a.attach("w-old"), await b.attach("w-new")
            log = await a.open(writer, prompt, cache_mode=2)
            if is_followed:
                await expect(old, b, log)
            await prefill(writer, log, CHUNK_S)
            began_s = time.monotonic()
            answer = await b.stub.AdoptLog(adopt_request(old, log, 30.0))
            move_s = time.monotonic() - began_s
            _log.warning(
                "%s, %s: move %.0f ms, hidden_transfer_share %.3f, %.1f MB, queue %.1f ms, "
                "transfer %.1f ms, verify %.1f ms",
                rate,
                "followed" if is_followed else "at once",
                move_s * 1000,
                answer.hidden_transfer_share,
                answer.transfer_bytes / 1e6,
                answer.queue.ToMilliseconds(),
                answer.transfer.ToMicroseconds() / 1000,
                answer.verify.ToMicroseconds() / 1000,
            )
            here = await take(reader, log, answer.generation)
            assert await check_kv(reader, here, [*prompt, FIRST_TOKEN]) == TOKENS
            assert (answer.hidden_transfer_share > 0.5) == is_followed
            writer.leave()
            a.workers.clear()
            await until_empty(a, "the old home")
            reader.leave()
            b.workers.clear()
            await b.close(here, drop=True)
            await until_empty(b, "the new home")
    finally:
        lab.uncap()


async def test_a_link_cut_before_the_move_costs_the_deadline_and_the_old_home_keeps_the_log(
    stores: Stores, lab: Network
) -> None:
    """The reason is said in time; after the cut the same request goes through."""
    old, new = stores
    prompt = prompt_of(100, seed=1)
    async with connected(old) as a, connected(new) as b:
        writer, reader = await a.attach("w-old"), await b.attach("w-new")
        log = await a.open(writer, prompt)
        await prefill(writer, log)
        lab.cut()
        try:
            began_s = time.monotonic()
            refused = await outcome(b.stub.AdoptLog(adopt_request(old, log, 2.0), timeout=20.0))
            waited_s = time.monotonic() - began_s
        finally:
            lab.heal()
        assert isinstance(refused, ServiceError), refused
        assert refused.reason in (Reason.TRANSFER_TIMEOUT, Reason.WORKER_LOST), refused
        assert waited_s < 4.0
        found = await head(a, log)
        assert found is not None
        assert found.head.generation == log.generation
        answer = await _adopted_at_last(b.stub, old, log)
        here = await take(reader, log, answer.generation)
        assert await check_kv(reader, here, [*prompt, FIRST_TOKEN]) == len(prompt)
        await b.close(here, drop=True)
        writer.leave()
        a.workers.clear()
        await until_empty(a, "the old home")


async def test_a_link_cut_in_the_middle_opens_the_log_with_what_came(
    stores: Stores, lab: Network
) -> None:
    """The old home has given it away: the new one has all tokens, and the KV that arrived. The old
    home learns of it when the link is back.
    """
    old, new = stores
    prompt = prompt_of(TOKENS, seed=2)
    lab.cap("100mbit")
    try:
        async with connected(old) as a, connected(new) as b:
            writer, reader = await a.attach("w-old"), await b.attach("w-new")
            log = await a.open(writer, prompt, cache_mode=2)
            await prefill(writer, log)
            request = adopt_request(old, log, 3.0)
            async with asyncio.TaskGroup() as group:
                moving = group.create_task(outcome(b.stub.AdoptLog(request, timeout=20.0)))
                await _until_receiving(b)
                lab.cut()
                began_s = time.monotonic()
            answer = moving.result()
            assert time.monotonic() - began_s < 6.0
            assert not isinstance(answer, ServiceError), answer
            assert answer.position == TOKENS + 1
            assert answer.committed_position < TOKENS
            here = await take(reader, log, answer.generation)
            assert await check_kv(reader, here, [*prompt, FIRST_TOKEN]) < TOKENS
            assert await is_taker_refused(writer, log, log.generation + 1)
            lab.heal()
            lab.uncap()
            writer.leave()
            a.workers.clear()
            await until_empty(a, "the old home, once it has asked")
            reader.leave()
            b.workers.clear()
            await b.close(here, drop=True)
            await until_empty(b, "the new home")
    finally:
        lab.heal()
        lab.cap("1gbit")
        lab.uncap()


async def test_a_link_that_was_cut_for_a_while_breaks_the_transfer_which_then_goes_on(
    stores: Stores, lab: Network
) -> None:
    """Nothing comes for the stated time: the transfer breaks for that reason, is tried again a
    bounded number of times, and what had arrived is not sent again.
    """
    old, new = stores
    prompt = prompt_of(TOKENS, seed=3)
    said = len(new.text())
    lab.cap("100mbit")
    try:
        async with connected(old) as a, connected(new) as b:
            writer, reader = await a.attach("w-old"), await b.attach("w-new")
            log = await a.open(writer, prompt, cache_mode=2)
            await prefill(writer, log)
            request = adopt_request(old, log, 60.0)
            async with asyncio.TaskGroup() as group:
                moving = group.create_task(outcome(b.stub.AdoptLog(request, timeout=90.0)))
                await _until_receiving(b)
                lab.cut()
                try:
                    await _until_said(new, said, "transfer_broken")
                finally:
                    lab.heal()
            answer = moving.result()
            assert not isinstance(answer, ServiceError), answer
            broken = [
                json.loads(line)
                for line in new.text()[said:].splitlines()
                if '"event": "transfer_broken"' in line
            ]
            _log.warning(
                "cut for a while: move %.0f ms, %d tries broke (%s), hidden share %.3f",
                answer.total.ToMilliseconds(),
                len(broken),
                ", ".join(f"{line['reason']}/{line['step']}" for line in broken),
                answer.hidden_transfer_share,
            )
            assert (broken[0]["reason"], broken[0]["step"]) == ("TRANSFER_TIMEOUT", "stall")
            # Each pause is longer than the one before: a minute has room for few.
            assert len(broken) <= 30
            here = await take(reader, log, answer.generation)
            assert await check_kv(reader, here, [*prompt, FIRST_TOKEN]) == TOKENS
            writer.leave()
            a.workers.clear()
            await until_empty(a, "the old home")
            reader.leave()
            b.workers.clear()
            await b.close(here, drop=True)
            await until_empty(b, "the new home")
    finally:
        lab.heal()
        lab.uncap()


async def _until_said(store: NodeStore, offset: int, event: str) -> None:
    """The store has logged such an event behind `offset`."""
    deadline_s = time.monotonic() + 40.0
    while f'"event": "{event}"' not in store.text()[offset:]:
        assert time.monotonic() < deadline_s, event
        await CLOCK.wait(asyncio.Event(), 0.1)


async def _until_receiving(new: Site) -> None:
    """The new home has the state and pages for all of it: the old one gave the log away."""
    deadline_s = time.monotonic() + 10.0
    while (await new.counts()).pages_granted < TOKENS // BLOCK:
        assert time.monotonic() < deadline_s


async def _adopted_at_last(stub: Any, old: NodeStore, log: FakeLog) -> kvstore_pb2.AdoptLogResponse:
    """The link is back: connections find that out within moments."""
    deadline_s = time.monotonic() + 20.0
    while True:
        answer = await outcome(stub.AdoptLog(adopt_request(old, log, 5.0)))
        if not isinstance(answer, ServiceError):
            assert isinstance(answer, kvstore_pb2.AdoptLogResponse)
            return answer
        assert time.monotonic() < deadline_s, answer

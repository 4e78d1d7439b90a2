"""Kills that the matrix has no room for: the only decode worker, the gateway of a long stream, the
merger whose splice is wanted, Redis, and a decode worker with new requests at its heels.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import pytest

from baton.testing.cluster import RunningCluster
from tests.faults.drill import Drill, Outcome, drill_on, drilled_cluster, prompt_of, until
from tests.integration.redis.conftest import RedisServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

_log = logging.getLogger("drill")
TOKENS: Final = 24
LONG_TOKENS: Final = 400
KILL_AT_TOKEN: Final = 6
ERROR_WITHIN_S: Final = 5.0
SERVED_WITHIN_S: Final = 5.0
UNNOTICED_S: Final = 1.5
"""Far above what a step takes, far below what anybody waits for a dead part."""

PACE_S: Final = 0.03
REDIS_URL: Final = "BATON_GATEWAY_REDIS_URL"


# --- one decode worker, and Redis -----------------------------------------------------------------


@pytest.fixture(scope="module")
def redis_folder() -> Iterator[Path]:
    """A short path: a socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="baton-drill-redis-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def one_decode(
    tmp_path_factory: pytest.TempPathFactory, redis_folder: Path
) -> Iterator[RunningCluster]:
    """One worker of each kind; the gateway knows of a Redis that need not be there."""
    # Children copy the environment when they start.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, REDIS_URL, RedisServer(redis_folder).url)
        with drilled_cluster(tmp_path_factory.mktemp("one")) as cluster:
            yield cluster


@pytest.fixture
async def lone(one_decode: RunningCluster) -> AsyncIterator[Drill]:
    """The cluster of one decode worker, whole and at rest before and after."""
    async with drill_on(one_decode) as drill:
        yield drill


@pytest.fixture
async def redis(redis_folder: Path) -> AsyncIterator[RedisServer]:
    """A Redis at the address that the gateway was given."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed: NOTHING about Redis was tested")
    server = RedisServer(redis_folder)
    await server.start()
    try:
        yield server
    finally:
        await server.kill()


@pytest.mark.parametrize("point", [None, "decode.first_token"], ids=["mid_decode", "first_token"])
async def test_the_only_decode_worker_killed(lone: Drill, point: str | None) -> None:
    """Nobody else is there: the stream goes on at the restarted one, or says why in five seconds;
    the next request is served once it is back.
    """
    prompt = prompt_of(301)
    expected = await lone.ask(prompt, tokens=TOKENS)
    assert expected.is_whole, expected
    await lone.pace(PACE_S)
    killed_at_s: list[float] = []

    def kill() -> None:
        killed_at_s.append(time.monotonic())
        lone.kill("decode-0")

    async def on_token(count: int) -> None:
        if point is None and count == KILL_AT_TOKEN:
            kill()

    before = [0 if point is None else await lone.hits("decode-0", point)]
    if point is not None:
        await lone.arm("decode-0", f"{point}:pause:30:once")
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(lone.ask(prompt, tokens=TOKENS, on_token=on_token))
        if point is not None:
            await lone.until_hit(["decode-0"], point, before)
            kill()
    outcome, after_s = asking.result(), time.monotonic() - killed_at_s[0]
    _log.info("the only decode worker: %s after %.2f s", outcome.error or "whole", after_s)
    assert outcome.token_ids == expected.token_ids[: len(outcome.token_ids)]
    if outcome.is_whole:
        assert outcome.token_ids == expected.token_ids
    else:
        assert outcome.error in {"worker_lost", "no_worker"}, outcome
        assert outcome.has_done
        assert after_s < ERROR_WITHIN_S
    await lone.is_whole()
    again = await lone.ask(prompt, tokens=TOKENS)
    assert again.token_ids == expected.token_ids


async def test_redis_killed_under_a_stream_is_not_noticed(lone: Drill, redis: RedisServer) -> None:
    """No pause in the stream, none for the next request; Redis is used again once it is back."""

    async def is_up(wanted: float) -> bool:
        return await lone.metric("gateway-0", "baton_redis_up") == wanted

    await until(lambda: is_up(1.0), 20.0, "the gateway connected to Redis")
    prompt = prompt_of(302)
    expected = await lone.ask(prompt, tokens=TOKENS)
    await lone.pace(PACE_S)
    during: list[asyncio.Task[Outcome]] = []
    async with asyncio.TaskGroup() as group:

        async def on_token(count: int) -> None:
            if count == KILL_AT_TOKEN:
                await redis.kill()
                during.append(group.create_task(lone.ask(prompt_of(303), tokens=4)))

        outcome = await lone.ask(prompt, tokens=TOKENS, on_token=on_token)
    _log.info("redis killed: longest gap %.2f s", outcome.longest_gap_s)
    assert outcome.is_whole, outcome
    assert outcome.token_ids == expected.token_ids
    assert outcome.longest_gap_s < UNNOTICED_S
    assert during[0].result().is_whole
    assert during[0].result().first_s < UNNOTICED_S
    await until(lambda: is_up(0.0), 20.0, "the loss of Redis in the metrics")
    await redis.start()
    await until(lambda: is_up(1.0), 20.0, "the gateway connected again")
    assert (await lone.ask(prompt, tokens=TOKENS)).token_ids == expected.token_ids


async def test_redis_frozen_under_a_stream_is_not_noticed(lone: Drill, redis: RedisServer) -> None:
    """Connections stay and nothing is answered: the worst that a store can do."""

    async def is_up() -> bool:
        return await lone.metric("gateway-0", "baton_redis_up") == 1.0

    await until(is_up, 20.0, "the gateway connected to Redis")
    await lone.pace(PACE_S)

    async def on_token(count: int) -> None:
        if count == KILL_AT_TOKEN:
            redis.freeze()

    try:
        outcome = await lone.ask(prompt_of(304), tokens=TOKENS, on_token=on_token)
        after = await lone.ask(prompt_of(305), tokens=4)
    finally:
        redis.thaw()
    assert outcome.is_whole, outcome
    assert outcome.longest_gap_s < UNNOTICED_S
    assert after.is_whole, after
    assert after.first_s < UNNOTICED_S


# --- two decode workers ---------------------------------------------------------------------------


async def test_requests_at_the_heels_of_a_killed_decode_worker(drill: Drill) -> None:
    """Four streams, two on each worker; one dies and four more requests come at once, before any
    heartbeat is missed: the streams go on, and none of the new ones waits for the dead.
    """
    prompts = [prompt_of(310 + index) for index in range(4)]
    expected = [await drill.ask(prompt, tokens=TOKENS) for prompt in prompts]
    await drill.pace(0.1)
    begun = [asyncio.Event() for _ in prompts]

    async def stream(index: int) -> Outcome:
        async def on_token(count: int) -> None:
            if count == 2:
                begun[index].set()

        return await drill.ask(prompts[index], tokens=TOKENS, on_token=on_token)

    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(stream(index)) for index in range(4)]
        async with asyncio.timeout(20.0):
            for event in begun:
                await event.wait()
        spread = {
            name: await drill.metric(name, "baton_decode_active_sequences")
            for name in drill.decodes()
        }
        drill.kill("decode-0")
        newcomers = [
            group.create_task(drill.ask(prompt_of(320 + index), tokens=4)) for index in range(4)
        ]
    assert sorted(spread.values()) == [2.0, 2.0], spread
    outcomes = [one.result() for one in streams]
    late = [one.result() for one in newcomers]
    _log.info(
        "resumed %s, longest gaps %s; new requests' first tokens after %s",
        [one.resumed for one in outcomes],
        [round(one.longest_gap_s, 2) for one in outcomes],
        [round(one.first_s, 2) for one in late],
    )
    assert [one.token_ids for one in outcomes] == [one.token_ids for one in expected]
    assert sorted(one.resumed for one in outcomes) == [0, 0, 1, 1]
    assert all(one.is_whole for one in late), late
    assert max(one.ended_s for one in late) < SERVED_WITHIN_S


async def test_gateway_killed_with_a_long_stream(drill: Drill) -> None:
    """The client's connection breaks at once; the worker lets the sequence go by itself, nothing is
    left held, and the next request is served by the new gateway.
    """
    await drill.pace(PACE_S)
    # The cluster is the session's: other drills' steps are counted too.
    before = [await drill.hits(name, "decode.step") for name in drill.decodes()]
    killed_at_s: list[float] = []

    async def on_token(count: int) -> None:
        if count == KILL_AT_TOKEN:
            killed_at_s.append(time.monotonic())
            drill.kill("gateway-0")

    outcome = await drill.ask(prompt_of(330), tokens=LONG_TOKENS, on_token=on_token)
    assert outcome.is_broken, outcome
    assert time.monotonic() - killed_at_s[0] < ERROR_WITHIN_S
    await drill.is_whole()
    whole_s = time.monotonic() - killed_at_s[0]
    assert (await drill.ask(prompt_of(331), tokens=8)).is_whole
    # A gateway may come back for its sequences: they are kept for ten seconds, with their log.
    await drill.settles(timeout_s=30.0)
    settled_s = time.monotonic() - killed_at_s[0]
    _log.info("gateway killed: whole after %.2f s, nothing held after %.2f s", whole_s, settled_s)
    after = [await drill.hits(name, "decode.step") for name in drill.decodes()]
    assert 0 < sum(after) - sum(before) < LONG_TOKENS * 2


async def test_merger_killed_while_its_splice_is_wanted(drill: Drill) -> None:
    """A published prefix is spliced all the same, by the same pure function in the gateway."""
    text = "You answer in one short line, in plain words, and never twice the same. "
    name = f"drill-{time.monotonic_ns()}"
    published = await drill.client.post("/v1/prefixes", json={"name": name, "text": text})
    assert published.status_code == 200, published.text
    prefix_id = published.json()["id"]
    prompt = text + "How do you do?"
    try:
        expected = await drill.ask(prompt, tokens=TOKENS, is_cached=True)
        assert expected.is_whole, expected
        assert expected.prefix_id == prefix_id
        assert expected.cached_tokens >= 32
        await drill.pace(PACE_S)

        async def on_token(count: int) -> None:
            if count == KILL_AT_TOKEN:
                drill.kill("merger-0")

        streamed = await drill.ask(prompt, tokens=TOKENS, is_cached=True, on_token=on_token)
        at_once = await drill.ask(prompt, tokens=TOKENS, is_cached=True)
        for outcome in (streamed, at_once):
            assert outcome.is_whole, outcome
            assert outcome.prefix_id == prefix_id
            assert outcome.token_ids == expected.token_ids
        assert at_once.first_s < UNNOTICED_S
        await drill.is_whole()
        again = await drill.ask(prompt, tokens=TOKENS, is_cached=True)
        assert again.token_ids == expected.token_ids
    finally:
        await drill.client.delete(f"/v1/prefixes/{prefix_id}")

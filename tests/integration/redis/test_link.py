"""The connection to Redis: prompt or absent, never in the way."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest
from redis.exceptions import ResponseError
from structlog.testing import capture_logs

from baton.capability import DEV_KEY
from baton.clock import SystemClock
from baton.metrics import Metrics
from baton.metrics_families import REDIS_ASK_OUTCOMES
from services.gateway import registry_store
from services.gateway.redis_measures import RedisMeasures
from services.gateway.registry_hints import KIND, RecordSeal
from services.gateway.registry_store import QUEUE_MAX, RedisLink
from services.gateway.shared_limits import HOLD_S, Claim, renewal
from services.gateway.shared_store import ASK_WITHIN_S, KeySpace
from tests.integration.redis.conftest import RedisServer, running_link, until, up, within

LONG_S = 20.0


async def settled(link: RedisLink) -> None:
    """Everything posted before was done."""
    assert await link.ask([("PING",)], LONG_S) == [b"PONG"]


async def test_replies_come_in_the_order_of_commands(link: RedisLink) -> None:
    """One transaction; an error is the reply of its own command and of no other."""
    asked = [("SET", "text", "a"), ("ZCARD", "text"), ("INCR", "number"), ("GET", "text")]
    replies = await link.ask(asked, LONG_S)
    assert replies is not None
    assert [replies[0], replies[2], replies[3]] == [b"OK", 1, b"a"]
    assert isinstance(replies[1], ResponseError)


async def test_many_ask_at_once_and_each_gets_its_own(link: RedisLink) -> None:
    """Requests share one connection."""
    texts = [f"text-{number}" for number in range(200)]
    replies = await asyncio.gather(*(link.ask([("ECHO", text)], LONG_S) for text in texts))
    assert replies == [[text.encode()] for text in texts]


async def test_a_cancelled_ask_leaves_no_answer_for_the_next(
    link: RedisLink, redis_server: RedisServer
) -> None:
    """redis-py#2624, redis-py#2665: an unread reply was given to the next command."""
    redis_server.freeze()
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(link.ask([("ECHO", "of the cancelled")], LONG_S))
        # Sent and unanswered: the link owes its answer.
        await until(lambda: not link.is_up)
        asking.cancel()
    redis_server.thaw()
    await until(lambda: link.is_up)
    assert await link.ask([("ECHO", "of the next")], LONG_S) == [b"of the next"]


async def test_metrics_tell_how_redis_answered_and_that_it_was_lost(
    redis_server: RedisServer,
) -> None:
    """Answered in time, too late, not asked at all; refusals, losses and dropped writes."""
    metrics = Metrics("gateway")

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    async with running_link(redis_server.url, RedisMeasures(metrics)) as link:
        assert value("baton_redis_up") == 1.0
        assert await link.ask([("PING",)], LONG_S) is not None
        assert await link.ask([("NO-SUCH-COMMAND",)], LONG_S) is None
        redis_server.freeze()
        assert await link.ask([("PING",)]) is None
        await redis_server.kill()
        await until(lambda: value("baton_redis_up") == 0.0)
        assert await link.ask([("PING",)]) is None
        assert not link.post([("PING",)])
    asked = {one: value("baton_redis_asks_total", outcome=one) for one in REDIS_ASK_OUTCOMES}
    assert asked == {"answered": 2.0, "late": 1.0, "away": 1.0}
    assert value("baton_redis_ask_seconds_count") == 3.0
    assert value("baton_redis_connections_lost_total") == 1.0
    assert value("baton_redis_posts_dropped_total") == 1.0
    assert value("baton_redis_refusals_total") == 2.0, "the command, and the transaction with it"


async def test_a_frozen_redis_costs_a_moment_and_two_lines(
    link: RedisLink, redis_server: RedisServer
) -> None:
    """Who asks in the first moment waits for it; nobody else waits; nothing is logged for each."""
    with capture_logs() as logs:
        redis_server.freeze()
        began_s = time.monotonic()
        assert await asyncio.gather(*(link.ask([("PING",)]) for _ in range(100))) == [None] * 100
        # Far below one bound after the other.
        assert time.monotonic() - began_s < 50 * ASK_WITHIN_S
        await until(lambda: not link.is_up)
        assert [await link.ask([("PING",)], LONG_S) for _ in range(100)] == [None] * 100
        await until(lambda: any(line["event"] == "redis_lost" for line in logs))
        found = up(link)
        redis_server.thaw()
        await within(found)
        await settled(link)
    assert [line["event"] for line in logs] == ["redis_lost", "redis_back"]


async def test_who_comes_while_an_answer_is_owed_does_not_wait(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the connection counts as lost, it is already not asked any more."""
    monkeypatch.setattr(registry_store, "BATCH_TIMEOUT_S", LONG_S)
    with capture_logs() as logs:
        async with running_link(redis_server.url) as link:
            redis_server.freeze()
            assert await link.ask([("PING",)]) is None
            await until(lambda: not link.is_up)
            assert await link.ask([("PING",)], LONG_S) is None
            redis_server.thaw()
            await until(lambda: link.is_up)
            await settled(link)
    assert [line["event"] for line in logs] == ["redis_connected"]


async def test_a_killed_redis_is_found_again(link: RedisLink, redis_server: RedisServer) -> None:
    """One line when it goes and one when it is back."""
    with capture_logs() as logs:
        await redis_server.kill()
        await until(lambda: any(line["event"] == "redis_lost" for line in logs))
        assert await link.ask([("PING",)]) is None
        assert not link.post([("PING",)])
        found = up(link)
        await redis_server.start()
        await within(found)
        await settled(link)
    assert [line["event"] for line in logs] == ["redis_lost", "redis_back"]


async def test_the_queue_has_a_bound(link: RedisLink, redis_server: RedisServer) -> None:
    """What does not fit is dropped at once and said so; memory does not grow under a dead Redis."""
    redis_server.freeze()
    taken = sum(link.post([("PING",)]) for _ in range(3 * QUEUE_MAX))
    assert taken == QUEUE_MAX


async def test_a_full_redis_refuses_and_stays_connected(
    link: RedisLink, redis_server: RedisServer
) -> None:
    """Out of memory without eviction: no answer is better than a wrong one; one line says it."""
    async with redis_server.client() as other:
        await other.config_set("maxmemory", "1")
        with capture_logs() as logs:
            for _ in range(5):
                assert await link.ask([("SET", "a", "b"), ("GET", "a")], LONG_S) is None
            await other.config_set("maxmemory", "0")
            await settled(link)
        assert [line["event"] for line in logs] == ["redis_refused"]


async def test_a_wrong_password_is_a_lost_redis_and_is_not_shown(redis_server: RedisServer) -> None:
    """The URL holds a secret."""
    async with redis_server.client() as other:
        await other.config_set("requirepass", "right")
    url = redis_server.url.replace("unix://", "unix://:hunter2@")
    with capture_logs() as logs:
        async with asyncio.TaskGroup() as group:
            link = RedisLink(url, SystemClock(), lambda name, work: group.create_task(work))
            await link.start()
            await until(lambda: bool(logs))
            assert await link.ask([("PING",)]) is None
            await link.stop()
    assert logs[0]["reason"] == "AuthenticationError"
    assert "hunter2" not in repr(logs)


async def test_a_right_password_lets_in(redis_server: RedisServer) -> None:
    """The check above is one of the password."""
    async with redis_server.client() as other:
        await other.config_set("requirepass", "right")
    url = redis_server.url.replace("unix://", "unix://:right@")
    async with running_link(url) as link:
        await settled(link)


def documented_rights() -> list[str]:
    """The keys and commands that docs/compose.md says a gateway needs."""
    text = (Path(__file__).parents[3] / "docs" / "compose.md").read_text(encoding="utf-8")
    found = re.search(r"`(~baton[^`]+)`", text)
    assert found is not None
    return found[1].split()


async def test_the_documented_rights_are_enough(redis_server: RedisServer) -> None:
    """A user of its own for the gateway, that can do nothing else."""
    async with redis_server.client() as other:
        rights = ["ACL", "SETUSER", "gateway", "on", ">secret", *documented_rights()]
        await other.execute_command(*rights)
    url = redis_server.url.replace("unix://", "unix://gateway:secret@") + "?db=1"
    keys = KeySpace(DEV_KEY)
    with capture_logs() as logs:
        async with running_link(url) as link:
            hints, places = RecordSeal(keys, 3.0), keys.key("answers", "a")
            claim = Claim(key=places, members=("m",), places_max=1, hold_s=HOLD_S)
            key = hints.key("w")
            for commands in (
                [("SET", key, b"x", "PX", 3000)],
                [("SCAN", 0, "MATCH", keys.pattern(KIND), "COUNT", 10)],
                [("GETRANGE", key, 0, 10)],
                claim.commands(1_700_000_000.0),
                renewal(places, ["m"], 1_700_000_000_000),
                claim.release(),
            ):
                replies = await link.ask(commands, LONG_S)
                assert replies is not None
                assert not any(isinstance(reply, Exception) for reply in replies)
            assert await link.ask([("GET", "of others")], LONG_S) is None
    assert [line["event"] for line in logs] == ["redis_connected", "redis_refused"]


@pytest.mark.parametrize("answer", [b"", b"\xff\xfe\n", b"HTTP/1.1 400 Bad\r\n\r\n", b"$-9\r\n"])
async def test_whatever_answers_the_gateway_goes_on(answer: bytes) -> None:
    """Something else listens there: the link stays lost, and its task alive."""

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with capture_logs() as logs:
        async with server, asyncio.TaskGroup() as group:
            link = RedisLink(
                f"redis://127.0.0.1:{port}/0",
                SystemClock(),
                lambda name, work: group.create_task(work),
            )
            await link.start()
            await until(lambda: bool(logs))
            assert await link.ask([("PING",)]) is None
            await link.stop()
    assert [line["event"] for line in logs] == ["redis_lost"]

"""What a fresh gateway learns from Redis, and that it believes none of it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from baton.capability import DEV_KEY
from baton.client import ChannelPool
from baton.clock import SystemClock
from services.gateway.hub import WorkerHub
from services.gateway.registry import Registry, WorkerRecord, WorkerRole
from services.gateway.registry_hints import (
    KIND,
    VALUE_BYTES_MAX,
    RecordSeal,
    RegistryHints,
)
from services.gateway.registry_store import RedisLink
from services.gateway.shared_store import KeySpace
from tests.integration.redis.conftest import RedisServer, running_link, until

KEYS = KeySpace(DEV_KEY)
LEASE_S = 30.0
MERGER = WorkerRecord(
    worker_id="m-0",
    role=WorkerRole.MERGER,
    incarnation=1,
    node_id="n",
    address="127.0.0.1:9",
    kvstore_address="",
    model="m",
    is_ready=True,
)


class Gateway:
    """The parts of a gateway that hear and hint."""

    def __init__(self, link: RedisLink, keys: KeySpace = KEYS) -> None:
        self.hub = WorkerHub(Registry(dead_after_s=LEASE_S, lease_s=LEASE_S), SystemClock())
        self.channels = ChannelPool()
        self.seal = RecordSeal(keys, LEASE_S)
        self.tasks: list[Coroutine[Any, Any, None]] = []
        self.hints = RegistryHints(
            link,
            self.hub,
            self.channels,
            seal=self.seal,
            pattern=keys.pattern(KIND),
            clock=SystemClock(),
            spawn=lambda _name, work: self.tasks.append(work),
        )

    async def reads(self) -> int:
        """What a start does with what it finds; the connections it opened are closed again."""
        found = await self.hints.warm()
        await self.channels.stop()
        return found

    def reasons(self) -> dict[str, str | None]:
        """Every known worker and why it gets no work."""
        return {one.record.worker_id: one.reason for one in self.hub.statuses()}


@pytest.mark.parametrize("workers", [1, 100])
async def test_a_fresh_gateway_knows_and_does_not_believe(link: RedisLink, workers: int) -> None:
    """Known before its first beat, routable only by it."""
    first, fresh = Gateway(link), Gateway(link)
    records = [replace(MERGER, worker_id=f"m-{number}") for number in range(workers)]
    for record in records:
        first.hub.observe(record)
    first.hints.write()
    assert await fresh.reads() == workers
    assert set(fresh.reasons().values()) == {"known from another gateway, not heard yet"}
    assert fresh.hub.routable(WorkerRole.MERGER) == ()
    assert not fresh.hub.is_alive("m-0", 1)
    fresh.hub.observe(records[0])
    assert [one.worker_id for one in fresh.hub.routable(WorkerRole.MERGER)] == ["m-0"]
    assert first.reasons() == dict.fromkeys(one.worker_id for one in records)


async def test_the_rhythm_reads_once_and_then_writes(redis_server: RedisServer) -> None:
    """As the service runs it: found, read, written, stopped."""
    async with running_link(redis_server.url) as link:
        one, other = Gateway(link), Gateway(link)
        one.hub.observe(MERGER)
        one.hints.write()
        async with redis_server.client() as client:
            await until_async(client, one.seal.key("m-0"))
        other.hub.observe(replace(MERGER, worker_id="m-1"))
        await other.hints.start()
        other.hints._found.set()
        async with asyncio.TaskGroup() as group:
            for work in other.tasks:
                group.create_task(work)
            await until(lambda: "m-0" in other.reasons())
            async with redis_server.client() as client:
                await until_async(client, other.seal.key("m-1"))
            await other.hints.stop()
        await other.channels.stop()


async def until_async(client: Any, key: str) -> None:
    """Waits for a key."""
    clock, never = SystemClock(), asyncio.Event()
    async with asyncio.timeout(20.0):
        while not await client.exists(key):
            await clock.wait(never, 0.01)


async def test_hints_end_with_the_lease(link: RedisLink, redis_server: RedisServer) -> None:
    """Redis forgets by itself; what a gateway that died wrote does not stay."""
    gateway = Gateway(link)
    gateway.hub.observe(MERGER)
    gateway.hints.write()
    async with redis_server.client() as client:
        await until_async(client, gateway.seal.key("m-0"))
        assert 0 < await client.pttl(gateway.seal.key("m-0")) <= LEASE_S * 1000


async def test_another_cluster_in_the_same_redis_is_not_seen(link: RedisLink) -> None:
    """Two clusters, one Redis, two keys."""
    ours, theirs = Gateway(link), Gateway(link, KeySpace(bytes(32)))
    theirs.hub.observe(MERGER)
    theirs.hints.write()
    assert await ours.reads() == 0


async def test_whatever_stands_in_redis_is_read_without_harm(
    link: RedisLink, redis_server: RedisServer
) -> None:
    """Wrong types, bytes, sizes and places: the one right value among them counts."""
    first, fresh = Gateway(link), Gateway(link)
    first.hub.observe(MERGER)
    first.hints.write()
    good = first.seal.sealed(MERGER, SystemClock().wall_s())
    assert good is not None
    async with redis_server.client() as client:
        await until_async(client, first.seal.key("m-0"))
        at = first.seal.key
        await client.rpush(at("a list"), "x")
        await client.zadd(at("a set"), {"x": 1})
        await client.hset(at("a hash"), "x", "y")
        await client.set(at("nothing"), b"")
        await client.set(at("noise"), bytes(range(256)))
        await client.set(at("elsewhere"), good)
        await client.set(at("torn"), good[:-1])
        await client.set(at("longer"), good + b"\0")
        await client.set(at("huge"), b"\xff" * (32 << 20))
        await client.set(at("just too long"), bytes(VALUE_BYTES_MAX + 1))
        await client.set("x" * (1 << 20), b"a long name")
        await client.set(at("m-0") + "0", b"a longer name")
    assert await fresh.reads() == 1
    assert list(fresh.reasons()) == ["m-0"]

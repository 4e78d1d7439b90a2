"""Publications under way: what is put off, what was there already, what a leaving client ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from baton.clock import SystemClock
from baton.errors import Reason, ServiceError
from baton.kv.digests import ids_hash, text_hash
from baton.kv.manifest import Segment
from services.gateway.prefix_desk import COMPUTING_MAX, PrefixDesk, PrefixStatus
from services.gateway.prefixes import PublishedPrefix, ReadingRules
from services.gateway.publishing import Publisher, PublishOrder
from services.gateway.request import EncodedPrompt, Tenant

ACME, GLOBEX = Tenant(name="acme"), Tenant(name="globex")
OLD_ID = "pfx-" + "0" * 24
IDS = tuple(range(16))


def order(name: str) -> PublishOrder:
    return PublishOrder(name=name, turns=(), text="x" * 1000, tenants=(), ttl_s=None)


def prefix(
    tenant: Tenant, name: str, prefix_id: str, token_ids: tuple[int, ...] = IDS
) -> PublishedPrefix:
    segment = Segment(
        log_id=bytes(16),
        generation=1,
        from_position=0,
        to_position=16,
        history_start=bytes(32),
        history_end=bytes(32),
        kv_digest=bytes(16),
        tokenizer_hash=bytes(16),
        block_tokens=16,
        numeric_class_id=bytes(16),
        text_hash=text_hash(b"x"),
        ids_hash=ids_hash(token_ids),
    )
    return PublishedPrefix(
        prefix_id=prefix_id,
        name=name,
        segment=segment,
        text_bytes=1,
        template_digest=b"",
        owner_tenant=tenant.name,
        tenants=(),
        model="m",
        create_wall_s=1.0,
        expire_wall_s=None,
        hits=0,
        kvstore_address="store:1",
    )


@dataclass(slots=True)
class FakePublisher:
    """Publishes as `how` says."""

    how: Callable[[Tenant, PublishOrder, str], Awaitable[PublishedPrefix]]
    there: list[PublishedPrefix] = field(default_factory=list)
    listings: int = 0
    model_name: str = "m"
    rules: ReadingRules = field(
        default_factory=lambda: ReadingRules(tokenizer_hash=bytes(16), template_digest=b"")
    )

    async def publish(
        self, tenant: Tenant, order: PublishOrder, prefix_id: str = ""
    ) -> PublishedPrefix:
        """Compute."""
        found = await self.how(tenant, order, prefix_id)
        self.there.append(found)
        return found

    async def usable(self, tenant: Tenant) -> list[PublishedPrefix]:
        """The tenant's own, and what it was granted."""
        self.listings += 1
        return [one for one in self.there if tenant.name in (one.owner_tenant, *one.tenants)]

    async def revoke(self, tenant: Tenant, id_or_name: str) -> int:
        """By id or name."""
        own = await self.usable(tenant)
        ended = [one for one in own if id_or_name in (one.prefix_id, one.name)]
        self.there = [one for one in self.there if one not in ended]
        return len(ended)


class NoLimits:
    """Admits everybody."""

    @asynccontextmanager
    async def admitted(self, _tenant: str, _sequences: int) -> AsyncIterator[None]:
        """At once."""
        yield


class StillClock(SystemClock):
    """Waits last for ever; how long each was to be is remembered."""

    __slots__ = ("waits",)

    def __init__(self) -> None:
        self.waits: list[float] = []

    async def wait(self, event: asyncio.Event, timeout_s: float) -> bool:
        """Until it is cancelled."""
        self.waits.append(timeout_s)
        return await event.wait()


class HurriedClock(StillClock):
    """Waits are over at once, and take the time they were to take."""

    __slots__ = ()

    def monotonic_s(self) -> float:
        """What was waited."""
        return sum(self.waits)

    async def wait(self, _event: asyncio.Event, timeout_s: float) -> bool:
        """No wait."""
        self.waits.append(timeout_s)
        return False


class Desk:
    """A desk over a fake publisher; its tasks are the group's."""

    def __init__(
        self, publisher: FakePublisher, group: asyncio.TaskGroup, clock: StillClock | None = None
    ) -> None:
        self._group = group
        limits = NoLimits()
        self.desk = PrefixDesk(
            cast("Publisher", publisher), limits, clock or StillClock(), self._spawn
        )

    def _spawn(self, _name: str, work: Coroutine[Any, Any, None]) -> None:
        self._group.create_task(work)


async def refuse(_tenant: Tenant, _order: PublishOrder, _prefix_id: str) -> PublishedPrefix:
    raise ServiceError(Reason.NO_WORKER, "nobody", retry_after_s=1.0)


async def test_what_is_put_off_holds_up_nobody_elses() -> None:
    """One tenant's that wait for a worker, more than are computed at once, and another's."""

    async def how(tenant: Tenant, order: PublishOrder, prefix_id: str) -> PublishedPrefix:
        if tenant == ACME:
            return await refuse(tenant, order, prefix_id)
        return prefix(tenant, order.name, prefix_id)

    clock = StillClock()
    async with asyncio.timeout(5.0), asyncio.TaskGroup() as group:
        desk = Desk(FakePublisher(how), group, clock).desk
        put_off = [desk.order(ACME, order(f"n{index}")) for index in range(COMPUTING_MAX)]
        found = await desk.publish(GLOBEX, order("brief"))
        assert found.name == "brief"
        assert len(clock.waits) == COMPUTING_MAX
        view = await desk.find(ACME, put_off[0].prefix_id)
        assert view.status is PrefixStatus.PENDING
        # And none of them holds up the end of the service.
        await desk.drain()


async def test_tries_become_rarer() -> None:
    """Each counts against the rate of its tenant: five minutes are a dozen, not hundreds."""
    clock = HurriedClock()
    async with asyncio.TaskGroup() as group:
        desk = Desk(FakePublisher(refuse), group, clock).desk
        wanted = desk.order(ACME, order("brief"))
    assert (await desk.find(ACME, wanted.prefix_id)).status is PrefixStatus.FAILED
    assert clock.waits[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert 240.0 < sum(clock.waits) <= 300.0


async def test_the_id_that_was_given_finds_what_was_there_already() -> None:
    """Whoever orders what is published is told an id before anybody looked."""

    async def how(tenant: Tenant, order: PublishOrder, _prefix_id: str) -> PublishedPrefix:
        return prefix(tenant, order.name, OLD_ID)

    publisher = FakePublisher(how)
    async with asyncio.TaskGroup() as group:
        desk = Desk(publisher, group).desk
        given = desk.order(ACME, order("brief")).prefix_id
    assert given != OLD_ID
    assert (await desk.find(ACME, given)).prefix_id == OLD_ID
    with pytest.raises(ServiceError) as refused:
        await desk.find(GLOBEX, given)
    assert refused.value.reason is Reason.PREFIX_NOT_FOUND
    await desk.revoke(ACME, given)
    assert not publisher.there


async def test_a_grantee_reads_neither_who_else_may_nor_how_often_anybody_did() -> None:
    """Both are the owner's to know."""
    publisher = FakePublisher(refuse)
    granted = ("globex", "initech")
    publisher.there.append(replace(prefix(ACME, "brief", OLD_ID), tenants=granted, hits=7))
    async with asyncio.TaskGroup() as group:
        desk = Desk(publisher, group).desk
        owners = await desk.find(ACME, "brief")
        theirs = await desk.find(GLOBEX, "brief")
    assert owners.prefix is not None
    assert (owners.tenants, owners.prefix.hits) == (granted, 7)
    assert theirs.prefix is not None
    assert (theirs.tenants, theirs.prefix.hits) == (("globex",), 0)


async def test_one_request_of_many_prompts_asks_the_stores_once() -> None:
    """And each prompt is compared: the last one begins otherwise."""
    publisher = FakePublisher(refuse)
    publisher.there.append(prefix(ACME, "brief", OLD_ID, IDS))
    same = EncodedPrompt(token_ids=(*IDS, 7), rendered=b"x")
    other = EncodedPrompt(token_ids=(*IDS[1:], 7, 7), rendered=b"x")
    async with asyncio.TaskGroup() as group:
        desk = Desk(publisher, group).desk
        assert (await desk.require(ACME, "brief", [same] * 64)).prefix_id == OLD_ID
        assert publisher.listings == 1
        with pytest.raises(ServiceError) as refused:
            await desk.require(ACME, "brief", [same, other])
    assert refused.value.reason is Reason.INVALID_REQUEST


async def test_a_client_that_leaves_takes_nobodys_order_with_it() -> None:
    """The same content, waited for by one and ordered by another."""
    began, may_end = asyncio.Event(), asyncio.Event()

    async def how(tenant: Tenant, order: PublishOrder, prefix_id: str) -> PublishedPrefix:
        began.set()
        await may_end.wait()
        return prefix(tenant, order.name, prefix_id)

    async with asyncio.timeout(5.0), asyncio.TaskGroup() as group:
        desk = Desk(FakePublisher(how), group).desk
        waiting = group.create_task(desk.publish(ACME, order("brief")))
        await began.wait()
        given = desk.order(ACME, order("brief")).prefix_id
        waiting.cancel()
        await asyncio.wait((waiting,))
        assert waiting.cancelled()
        may_end.set()
    assert (await desk.find(ACME, given)).status is PrefixStatus.READY


async def test_one_that_is_deleted_before_it_begins_is_given_up() -> None:
    """Between the order and the first step of its task."""
    refusals: list[ServiceError] = []

    async def wait_for_it(desk: PrefixDesk) -> None:
        with pytest.raises(ServiceError) as refused:
            await desk.publish(ACME, order("brief"))
        refusals.append(refused.value)

    async with asyncio.timeout(5.0), asyncio.TaskGroup() as group:
        desk = Desk(FakePublisher(refuse), group).desk
        group.create_task(wait_for_it(desk))
        group.create_task(desk.revoke(ACME, "brief"))
    assert [one.reason for one in refusals] == [Reason.CANCELLED]


async def test_of_what_failed_the_content_is_not_kept() -> None:
    """Sixteen of each tenant are remembered, and each may have had megabytes."""

    async def how(_tenant: Tenant, _order: PublishOrder, _prefix_id: str) -> PublishedPrefix:
        raise ServiceError(Reason.PROMPT_TOO_LONG, "too long", field="text")

    async with asyncio.TaskGroup() as group:
        desk = Desk(FakePublisher(how), group).desk
        desk.order(ACME, order("brief"))
    (failed,) = desk._failed["acme"]
    assert (failed.order.name, failed.order.text) == ("brief", None)
    assert failed.error is not None

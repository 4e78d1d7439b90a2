"""Publications under way: computed behind the client's back, bounded, shown until they are done.

Owns the table of publications that are no prefix yet (pending, computing, failed) and what is shown
of prefixes and of these together. Computing and publishing is `publishing`'s. The table is this
gateway's own: what a store has published outlives it, what was under way does not.

Invariants: publications of one name follow each other; a tenant, and all tenants together, have a
bounded number under way, and of failed ones the newest few are remembered.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from enum import StrEnum, unique
from typing import Any, Final, Protocol

import structlog

from baton.clock import WaitingClock
from baton.errors import Reason, ServiceError
from services.gateway.prefixes import PublishedPrefix
from services.gateway.publishing import PUBLISH_TIMEOUT_S, Publisher, PublishOrder
from services.gateway.request import EncodedPrompt, Tenant

_log = structlog.stdlib.get_logger("baton.gateway.prefix_desk")

Spawn = Callable[[str, Coroutine[Any, Any, None]], None]

TENANT_UNDER_WAY_MAX: Final = 16
UNDER_WAY_MAX: Final = 64
COMPUTING_MAX: Final = 4
FAILED_MAX: Final = 16
"""Failed publications that are remembered of a tenant."""

PREFIX_ID_BYTES: Final = 12
RETRY_AFTER_S: Final = 1.0
BACK_OFF_MAX_S: Final = 30.0
"""Each try counts against its tenant's rate: they become rarer, up to so many seconds."""

KNOWN_MAX: Final = 64
"""Ids of a tenant's publications of what was there already that are remembered."""


@unique
class PrefixStatus(StrEnum):
    """Where a publication stands."""

    PENDING = "pending"
    COMPUTING = "computing"
    READY = "ready"
    FAILED = "failed"
    STALE = "stale"


class Admits(Protocol):
    """What holds a tenant's place while something is computed for it; `Admission` does."""

    def admitted(self, tenant: str, sequences: int) -> AbstractAsyncContextManager[object]:
        """Hold slots for the block, or refuse."""
        ...


@dataclass(slots=True, kw_only=True)
class Publication:
    """A prefix that is wanted. `error` is why it failed; `is_waited` while a client waits."""

    prefix_id: str
    tenant: Tenant
    order: PublishOrder
    create_wall_s: float
    is_waited: bool
    status: PrefixStatus = PrefixStatus.PENDING
    error: ServiceError | None = None
    prefix: PublishedPrefix | None = None
    task: asyncio.Task[None] | None = None
    is_cancelled: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixView:
    """A prefix as its users see it: published, or on the way. `superseded_by`: a newer version."""

    prefix_id: str
    name: str
    owner: str
    tenants: tuple[str, ...]
    status: PrefixStatus
    detail: str | None
    create_wall_s: float
    is_pinned: bool
    model: str
    prefix: PublishedPrefix | None
    superseded_by: int | None = None

    def as_seen_by(self, tenant: str) -> PrefixView:
        """Who else may use it, and how often anybody did, is the owner's to know."""
        if tenant == self.owner:
            return self
        prefix = None if self.prefix is None else replace(self.prefix, hits=0)
        return replace(self, tenants=(tenant,), prefix=prefix)


class PrefixDesk:
    """Where clients publish, look and revoke."""

    def __init__(
        self, publisher: Publisher, limits: Admits, clock: WaitingClock, spawn: Spawn
    ) -> None:
        self._publisher = publisher
        self._limits = limits
        self._clock = clock
        self._spawn = spawn
        self._under_way: dict[str, Publication] = {}
        self._failed: dict[str, list[Publication]] = {}
        self._known: dict[str, dict[str, str]] = {}
        """By tenant: ids that were given for what had another one already."""
        self._turns: dict[tuple[str, str], asyncio.Lock] = {}
        self._computing = asyncio.Semaphore(COMPUTING_MAX)
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    # --- the service's part --------------------------------------------------------------------

    async def start(self) -> None:
        """Nothing: work comes with orders."""

    async def drain(self) -> None:
        """What has not begun is given up; returns when what is being computed is done."""
        self._is_draining = True
        for one in list(self._under_way.values()):
            if one.status is PrefixStatus.PENDING:
                self._cancel(one)
        await self._is_idle.wait()

    async def stop(self) -> None:
        """What is still being computed is given up."""
        for one in list(self._under_way.values()):
            self._cancel(one)
        await self._is_idle.wait()

    # --- publishing ------------------------------------------------------------------------------

    async def publish(self, tenant: Tenant, order: PublishOrder) -> PublishedPrefix:
        """Compute and publish, and wait for it; given up when the caller is cancelled."""
        one = self._begun(tenant, order, is_waited=True)
        try:
            await self._run(one)
        finally:
            self._forget_failed(one)
        if one.error is not None:
            raise one.error
        assert one.prefix is not None, "it ended without an error"
        return one.prefix

    def order(self, tenant: Tenant, order: PublishOrder) -> PrefixView:
        """Have it computed and published in the background; what is shown of it now.

        The same order under way is that one, unless it ends with somebody who waits for it.
        QUOTA_EXCEEDED or QUEUE_FULL where too many are.
        """
        for one in self._under_way.values():
            is_ending = one.is_waited or one.is_cancelled
            if one.tenant.name == tenant.name and one.order == order and not is_ending:
                return self._view_of(one)
        one = self._begun(tenant, order, is_waited=False)
        self._spawn(f"publish-{one.prefix_id}", self._run(one))
        return self._view_of(one)

    def _begun(self, tenant: Tenant, order: PublishOrder, *, is_waited: bool) -> Publication:
        if self._is_draining:
            raise ServiceError(
                Reason.DRAINING, "this gateway is stopping; publish at another", retry_after_s=1.0
            )
        own = sum(one.tenant.name == tenant.name for one in self._under_way.values())
        if own >= TENANT_UNDER_WAY_MAX:
            raise ServiceError(
                Reason.QUOTA_EXCEEDED,
                f"at most {TENANT_UNDER_WAY_MAX} prefixes of a tenant are published at once; "
                "wait for one",
                retry_after_s=RETRY_AFTER_S,
            )
        if len(self._under_way) >= UNDER_WAY_MAX:
            raise ServiceError(
                Reason.QUEUE_FULL,
                f"{UNDER_WAY_MAX} prefixes are being published; retry later",
                retry_after_s=RETRY_AFTER_S,
            )
        one = Publication(
            prefix_id=f"pfx-{secrets.token_hex(PREFIX_ID_BYTES)}",
            tenant=tenant,
            order=order,
            create_wall_s=self._clock.wall_s(),
            is_waited=is_waited,
        )
        self._under_way[one.prefix_id] = one
        self._is_idle.clear()
        return one

    async def _run(self, one: Publication) -> None:
        """Its task can be cancelled from outside without the one who waits for it."""
        try:
            async with asyncio.TaskGroup() as group:
                one.task = group.create_task(self._guarded(one))
        finally:
            self._ended(one)

    async def _guarded(self, one: Publication) -> None:
        error = _given_up()
        try:
            one.prefix = await self._turn(one)
            return
        except ServiceError as refused:
            error = refused
        except Exception as problem:  # noqa: BLE001  # a fault of one publication stops no service
            _log.error("publication_crashed", prefix_id=one.prefix_id, exc_info=problem)
            error = ServiceError(Reason.INTERNAL, "the prefix could not be computed; see the log")
        finally:
            if one.prefix is None:
                one.error, one.status = error, PrefixStatus.FAILED

    async def _turn(self, one: Publication) -> PublishedPrefix:
        """Behind those of the same name, and a few at a time."""
        if one.is_cancelled:
            raise _given_up()
        key = (one.tenant.name, one.order.name)
        turn = self._turns.setdefault(key, asyncio.Lock())
        async with turn:
            return await self._computed(one)

    async def _computed(self, one: Publication) -> PublishedPrefix:
        """In the background what may be tried again is, as long as a publication may take. What is
        put off keeps nobody else from being computed.
        """
        deadline_s: float | None = None
        tries = 0
        while True:
            try:
                async with self._computing:
                    one.status = PrefixStatus.COMPUTING
                    deadline_s = deadline_s or self._clock.monotonic_s() + PUBLISH_TIMEOUT_S
                    return await self._tried(one)
            except ServiceError as error:
                if one.is_waited or self._is_draining or error.retry_after_s is None:
                    raise
                assert deadline_s is not None
                after_s = max(error.retry_after_s, min(2.0**tries, BACK_OFF_MAX_S))
                if after_s > deadline_s - self._clock.monotonic_s():
                    raise
                _log.warning("publication_put_off", reason=error.reason.value, after_s=after_s)
            one.status, tries = PrefixStatus.PENDING, tries + 1
            await self._clock.wait(asyncio.Event(), after_s)

    async def _tried(self, one: Publication) -> PublishedPrefix:
        async with self._limits.admitted(one.tenant.name, 1):
            prefix = await self._publisher.publish(one.tenant, one.order, one.prefix_id)
        if prefix.prefix_id != one.prefix_id and not one.is_waited:
            # It was there already: who was told another id finds it by that one, too.
            known = self._known.setdefault(one.tenant.name, {})
            known[one.prefix_id] = prefix.prefix_id
            if len(known) > KNOWN_MAX:
                del known[next(iter(known))]
        return prefix

    def _ended(self, one: Publication) -> None:
        self._under_way.pop(one.prefix_id, None)
        key = (one.tenant.name, one.order.name)
        if all((other.tenant.name, other.order.name) != key for other in self._under_way.values()):
            self._turns.pop(key, None)
        failed = self._failed.setdefault(one.tenant.name, [])
        # What succeeded now makes old news of what failed under its name.
        failed[:] = [other for other in failed if other.order.name != one.order.name]
        if one.prefix is None and one.error is None:
            # Cancelled before its task's first step.
            one.error, one.status = _given_up(), PrefixStatus.FAILED
        if one.prefix is None and not one.is_cancelled:
            # What is remembered is why, and not megabytes of content.
            one.order = replace(one.order, turns=(), text=None)
            failed.append(one)
            del failed[:-FAILED_MAX]
        if not failed:
            del self._failed[one.tenant.name]
        if not self._under_way:
            self._is_idle.set()
        one.done.set()

    def _cancel(self, one: Publication) -> None:
        one.is_cancelled = True
        if one.task is not None:
            one.task.cancel()

    def _forget_failed(self, one: Publication) -> bool:
        """Whoever waited was told, or the owner has read it."""
        failed = self._failed.get(one.tenant.name, [])
        if one not in failed:
            return False
        failed.remove(one)
        if not failed:
            del self._failed[one.tenant.name]
        return True

    # --- looking ---------------------------------------------------------------------------------

    async def visible(self, tenant: Tenant) -> list[PrefixView]:
        """What a tenant may use and what it has under way, by name, the newest version first."""
        published = await self._publisher.usable(tenant)
        newest: dict[tuple[str, str], int] = {}
        for prefix in published:
            key = (prefix.owner_tenant, prefix.name)
            newest[key] = max(newest.get(key, 0), prefix.version)
        views = [
            self.view_of(one, newest=newest[one.owner_tenant, one.name]).as_seen_by(tenant.name)
            for one in published
        ]
        there = {view.prefix_id for view in views}
        views += [self._view_of(one) for one in self._own(tenant) if one.prefix_id not in there]
        return sorted(views, key=lambda view: view.name)

    async def find(self, tenant: Tenant, id_or_name: str) -> PrefixView:
        """One of `visible`: by its id, else by name the newest version of the tenant's own, then
        of others'. PREFIX_NOT_FOUND.
        """
        views = await self.visible(tenant)
        prefix_id = self._known.get(tenant.name, {}).get(id_or_name, id_or_name)
        for view in views:
            if view.prefix_id == prefix_id:
                return view
        named = [view for view in views if view.name == id_or_name]
        if not named:
            raise _unknown()
        # The first of several: within one owner the newest version, what is under way last.
        return min(named, key=lambda view: view.owner != tenant.name)

    def view_of(self, prefix: PublishedPrefix, *, newest: int | None = None) -> PrefixView:
        """A published prefix; `newest` is the newest version of its name."""
        stale = self._publisher.rules.refusal(prefix)
        is_superseded = newest is not None and newest > prefix.version
        return PrefixView(
            prefix_id=prefix.prefix_id,
            name=prefix.name,
            owner=prefix.owner_tenant,
            tenants=prefix.tenants,
            status=PrefixStatus.READY if stale is None else PrefixStatus.STALE,
            detail=None if stale is None else stale.message,
            create_wall_s=prefix.create_wall_s,
            is_pinned=prefix.is_pinned,
            model=prefix.model,
            prefix=prefix,
            superseded_by=newest if is_superseded else None,
        )

    def _view_of(self, one: Publication) -> PrefixView:
        return PrefixView(
            prefix_id=one.prefix_id,
            name=one.order.name,
            owner=one.tenant.name,
            tenants=one.order.tenants,
            status=one.status,
            detail=None if one.error is None else f"{one.error.reason.value}: {one.error.message}",
            create_wall_s=one.create_wall_s,
            is_pinned=one.order.is_pinned,
            model=self._publisher.model_name,
            prefix=None,
        )

    def _own(self, tenant: Tenant) -> list[Publication]:
        under_way = [one for one in self._under_way.values() if one.tenant.name == tenant.name]
        return [*under_way, *self._failed.get(tenant.name, [])]

    async def require(
        self, tenant: Tenant, id_or_name: str, prompts: Iterable[EncodedPrompt]
    ) -> PrefixView:
        """The prefix that a request says its prompts begin with, if they can: PREFIX_NOT_FOUND
        where the tenant may use none of this id or name, TOKENIZER_MISMATCH or COMPAT_MISMATCH
        naming both hashes where it is stale, INVALID_REQUEST where a prompt begins otherwise.
        """
        view = await self.find(tenant, id_or_name)
        if view.prefix is None:
            raise ServiceError(
                Reason.PREFIX_NOT_FOUND,
                f"prefix {view.name} is {view.status.value}; wait until it is ready",
                field="X-Baton-Prefix",
                retry_after_s=RETRY_AFTER_S,
            )
        stale = self._publisher.rules.refusal(view.prefix)
        if stale is not None:
            raise stale
        for prompt in prompts:
            differs = view.prefix.difference_to(prompt)
            if differs is not None:
                raise differs
        return view

    # --- ending ----------------------------------------------------------------------------------

    async def revoke(self, tenant: Tenant, id_or_name: str) -> None:
        """End a prefix of the tenant, whatever its status; by name all versions of it.
        PREFIX_NOT_FOUND for any other.
        """
        found = 0
        id_or_name = self._known.get(tenant.name, {}).get(id_or_name, id_or_name)
        for one in self._own(tenant):
            if id_or_name in (one.prefix_id, one.order.name):
                found += 1
                if not self._forget_failed(one):
                    self._cancel(one)
                    await one.done.wait()
        found += await self._publisher.revoke(tenant, id_or_name)
        if not found:
            raise _unknown()


def _given_up() -> ServiceError:
    return ServiceError(Reason.CANCELLED, "the publication was given up")


def _unknown() -> ServiceError:
    return ServiceError(
        Reason.PREFIX_NOT_FOUND,
        "no published prefix of yours has this id or name; GET /v1/prefixes lists them",
        field="id",
    )

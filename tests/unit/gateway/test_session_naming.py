"""The last step of a change, over a store that is silent, restarts, or refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest

from baton.capability import DEV_KEY, CapabilitySigner
from baton.clock import SystemClock
from baton.errors import Reason, ServiceError
from services.gateway.client_sessions import Session, SessionClient, SetSession
from services.gateway.legs import CapabilityMint
from services.gateway.opening import SequenceParts
from services.gateway.request import ParentLog, Tenant
from services.gateway.session_naming import SessionNames

TENANT = Tenant(name="acme")
ADDRESS = "store:1"
OLD = ParentLog(log_id=bytes(16), position=9, address=ADDRESS)
NEW = ParentLog(log_id=bytes(range(16)), position=7, address="store:2")
ORDER = SetSession(session_id="sess-1", expected=3, head=NEW)

Step = ServiceError | None
"""What the store answers: an error, or that it is done."""


def session(generation: int, head: ParentLog) -> Session:
    """As the store has it."""
    return Session(
        session_id="sess-1",
        generation=generation,
        head=head,
        address=ADDRESS,
        create_wall_s=1.0,
        expire_wall_s=2.0,
        ttl_s=1.0,
        parent_id=None,
        parent_position=0,
    )


@dataclass(slots=True)
class FakeStore:
    """Answers by a script; remembers the request ids, and what was closed how."""

    steps: list[Step]
    now: Session = field(default_factory=lambda: session(3, OLD))
    request_ids: list[str] = field(default_factory=list)
    closes: list[bool] = field(default_factory=list)

    async def set(
        self, _address: str, order: SetSession, *, capability: str, request_id: str
    ) -> Session:
        """Compare-and-set."""
        assert capability
        self.request_ids.append(request_id)
        step = self.steps.pop(0)
        if step is not None:
            raise step
        self.now = session(4, order.head)
        return self.now

    async def get(self, *_: object, **__: object) -> tuple[Session, list[object]]:
        """As it is now."""
        return self.now, []

    async def close(self, _address: str, _log_id: bytes, _cap: str, *, drop: bool) -> None:
        """The end of a fork."""
        self.closes.append(drop)


class HurriedClock(SystemClock):
    """Waits are over at once, and take the time they were to take."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def monotonic_s(self) -> float:
        """Time that was waited."""
        return self.passed_s

    async def wait(self, _event: asyncio.Event, timeout_s: float | None = None) -> bool:
        """No wait."""
        self.passed_s += timeout_s or 0.0
        return False


@dataclass(frozen=True, slots=True)
class FakeParts:
    """What of a gateway's parts is used."""

    stores: FakeStore
    mint: CapabilityMint
    clock: HurriedClock


def names_at(store: FakeStore) -> SessionNames:
    """The real naming over the fake store."""
    mint = CapabilityMint(CapabilitySigner(DEV_KEY, SystemClock()))
    parts = FakeParts(store, mint, HurriedClock())
    return SessionNames(cast(SequenceParts, parts), cast(SessionClient, store))


def lost() -> ServiceError:
    """Nobody answered."""
    return ServiceError(Reason.WORKER_LOST, "gone", metadata={"grpc_code": "UNAVAILABLE"})


def stale() -> ServiceError:
    """Somebody was faster."""
    return ServiceError(Reason.STALE_GENERATION, "changed")


async def test_a_silent_store_is_asked_again_under_the_same_request_id() -> None:
    """What it has done already it answers again; a second name is never made."""
    store = FakeStore([lost(), lost(), None])
    named = await names_at(store).name_fork(ADDRESS, ORDER, TENANT)
    assert named.generation == 4
    assert len(set(store.request_ids)) == 1
    assert store.closes == [False]


async def test_a_change_that_was_done_before_a_restart_is_known_by_its_head() -> None:
    """The restarted store has forgotten the request id, not the record."""
    store = FakeStore([lost(), stale()], now=session(4, NEW))
    assert (await names_at(store).name_fork(ADDRESS, ORDER, TENANT)).generation == 4
    assert store.closes == [False]


async def test_somebody_elses_change_meanwhile_is_stale() -> None:
    """The head is theirs: the edit is refused, and its log goes."""
    store = FakeStore([lost(), stale()], now=session(4, OLD))
    with pytest.raises(ServiceError) as caught:
        await names_at(store).name_fork(ADDRESS, ORDER, TENANT)
    assert caught.value.reason is Reason.STALE_GENERATION
    assert store.closes == [True]


async def test_a_first_refusal_is_believed() -> None:
    """No look at the head: nothing of ours can have been done."""
    store = FakeStore([stale()], now=session(4, NEW))
    with pytest.raises(ServiceError) as caught:
        await names_at(store).name_fork(ADDRESS, ORDER, TENANT)
    assert caught.value.reason is Reason.STALE_GENERATION
    assert store.closes == [True]


@pytest.mark.parametrize(
    "error",
    [lost, lambda: ServiceError(Reason.QUEUE_FULL, "disk full", retry_after_s=1.0)],
)
async def test_a_log_whose_naming_is_in_doubt_is_not_dropped(
    error: Callable[[], ServiceError],
) -> None:
    """Dropped it would take the session with it that names it after all."""
    store = FakeStore([error() for _ in range(1000)])
    with pytest.raises(ServiceError) as caught:
        await names_at(store).name_fork(ADDRESS, ORDER, TENANT)
    assert caught.value.reason is error().reason
    assert store.closes == [False]


async def test_a_reader_who_leaves_meanwhile_drops_nothing() -> None:
    """A cancelled call says nothing of what the store did."""
    begun, never = asyncio.Event(), asyncio.Event()

    class SlowStore(FakeStore):
        async def set(
            self, address: str, order: SetSession, *, capability: str, request_id: str
        ) -> Session:
            begun.set()
            await never.wait()
            return await super().set(address, order, capability=capability, request_id=request_id)

    store = SlowStore([None])
    async with asyncio.TaskGroup() as group:
        task = group.create_task(names_at(store).name_fork(ADDRESS, ORDER, TENANT))
        await begun.wait()
        task.cancel()
    assert task.cancelled()
    assert store.closes == [False]

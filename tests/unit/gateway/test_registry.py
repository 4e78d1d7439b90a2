"""What a gateway believes about workers, under a clock that the test moves; and placement."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.gateway.policy import PairFacts, Placement, PrefillMode, place
from services.gateway.registry import (
    DOUBT_S,
    RETIRED_MAX,
    STUCK_AFTER_S,
    Registry,
    WorkerRecord,
    WorkerRole,
)

RECORD = WorkerRecord(
    worker_id="d-0",
    role=WorkerRole.DECODE,
    incarnation=1,
    node_id="n",
    address="h:1",
    kvstore_address="h:2",
    model="m",
    is_ready=True,
)


def routable(registry: Registry, now_s: float) -> list[str]:
    return [one.worker_id for one in registry.routable(WorkerRole.DECODE, now_s)]


def test_worker_is_dead_after_silence_and_dropped_after_its_lease() -> None:
    """1.5 s without a heartbeat: no new work. 3 s: forgotten."""
    registry = Registry()
    assert registry.observe(RECORD, 10.0)
    assert routable(registry, 11.5) == ["d-0"]
    assert routable(registry, 11.6) == []
    assert registry.is_alive("d-0", 1, 11.5)
    assert not registry.is_alive("d-0", 1, 11.6)
    assert registry.expire(13.0) == ()
    assert registry.expire(13.1) == (RECORD,)
    assert registry.get("d-0") is None


def test_not_ready_draining_and_stuck_workers_get_no_work_and_say_why() -> None:
    """A beating heart alone is not health."""
    registry = Registry()
    registry.observe(replace(RECORD, is_ready=False), 0.0)
    assert registry.statuses(0.0)[0].reason == "not ready"
    registry.observe(replace(RECORD, is_draining=True), 0.0)
    assert registry.statuses(0.0)[0].reason == "draining"
    registry.observe(replace(RECORD, progress=1), 1.0)
    registry.observe(replace(RECORD, progress=1), STUCK_AFTER_S + 1.5)
    assert registry.statuses(STUCK_AFTER_S + 1.5)[0].reason == "no progress"
    registry.observe(replace(RECORD, progress=2), STUCK_AFTER_S + 1.6)
    assert routable(registry, STUCK_AFTER_S + 1.6) == ["d-0"]


def test_worker_in_doubt_gets_no_work_until_it_is_heard_later_with_progress() -> None:
    """A beat on its way when the worker died must not bring it back."""
    registry = Registry()
    registry.observe(replace(RECORD, progress=5), 0.0)
    registry.doubt("d-0", 1, 0.2)
    assert routable(registry, 0.2) == []
    assert registry.is_doubting(0.2)
    registry.observe(replace(RECORD, progress=6), 0.2 + DOUBT_S / 2)
    assert routable(registry, 0.4) == [], "sent before the connection broke, perhaps"
    registry.observe(replace(RECORD, progress=5), 0.3 + DOUBT_S)
    assert routable(registry, 0.6) == [], "no progress since"
    assert "connection broke" in str(registry.statuses(0.6)[0].reason)
    registry.observe(replace(RECORD, progress=7), 0.7 + DOUBT_S)
    assert routable(registry, 1.0) == ["d-0"]
    assert not registry.is_doubting(1.0)


def test_doubt_is_of_one_run_and_never_of_a_hint() -> None:
    """A restarted worker is another one; a late doubt of the old run does not touch it."""
    registry = Registry()
    registry.observe(RECORD, 0.0)
    registry.doubt("d-0", 1, 0.1)
    registry.observe(replace(RECORD, incarnation=2), 0.15)
    assert routable(registry, 0.2) == ["d-0"]
    registry.doubt("d-0", 1, 0.3)
    registry.doubt("nobody", 1, 0.3)
    assert routable(registry, 0.3) == ["d-0"]
    registry.hint(replace(RECORD, worker_id="d-1"), 0.3)
    registry.doubt("d-1", 1, 0.3)
    assert not registry.is_doubting(0.3)


def test_a_beating_worker_without_progress_counts_as_dead_for_what_it_runs() -> None:
    """Heartbeats come, nothing moves: a request that waits for it must not wait for ever."""
    registry = Registry()
    registry.observe(replace(RECORD, progress=1), 0.0)
    registry.observe(replace(RECORD, progress=1), STUCK_AFTER_S)
    assert registry.is_alive("d-0", 1, STUCK_AFTER_S)
    registry.observe(replace(RECORD, progress=1), STUCK_AFTER_S + 0.5)
    assert not registry.is_alive("d-0", 1, STUCK_AFTER_S + 0.5)


def test_late_heartbeat_of_an_old_incarnation_changes_nothing() -> None:
    """The process that restarted must not be shadowed by its own past."""
    registry = Registry()
    registry.observe(RECORD, 0.0)
    registry.observe(replace(RECORD, incarnation=2, address="h:9"), 0.1)
    assert not registry.observe(RECORD, 0.2)
    record = registry.get("d-0")
    assert record is not None
    assert record.address == "h:9"
    assert not registry.is_alive("d-0", 1, 0.2)
    for incarnation in range(3, 3 + 2 * RETIRED_MAX):
        registry.observe(replace(RECORD, incarnation=incarnation), 0.3)
    assert not registry.observe(replace(RECORD, incarnation=2 * RETIRED_MAX), 0.4)


def test_roles_do_not_mix() -> None:
    """A prefill worker never gets a decode's work."""
    registry = Registry()
    registry.observe(replace(RECORD, role=WorkerRole.PREFILL), 0.0)
    assert routable(registry, 0.0) == []


@pytest.mark.parametrize(
    ("mode", "pair", "decode", "room", "placement", "is_fallback"),
    [
        (PrefillMode.AUTO, True, True, True, Placement.REMOTE, False),
        (PrefillMode.AUTO, False, True, True, Placement.LOCAL, True),
        (PrefillMode.AUTO, True, True, False, Placement.LOCAL, True),
        (PrefillMode.AUTO, True, False, True, Placement.REFUSED, False),
        (PrefillMode.REMOTE, True, True, True, Placement.REMOTE, False),
        (PrefillMode.REMOTE, False, True, True, Placement.REFUSED, False),
        (PrefillMode.REMOTE, True, True, False, Placement.REFUSED, False),
        (PrefillMode.LOCAL, True, True, True, Placement.LOCAL, False),
        (PrefillMode.LOCAL, False, False, True, Placement.REFUSED, False),
    ],
)
def test_placement_follows_the_mode(
    mode: PrefillMode,
    pair: bool,
    decode: bool,
    room: bool,
    placement: Placement,
    is_fallback: bool,
) -> None:
    """Remote where there is a pair; a fallback only where the mode allows one."""
    decision = place(
        mode,
        PairFacts(has_compatible_pair=pair, has_decode=decode, has_room_in_prefill_queue=room),
    )
    assert (decision.placement, decision.is_fallback) == (placement, is_fallback)

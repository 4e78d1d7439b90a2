"""Hints of other gateways: sealed, bounded, shown and never believed."""

from __future__ import annotations

from dataclasses import replace

import hypothesis
import pytest
from hypothesis import strategies

from baton.capability import DEV_KEY
from baton.errors import StartupError
from baton.testing.clock import ManualClock
from services.gateway.hub import WorkerHub
from services.gateway.registry import HINTS_MAX, Registry, WorkerRecord, WorkerRole
from services.gateway.registry_hints import RECORD_BYTES_MAX, RecordSeal
from services.gateway.registry_store import BACKOFF_MAX_S, RedisLink, backoff_s
from services.gateway.registry_wire import record_to_bytes
from services.gateway.shared_store import KeySpace

KEYS = KeySpace(DEV_KEY)
LEASE_S = 3.0
NOW_S = 1_700_000_000.0
SEAL = RecordSeal(KEYS, LEASE_S)
RECORD = WorkerRecord(
    worker_id="m-0",
    role=WorkerRole.MERGER,
    incarnation=7,
    node_id="n",
    address="h:1",
    kvstore_address="",
    model="m",
    is_ready=True,
    progress=3,
)


def sealed(record: WorkerRecord = RECORD, wall_s: float = NOW_S) -> bytes:
    value = SEAL.sealed(record, wall_s)
    assert value is not None
    return value


def opened(value: object, wall_s: float = NOW_S) -> WorkerRecord | None:
    return SEAL.opened(SEAL.key("m-0"), value, wall_s)


def test_a_sealed_record_comes_back_whole() -> None:
    """Every field that a heartbeat carries."""
    assert opened(sealed()) == RECORD


def test_a_seal_ends_with_the_lease_and_does_not_begin_in_the_future() -> None:
    """An old copy of Redis, restored, holds nothing that counts; nor does a clock gone wild."""
    assert opened(sealed(), NOW_S + LEASE_S - 0.01) == RECORD
    assert opened(sealed(), NOW_S + LEASE_S) is None
    assert opened(sealed(), NOW_S - LEASE_S) == RECORD
    assert opened(sealed(), NOW_S - LEASE_S - 0.01) is None


def test_a_seal_holds_for_its_worker_and_its_cluster_only() -> None:
    """A right value in a wrong place is a wrong value."""
    assert SEAL.opened(SEAL.key("m-1"), sealed(), NOW_S) is None
    other = RecordSeal(KeySpace(bytes(32)), LEASE_S)
    assert other.opened(other.key("m-0"), sealed(), NOW_S) is None
    assert other.key("m-0") != SEAL.key("m-0")


@hypothesis.given(strategies.integers(0, len(sealed()) * 8 - 1))
def test_no_bit_of_a_value_can_be_changed(bit: int) -> None:
    """Who can write to Redis but has no cluster key cannot make a hint."""
    value = bytearray(sealed())
    value[bit // 8] ^= 1 << bit % 8
    assert opened(bytes(value)) is None


@hypothesis.given(
    strategies.one_of(
        strategies.none(),
        strategies.integers(),
        strategies.text(),
        strategies.binary(max_size=100),
        strategies.lists(strategies.binary()),
        strategies.builds(Exception),
    )
)
def test_anything_else_is_no_value(value: object) -> None:
    """A reply can be of any type, an error among them."""
    assert opened(value) is None


def test_a_value_is_bounded_even_when_its_seal_is_right() -> None:
    """Another version may write more than this one reads."""
    body = record_to_bytes(replace(RECORD, metrics_address="x" * RECORD_BYTES_MAX))
    signed = round((NOW_S + 1.0) * 1000).to_bytes(8, "little") + body
    assert opened(KEYS.mac(signed) + signed) is None
    assert SEAL.sealed(replace(RECORD, metrics_address="x" * RECORD_BYTES_MAX), NOW_S) is None


@hypothesis.given(strategies.binary(max_size=64))
def test_a_right_seal_around_no_record_is_no_value(body: bytes) -> None:
    """Another version may seal what this one cannot read, or would refuse as a heartbeat."""
    signed = round((NOW_S + 1.0) * 1000).to_bytes(8, "little") + body
    assert opened(KEYS.mac(signed) + signed) is None


def test_names_have_one_length_and_say_nothing() -> None:
    """A name of any length must not become a long key, and tenants are not shown."""
    names = {KEYS.key("answers", name) for name in ("a", "b" * 10_000, "")}
    assert len({len(name) for name in names}) == 1
    assert len(names) == 3
    assert "tenant" not in KEYS.key("answers", "tenant")


def test_a_hint_is_shown_and_gets_no_work() -> None:
    """Gateways believe what they hear themselves."""
    hub = WorkerHub(Registry(), ManualClock())
    assert hub.hint(RECORD)
    (status,) = hub.statuses()
    assert (status.record, status.reason is None) == (RECORD, False)
    assert hub.routable(WorkerRole.MERGER) == ()
    assert not hub.is_alive("m-0", RECORD.incarnation)
    assert hub.heard_s("m-0", RECORD.incarnation) is None
    assert hub.is_hint("m-0")


def test_what_is_heard_replaces_a_hint_and_never_the_other_way_round() -> None:
    """A hint of a run that is gone must not retire the one that is heard, nor the reverse."""
    hub = WorkerHub(Registry(), ManualClock())
    hub.hint(replace(RECORD, incarnation=9))
    assert hub.observe(RECORD)
    assert not hub.is_hint("m-0")
    assert not hub.hint(replace(RECORD, incarnation=9))
    assert hub.get("m-0") == RECORD
    assert hub.observe(replace(RECORD, incarnation=9))


def test_a_hint_is_dropped_after_a_lease() -> None:
    """A worker that nobody hears any more is no worker."""
    clock = ManualClock()
    hub = WorkerHub(Registry(lease_s=LEASE_S), clock)
    hub.hint(RECORD)
    clock.advance(LEASE_S)
    assert hub.expire() == ()
    clock.advance(0.1)
    assert hub.expire() == (RECORD,)


def test_hints_leave_room_for_those_that_are_heard() -> None:
    """A flood of hints cannot shut out a worker."""
    hub = WorkerHub(Registry(), ManualClock())
    taken = [hub.hint(replace(RECORD, worker_id=f"h-{n}")) for n in range(HINTS_MAX + 1)]
    assert taken.count(True) == HINTS_MAX
    assert hub.observe(RECORD)


def test_only_what_is_heard_is_passed_on() -> None:
    """A hint that was passed on would never end."""
    hub = WorkerHub(Registry(), ManualClock())
    heard: list[WorkerRecord] = []
    hub.on_heard(heard.append)
    hub.hint(RECORD)
    assert heard == []
    hub.observe(RECORD)
    assert heard == [RECORD]


def test_attempts_come_later_and_later_and_not_in_step() -> None:
    """A cluster of gateways must not meet a returning Redis all at once."""
    for failures in range(1, 100):
        waits = {backoff_s(failures) for _ in range(50)}
        assert max(waits) <= BACKOFF_MAX_S
        assert len(waits) > 1
    assert min(backoff_s(50) for _ in range(50)) > max(backoff_s(1) for _ in range(50))


@pytest.mark.parametrize("url", ["", "host:6379", "http://u:hunter2@h/0", "redis://h:port/0"])
def test_a_url_that_is_none_is_a_fault_of_configuration(url: str) -> None:
    """Said before anything starts, and without the password."""
    with pytest.raises(StartupError) as caught:
        RedisLink(url, ManualClock(), lambda _name, work: work.close())
    assert caught.value.exit_code == 2
    assert "hunter2" not in str(caught.value)

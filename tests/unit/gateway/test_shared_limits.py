"""Limits per tenant: over all gateways where a store answers, else each gateway's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies

from baton.capability import DEV_KEY
from baton.errors import Reason, ServiceError, StartupError
from baton.testing.clock import ManualClock
from services.gateway.auth import Authenticator
from services.gateway.limits import RATE_WINDOW_S, Admission, RateLimits, RequestLimits
from services.gateway.shared_limits import COMMANDS, COUNT_AT, RENEWALS_MAX, SharedLimits
from services.gateway.shared_store import Command, KeySpace, Replies
from services.gateway.tenants_file import tenants_from

KEYS = KeySpace(DEV_KEY)
SHARE = 2


class FakeStore:
    """Answers as it is told and keeps what it was sent."""

    def __init__(self, replies: Replies | None) -> None:
        self.replies = replies
        self.posted: list[Sequence[Command]] = []
        self.asked = 0
        self.is_up = True

    async def ask(self, commands: Sequence[Command], within_s: float = 0.0) -> Replies | None:
        """What the test said."""
        self.asked += 1
        return self.replies

    def post(self, commands: Sequence[Command]) -> bool:
        """Kept."""
        self.posted.append(commands)
        return True

    def on_up(self, listener: Callable[[], None]) -> None:
        """Never lost."""


def counted(*counts: object) -> list[object]:
    """Replies of claims that found these counts."""
    replies: list[object] = [0] * (COMMANDS * len(counts))
    for index, found in enumerate(counts):
        replies[index * COMMANDS + COUNT_AT] = found
    return replies


def shared(store: FakeStore) -> SharedLimits:
    return SharedLimits(
        store,
        KEYS,
        ManualClock(),
        tenant_sequences_max=SHARE,
        holder="me",
        spawn=lambda _name, work: work.close(),
    )


async def is_admitted(limits: SharedLimits, rate: int | None = None) -> bool:
    """Whether one answer gets in."""
    try:
        async with limits.admitted("a", 1, rate):
            return True
    except ServiceError as error:
        return error.reason is not Reason.QUOTA_EXCEEDED


@pytest.mark.parametrize(
    ("replies", "rate", "expected"),
    [
        pytest.param(counted(SHARE), None, True, id="at the limit"),
        pytest.param(counted(SHARE + 1), None, False, id="past it"),
        pytest.param(counted(1, 5), 5, True, id="at the rate"),
        pytest.param(counted(1, 6), 5, False, id="past the rate"),
        pytest.param(counted(SHARE + 1, 1), 5, False, id="past the share, within the rate"),
        pytest.param(None, 5, True, id="no answer"),
        pytest.param([], 5, True, id="too few replies"),
        pytest.param(counted(RuntimeError(), b"9"), 5, True, id="errors and texts"),
    ],
)
async def test_only_a_count_that_makes_sense_refuses(
    replies: Replies | None, rate: int | None, expected: bool
) -> None:
    """Without a clear no it is yes: this gateway's own limit was asked before."""
    assert await is_admitted(shared(FakeStore(replies)), rate) is expected


REPLY = strategies.one_of(
    strategies.none(),
    strategies.integers(max_value=SHARE),
    strategies.binary(max_size=8),
    strategies.builds(Exception),
    strategies.lists(strategies.integers(), max_size=3),
)


@hypothesis.given(strategies.one_of(strategies.none(), strategies.lists(REPLY, max_size=12)))
async def test_no_reply_can_do_harm(replies: list[object] | None) -> None:
    """Whatever comes back, the request goes on and its places are given back."""
    store = FakeStore(replies)
    limits = shared(store)
    assert await is_admitted(limits, SHARE)
    assert limits.held == 0
    assert [commands[0][0] for commands in store.posted] == ["ZREM"]


async def test_a_refused_request_gives_everything_back() -> None:
    """Its place among the answers and among the requests of the minute."""
    store = FakeStore(counted(1, 6))
    assert not await is_admitted(shared(store), 5)
    keys = {commands[0][1] for commands in store.posted}
    assert keys == {KEYS.key("answers", "a"), KEYS.key("requests", "a")}


async def test_renewals_are_sent_in_bounded_parts() -> None:
    """A thousand running answers are not one huge command."""
    store = FakeStore(None)
    limits = shared(store)
    async with limits.admitted("a", 2 * RENEWALS_MAX + 1, None):
        limits.renew()
    sizes = [(len(commands[0]) - 2) // 2 for commands in store.posted[:-1]]
    assert sizes == [RENEWALS_MAX, RENEWALS_MAX, 1]


def admission(
    clock: ManualClock, rates: dict[str, int], across: SharedLimits | None = None
) -> Admission:
    limits = RequestLimits(sequences_max=4, tenant_sequences_max=2)
    return Admission(limits, RateLimits(rates, clock), across)


async def asked(gate: Admission, tenant: str = "a", sequences: int = 1) -> float | None:
    """None when admitted, else after how long to come back."""
    try:
        async with gate.admitted(tenant, sequences):
            return None
    except ServiceError as error:
        return error.retry_after_s if error.reason is Reason.QUOTA_EXCEEDED else None


async def test_no_minute_has_more_requests_than_the_limit() -> None:
    """A sliding minute: the place of the first comes free exactly a minute after it."""
    clock = ManualClock()
    gate = admission(clock, {"a": 2})
    assert await asked(gate) is None
    clock.advance(20.0)
    assert await asked(gate) is None
    assert await asked(gate) == pytest.approx(RATE_WINDOW_S - 20.0)
    clock.advance(RATE_WINDOW_S - 20.0)
    assert await asked(gate) is None
    assert await asked(gate) == pytest.approx(20.0)
    assert await asked(gate, "no limit") is None


async def test_who_is_admitted_hears_what_is_left_of_its_minute() -> None:
    """The less of what this gateway and all of them together counted; nothing without a limit."""
    clock = ManualClock()
    gate = admission(clock, {"a": 3})
    told = []
    for _ in range(3):
        async with gate.admitted("a", 1) as state:
            assert state is not None
            told.append((state.remaining, state.limit, state.reset_s))
    assert [one[:2] for one in told] == [(2, 3), (1, 3), (0, 3)]
    assert told[-1][2] == RATE_WINDOW_S
    async with gate.admitted("free", 1) as state:
        assert state is None
    gate = admission(clock, {"a": 9}, shared(FakeStore(counted(1, 8))))
    async with gate.admitted("a", 1) as state:
        assert state is not None
        assert state.remaining == 1, "other gateways had seven"
    gate = admission(clock, {"a": 9}, shared(FakeStore(None)))
    async with gate.admitted("a", 1) as state:
        assert state is not None
        assert state.remaining == 8


def test_a_tenant_knows_its_share_by_who_else_is_here() -> None:
    """Alone nobody is below it once it runs something; beside another it is."""
    limits = RequestLimits(sequences_max=10, tenant_sequences_max=8)
    with limits.admitted("many", 6):
        assert not limits.is_below_share("many")
        assert limits.is_below_share("few")
        with limits.admitted("few", 2):
            assert limits.is_below_share("few")
            assert not limits.is_below_share("many")


async def test_a_request_refused_for_its_size_is_not_counted() -> None:
    """Neither by this gateway nor, when others refuse it, afterwards here."""
    clock = ManualClock()
    gate = admission(clock, {"a": 1})
    assert await asked(gate, sequences=3) is not None
    assert await asked(gate) is None
    store = FakeStore(counted(SHARE + 1, 1))
    gate = admission(clock, {"a": 1}, shared(store))
    assert await asked(gate) is not None
    store.replies = counted(1, 1)
    assert await asked(gate) is None


async def test_the_own_limit_is_asked_first() -> None:
    """What is refused here anyway costs no way to the store."""
    store = FakeStore(counted(1, 1))
    gate = admission(ManualClock(), {}, shared(store))
    assert await asked(gate, sequences=3) is not None
    assert store.asked == 0


def test_the_tenants_file_names_requests_a_minute() -> None:
    """One limit for all keys of a tenant; absent: none."""
    document = {
        "tenants": [
            {"name": "a", "keys": ["1"], "teams": [{"name": "t", "keys": ["2"]}]}
            | {"requests_per_minute": 5},
            {"name": "b", "keys": ["3"]},
        ]
    }
    rows = tenants_from(document, Path("t.yaml"))
    assert Authenticator(rows, is_open=False).requests_per_minute() == {"a": 5}


@pytest.mark.parametrize("limit", [0, -1, 60_001, 1.5, "5", True, [5]])
def test_a_limit_that_is_none_is_refused(limit: object) -> None:
    """The fault names the entry."""
    document = {"tenants": [{"name": "a", "keys": ["1"], "requests_per_minute": limit}]}
    with pytest.raises(StartupError, match=r"tenants\[0\]\.requests_per_minute"):
        tenants_from(document, Path("t.yaml"))

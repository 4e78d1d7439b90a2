"""Which transport a pair uses, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import pytest

from baton.errors import Reason, ServiceError, StartupError
from baton.metrics_families import TRANSPORT_WHYS
from services.kvstore.moving import assembly
from services.kvstore.moving.assembly import Planes, open_planes
from services.kvstore.moving.transport import AVOID_S, STREAM, UCX, Transports, Why
from services.kvstore.moving.ucx import UcxMissing

PEER: Final = "10.0.0.2:7411"


@dataclass(frozen=True)
class Named:
    """A transport by name; nothing is fetched here."""

    name: str

    async def fetch(self, *_arguments: Any) -> Any:
        """Never called."""
        raise AssertionError


BOTH: Final = Transports([Named(UCX), Named(STREAM)])
STREAM_ONLY: Final = Transports([Named(STREAM)])


def test_the_best_that_both_have_is_chosen_and_said_why() -> None:
    """Best first, as this side lists them."""
    choice = BOTH.choose(PEER, (STREAM, UCX), 0.0)
    assert (choice.name, choice.why) == (UCX, Why.BEST)


def test_what_the_other_side_lacks_is_named() -> None:
    """`stream` is always there."""
    choice = BOTH.choose(PEER, (STREAM,), 0.0)
    assert (choice.name, choice.why) == (STREAM, Why.PEER_LACKS)
    assert "lacks ucx" in choice.reason


def test_a_peer_that_lists_none_has_stream() -> None:
    """It is older than the choice."""
    assert BOTH.choose(PEER, (), 0.0).name == STREAM


def test_a_forced_transport_is_used_or_refused_never_replaced() -> None:
    """The refusal names what each side may use and the setting."""
    forced = Transports([Named(UCX)], is_forced=True)
    assert forced.choose(PEER, (UCX, STREAM), 0.0).why is Why.FORCED
    for one, theirs in ((forced, (STREAM,)), (forced, ()), (STREAM_ONLY, (UCX,))):
        with pytest.raises(ServiceError, match="--transport auto") as caught:
            one.choose(PEER, theirs, 0.0)
        assert caught.value.reason is Reason.UNSUPPORTED


def test_what_failed_with_a_peer_is_left_alone_for_a_while_with_that_peer_only() -> None:
    """A fabric that does not reach costs each log one try a minute, not one a run of pages."""
    transports = Transports([Named(UCX), Named(STREAM)])
    fell = transports.failed(PEER, transports.choose(PEER, (UCX, STREAM), 0.0), 1.0)
    assert (fell.name, fell.why) == (STREAM, Why.FELL_BACK)
    again = transports.choose(PEER, (UCX, STREAM), 2.0)
    assert (again.name, again.why) == (STREAM, Why.FAILED_BEFORE)
    assert transports.choose("10.0.0.3:7411", (UCX, STREAM), 2.0).name == UCX
    assert transports.choose(PEER, (UCX, STREAM), 1.0 + AVOID_S).name == UCX


def test_stream_and_a_forced_transport_have_nothing_to_fall_back_to() -> None:
    """They are tried again as they are."""
    stream = STREAM_ONLY.choose(PEER, (STREAM,), 0.0)
    assert STREAM_ONLY.failed(PEER, stream, 1.0) is stream
    forced = Transports([Named(UCX)], is_forced=True)
    choice = forced.choose(PEER, (UCX,), 0.0)
    assert forced.failed(PEER, choice, 1.0) is choice


def test_every_why_has_its_place_in_the_metrics() -> None:
    """Counted under a name that the table knows."""
    assert tuple(why.value for why in Why) == TRANSPORT_WHYS


def test_ucx_that_is_not_there_is_refused_at_start_when_forced_and_else_done_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The refusal says how to install it."""

    def missing(*, is_loopback: bool, ports: str | None) -> None:
        raise UcxMissing("ucxx is not installed: pip install 'baton-serving[ucx]'")

    monkeypatch.setattr(assembly, "UcxPlane", missing)
    with pytest.raises(StartupError, match=r"baton-serving\[ucx\]"):
        open_planes("ucx", is_loopback=True)
    assert open_planes("auto", is_loopback=True) == Planes()
    assert open_planes("stream", is_loopback=True) == Planes(is_forced=True)

"""Who may make a kvstore send over UCX, and what becomes of lanes that break; without UCX."""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np
import pytest

from baton.api.kvstore.v1 import kvstore_pb2
from baton.capability import DEV_KEY, CapabilitySigner, CapabilityVerifier, Claims, Right
from baton.clock import SystemClock
from baton.errors import Reason, ServiceError
from services.kvstore.moving import ucx
from services.kvstore.moving.own import OwnRight
from services.kvstore.moving.ucx import LOST_MAX, Target, UcxMissing, UcxPlane
from services.kvstore.moving.ucx_rpc import target_of, target_to_proto

CLOCK: Final = SystemClock()
SIGNER: Final = CapabilitySigner(DEV_KEY, CLOCK)
LOG: Final = b"l" * 16
TARGET: Final = Target(address=b"somewhere", tag=0xABCD << 16, host=b"h" * 16)


def verify(token: str) -> Claims:
    """As a kvstore does for this log."""
    return CapabilityVerifier(DEV_KEY, CLOCK).verify(token, right=Right.MOVE, log_id=LOG)


def named(**changed: Any) -> kvstore_pb2.UcxTarget:
    """A right target, but for what is changed."""
    message = target_to_proto(TARGET, OwnRight(SIGNER), LOG)
    for name, value in changed.items():
        setattr(message, name, value)
    return message


def test_a_kvstores_own_target_is_taken() -> None:
    """Address, tag and host as they were given."""
    assert target_of(named(), verify) == TARGET


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"address": b"elsewhere"}, Reason.PERMISSION_DENIED),
        ({"tag": 0xABCE << 16}, Reason.PERMISSION_DENIED),
        ({"host": b"g" * 16}, Reason.PERMISSION_DENIED),
        ({"token": ""}, Reason.UNAUTHENTICATED),
        ({"address": b""}, Reason.INVALID_REQUEST),
        ({"address": b"a" * 4097}, Reason.INVALID_REQUEST),
        ({"host": b"short"}, Reason.INVALID_REQUEST),
    ],
)
def test_a_target_that_was_altered_reaches_nobody(changed: dict[str, Any], reason: Reason) -> None:
    """The token is for one address and one tag; UCX would end the process over a bad address."""
    with pytest.raises(ServiceError) as caught:
        target_of(named(**changed), verify)
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("tenant", "log_id"), [("acme", LOG), (None, None), (None, b"m" * 16)], ids=str
)
def test_only_a_kvstore_may_name_a_target(tenant: str | None, log_id: bytes | None) -> None:
    """Not the tenant whose log moves, nor who may move another log."""
    good = verify(named().token)
    claims = Claims(
        tenant=tenant,
        scope=None if tenant is None else "",
        rights=frozenset({Right.MOVE}),
        expiry_wall_s=SIGNER.expiry_after(60.0),
        request_id=good.request_id,
        log_id=log_id,
    )
    with pytest.raises(ServiceError) as caught:
        target_of(named(token=SIGNER.sign(claims)), verify)
    assert caught.value.reason is Reason.PERMISSION_DENIED


class Error(Exception):
    """What the binding raises."""


class Request:
    """Done at once, later, or with an error."""

    def __init__(self, *, completed: bool, fails: bool) -> None:
        self.completed = completed
        self._fails = fails

    def check_error(self) -> None:
        if self._fails:
            raise Error("reset by peer")


class Binding:
    """As much of the binding as receiving needs; `fails` and `completes` are for new requests."""

    UCXError = Error

    class Feature:
        TAG = WAKEUP = 0

    def __init__(self) -> None:
        self.fails = self.completes = False
        self.workers = 0

    def UCXContext(self, *_arguments: Any, **_named: Any) -> object:
        return object()

    def UCXWorker(self, *_arguments: Any, **_named: Any) -> Any:
        self.workers += 1
        return self

    def init_blocking_progress_mode(self) -> None:
        return

    def progress_worker_event(self, _tick_ms: int) -> None:
        return

    def UCXXTag(self, value: int) -> int:
        return value

    def tag_recv(self, _array: Any, _tag: int) -> Request:
        return Request(completed=self.completes or self.fails, fails=self.fails)


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Binding:
    """In the place of ucxx."""
    made = Binding()
    monkeypatch.setattr(ucx, "_imported", lambda: (made, lambda buffer: buffer))
    return made


def receive(plane: UcxPlane, stopped: threading.Event) -> list[int]:
    """One transfer of two pages; which arrived."""
    arrived: list[int] = []
    buffers = [np.zeros(8, dtype=np.uint8) for _ in range(2)]
    lane = plane.take()
    try:
        plane.receive(lane, TARGET, buffers, arrived.append, stopped)
    finally:
        plane.give_back(lane)
    return arrived


def test_a_lane_that_was_whole_is_used_again(binding: Binding) -> None:
    """One worker serves one transfer after the other."""
    plane = UcxPlane(is_loopback=True)
    binding.completes = True
    for _ in range(3):
        assert receive(plane, threading.Event()) == [0, 1]
    assert binding.workers == 1


def test_a_lane_that_was_given_up_is_never_driven_again(binding: Binding) -> None:
    """Its requests still name pages that will be somebody else's."""
    plane = UcxPlane(is_loopback=True)
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(ServiceError) as caught:
        receive(plane, stopped)
    assert caught.value.reason is Reason.CANCELLED
    binding.completes = True
    receive(plane, threading.Event())
    assert binding.workers == 2


def test_after_many_lost_lanes_a_process_does_without_ucx(binding: Binding) -> None:
    """Each costs memory that only a restart gives back."""
    plane = UcxPlane(is_loopback=True)
    binding.fails = True
    for _ in range(LOST_MAX):
        with pytest.raises(ServiceError) as caught:
            receive(plane, threading.Event())
        assert caught.value.reason is Reason.WORKER_LOST
    with pytest.raises(ServiceError) as caught:
        plane.take()
    assert caught.value.reason is Reason.UNSUPPORTED


def test_without_ucxx_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install."""
    monkeypatch.setattr(ucx, "installed", lambda: False)
    with pytest.raises(UcxMissing, match=r"pip install 'baton-serving\[ucx\]'"):
        UcxPlane(is_loopback=True)

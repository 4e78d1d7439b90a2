"""What UCX raises, whatever it was asked for: a transfer that broke, never the end of the store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton.errors import Reason, ServiceError
from baton.kv.crc import ByteArray
from services.kvstore.moving import ucx
from services.kvstore.moving.ucx import Lane, Target, UcxMissing, UcxPlane

TARGET = Target(address=b"a", tag=0, host=bytes(16))


class Trouble(Exception):
    """What the binding raises."""


def fails(*_args: object, **_more: object) -> Any:
    """Any call of the binding."""
    raise Trouble("out of memory")


def plane() -> UcxPlane:
    """A plane over a binding of which nothing works."""
    made = object.__new__(UcxPlane)
    binding = SimpleNamespace(UCXError=Trouble, UCXWorker=fails, UCXXTag=int, UCXAddress=fails)
    made._ucx, made._array, made._context = binding, lambda buffer: buffer, None
    made._lock, made._lost, made._idle = threading.Lock(), 0, []
    made.host = bytes(16)
    return made


def reason_of(call: Callable[[], object]) -> Reason:
    """Why it failed."""
    with pytest.raises(ServiceError) as caught:
        call()
    return caught.value.reason


def test_host_that_does_not_say_which_it_is_does_without_ucx(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container that hides it: `auto` takes the stream, the store starts."""
    worker = SimpleNamespace(init_blocking_progress_mode=lambda: None)
    binding = SimpleNamespace(
        UCXError=Trouble,
        Feature=SimpleNamespace(TAG=1, WAKEUP=2),
        UCXContext=lambda *_args, **_more: None,
        UCXWorker=lambda *_args, **_more: worker,
    )
    monkeypatch.setattr(ucx, "_imported", lambda: (binding, lambda buffer: buffer))
    assert UcxPlane(is_loopback=True).host == ucx.host_key()
    monkeypatch.setattr(ucx, "_HOST_FILES", ("/proc/none-such",))
    with pytest.raises(UcxMissing, match="none-such"):
        UcxPlane(is_loopback=True)


def test_no_worker_more_is_a_broken_transfer() -> None:
    """As where files or memory are short: the log comes over gRPC then."""
    assert reason_of(plane().take) is Reason.WORKER_LOST


def test_receive_that_cannot_begin_is_a_broken_transfer() -> None:
    """Its lane is set aside: what was posted before may be under way."""
    made, lane = plane(), Lane(worker=SimpleNamespace(tag_recv=fails))
    buffers = [np.zeros(8, dtype=np.uint8)]
    stopped = threading.Event()
    # Named, because the call alone fills a line.
    call = lambda: made.receive(lane, TARGET, buffers, lambda _index: None, stopped)  # noqa: E731
    assert reason_of(call) is Reason.WORKER_LOST
    assert not lane.is_whole


def test_send_that_was_given_up_before_its_turn_begins_nothing() -> None:
    """No lane is lost by it, no page read."""
    made, stopped, reads = plane(), threading.Event(), list[str]()
    stopped.set()

    def pages() -> Iterator[ByteArray]:
        reads.append("a page")
        yield np.zeros(8, dtype=np.uint8)

    assert reason_of(lambda: made.send(TARGET, pages(), stopped)) is Reason.CANCELLED
    assert not reads
    assert made._lost == 0

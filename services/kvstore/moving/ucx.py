"""Bytes of pages over UCX: from arena memory into arena memory, outside gRPC.

Owns everything that touches `ucxx`: whether it can be had, the workers, one transfer's sends or
receives. Blocking; runs in threads of its own, never on the event loop. Never authorises and never
verifies: who may send where is agreed over gRPC, and what arrived is compared by the receiver.

A worker (UCX's word) carries one transfer at a time, and one that was given up is set aside:
nobody drives it any more, so that UCX neither reads nor writes the pages it was told of. That costs
memory; after `LOST_MAX` of them this process does without UCX. A sender sends nothing before the
receiver asks for it (rendezvous, receiver-driven), so that a completed send was taken, and a
receiver that stopped gets nothing more.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from blake3 import blake3

from baton.errors import Reason, ServiceError
from baton.kv.crc import ByteArray

INSTALL: Final = "pip install 'baton-serving[ucx]'"
ADDRESS_BYTES_MAX: Final = 4096
HOST_BYTES: Final = 16
INDEX_BITS: Final = 16
WORKERS_MAX: Final = 8
LOST_MAX: Final = 64
CLOSE_TURNS: Final = 3
IN_FLIGHT_MAX: Final = 32
TICK_MS: Final = 20

# Only where the operator's environment (UCX_*) says nothing.
_DEFAULTS: Final = {
    # Reading another process's memory by its number: not between kvstores.
    "TLS": "^cma",
    "RNDV_THRESH": "1",
    "RNDV_SCHEME": "get_zcopy",
}
_ENVIRONMENT: Final = {
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # A crash is the process's own business: no handlers for its signals, no waiting for a debugger.
    "UCX_ERROR_SIGNALS": "",
    "UCX_HANDLE_ERRORS": "none",
}
_HOST_FILES: Final = ("/proc/sys/kernel/random/boot_id",)
_HOST_LINKS: Final = ("/proc/self/ns/net", "/proc/self/ns/ipc", "/proc/self/ns/mnt")


class UcxMissing(Exception):
    """UCX cannot be used in this process; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a transfer's pages go: page i comes under `tag` + i."""

    address: bytes
    tag: int
    host: bytes


@dataclass(slots=True, kw_only=True)
class Lane:
    """A worker with what is under way on it: requests, and the buffers that they name by address
    only.
    """

    worker: Any
    waiting: dict[int, tuple[Any, ByteArray]] = field(default_factory=dict)
    is_whole: bool = True


def installed() -> bool:
    """Whether there is a ucxx to import."""
    return importlib.util.find_spec("ucxx") is not None


def host_key() -> bytes:
    """Which host, network and shared memory this process has, as 16 bytes that say nothing else."""
    parts = [Path(name).read_bytes() for name in _HOST_FILES]
    parts += [Path(name).readlink().as_posix().encode() for name in _HOST_LINKS]
    return blake3(b"\0".join(parts)).digest(HOST_BYTES)


class UcxPlane:
    """UCX in one process. `is_loopback`: this store listens to this machine only. `ports`: those it
    may listen on, FIRST-LAST. `settings`: names of what the operator's environment says about UCX.
    """

    def __init__(self, *, is_loopback: bool, ports: str | None = None) -> None:
        """UcxMissing where it is not installed or does not start."""
        # Before the import, which sets some of its own.
        self.settings = tuple(sorted(name for name in os.environ if name.startswith("UCX_")))
        self._ucx, self._array = _imported()
        options = dict(_DEFAULTS)
        if is_loopback:
            options["NET_DEVICES"] = "lo"
        if ports is not None:
            options["TCP_PORT_RANGE"] = ports
        given = {name: text for name, text in options.items() if f"UCX_{name}" not in self.settings}
        features = (self._ucx.Feature.TAG, self._ucx.Feature.WAKEUP)
        try:
            self._context = self._ucx.UCXContext(given, feature_flags=features)
            self._idle = [self._worker()]
        except self._ucx.UCXError as error:
            raise UcxMissing(f"UCX does not start: {error}") from error
        try:
            self.host = host_key()
        except OSError as error:
            raise UcxMissing(f"this host cannot be told from others: {error}") from error
        self._lock = threading.Lock()
        self._lost = 0

    def _worker(self) -> Any:
        worker = self._ucx.UCXWorker(
            self._context, enable_delayed_submission=False, enable_python_future=False
        )
        worker.init_blocking_progress_mode()
        return worker

    def take(self) -> Lane:
        """A lane of the caller's own; `give_back` it. UNSUPPORTED after too many were lost,
        WORKER_LOST when UCX has no more.
        """
        with self._lock:
            if self._lost >= LOST_MAX:
                raise ServiceError(
                    Reason.UNSUPPORTED,
                    f"{LOST_MAX} transfers over ucx broke off; restart this kvstore to use it "
                    "again",
                    field="transport",
                )
            worker = self._idle.pop() if self._idle else None
        with self._errors():
            return Lane(worker=self._worker() if worker is None else worker)

    def give_back(self, lane: Lane) -> None:
        """Keeps a whole lane's worker for the next transfer; sets a broken one aside."""
        with self._lock:
            if not lane.is_whole:
                self._lost += 1
            elif len(self._idle) < WORKERS_MAX:
                self._idle.append(lane.worker)

    def target(self, lane: Lane) -> Target:
        """Where that lane takes one transfer's pages, under tags drawn for it."""
        tag = secrets.randbits(64 - INDEX_BITS) << INDEX_BITS
        with self._errors():
            return Target(address=lane.worker.address.tobytes(), tag=tag, host=self.host)

    def receive(
        self,
        lane: Lane,
        target: Target,
        buffers: Sequence[ByteArray],
        arrived: Callable[[int], None],
        stopped: threading.Event,
    ) -> None:
        """Fills `buffers`; `arrived` is called with the index of each that is full, in any order.

        CANCELLED once `stopped` is set; WORKER_LOST when the connection broke.
        """
        lane.is_whole = False
        with self._errors():
            for index, buffer in enumerate(buffers):
                tag = self._ucx.UCXXTag(target.tag + index)
                lane.waiting[index] = (lane.worker.tag_recv(self._array(buffer), tag), buffer)
            while lane.waiting:
                for index in self._turn(lane, stopped):
                    arrived(index)
        lane.is_whole = True

    def send(self, target: Target, pages: Iterable[ByteArray], stopped: threading.Event) -> float:
        """Sends the pages in order; returns when the receiver has taken all of them. The result is
        how many seconds it took to connect.

        CANCELLED once `stopped` is set; WORKER_LOST when the connection broke or cannot be made.
        """
        if stopped.is_set():
            # Given up before its turn: nothing was begun, so no lane is lost.
            raise _given_up()
        lane = self.take()
        try:
            with self._errors():
                return self._sent(lane, target, pages, stopped)
        finally:
            self.give_back(lane)

    def _sent(
        self, lane: Lane, target: Target, pages: Iterable[ByteArray], stopped: threading.Event
    ) -> float:
        began_s = time.perf_counter()
        endpoint = self._endpoint(lane, target)
        sync_s = time.perf_counter() - began_s
        lane.is_whole = False
        for index, page in enumerate(pages):
            tag = self._ucx.UCXXTag(target.tag + index)
            lane.waiting[index] = (endpoint.tag_send(self._array(page), tag), page)
            while len(lane.waiting) >= IN_FLIGHT_MAX:
                self._turn(lane, stopped)
        while lane.waiting:
            self._turn(lane, stopped)
        # Everything was taken: nothing hangs on this but the connection itself. It is not waited
        # for, since the other side need not be there any more; the next turns close it.
        endpoint.close()
        for _ in range(CLOSE_TURNS):
            lane.worker.progress_worker_event(0)
        lane.is_whole = True
        return sync_s

    def _endpoint(self, lane: Lane, target: Target) -> Any:
        """The connection. On one host without UCX's error handling, which shared memory lacks: the
        gRPC call beside each transfer tells of a peer that died.
        """
        return lane.worker.create_endpoint_from_worker_address(
            self._ucx.UCXAddress.create_from_buffer(target.address),
            target.host != self.host,
        )

    def _turn(self, lane: Lane, stopped: threading.Event) -> list[int]:
        """Drives the worker a moment; takes out what is done."""
        if stopped.is_set():
            raise _given_up()
        done = [index for index, (request, _) in lane.waiting.items() if request.completed]
        if not done:
            lane.worker.progress_worker_event(TICK_MS)
        for index in done:
            lane.waiting.pop(index)[0].check_error()
        return done

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Whatever UCX raises is a transfer that broke: it goes on over another transport."""
        try:
            yield
        except self._ucx.UCXError as error:
            raise _broken(error) from error


def _given_up() -> ServiceError:
    return ServiceError(Reason.CANCELLED, "the transfer was given up")


def _broken(error: Exception) -> ServiceError:
    return ServiceError(
        Reason.WORKER_LOST, f"the ucx connection broke: {error}", metadata={"transport": "ucx"}
    )


def _imported() -> tuple[Any, Any]:
    """The binding and its buffer type. UcxMissing with the remedy."""
    if not installed():
        raise UcxMissing(f"ucxx is not installed: {INSTALL}")
    for name, text in _ENVIRONMENT.items():
        os.environ.setdefault(name, text)
    try:
        importlib.import_module("ucxx")
        binding: ModuleType = importlib.import_module("ucxx._lib.libucxx")
        arrays: ModuleType = importlib.import_module("ucxx._lib.arr")
    except (ImportError, OSError, RuntimeError) as error:
        raise UcxMissing(f"ucxx does not load ({error}): {INSTALL} again") from error
    return binding, arrays.Array

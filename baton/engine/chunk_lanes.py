"""Copies between a device's pages and host memory: one lane for each chunk in flight.

Owns what such a copy has to itself: a pinned buffer, a stream and an event, so that no copy waits
for another and no buffer is written while it is read. Never decides which slot holds what.

Order on the device: a copy down begins when everything that was computed before it was asked for is
done; what is computed after a copy up was asked for begins when it is done. Nobody waits on the
host but in `wait`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from baton.errors import Reason, ServiceError

HostPages = NDArray[np.uint8]


class Lane(Protocol):
    """One chunk's copy. One copy at a time: `wait` before the next."""

    @property
    def host(self) -> HostPages:
        """The buffer [pages, page_bytes]: written before `start_up`, read after `wait`."""
        ...

    def start_down(self, slots: Sequence[int]) -> None:
        """Begin to copy these device slots into the buffer, row by row."""
        ...

    def start_up(self, slots: Sequence[int]) -> None:
        """Begin to copy the buffer's rows into these device slots."""
        ...

    def wait(self) -> None:
        """Returns when the copy under way is done, at once if there is none. RuntimeError where
        the device failed.
        """
        ...


class CudaLane:
    """`Lane` on a CUDA device. `memory`: all slots there [slots, slot_bytes] of uint8."""

    def __init__(self, memory: torch.Tensor, pages: int, page_bytes: int) -> None:
        self._memory = memory
        self._page_bytes = page_bytes
        self._pinned = torch.empty((pages, page_bytes), dtype=torch.uint8, pin_memory=True)
        self._host: HostPages = self._pinned.numpy()
        # torch has no type for it.
        self._stream: Any = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
        # torch has no type for it.
        self._done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def host(self) -> HostPages:
        """See `Lane.host`."""
        return self._host

    def start_down(self, slots: Sequence[int]) -> None:
        """See `Lane.start_down`."""
        # The slots are the output of what the caller's stream computes: behind all of it.
        self._stream.wait_stream(torch.cuda.current_stream(self._memory.device))
        with torch.cuda.stream(self._stream):
            for row, slot in enumerate(slots):
                source = self._memory[slot, : self._page_bytes]
                self._pinned[row].copy_(source, non_blocking=True)
            self._done.record(self._stream)

    def start_up(self, slots: Sequence[int]) -> None:
        """See `Lane.start_up`."""
        current = torch.cuda.current_stream(self._memory.device)
        # A slot that is given to another prompt may still be read by what was computed for the old.
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for row, slot in enumerate(slots):
                target = self._memory[slot, : self._page_bytes]
                target.copy_(self._pinned[row], non_blocking=True)
            self._done.record(self._stream)
        current.wait_event(self._done)

    def wait(self) -> None:
        """See `Lane.wait`."""
        self._done.synchronize()


class StandInLane:
    """`Lane` over ordinary memory. A copy is done at the last moment at which a device may do it,
    so that who reads or writes a buffer too early is found out.
    """

    def __init__(self, memory: torch.Tensor, pages: int, page_bytes: int) -> None:
        self._memory: HostPages = memory.numpy()
        self._page_bytes = page_bytes
        self._host: HostPages = np.zeros((pages, page_bytes), dtype=np.uint8)
        self._down: Sequence[int] = ()

    @property
    def host(self) -> HostPages:
        """See `Lane.host`."""
        return self._host

    def start_down(self, slots: Sequence[int]) -> None:
        """See `Lane.start_down`."""
        assert not self._down, "the copy before this one was not waited for"
        self._down = tuple(slots)

    def start_up(self, slots: Sequence[int]) -> None:
        """See `Lane.start_up`. What is computed next needs it: it cannot be put off."""
        assert not self._down, "the copy before this one was not waited for"
        for row, slot in enumerate(slots):
            self._memory[slot, : self._page_bytes] = self._host[row]

    def wait(self) -> None:
        """See `Lane.wait`."""
        for row, slot in enumerate(self._down):
            self._host[row] = self._memory[slot, : self._page_bytes]
        self._down = ()


def open_lane(memory: torch.Tensor, pages: int, page_bytes: int) -> Lane:
    """A lane to `memory`, wherever that is."""
    kind = CudaLane if memory.is_cuda else StandInLane
    return kind(memory, pages, page_bytes)


def require_device(name: str) -> None:
    """ServiceError UNSUPPORTED where torch has no such device."""
    if torch.device(name).type == "cuda" and not torch.cuda.is_available():
        raise ServiceError(
            Reason.UNSUPPORTED,
            "torch finds no CUDA device, or was built without CUDA",
            field="device",
        )

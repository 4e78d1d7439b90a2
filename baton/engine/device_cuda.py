"""Device pages in the memory of a CUDA device, by torch.

Owns one tensor of all slots and, for each transfer in flight, a pinned buffer, a stream and an
event of its own: a copy never waits for another, and no buffer is written while it is read. Every
byte passes through a pinned buffer once, also where the arena's mapping could be page-locked: parts
of a page are scattered there, and a page that comes is checked before it is seen.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import structlog
import torch

from baton.arena.device import SlotPart
from baton.kv.layout import KvGeometry, copy_slots, page_view

LANES: Final = 8
"""Transfers in flight at once."""

LANE_TIMEOUT_S: Final = 30.0
CUDA_SUCCESS: Final = 0

_log = structlog.stdlib.get_logger("baton.engine")


@dataclass(frozen=True, slots=True)
class _Lane:
    """What one transfer in flight has to itself. `host` is the pinned buffer as numpy sees it."""

    pinned: torch.Tensor
    host: np.ndarray[Any, np.dtype[np.uint8]]
    stream: torch.cuda.Stream
    event: torch.cuda.Event


class CudaPages:
    """`DevicePages` on one CUDA device; see there. RuntimeError where there is no such device, or
    it has too little memory.
    """

    def __init__(
        self, geometry: KvGeometry, slot_count: int, device: str = "cuda", lanes: int = LANES
    ) -> None:
        self._geometry = geometry
        self._device = torch.device(device)
        self._slots = torch.zeros(
            (slot_count, geometry.page_bytes), dtype=torch.uint8, device=self._device
        )
        self._lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        for _ in range(lanes):
            self._lanes.put(self._lane())
        # The lanes' streams do not wait for the one that zeroed the slots.
        torch.cuda.synchronize(self._device)

    def _lane(self) -> _Lane:
        pinned = torch.empty(self._geometry.page_bytes, dtype=torch.uint8, pin_memory=True)
        return _Lane(
            pinned=pinned,
            host=pinned.numpy(),
            # torch has no type for it.
            stream=torch.cuda.Stream(self._device),  # type: ignore[no-untyped-call]
            # torch has no type for it.
            event=torch.cuda.Event(),  # type: ignore[no-untyped-call]
        )

    @property
    def geometry(self) -> KvGeometry:
        """The shape of every page."""
        return self._geometry

    @property
    def slot_count(self) -> int:
        """Slots there are."""
        return int(self._slots.shape[0])

    @property
    def slots(self) -> torch.Tensor:
        """All slots, (slot_count, page_bytes) of uint8: what attention reads and KV is put into.

        Who writes a slot on another stream calls `wait_written` with it before `write_through`.
        """
        return self._slots

    @contextmanager
    def lock_host(self, memory: memoryview) -> Iterator[None]:
        """See `DevicePages.lock_host`. Says so once where the driver refuses (`ulimit -l`)."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch has no type for it
        array = np.frombuffer(memory, dtype=np.uint8)
        address, size = array.ctypes.data, array.nbytes
        # No view may outlive the mapping.
        del array
        error = int(runtime.cudaHostRegister(address, size, 0))
        if error != CUDA_SUCCESS:
            _log.warning("arena_not_page_locked", cuda_error=error, arena_bytes=size)
        try:
            yield
        finally:
            if error == CUDA_SUCCESS:
                runtime.cudaHostUnregister(address)

    def load(self, slot: int, page: memoryview) -> None:
        """See `DevicePages.load`."""
        with self._own_lane() as lane:
            lane.host[:] = np.frombuffer(page, dtype=np.uint8, count=self._geometry.page_bytes)
            with torch.cuda.stream(lane.stream):
                self._slots[slot].copy_(lane.pinned, non_blocking=True)
                lane.event.record(lane.stream)
            lane.event.synchronize()

    def clear(self, slot: int) -> None:
        """See `DevicePages.clear`."""
        with self._own_lane() as lane:
            with torch.cuda.stream(lane.stream):
                self._slots[slot].zero_()
                lane.event.record(lane.stream)
            lane.event.synchronize()

    def write_through(self, parts: Sequence[SlotPart]) -> None:
        """See `DevicePages.write_through`. As many copies are in flight as lanes are free."""
        flying: deque[tuple[_Lane, SlotPart]] = deque()
        try:
            for part in parts:
                lane = self._free_lane(is_waiting=not flying)
                if lane is None:
                    lane = self._land(*flying.popleft())
                flying.append((lane, part))
                self._start_fetch(lane, part.slot)
            while flying:
                self._lanes.put(self._land(*flying.popleft()))
        finally:
            for lane, _ in flying:
                lane.stream.synchronize()
                self._lanes.put(lane)

    def _land(self, lane: _Lane, part: SlotPart) -> _Lane:
        """Waits for a slot's bytes and puts the part of them where it belongs."""
        lane.event.synchronize()
        source = page_view(self._geometry, lane.host)
        target = page_view(self._geometry, np.frombuffer(part.page, dtype=np.uint8))
        copy_slots(source, part.first, target, part.first, part.tokens)
        return lane

    def _start_fetch(self, lane: _Lane, slot: int) -> None:
        with torch.cuda.stream(lane.stream):
            lane.pinned.copy_(self._slots[slot], non_blocking=True)
            lane.event.record(lane.stream)

    def wait_written(self, stream: torch.cuda.Stream) -> None:
        """Returns when all that was put on `stream` so far is done."""
        stream.synchronize()

    def read(self, slot: int) -> bytes:
        """See `DevicePages.read`."""
        with self._own_lane() as lane:
            self._start_fetch(lane, slot)
            lane.event.synchronize()
            return lane.host.tobytes()

    def close(self) -> None:
        """See `DevicePages.close`."""
        torch.cuda.synchronize(self._device)
        self._slots = torch.empty((0, self._geometry.page_bytes), dtype=torch.uint8)

    @contextmanager
    def _own_lane(self) -> Iterator[_Lane]:
        """A lane that nobody else has; after a failure its stream is done before the next use."""
        lane = self._free_lane(is_waiting=True)
        assert lane is not None
        try:
            yield lane
        finally:
            lane.stream.synchronize()
            self._lanes.put(lane)

    def _free_lane(self, *, is_waiting: bool) -> _Lane | None:
        """A lane; None if there is none and nobody waits. RuntimeError when none comes free."""
        try:
            return self._lanes.get(block=is_waiting, timeout=LANE_TIMEOUT_S)
        except queue.Empty:
            if not is_waiting:
                return None
            raise RuntimeError("the device did not end a transfer in time") from None

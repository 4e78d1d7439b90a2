"""Prompts computed in a device's memory: a chunk's KV lands in the arena beside the next chunk.

Owns the stages of a chunk between the compute thread and the packing thread: earlier KV comes up
from the arena (host memory, pinned buffer, device), the chunk is computed over device slots, and
its KV goes down (device, pinned buffer, arena). A copy is asked for in the compute thread and
waited for where the chunk is packed, or in the compute thread where there is no room before it has
landed. Never commits anything.

Invariants: no thread waits for what another one has yet to begin; a chunk's slots keep their bytes
until it has landed or its prompt is forgotten; only the positions that a chunk computed are written
to the arena.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.chunk_lanes import HostPages, Lane, open_lane
from baton.engine.device_slots import DeviceSlots, Resident
from baton.engine.prompt_chunk import PromptChunk
from baton.engine.transformer import Transformer
from baton.errors import Reason, ServiceError
from baton.kv.layout import copy_slots, page_view

LANES: Final = 4
"""Chunks whose KV goes down at once; a chunk beyond them goes when it is packed."""

UP_LANES: Final = 2
"""While one piece of earlier KV goes up, the next is put into its buffer."""


class HostArena(Protocol):
    """Where KV comes from and lands."""

    def page(self, page: int) -> memoryview:
        """The page's slot, writable."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Flight:
    """A computed chunk of `owner`, positions [first, end), on its way: row i of its copy is device
    slot `slots[i]` and goes to arena page `pages[i]`. `lane` None: its copy was not begun.

    `ending` is held by whoever ends it, once; that need not be who packs it.
    """

    owner: int
    slots: tuple[int, ...]
    pages: tuple[int, ...]
    first: int
    end: int
    lane: Lane | None
    ending: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False
    has_landed: bool = False

    def rows(self, block_tokens: int) -> Iterator[tuple[int, int, int]]:
        """For each page: its number, and the slots [first, end) of it that the chunk computed."""
        start = self.first // block_tokens * block_tokens
        for index, page in enumerate(self.pages):
            begin = start + index * block_tokens
            end = min(self.end, begin + block_tokens)
            yield page, max(self.first, begin) - begin, end - begin


class DeviceChunks:
    """`transformer` computes over pages in device memory, all of which are this object's.

    `chunk_tokens` is what a lane's buffer holds. `prefill_batch` and `remap` are called from one
    thread, `land` and `forget` from any.
    """

    def __init__(
        self, transformer: Transformer, arena: HostArena, chunk_tokens: int, lanes: int = LANES
    ) -> None:
        self._transformer = transformer
        self._arena = arena
        pages = transformer.pages
        self._geometry = pages.geometry
        self._block_tokens = pages.geometry.block_tokens
        self._memory = pages.memory
        # A chunk that begins inside a page touches one page more.
        self._lane_pages = -(-chunk_tokens // self._block_tokens) + 1
        self._lane_count = lanes
        self._lanes = [self._open_lane() for _ in range(lanes)]
        self._up_lanes = [self._open_lane() for _ in range(UP_LANES)]
        self._spare = self._open_lane()
        self._spare_lock = threading.Lock()
        # Held for bookkeeping only, never while something is copied or computed.
        self._lock = threading.Lock()
        self._slots = DeviceSlots(pages.page_count, self._block_tokens)
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._passing_owners = count(-1, -1)

    @property
    def in_flight(self) -> int:
        """Chunks that have not landed."""
        return len(self._flights)

    @property
    def free_slots(self) -> int:
        """Device slots of no prompt."""
        return self._slots.free

    def prefill_batch(self, chunks: Sequence[PromptChunk]) -> list[torch.Tensor | None]:
        """As `Transformer.prefill_batch`, whose page tables name arena pages; KV of chunks that
        have an owner is on its way to them when this returns, other chunks' KV goes nowhere.
        """
        owners = [next(self._passing_owners) if c.owner is None else c.owner for c in chunks]
        try:
            placed = [
                self._placed(owner, chunk, owners)
                for owner, chunk in zip(owners, chunks, strict=True)
            ]
            found = self._transformer.prefill_batch(placed)
            for owner, chunk in zip(owners, chunks, strict=True):
                if chunk.owner is not None:
                    self._depart(owner, chunk)
        finally:
            for owner in owners:
                if owner < 0:
                    self.forget(owner)
        if self._memory.is_cuda:
            # What is measured is the computation; the copies behind it go on.
            torch.cuda.current_stream(self._memory.device).synchronize()
        return found

    def land(self, owner: int, first_position: int) -> None:
        """Returns when the KV of the owner's chunk at that position is in the arena. ServiceError
        INTERNAL where it did not get there, although another prompt needed its slots.
        """
        with self._lock:
            flight = self._flights[owner, first_position]
        try:
            self._end(flight, is_wanted=True)
            if not flight.has_landed:
                raise ServiceError(
                    Reason.INTERNAL, "a chunk's KV did not come from the device into the arena"
                )
        finally:
            with self._lock:
                del self._flights[owner, first_position]

    def forget(self, owner: int) -> None:
        """The prompt is over: what has not landed is dropped, its slots are free."""
        with self._lock:
            flights = {key: one for key, one in self._flights.items() if key[0] == owner}
        for flight in flights.values():
            self._end(flight, is_wanted=False)
        with self._lock:
            for key in flights:
                del self._flights[key]
            self._slots.forget(owner)

    def remap(self, arena: HostArena) -> None:
        """KV comes from and lands in another arena from now on."""
        self._arena = arena

    def check_invariants(self) -> None:
        """For tests and idle moments."""
        with self._lock:
            self._slots.check_invariants()
            under_way = [one for one in self._flights.values() if not one.is_over]
            flying = sum(flight.lane is not None for flight in under_way)
            assert flying + len(self._lanes) == self._lane_count

    def _open_lane(self) -> Lane:
        return open_lane(self._memory, self._lane_pages, self._geometry.page_bytes)

    def _placed(self, owner: int, chunk: PromptChunk, kept: Sequence[int]) -> PromptChunk:
        """The chunk over device slots, which hold all KV before it."""
        resident = self._room(owner, chunk.end, kept)
        if resident.valid_end < chunk.first_position:
            self._bring_up(resident, chunk)
            resident.valid_end = chunk.first_position
        return replace(chunk, page_table=tuple(resident.slots))

    def _room(self, owner: int, end: int, kept: Sequence[int]) -> Resident:
        """Slots for the owner's positions [0, end); where there are too few, others land first."""
        while True:
            with self._lock:
                try:
                    return self._slots.reach(owner, end, kept)
                except ServiceError:
                    waiting = [
                        flight
                        for (other, _), flight in self._flights.items()
                        if other not in kept and not flight.is_over
                    ]
                    if not waiting:
                        raise
            self._end(waiting[0], is_wanted=True)

    def _bring_up(self, resident: Resident, chunk: PromptChunk) -> None:
        first = resident.valid_end // self._block_tokens
        end = -(-chunk.first_position // self._block_tokens)
        for turn, start in enumerate(range(first, end, self._lane_pages)):
            lane = self._up_lanes[turn % UP_LANES]
            indexes = range(start, min(start + self._lane_pages, end))
            lane.wait()
            for row, index in enumerate(indexes):
                lane.host[row] = self._page(chunk.page_table[index])
            lane.start_up(resident.slots[indexes.start : indexes.stop])

    def _depart(self, owner: int, chunk: PromptChunk) -> None:
        """Ask for the way down of a chunk that is being computed, if there is a lane for it."""
        first = chunk.first_position // self._block_tokens
        end = -(-chunk.end // self._block_tokens)
        with self._lock:
            resident = self._slots.of(owner)
            fits = end - first <= self._lane_pages
            lane = self._lanes.pop() if fits and self._lanes else None
            flight = _Flight(
                owner=owner,
                slots=tuple(resident.slots[first:end]),
                pages=tuple(chunk.page_table[first:end]),
                first=chunk.first_position,
                end=chunk.end,
                lane=lane,
            )
            resident.flights += 1
            resident.valid_end = chunk.end
            self._flights[owner, chunk.first_position] = flight
        if lane is not None:
            lane.start_down(flight.slots)

    def _end(self, flight: _Flight, *, is_wanted: bool) -> None:
        """Returns when the flight is over: landed, by whoever came first, or dropped."""
        with flight.ending:
            if flight.is_over:
                return
            try:
                if flight.lane is not None:
                    flight.lane.wait()
                    if is_wanted:
                        self._put(flight, flight.lane.host)
                elif is_wanted:
                    self._land_late(flight)
                flight.has_landed = is_wanted
            finally:
                with self._lock:
                    flight.is_over = True
                    self._slots.of(flight.owner).flights -= 1
                    if flight.lane is not None:
                        self._lanes.append(flight.lane)

    def _land_late(self, flight: _Flight) -> None:
        """Copy down by the spare lane, piece by piece."""
        size = self._lane_pages
        with self._spare_lock:
            for start in range(0, len(flight.slots), size):
                self._spare.start_down(flight.slots[start : start + size])
                self._spare.wait()
                self._put(flight, self._spare.host, start)

    def _put(self, flight: _Flight, host: HostPages, start: int = 0) -> None:
        """The buffer's rows, which are those of the flight from `start` on, into the arena."""
        rows = list(flight.rows(self._block_tokens))[start : start + self._lane_pages]
        for row, (number, first, end) in enumerate(rows):
            page = self._page(number)
            if end - first == self._block_tokens:
                page[:] = host[row]
            else:
                source = page_view(self._geometry, host[row])
                target = page_view(self._geometry, page)
                copy_slots(source, first, target, first, end - first)

    def _page(self, number: int) -> NDArray[np.uint8]:
        """The content of an arena page [page_bytes], writable."""
        page = self._arena.page(number)
        return np.frombuffer(page, dtype=np.uint8, count=self._geometry.page_bytes)

"""Device pages on a CUDA device: the same bytes as with the stand-in, from many threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from baton.arena.device import SlotPart
from baton.arena.device_standin import StandInPages
from baton.engine.device_cuda import LANES, CudaPages
from baton.kv.layout import KvDtype, KvGeometry

pytestmark = pytest.mark.gpu

GEOMETRY = KvGeometry(
    layers=4, kv_heads=3, head_dim=64, head_dim_v=64, block_tokens=16, dtype=KvDtype.BF16
)
SLOTS = 4 * LANES


def random_page(seed: int) -> memoryview:
    """A page of an arena."""
    return memoryview(bytearray(np.random.default_rng(seed).bytes(GEOMETRY.page_bytes)))


def test_every_slot_gets_and_keeps_its_own_bytes() -> None:
    """Loads, reads and clears from more threads than there are lanes."""
    pages = CudaPages(GEOMETRY, SLOTS)
    sources = [random_page(slot) for slot in range(SLOTS)]
    assert not any(pages.read(SLOTS - 1))
    with ThreadPoolExecutor(2 * LANES) as threads:
        list(threads.map(pages.load, range(SLOTS), sources))
        found = list(threads.map(pages.read, range(SLOTS)))
        assert found == [bytes(source) for source in sources]
        list(threads.map(pages.clear, range(0, SLOTS, 2)))
        for slot, content in enumerate(threads.map(pages.read, range(SLOTS))):
            assert content == (bytes(len(content)) if slot % 2 == 0 else bytes(sources[slot]))
    pages.close()


def test_parts_are_written_through_as_by_the_stand_in() -> None:
    """More parts than lanes, of several slots; other bytes of the arena's pages stay."""
    pages, model = CudaPages(GEOMETRY, SLOTS), StandInPages(GEOMETRY, SLOTS)
    for slot in range(SLOTS):
        pages.load(slot, random_page(slot))
        model.load(slot, random_page(slot))
    random = np.random.default_rng(9)
    ours = [random_page(100 + slot) for slot in range(SLOTS)]
    theirs = [memoryview(bytearray(page)) for page in ours]
    for slot in range(SLOTS):
        first = int(random.integers(0, GEOMETRY.block_tokens))
        tokens = int(random.integers(1, GEOMETRY.block_tokens - first + 1))
        for target, device in ((ours, pages), (theirs, model)):
            part = SlotPart(slot=slot, page=target[slot], first=first, tokens=tokens)
            device.write_through([part])
    every = [SlotPart(slot=s, page=ours[s], first=0, tokens=1) for s in range(SLOTS)]
    pages.write_through(every)
    model.write_through([SlotPart(slot=s, page=theirs[s], first=0, tokens=1) for s in range(SLOTS)])
    assert [bytes(page) for page in ours] == [bytes(page) for page in theirs]
    pages.close()


def test_an_arena_is_page_locked_and_let_go() -> None:
    """A second lock of the same memory is refused by the driver while the first one stands."""
    pages, arena = CudaPages(GEOMETRY, 1), memoryview(bytearray(1 << 20))
    runtime = torch.cuda.cudart()
    address = np.frombuffer(arena, dtype=np.uint8).ctypes.data
    with pages.lock_host(arena):
        assert int(runtime.cudaHostRegister(address, 1 << 20, 0)) != 0
    assert int(runtime.cudaHostRegister(address, 1 << 20, 0)) == 0
    assert int(runtime.cudaHostUnregister(address)) == 0

"""Prompts over device memory: the same logits and the same KV in the arena as computed there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.device_chunks import LANES, DeviceChunks
from baton.engine.kv_pages import KvPages
from baton.engine.prompt_chunk import PromptChunk
from baton.engine.transformer import ComputeCancelled, Transformer
from baton.engine.weights import ComputeDtype, load_weights
from baton.errors import Reason, ServiceError
from baton.kv.layout import KvDtype, KvGeometry
from baton.testing.tiny_models import GQA_TIED, write_directory

BLOCK = 16
ARENA_PAGES = 64
CHUNK = 32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Arena:
    """Pages in ordinary memory; `computed` is the same memory as torch sees it."""

    def __init__(self, geometry: KvGeometry) -> None:
        self._memory = bytearray(ARENA_PAGES * geometry.slot_bytes)
        self._slot_bytes = geometry.slot_bytes
        self.computed = KvPages.from_buffer(self._memory, geometry, ARENA_PAGES)

    def page(self, page: int) -> memoryview:
        start = page * self._slot_bytes
        return memoryview(self._memory)[start : start + self._slot_bytes]

    def bytes_of(self, table: list[int]) -> list[bytes]:
        return [bytes(self.page(page)) for page in table]


class Gone:
    """An arena that nothing can be written to."""

    def page(self, page: int) -> memoryview:
        raise RuntimeError(f"page {page} is gone")


class Bench:
    """One model computed in an arena, and by way of a device in another."""

    def __init__(self, path: Path, device: str, kv: KvDtype, slots: int) -> None:
        here = load_weights(path, ComputeDtype.FLOAT32)
        geometry = here.config.kv_geometry(BLOCK, kv)
        self.expected, self.arena = Arena(geometry), Arena(geometry)
        self.plain = Transformer(here, self.expected.computed)
        there = load_weights(path, ComputeDtype.FLOAT32, device=device)
        pages = KvPages.allocate(geometry, slots, device)
        self.chunks = DeviceChunks(Transformer(there, pages), self.arena, CHUNK)
        # On another device sums are made in another order.
        self.tolerance = 0.0 if device == "cpu" else 1e-4

    def same(self, found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
        """Both there and equal, or both not."""
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert torch.allclose(found.cpu(), expected, rtol=0.0, atol=self.tolerance)

    def same_pages(self, table: list[int], tokens: int) -> None:
        """The computed positions as numbers; all other bytes are as they were."""
        for index, page in enumerate(table):
            count = min(BLOCK, tokens - index * BLOCK)
            ours = self.arena.computed.memory[page].float()
            theirs = self.expected.computed.memory[page].float()
            if not self.tolerance:
                assert torch.equal(ours, theirs), (index, page)
                continue
            for layer in range(GQA_TIED.layers):
                found = self.arena.computed.layer(layer)[page, :, :, :count].float()
                wanted = self.expected.computed.layer(layer)[page, :, :, :count].float()
                assert torch.allclose(found, wanted, rtol=0.0, atol=self.tolerance)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return write_directory(tmp_path_factory.mktemp("tiny") / "model", GQA_TIED)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Ordinary memory as a device, and a CUDA device where there is one."""
    return str(request.param)


@pytest.fixture
def bench(path: Path, device: str) -> Iterator[Bench]:
    made = Bench(path, device, KvDtype.F32, 32)
    yield made
    assert made.chunks.in_flight == 0
    made.chunks.check_invariants()


def tokens_of(count: int, seed: int = 0) -> list[int]:
    """Random text tokens."""
    return [int(one) for one in np.random.default_rng(seed).integers(3, 250, count)]


def chunks_of(tokens: list[int], owner: int | None, table: list[int]) -> list[PromptChunk]:
    """A whole prompt, cut."""
    return [
        PromptChunk(
            tokens=tokens[first : first + CHUNK],
            first_position=first,
            page_table=table,
            wants_logits=first + CHUNK >= len(tokens),
            owner=owner,
        )
        for first in range(0, len(tokens), CHUNK)
    ]


@pytest.mark.parametrize("kv", [KvDtype.F32, KvDtype.INT8])
@pytest.mark.parametrize("count", [1, 16, 32, 75])
def test_a_prompt_lands_as_if_it_was_computed_there(
    path: Path, device: str, kv: KvDtype, count: int
) -> None:
    """Chunk i+1 is computed before chunk i landed, in a scattered page table."""
    bench = Bench(path, device, kv, 32)
    tokens, table = tokens_of(count), [9, 3, 40, 12, 7]
    before = None
    for chunk in chunks_of(tokens, 5, table):
        expected = bench.plain.prefill_batch([chunk])[0]
        bench.same(bench.chunks.prefill_batch([chunk])[0], expected)
        if before is not None:
            bench.chunks.land(5, before)
        before = chunk.first_position
    assert before is not None
    bench.chunks.land(5, before)
    bench.chunks.forget(5)
    bench.same_pages(table[: -(-count // BLOCK)], count)
    assert bench.chunks.free_slots == 32


def test_a_cached_prefix_comes_up_and_is_not_written_again(bench: Bench) -> None:
    """It ends inside a page: of that page only the slots behind it are written."""
    tokens, table = tokens_of(90), list(range(20, 26))
    for chunk in chunks_of(tokens[:55], None, table):
        bench.plain.prefill_batch([chunk])
    for page in table[:4]:
        bench.arena.page(page)[:] = bench.expected.page(page)
    marked = bench.arena.page(table[0])
    marked[:8] = b"\xff" * 8
    bench.expected.page(table[0])[:8] = b"\xff" * 8
    # NaN in the first key: whoever reads the prefix from the arena has it in the logits, too.
    rest = PromptChunk(
        tokens=tokens[55:], first_position=55, page_table=table, wants_logits=True, owner=1
    )
    expected = bench.plain.prefill_batch([rest])[0]
    found = bench.chunks.prefill_batch([rest])[0]
    assert expected is not None
    assert found is not None
    assert torch.isnan(expected).any()
    assert torch.equal(torch.isnan(found.cpu()), torch.isnan(expected))
    bench.chunks.land(1, 55)
    bench.chunks.forget(1)
    assert bench.arena.bytes_of(table[:3]) == bench.expected.bytes_of(table[:3])


def test_prompts_of_one_pass_land_each_in_its_own_pages(bench: Bench) -> None:
    """More of them than lanes: the copy of the last ones begins when they are packed."""
    prompts = [tokens_of(20, seed) for seed in range(LANES + 2)]
    tables = [[2 * index, 2 * index + 1] for index in range(len(prompts))]
    chunks = [chunks_of(p, owner, tables[owner])[0] for owner, p in enumerate(prompts)]
    expected = bench.plain.prefill_batch(chunks)
    found = bench.chunks.prefill_batch(chunks)
    assert bench.chunks.in_flight == len(prompts)
    with ThreadPoolExecutor(len(prompts)) as threads:
        list(threads.map(lambda owner: bench.chunks.land(owner, 0), range(len(prompts))))
    for owner, table in enumerate(tables):
        bench.same(found[owner], expected[owner])
        bench.same_pages(table, 20)
        bench.chunks.forget(owner)


def test_what_had_to_give_way_comes_up_again(path: Path, device: str) -> None:
    """Device memory for one prompt and a half: they take turns and push each other out."""
    bench = Bench(path, device, KvDtype.F32, 8)
    tables = [list(range(0, 6)), list(range(10, 16))]
    prompts = [chunks_of(tokens_of(90, seed), seed, tables[seed]) for seed in (0, 1)]
    for pair in zip(*prompts, strict=True):
        for chunk in pair:
            expected = bench.plain.prefill_batch([chunk])[0]
            bench.same(bench.chunks.prefill_batch([chunk])[0], expected)
            assert chunk.owner is not None
            bench.chunks.land(chunk.owner, chunk.first_position)
    for table in tables:
        bench.same_pages(table, 90)
    bench.chunks.check_invariants()


def test_what_is_in_flight_lands_before_it_gives_way(path: Path, device: str) -> None:
    """Its only copy is in the slots that another prompt needs; whoever packs it finds it landed."""
    bench = Bench(path, device, KvDtype.F32, 3)
    for owner, table in enumerate(([0, 8], [1, 9], [2, 10])):
        chunk = chunks_of(tokens_of(32, owner), owner, table)[0]
        expected = bench.plain.prefill_batch([chunk])
        bench.same(bench.chunks.prefill_batch([chunk])[0], expected[0])
        bench.chunks.check_invariants()
    bench.same_pages([0, 8], 32)
    bench.chunks.land(1, 0)
    bench.chunks.forget(0)
    bench.chunks.land(2, 0)
    bench.same_pages([2, 10], 32)
    bench.chunks.check_invariants()
    assert bench.chunks.in_flight == 0


def test_a_landing_that_fails_for_another_prompt_fails_whoever_packs_it(path: Path) -> None:
    """The pages hold nothing then: they must not be packed as if they did."""
    bench = Bench(path, "cpu", KvDtype.F32, 3)
    first, second = (
        chunks_of(tokens_of(32, owner), owner, [owner, owner + 8])[0] for owner in (0, 1)
    )
    bench.chunks.prefill_batch([first])
    arena = bench.arena
    bench.chunks.remap(Gone())
    with pytest.raises(RuntimeError, match="gone"):
        bench.chunks.prefill_batch([second])
    bench.chunks.remap(arena)
    with pytest.raises(ServiceError) as failed:
        bench.chunks.land(0, 0)
    assert failed.value.reason is Reason.INTERNAL
    bench.chunks.forget(0)
    bench.chunks.forget(1)
    assert (bench.chunks.in_flight, bench.chunks.free_slots) == (0, 3)
    bench.chunks.check_invariants()


def test_what_does_not_fit_is_refused_and_nothing_stays(path: Path, device: str) -> None:
    """A pass over all of device memory: refused whole, so that its chunks are tried one by one."""
    bench = Bench(path, device, KvDtype.F32, 3)
    chunks = [chunks_of(tokens_of(32, seed), seed, [seed, seed + 8])[0] for seed in (0, 1)]
    with pytest.raises(ServiceError) as refused:
        bench.chunks.prefill_batch(chunks)
    assert refused.value.reason is Reason.PAGES_EXHAUSTED
    assert bench.chunks.in_flight == 0
    for chunk in chunks:
        assert bench.chunks.prefill_batch([chunk])[0] is not None
        bench.chunks.land(chunk.owner or 0, 0)
    bench.chunks.check_invariants()


def test_a_prompt_that_is_given_up_leaves_nothing_in_flight(bench: Bench) -> None:
    """Cancelled in the middle, or with a chunk that nobody will pack."""
    table = list(range(6))
    first, second, *_ = chunks_of(tokens_of(90), 3, table)
    bench.chunks.prefill_batch([first])
    stopped: dict[str, Any] = {"should_cancel": lambda: True}
    with pytest.raises(ComputeCancelled):
        bench.chunks.prefill_batch(
            [
                PromptChunk(
                    tokens=second.tokens,
                    first_position=second.first_position,
                    page_table=table,
                    owner=3,
                    **stopped,
                )
            ]
        )
    bench.chunks.forget(3)
    assert bench.chunks.free_slots == 32
    assert bench.arena.bytes_of(table) == [bytes(len(bench.arena.page(0)))] * 6


def test_a_chunk_without_an_owner_lands_nowhere(bench: Bench) -> None:
    """The last token once more, for its logits: committed slots are not written twice."""
    tokens, table = tokens_of(32), [4, 5]
    bench.plain.prefill_batch(chunks_of(tokens, None, table))
    for page in table:
        bench.arena.page(page)[:] = bench.expected.page(page)
    again = PromptChunk(tokens=tokens[31:], first_position=31, page_table=table, wants_logits=True)
    before = bench.arena.bytes_of(table)
    found = bench.chunks.prefill_batch([again])[0]
    bench.same(found, bench.plain.prefill_batch([again])[0])
    assert bench.arena.bytes_of(table) == before
    assert bench.chunks.free_slots == 32

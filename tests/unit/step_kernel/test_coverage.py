"""Every weight and KV type on every instruction set: batches of 1 to 64, contexts of 1 to 8,192,
partial pages, pages in any order at any address; equal to torch within the class.

Torch computes in float32 over the same numbers: the weights as stored, the KV as it is in the
pages. What is left between the two is the class's own rounding. `make test` runs a small set,
`make test-more` the large one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pytest

from baton.engine.kernel_weights import WeightMode
from baton.engine.kv_pages import KvPages
from baton.engine.step_kernel_abi import Isa, is_supported
from baton.kv.layout import KvDtype
from baton.testing.tiny_models import GQA_TIED, write_directory, write_gguf
from tests.unit.step_kernel.kernels import (
    VECTOR_ISAS,
    Model,
    distance,
    fill,
    load_model,
    numbers_of,
    put,
    require_isa,
    require_library,
)

CONTEXT_MAX: Final = 8192
BLOCK: Final = 16
SHARED_PAGES: Final = 40
KV_TYPES: Final = (KvDtype.BF16, KvDtype.F16, KvDtype.F32, KvDtype.INT8)
# How the matrices are kept, and the largest distance of a step: with float32 KV, with other KV.
# The step's own K and V are rounded, which shows most where they are all there is.
KINDS: Final = {
    "f32": (WeightMode.FLOAT32, 1e-5, 2e-2),
    "bf16": (WeightMode.BFLOAT16, 5e-2, 5e-2),
    "int8": (WeightMode.INT8, 2e-1, 2e-1),
    "Q4_1": (WeightMode.PACKED, 2e-3, 2e-2),
    "Q8_0": (WeightMode.PACKED, 2e-3, 2e-2),
}
# A step's own K and V in int8: where they are all there is, three hundredths were seen.
INT8_KV_BOUND: Final = 6e-2
SMALL_CONTEXTS: Final = (1, 2, 15, 16, 17, 31, 33, 64, 65, 130)
# Where pages, vectors and parts of attention begin and end, and between.
LARGE_CONTEXTS: Final = (
    *(1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 95, 127, 128, 129, 255, 257, 511, 513),
    *(1000, 1023, 1024, 1025, 1040, 2047, 2049, 3000, 4095, 4097, 5555, 8190, 8191, 8192),
)
LARGE_BATCHES: Final = (1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 33, 63, 64)


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    require_library()


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory) -> tuple[str, Model]:
    """One model kept in one way."""
    tiny = replace(GQA_TIED, max_context=CONTEXT_MAX)
    folder = tmp_path_factory.mktemp(request.param)
    if KINDS[request.param][0] is WeightMode.PACKED:
        path = write_gguf(folder / "model.gguf", tiny, matrix_type=request.param)
    else:
        path = write_directory(folder, tiny)
    return request.param, load_model(path)


@dataclass(frozen=True)
class Step:
    """One step over a batch."""

    tokens: list[int]
    positions: list[int]
    tables: list[list[int]]

    def alone(self, index: int) -> Step:
        """One of its sequences."""
        return Step([self.tokens[index]], [self.positions[index]], [self.tables[index]])


def make_step(contexts: list[int], seed: int) -> Step:
    """Sequences of these lengths, the new token counted. Full pages come in any order and may be
    shared; the page that a sequence writes is its own.
    """
    random = np.random.default_rng(seed)
    own = SHARED_PAGES + random.permutation(len(contexts))
    tables = [
        [*random.integers(0, SHARED_PAGES, (context - 1) // BLOCK).tolist(), int(page)]
        for context, page in zip(contexts, own, strict=True)
    ]
    tokens = random.integers(0, 256, len(contexts)).tolist()
    return Step(tokens, [context - 1 for context in contexts], tables)


def odd_pages(model: Model, dtype: KvDtype, batch: int, offset: int) -> KvPages:
    """Pages full of numbers, beginning `offset` bytes into a buffer."""
    geometry = model.weights.config.kv_geometry(BLOCK, dtype)
    count = SHARED_PAGES + batch
    buffer = bytearray(count * geometry.slot_bytes + offset)
    pages = KvPages.from_buffer(buffer, geometry, count, offset=offset)
    fill(pages, seed=batch)
    return pages


def copied(model: Model, pages: KvPages, dtype: KvDtype, offset: int = 0) -> KvPages:
    """The same numbers in pages of another type, or at another address."""
    geometry = model.weights.config.kv_geometry(BLOCK, dtype)
    buffer = bytearray(pages.page_count * geometry.slot_bytes + offset)
    same = KvPages.from_buffer(buffer, geometry, pages.page_count, offset=offset)
    for layer in range(geometry.layers):
        put(same, layer, numbers_of(pages, layer))
    return same


def check(kind: tuple[str, Model], dtype: KvDtype, isas: tuple[Isa, ...], step: Step, offset: int):
    """One step on each instruction set against torch; then some of its sequences alone, which must
    come to the same bits.
    """
    name, model = kind
    mode, exact_bound, bound = KINDS[name]
    pages = odd_pages(model, dtype, len(step.tokens), offset)
    torch_path = model.transformer(copied(model, pages, KvDtype.F32))
    expected = torch_path.decode_step(step.tokens, step.positions, step.tables).numpy()
    for isa in isas:
        kernel = model.kernel(
            copied(model, pages, dtype, offset), weight_mode=mode, isa=isa, threads=2
        )
        try:
            found = kernel.decode_step(step.tokens, step.positions, step.tables)
            limit = exact_bound if dtype is KvDtype.F32 else bound
            if dtype is KvDtype.INT8:
                limit = max(bound, INT8_KV_BOUND)
            assert distance(found, expected) <= limit, (name, dtype, isa, step.positions)
            for index in {0, len(step.tokens) // 2, len(step.tokens) - 1}:
                one = step.alone(index)
                alone = kernel.decode_step(one.tokens, one.positions, one.tables)
                np.testing.assert_array_equal(alone[0], found[index])
        finally:
            kernel.close()


@pytest.mark.parametrize("dtype", KV_TYPES, ids=lambda dtype: dtype.text)
@pytest.mark.parametrize("isa", ["best", "portable"])
def test_batches_equal_torch(kind, dtype, isa):
    """The small set, with and without the CPU's vectors."""
    chosen = Isa.PORTABLE if isa == "portable" else Isa.AUTO
    step = make_step(list(SMALL_CONTEXTS), seed=1)
    check(kind, dtype, (chosen,), step, offset=20)


@pytest.mark.more
@pytest.mark.parametrize("dtype", KV_TYPES, ids=lambda dtype: dtype.text)
def test_every_batch_and_context_equals_torch(kind, dtype):
    """The large set: contexts run through all lengths while the batch grows."""
    isas = tuple(isa for isa in VECTOR_ISAS if is_supported(isa))
    first = 0
    for number, batch in enumerate(LARGE_BATCHES):
        contexts = [LARGE_CONTEXTS[(first + i) % len(LARGE_CONTEXTS)] for i in range(batch)]
        first += batch
        check(kind, dtype, isas, make_step(contexts, seed=number), offset=4 * (number % 7))


@pytest.mark.more
@pytest.mark.parametrize("isa", VECTOR_ISAS)
def test_every_context_alone_equals_torch(kind, isa):
    """Each length by itself, where nothing else in the batch hides it."""
    require_isa(isa)
    for number, context in enumerate(LARGE_CONTEXTS):
        step = make_step([context], seed=number)
        check(kind, KvDtype.BF16, (isa,), step, offset=4 * (number % 5))


@pytest.mark.parametrize("offset", [0, 4, 12, 20, 60, 4092])
def test_any_address_gives_the_same_bits(kind, offset):
    """Where an arena is mapped is nobody's choice."""
    name, model = kind
    step = make_step([40, 129], seed=3)
    pages = odd_pages(model, KvDtype.BF16, 2, 0)
    results = []
    for place in (0, offset):
        kernel = model.kernel(copied(model, pages, KvDtype.BF16, place), weight_mode=KINDS[name][0])
        results.append(kernel.decode_step(step.tokens, step.positions, step.tables))
        kernel.close()
    np.testing.assert_array_equal(*results)

"""Two requests in one process: neither sees the other's KV, activations or logits.

Pages that no table of a step names hold not-a-number here: one read of them and every logit of the
step would be one, too. And whatever ran before in the same instance, a step's bits are those of an
instance that ran nothing else.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.engine.kernel_weights import WeightMode
from baton.kv.layout import KvDtype
from baton.testing.tiny_models import GQA_TIED, write_directory
from tests.unit.step_kernel.kernels import (
    OTHER_TABLE,
    PAGES,
    TABLE,
    VECTOR_ISAS,
    copy_of,
    load_model,
    page_bytes,
    require_isa,
    require_library,
)

MODES = (WeightMode.FLOAT32, WeightMode.BFLOAT16, WeightMode.INT8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    require_library()
    return load_model(write_directory(tmp_path_factory.mktemp("model"), GQA_TIED))


def poisoned(model, tables, dtype):
    """Random KV in the pages of `tables`, not-a-number in all others."""
    pages = model.random_pages(dtype)
    others = sorted(set(range(PAGES)) - {page for table in tables for page in table})
    for layer in range(pages.geometry.layers):
        pages.layer(layer)[torch.tensor(others)] = float("nan")
    return pages


@pytest.mark.parametrize("dtype", [KvDtype.F32, KvDtype.BF16, KvDtype.F16], ids=lambda d: d.text)
@pytest.mark.parametrize("isa", VECTOR_ISAS)
def test_pages_of_nobody_in_the_step_are_not_read(model, isa, dtype):
    """Not by a fetch ahead, not by a vector that is wider than a page's end, not by a part."""
    require_isa(isa)
    pages = poisoned(model, [TABLE], dtype)
    kernel = model.kernel(pages, isa=isa, prefetch_pages=8, threads=2)
    for position in (0, 1, 15, 16, 17, 63, 64, 100, 191):
        assert np.isfinite(kernel.decode_step([5], [position], [TABLE])).all(), position
    kernel.close()


def test_slots_behind_a_sequences_end_are_not_read(model):
    """A page tail holds what somebody left there before, if it holds anything."""
    pages = model.random_pages()
    position = 35
    for layer in range(pages.geometry.layers):
        pages.layer(layer)[TABLE[2], :, :, position % 16 + 1 :] = float("nan")
    kernel = model.kernel(pages, threads=2)
    assert np.isfinite(kernel.decode_step([5], [position], [TABLE])).all()
    kernel.close()


@pytest.mark.parametrize("mode", MODES)
def test_what_ran_before_leaves_no_bit_behind(model, mode):
    """One instance steps two requests in turns, alone and together; each gets the bits that it gets
    from an instance of its own.
    """
    pages = model.random_pages()
    shared = model.kernel(copy_of(pages), weight_mode=mode, threads=2)
    first = model.kernel(copy_of(pages), weight_mode=mode)
    second = model.kernel(copy_of(pages), weight_mode=mode)
    for turn in range(12):
        ours = first.decode_step([7 + turn], [40 + turn], [TABLE])
        theirs = second.decode_step([201 - turn], [130 + turn], [OTHER_TABLE])
        if turn % 3 == 2:
            both = shared.decode_step(
                [7 + turn, 201 - turn], [40 + turn, 130 + turn], [TABLE, OTHER_TABLE]
            )
            np.testing.assert_array_equal(both, np.concatenate((ours, theirs)))
            continue
        np.testing.assert_array_equal(
            shared.decode_step([201 - turn], [130 + turn], [OTHER_TABLE]), theirs
        )
        np.testing.assert_array_equal(shared.decode_step([7 + turn], [40 + turn], [TABLE]), ours)
    for kernel in (shared, first, second):
        kernel.close()


def test_a_request_that_ends_in_nonsense_harms_nobody(model):
    """Not-a-number in one request's KV is that request's alone, also within one batch."""
    pages = poisoned(model, [TABLE], KvDtype.F32)
    kernel = model.kernel(pages, threads=2)
    alone = kernel.decode_step([5], [60], [TABLE])
    both = kernel.decode_step([9, 5], [60, 60], [OTHER_TABLE, TABLE])
    assert np.isnan(both[0]).any()
    np.testing.assert_array_equal(both[1], alone[0])
    kernel.close()


def test_results_are_the_callers_own(model):
    """Logits of a step stay as they were when the next step of another request has run."""
    kernel = model.kernel(model.random_pages())
    ours = kernel.decode_step([5], [60], [TABLE])
    kept = ours.copy()
    kernel.decode_step([77], [90], [OTHER_TABLE])
    np.testing.assert_array_equal(ours, kept)
    kernel.close()


def test_a_step_writes_the_new_slots_only(model):
    """Every other byte of every page stays, whoever else is in the batch."""
    pages = model.random_pages()
    before = [page_bytes(pages, page).copy() for page in range(PAGES)]
    kernel = model.kernel(pages, threads=2)
    positions, tables = [33, 47], [TABLE, OTHER_TABLE]
    kernel.decode_step([5, 6], positions, tables)
    written = {table[position // 16] for position, table in zip(positions, tables, strict=True)}
    item = pages.geometry.dtype.itemsize * pages.geometry.head_dim
    for page in range(PAGES):
        changed = np.flatnonzero(before[page] != page_bytes(pages, page))
        if page not in written:
            assert changed.size == 0, page
            continue
        slots = set((changed // item % 16).tolist())
        index = [table[p // 16] for p, table in zip(positions, tables, strict=True)].index(page)
        assert slots == {positions[index] % 16}
    kernel.close()

"""Int8 pages in the step kernel: quantised as torch quantises them, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.kernel_weights import WeightMode
from baton.engine.step_kernel_abi import Activation
from baton.kv.layout import KvDtype, page_view, slot_crc
from baton.testing.tiny_models import GQA_TIED, write_directory
from tests.unit.step_kernel.kernels import (
    TABLE,
    VECTOR_ISAS,
    all_bytes,
    copy_of,
    distance,
    load_model,
    page_bytes,
    random_tokens,
    require_isa,
    require_library,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    require_library()
    return load_model(write_directory(tmp_path_factory.mktemp("model"), GQA_TIED))


@pytest.mark.parametrize("isa", VECTOR_ISAS)
def test_steps_write_torchs_pages(model, isa):
    """Scales to rounding; elements the same but for those on the border between two steps."""
    require_isa(isa)
    pages = model.random_pages(KvDtype.INT8)
    theirs = copy_of(pages)
    kernel, torch_path = model.kernel(pages, isa=isa), model.transformer(theirs)
    for position, token in enumerate(random_tokens(40)):
        found = kernel.decode_step([token], [position], [TABLE])
        expected = torch_path.decode_step([token], [position], [TABLE]).numpy()
        # An element that falls on the other side of a border is 1/127 of its row's largest.
        assert distance(found, expected) <= 1e-2
        page = page_bytes(pages, TABLE[position // 16])
        assert kernel.slot_crcs() == (slot_crc(pages.geometry, page, position % 16),)
    kernel.close()
    for index in TABLE[:2]:
        own, other = (page_view(pages.geometry, page_bytes(one, index)) for one in (pages, theirs))
        np.testing.assert_allclose(own.scales, other.scales, rtol=1e-2)
        for ours, wanted in ((own.k, other.k), (own.v, other.v)):
            gap = np.abs(ours.astype(np.int32) - wanted.astype(np.int32))
            assert gap.max() <= 2
            assert (gap != 0).mean() < 0.02


@pytest.mark.parametrize("isa", VECTOR_ISAS)
def test_the_same_pages_give_the_same_logits(model, isa):
    """Nothing is rounded in reading: in float32 a step over given pages is torch's to rounding."""
    require_isa(isa)
    pages = model.random_pages(KvDtype.INT8)
    expected = model.transformer(copy_of(pages)).decode_step([9], [140], [TABLE]).numpy()
    kernel = model.kernel(pages, isa=isa, threads=2)
    assert distance(kernel.decode_step([9], [140], [TABLE]), expected) <= 1e-3
    assert kernel.numeric_class() == model.transformer(model.pages(KvDtype.INT8)).numeric_class()
    kernel.close()


def test_neither_batch_nor_threads_change_a_bit(model):
    """As with any other type."""
    alone, together = (model.random_pages(KvDtype.INT8) for _ in range(2))
    step = ([9, 8, 7], [100, 17, 0], [TABLE, [50, 51], [60]])
    single, batched = model.kernel(alone), model.kernel(together, threads=3)
    logits = batched.decode_step(*step)
    for index in range(3):
        one = single.decode_step(*([item[index]] for item in step))
        np.testing.assert_array_equal(one[0], logits[index])
    assert all_bytes(alone) == all_bytes(together)
    for kernel in (single, batched):
        kernel.close()


def test_the_class_says_so(model):
    """Rounded weights and int8 KV: a class of its own."""
    kernel = model.kernel(model.pages(KvDtype.INT8), weight_mode=WeightMode.BFLOAT16)
    assert kernel.activation is Activation.INT16
    assert kernel.numeric_class() == "weights=f32 act=bf16 acc=f32 kv=int8 invariant=no"
    kernel.close()

"""What the step kernel refuses, and that a refused step touches nothing."""

from __future__ import annotations

import resource

import numpy as np
import pytest

from baton.engine import step_kernel
from baton.engine.kernel_weights import WeightMode
from baton.engine.kv_pages import KvPages
from baton.engine.step_kernel import open_step_kernel
from baton.engine.step_kernel_abi import Error, Kind, Role, load
from baton.errors import Reason, ServiceError
from baton.kv.layout import KvDtype
from baton.testing.tiny_models import GQA_TIED, write_directory
from tests.unit.step_kernel.kernels import (
    PAGES,
    TABLE,
    all_bytes,
    load_model,
    require_library,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    require_library()
    return load_model(write_directory(tmp_path_factory.mktemp("model"), GQA_TIED))


@pytest.fixture
def kernel(model):
    kernel = model.kernel(model.random_pages(), batch_max=4, max_context=192)
    yield kernel
    kernel.close()


@pytest.mark.parametrize(
    ("tokens", "positions", "tables", "field"),
    [
        ([-1], [0], [TABLE], "tokens"),
        ([272], [0], [TABLE], "tokens"),
        ([2**31], [0], [TABLE], "tokens"),
        ([1], [-1], [TABLE], "first_position"),
        ([1], [192], [TABLE], "first_position"),
        ([1], [2**40], [TABLE], "first_position"),
        ([1], [16], [[3]], "page_table"),
        ([1], [0], [[]], "page_table"),
        ([1], [0], [[-1]], "page_table"),
        ([1], [0], [[PAGES]], "page_table"),
        ([1], [0], [[2**31]], "page_table"),
        ([1, 2], [3, 3], [[5], [5]], "page_table"),
        ([1, 2], [3, 20], [[5], [6]], "page_table"),
        ([], [], [], "tokens"),
        ([1] * 5, [0] * 5, [[page] for page in range(5)], "tokens"),
    ],
)
def test_wrong_steps_are_refused_and_write_nothing(kernel, tokens, positions, tables, field):
    """A page table comes from outside; a wrong one must end in an error, not in memory."""
    before = all_bytes(kernel.pages)
    with pytest.raises(ServiceError) as caught:
        kernel.decode_step(tokens, positions, tables)
    assert caught.value.reason is Reason.INVALID_REQUEST
    assert caught.value.field == field
    assert all_bytes(kernel.pages) == before


def test_limits_are_inclusive(kernel):
    """The last token id, position, page and batch size are all good."""
    tables = [[PAGES - 1 - 12 * index - block for block in range(12)] for index in range(4)]
    logits = kernel.decode_step([271] * 4, [191] * 4, tables)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("threads", 0),
        ("threads", 65),
        ("batch_max", 0),
        ("batch_max", 65),
        ("prefetch_pages", -1),
        ("max_context", 0),
        ("max_context", 513),
    ],
)
def test_options_out_of_range_are_named(model, option, value):
    """A wrong setting ends the start with its name."""
    with pytest.raises(ServiceError) as caught:
        model.kernel(model.pages(), **{option: value})
    assert caught.value.field == option


def test_pages_of_another_shape_are_refused(kernel, model):
    """Assigning pages is how an arena is exchanged; its layout must be the kernel's."""
    geometry = model.weights.config.kv_geometry(8, KvDtype.F32)
    with pytest.raises(ServiceError) as caught:
        kernel.pages = KvPages.allocate(geometry, 4)
    assert caught.value.reason is Reason.COMPAT_MISMATCH


def test_other_pages_serve_from_the_next_step(kernel, model):
    """The golden check runs on pages of its own and puts the live ones back."""
    live = kernel.pages
    before = all_bytes(live)
    kernel.pages = model.pages()
    kernel.decode_step([1], [0], [[0]])
    kernel.pages = live
    assert all_bytes(live) == before


def test_two_kernels_share_nothing(model):
    """Interleaved steps of two instances give what each gives alone."""
    pages = [model.random_pages() for _ in range(3)]
    first, second, alone = (model.kernel(one, threads=2) for one in pages)
    for position in range(30, 40):
        expected = alone.decode_step([5], [position], [TABLE])
        np.testing.assert_array_equal(first.decode_step([5], [position], [TABLE]), expected)
        second.decode_step([77], [position + 9], [TABLE])
    for kernel in (first, second, alone):
        kernel.close()


def test_memory_is_stated_and_constant(model):
    """The stated bytes do not move, and steps leave no memory behind."""
    kernel = model.kernel(model.random_pages(), threads=2)
    stated = kernel.memory
    assert stated.weight_bytes > 0
    assert stated.buffer_bytes > 0
    for _ in range(200):
        kernel.decode_step([5], [100], [TABLE])
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2000):
        kernel.decode_step([5], [100], [TABLE])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss <= peak_kib * 1.01
    assert kernel.memory == stated
    kernel.close()


def test_greedy_step_needs_no_logits(kernel):
    """Greedy decoding may skip 4 bytes a vocabulary entry; ties go to the lowest id."""
    full = kernel.step([5], [40], [TABLE])
    short = kernel.step([5], [40], [TABLE], needs_logits=False)
    assert short.logits is None
    assert short.best_tokens == full.best_tokens == (int(full.logits[0].argmax()),)
    assert short.slot_crcs == full.slot_crcs


def wide_config(ffi):
    """A model whose attention is wider than any matrix that is packed."""
    shape = ffi.new("bt_config *")
    shape.layers = shape.batch_max = shape.threads = shape.has_tied_head = 1
    shape.hidden = 2
    shape.heads = shape.kv_heads = shape.head_dim = shape.rotary_dim = 1024
    shape.intermediate = shape.vocabulary = shape.max_context = shape.block_tokens = 16
    shape.kv, shape.rms_eps, shape.weight_bytes = 3, 1e-5, 1 << 20
    return shape


def test_matrix_too_wide_to_be_packed_is_refused(model):
    """It was taken as one of no bytes, and written past the end of the weights."""
    ffi, library = load()
    made = ffi.new("bt_kernel **")
    assert library.bt_create(wide_config(ffi), made) == Error.OK
    kernel = ffi.gc(made[0], library.bt_destroy)
    size = 2 * 1024 * 1024 * 4
    source = ffi.new("char[]", size)
    assert library.bt_packed_bytes(Kind.F32, 2, 1024 * 1024) == 0
    code = library.bt_set_matrix(kernel, Role.OUTPUT, 0, Kind.F32, source, size)
    assert code == Error.BAD_MATRIX


def test_weights_larger_than_any_memory_are_refused(model):
    """The sum of their sizes does not run over."""
    ffi, library = load()
    shape = wide_config(ffi)
    shape.weight_bytes = 2**64 - 1
    assert library.bt_create(shape, ffi.new("bt_kernel **")) == Error.BAD_SHAPE


def test_no_library_leaves_the_torch_path(model, monkeypatch):
    """No compiler is no reason not to serve: one line says so, and there is no kernel."""

    def missing():
        return load(path=model.path / "absent.so")

    monkeypatch.setattr(step_kernel, "load", missing)
    assert open_step_kernel(model.path, model.pages()) is None


def test_damaged_model_is_no_reason_for_torch(model, tmp_path):
    """Falling back hides nothing that the torch path would refuse too."""
    with pytest.raises(ServiceError) as caught:
        open_step_kernel(tmp_path / "absent", model.pages())
    assert caught.value.reason is Reason.INVALID_REQUEST


def test_uncomputable_weight_mode_leaves_the_torch_path(model):
    """A model without blocks cannot be packed; the worker goes on."""
    options = step_kernel.KernelOptions(weight_mode=WeightMode.PACKED)
    assert open_step_kernel(model.path, model.pages(), options) is None

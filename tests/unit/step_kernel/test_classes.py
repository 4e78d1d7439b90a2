"""The rounded weight modes and KV types: near float32, and one result on every instruction set."""

from __future__ import annotations

import pytest

from baton.engine.config import read_config
from baton.engine.kernel_weights import WeightMode, default_mode
from baton.engine.step_kernel_abi import Activation, Isa, is_supported
from baton.errors import Reason, ServiceError
from baton.kv.layout import KvDtype, slot_crc
from baton.kv.numeric import NATIVE_Q4_1
from baton.testing.tiny_models import GQA_TIED, write_directory, write_gguf
from tests.unit.step_kernel.kernels import (
    TABLE,
    VECTOR_ISAS,
    copy_of,
    distance,
    load_model,
    page_bytes,
    require_isa,
    require_library,
)

KV_TYPES = (KvDtype.F32, KvDtype.BF16, KvDtype.F16, KvDtype.INT8)
# Distance of one step to float32 on the tiny model, whose few wide weights exaggerate rounding.
NEAR = {
    (WeightMode.FLOAT32, Activation.INT16): 2e-2,
    (WeightMode.BFLOAT16, Activation.INT16): 5e-2,
    (WeightMode.INT8, Activation.INT16): 1.5e-1,
    (WeightMode.INT8, Activation.INT8): 2e-1,
    (WeightMode.PACKED, Activation.INT16): 2e-2,
    (WeightMode.PACKED, Activation.INT8): 1.5e-1,
}
FORMATS = ("Q4_0", "Q4_1", "Q8_0")


@pytest.fixture(scope="module", autouse=True)
def library():
    require_library()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return load_model(write_directory(tmp_path_factory.mktemp("plain"), GQA_TIED))


@pytest.fixture(scope="module", params=FORMATS)
def packed(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "model.gguf"
    return load_model(write_gguf(path, GQA_TIED, matrix_type=request.param))


def steps(model, pages, **options):
    """Logits of a few steps and of a batch, over a copy of `pages`."""
    kernel = model.kernel(copy_of(pages), **options)
    try:
        alone = [kernel.decode_step([9], [140 + index], [TABLE])[0] for index in range(4)]
        tables = [TABLE, [page + 24 for page in TABLE], [page + 48 for page in TABLE]]
        batch = kernel.decode_step([3, 4, 5], [100, 17, 64], tables)
        return [*alone, *batch]
    finally:
        kernel.close()


@pytest.mark.parametrize("dtype", KV_TYPES, ids=lambda dtype: dtype.text)
@pytest.mark.parametrize("mode", [WeightMode.FLOAT32, WeightMode.BFLOAT16, WeightMode.INT8])
@pytest.mark.parametrize("activation", list(Activation))
def test_rounded_modes_stay_near_float32(plain, mode, activation, dtype):
    """Every mode with every KV type, and the same numbers wherever it runs."""
    if mode is not WeightMode.INT8 and activation is Activation.INT8:
        pytest.skip("integer activations are read by integer matrices only")
    exact = steps(plain, plain.random_pages())
    pages = plain.random_pages(dtype)
    options = {"weight_mode": mode, "activation": activation}
    reference = steps(plain, pages, isa=Isa.PORTABLE, **options)
    assert distance(reference, exact) <= NEAR[mode, activation]
    for isa in VECTOR_ISAS[1:]:
        if is_supported(isa):
            found = steps(plain, pages, isa=isa, **options)
            # Roundings flip where sums differ in the last bit, no more.
            assert distance(found, reference) <= NEAR[mode, activation]


@pytest.mark.parametrize("isa", VECTOR_ISAS)
@pytest.mark.parametrize("activation", list(Activation))
def test_packed_blocks_compute_the_stored_numbers(packed, isa, activation):
    """A packed matrix is the dequantised one: only activations are rounded."""
    require_isa(isa)
    pages = packed.random_pages()
    exact = steps(packed, pages)
    found = steps(
        packed, pages, weight_mode=WeightMode.PACKED, isa=isa, activation=activation, threads=2
    )
    assert distance(found, exact) <= NEAR[WeightMode.PACKED, activation]
    if activation is Activation.INT16:
        assert distance(found, exact) <= 2e-3


@pytest.mark.parametrize("dtype", KV_TYPES, ids=lambda dtype: dtype.text)
@pytest.mark.parametrize("isa", VECTOR_ISAS)
def test_slot_checksum_is_the_layouts(plain, dtype, isa):
    """The checksum that goes into the append record must be what the scrubber will compute."""
    require_isa(isa)
    pages = plain.random_pages(dtype)
    kernel = plain.kernel(pages, isa=isa)
    positions, tables = [35, 47, 0], [TABLE, [50, 51, 52], [60]]
    kernel.decode_step([1, 2, 3], positions, tables)
    expected = tuple(
        slot_crc(pages.geometry, page_bytes(pages, table[position // 16]), position % 16)
        for position, table in zip(positions, tables, strict=True)
    )
    assert kernel.slot_crcs() == expected
    kernel.close()


@pytest.mark.parametrize("prefetch_pages", [0, 1, 2, 64])
def test_prefetch_distance_changes_nothing(plain, prefetch_pages):
    """It is a hint to the memory; a distance past every table must not be followed."""
    pages = plain.random_pages()
    found = steps(plain, pages, prefetch_pages=prefetch_pages)
    assert distance(found, steps(plain, pages)) == 0.0


def test_default_mode_keeps_blocks_packed(tmp_path):
    """Nobody has to know the file's format to get the fast path."""
    blocks = load_model(write_gguf(tmp_path / "q.gguf", GQA_TIED, matrix_type="Q4_1"))
    kernel = blocks.kernel(blocks.pages(KvDtype.BF16), weight_mode=None)
    assert kernel.weight_mode is WeightMode.PACKED
    assert kernel.numeric_class() == NATIVE_Q4_1.text
    kernel.close()
    plain = write_directory(tmp_path / "plain", GQA_TIED)
    assert default_mode(read_config(plain)) is WeightMode.BFLOAT16


def test_packed_mode_refuses_what_has_no_blocks(plain):
    """Better a refusal that names a mode than a silent conversion."""
    with pytest.raises(ServiceError, match="bfloat16") as caught:
        plain.kernel(plain.pages(), weight_mode=WeightMode.PACKED)
    assert caught.value.reason is Reason.UNSUPPORTED
    assert caught.value.field == "weight_mode"

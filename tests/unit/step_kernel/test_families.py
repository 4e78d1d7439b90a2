"""Qwen2, Qwen3 and Phi-3 in the step kernel: the same tokens as torch, every weight and KV type
within its class, the batch changes no bit, and the golden check covers them.

Random tiny models of each family; torch is the specification, and itself compared with transformers
in the tests of the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch

from baton.engine.golden_check import GoldenCheck, TorchPath, own_reference
from baton.engine.kernel_golden import KernelPath
from baton.engine.kernel_weights import WeightMode
from baton.engine.kv_pages import KvPages
from baton.engine.step_kernel_abi import Activation, Isa
from baton.kv.layout import KvDtype
from tests.unit.engine.family_models import ORACLES, family_of, oracle_of, write_as_gguf
from tests.unit.step_kernel.kernels import (
    OTHER_TABLE,
    TABLE,
    VECTOR_ISAS,
    Model,
    copy_of,
    distance,
    load_model,
    require_isa,
    require_library,
)

CLOSE: Final = 1e-5
GREEDY_TOKENS: Final = 40
FORMATS: Final = ("Q4_0", "Q4_1", "Q8_0")
# Biases, norms of heads, and everything that Phi-3 may have at once; the others in test-more.
QUICK: Final = ("qwen2", "qwen3", "phi3_part_long")
MODELS: Final = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.more) for name in sorted(ORACLES)
]
# Plain C++ and the best there is in `make test`, those between in test-more.
EVERY_ISA: Final = [
    Isa.PORTABLE,
    Isa.AUTO,
    *(pytest.param(isa, marks=pytest.mark.more) for isa in VECTOR_ISAS[1:]),
]
# The largest distance of a step from float32 over the same numbers: with float32 KV, with other KV.
BOUNDS: Final = {
    (WeightMode.FLOAT32, Activation.INT16): (CLOSE, 3e-2),
    (WeightMode.BFLOAT16, Activation.INT16): (5e-2, 6e-2),
    (WeightMode.INT8, Activation.INT16): (2e-1, 2e-1),
    (WeightMode.INT8, Activation.INT8): (2.5e-1, 2.5e-1),
    (WeightMode.PACKED, Activation.INT16): (2e-3, 3e-2),
    (WeightMode.PACKED, Activation.INT8): (2e-1, 2e-1),
}


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    require_library()


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    oracle_of(request.param, folder)
    return load_model(folder)


@pytest.fixture(scope="module", params=MODELS)
def formats(request, tmp_path_factory) -> dict[str, Model]:
    """One model with its matrices stored as each type of blocks, and as `plain` numbers."""
    folder = tmp_path_factory.mktemp(request.param)
    oracle, family = oracle_of(request.param, folder), family_of(request.param)
    return {"plain": load_model(folder)} | {
        name: load_model(write_as_gguf(folder / f"{name}.gguf", oracle, family, name))
        for name in FORMATS
    }


def greedy(path, first: int) -> list[int]:
    """What `path` (the kernel or torch) says by itself, from one token on."""
    tokens = [first]
    for position in range(GREEDY_TOKENS):
        logits = np.asarray(path.decode_step([tokens[-1]], [position], [TABLE]))
        tokens.append(int(logits[0].argmax()))
    return tokens


@pytest.mark.parametrize("isa", EVERY_ISA)
def test_greedy_tokens_are_torchs(model, isa):
    """Two threads, every instruction set; what a near tie would flip is not among these."""
    require_isa(isa)
    kernel = model.kernel(model.pages(), isa=isa, threads=2)
    said = greedy(kernel, 9)
    assert said == greedy(model.transformer(model.pages()), 9)
    assert len(set(said)) > 3, "a model that repeats itself proves little"
    kernel.close()


@pytest.mark.parametrize("isa", ["best", "portable"])
def test_a_batch_equals_torch_and_each_alone(model, isa):
    """Contexts of several parts of attention; a sequence's bits do not know its batch."""
    chosen = Isa.PORTABLE if isa == "portable" else Isa.AUTO
    pages = model.random_pages()
    tables = [TABLE, OTHER_TABLE, [page + 24 for page in TABLE]]
    step = ([9, 8, 7], [150, 77, 0], tables)
    expected = model.transformer(copy_of(pages)).decode_step(*step).numpy()
    kernel = model.kernel(copy_of(pages), isa=chosen, threads=2)
    found = kernel.decode_step(*step)
    assert distance(found, expected) <= CLOSE
    for index in range(3):
        alone = kernel.decode_step(*([item[index]] for item in step))
        np.testing.assert_array_equal(alone[0], found[index])
    kernel.close()


def exact_and_found(model: Model, dtype: KvDtype, **options) -> tuple[np.ndarray, np.ndarray]:
    """A step of torch in float32 and one of the kernel, over the same random KV."""
    pages = model.random_pages()
    step = ([9, 8], [140, 30], [TABLE, OTHER_TABLE])
    expected = model.transformer(copy_of(pages)).decode_step(*step).numpy()
    kernel = model.kernel(model.random_pages(dtype), **options)
    try:
        return expected, kernel.decode_step(*step)
    finally:
        kernel.close()


@pytest.mark.parametrize("dtype", [KvDtype.F32, KvDtype.BF16], ids=lambda dtype: dtype.text)
@pytest.mark.parametrize("mode", [WeightMode.BFLOAT16, WeightMode.INT8])
def test_rounded_weights_stay_within_their_class(model, mode, dtype):
    """Biases, norms of heads and split matrices are not what rounding is about."""
    expected, found = exact_and_found(model, dtype, weight_mode=mode)
    assert distance(found, expected) <= BOUNDS[mode, Activation.INT16][dtype is not KvDtype.F32]


@pytest.mark.parametrize("stored", FORMATS)
def test_packed_blocks_stay_within_their_class(formats, stored):
    """Fused matrices are taken apart by rows, blocks and all."""
    bound = BOUNDS[WeightMode.PACKED, Activation.INT16][0]
    expected, found = exact_and_found(formats[stored], KvDtype.F32, weight_mode=WeightMode.PACKED)
    assert distance(found, expected) <= bound


@pytest.mark.more
@pytest.mark.parametrize("isa", VECTOR_ISAS)
@pytest.mark.parametrize("activation", list(Activation))
def test_every_type_on_every_instruction_set(formats, isa, activation):
    """The whole table: weights, inputs and KV."""
    require_isa(isa)
    rounded = (WeightMode.FLOAT32, WeightMode.BFLOAT16, WeightMode.INT8)
    cases = [(formats["plain"], mode) for mode in rounded]
    cases += [(formats[name], WeightMode.PACKED) for name in FORMATS]
    for which, mode in cases:
        is_integer = mode in (WeightMode.INT8, WeightMode.PACKED)
        used = activation if is_integer else Activation.INT16
        for dtype in (KvDtype.F32, KvDtype.BF16, KvDtype.F16, KvDtype.INT8):
            expected, found = exact_and_found(
                which, dtype, weight_mode=mode, isa=isa, activation=activation
            )
            bound = BOUNDS[mode, used][dtype is not KvDtype.F32]
            assert distance(found, expected) <= bound, (mode, dtype)


def test_the_golden_check_covers_the_family(model):
    """Its reference is torch's; a damaged byte of the weights is seen."""
    config = model.weights.config
    named = own_reference([bytes(32)], config.vocabulary)
    geometry = config.kv_geometry(16, KvDtype.F32)
    torch_path = TorchPath(model.transformer(KvPages.allocate(geometry, 2)), named)
    sketches = [found for found in torch_path.slices(named) if found is not None]
    reference = type(named)(
        weight_hashes=named.weight_hashes,
        prompt_ids=named.prompt_ids,
        forced_ids=named.forced_ids,
        sketches=np.stack(sketches),
    )
    kernel = model.kernel(KvPages.allocate(geometry, 2))
    check = GoldenCheck(KernelPath(kernel, reference), reference)
    first, second = check.run(), check.run()
    assert first.is_passed
    assert second.is_passed
    assert second.drift == 0.0
    weights = kernel.weight_bytes_view()
    weights[len(weights) // 2 + 3] ^= 0x40
    assert not check.run().is_passed
    kernel.close()


@pytest.mark.parametrize("name", MODELS)
def test_the_kernel_equals_transformers(tmp_path: Path, name: str):
    """Not by way of our own torch path: each position's logits are the oracle's."""
    oracle = oracle_of(name, tmp_path)
    tokens = torch.randint(3, 300, (60,), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected = oracle(tokens[None]).logits[0].numpy()
    own = load_model(tmp_path)
    kernel = own.kernel(own.pages())
    rows = [
        kernel.decode_step([token], [position], [TABLE])[0]
        for position, token in enumerate(tokens.tolist())
    ]
    kernel.close()
    wanted = expected[32:]
    assert distance(np.stack(rows[32:]), wanted) <= 1e-4
    assert (np.stack(rows[32:]).argmax(-1) == wanted.argmax(-1)).all()

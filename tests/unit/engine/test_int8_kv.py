"""KV kept in int8: the bytes of the layout, close to what float32 computes, and never mixed.

Every number of it is stated by docs/formats.md; `baton.kv.convert` is the reference that other
languages are held to, too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pytest
import torch

from baton.engine.golden_check import GoldenCheck, TorchPath, own_reference
from baton.engine.kernel_weights import WeightMode, kernel_numeric_class
from baton.engine.kv_pages import KvPages, quantise
from baton.engine.label import build_label
from baton.engine.step_kernel_abi import Activation
from baton.engine.transformer import Transformer
from baton.engine.weights import ComputeDtype, ModelWeights, load_weights
from baton.errors import Reason, ServiceError
from baton.kv import convert
from baton.kv.label import first_mismatch, require_match
from baton.kv.layout import KvDtype, page_view, slot_content
from baton.kv.numeric import DEFAULT_POLICY, NATIVE_Q4_1, TORCH_Q4_1, NumericClass
from baton.testing.tiny_models import GQA_TIED, write_directory
from baton.worker.engine import APPROXIMATE, WorkerParts

BLOCK: Final = 16
TABLE: Final = [5, 2, 7, 0, 3, 6]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_directory(tmp_path_factory.mktemp("model"), GQA_TIED)


@pytest.fixture(scope="module", params=list(ComputeDtype))
def weights(path: Path, request: pytest.FixtureRequest) -> ModelWeights:
    return load_weights(path, request.param)


def int8_pages(weights: ModelWeights, count: int = 8) -> KvPages:
    return KvPages.allocate(weights.config.kv_geometry(BLOCK, KvDtype.INT8), count)


def float_pages(weights: ModelWeights) -> KvPages:
    return KvPages.allocate(weights.config.kv_geometry(BLOCK, weights.dtype.kv_dtype), 8)


def test_rows_are_quantised_as_the_format_says() -> None:
    """To nearest even, a scale a row, zeros for a row of zeros and one too small for a scale."""
    rows = torch.randn(40, 32, generator=torch.Generator().manual_seed(1))
    rows[3], rows[4], rows[5] = 0.0, 1e-45, 1e30
    rows[6, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    rows[6, 4:] = 0.0
    ours, scales = quantise(rows)
    theirs, their_scales = convert.quantise(rows.numpy())
    np.testing.assert_array_equal(ours.numpy(), theirs)
    np.testing.assert_array_equal(scales.numpy(), their_scales)
    assert ours[6, :4].tolist() == [127, 0, 2, -2]


def test_pages_have_the_bytes_of_the_layout(weights: ModelWeights) -> None:
    """Scales at the head of the page, then the rows: what a kvstore reads without torch."""
    geometry = weights.config.kv_geometry(BLOCK, KvDtype.INT8)
    buffer = bytearray(4 * geometry.slot_bytes)
    pages = KvPages.from_buffer(buffer, geometry, 4)
    shape = (2, 2, geometry.kv_heads, geometry.head_dim)
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    pages.write(1, torch.tensor([2, 2]), torch.tensor([3, 9]), rows)
    view = page_view(geometry, memoryview(buffer)[2 * geometry.slot_bytes :])
    elements, scales = convert.quantise(rows.numpy())
    assert view.scales is not None
    for token, slot in ((0, 3), (1, 9)):
        np.testing.assert_array_equal(view.k[1][:, slot], elements[token, 0])
        np.testing.assert_array_equal(view.v[1][:, slot], elements[token, 1])
        np.testing.assert_array_equal(view.scales[1, :, :, slot], scales[token])
    read = pages.gather(1, torch.tensor([2]), torch.float32)[:, :, 3].numpy()
    np.testing.assert_array_equal(read, convert.dequantise(elements[0], scales[0]))
    # What a slot's checksum covers begins with its scales.
    slot_bytes = slot_content(geometry, memoryview(buffer)[2 * geometry.slot_bytes :], 3)
    assert slot_bytes.size == geometry.token_bytes
    written = slot_bytes[: geometry.scale_bytes].view("<f4").reshape(2, 2, geometry.kv_heads)
    np.testing.assert_array_equal(written[1], scales[0])


def test_half_the_bytes_of_bf16(weights: ModelWeights) -> None:
    """A head of 64 numbers takes 68 bytes for 128: the scales are a sixteenth."""
    wide = replace(weights.config, head_dim=64)
    int8 = wide.kv_geometry(BLOCK, KvDtype.INT8)
    assert int8.token_bytes / wide.kv_geometry(BLOCK, KvDtype.BF16).token_bytes == 68 / 128


def test_answers_stay_near_those_of_float_kv(weights: ModelWeights) -> None:
    """Chunks and steps over int8 pages; near, and not the same, or nothing was rounded."""
    ids = np.random.default_rng(3).integers(0, 256, 70).tolist()
    found = []
    for pages in (float_pages(weights), int8_pages(weights)):
        model = Transformer(weights, pages)
        model.prefill_kv(ids[:30], 0, TABLE)
        rows = [model.prefill_chunk(ids[30:60], 30, TABLE)]
        rows += [model.decode_step([ids[at]], [at], [TABLE])[0] for at in range(60, 70)]
        found.append(torch.stack(rows))
    distance = float((found[1] - found[0]).norm() / found[0].norm())
    assert 1e-4 < distance < 5e-2


def test_a_sequence_does_not_see_the_batch(weights: ModelWeights) -> None:
    """A scale belongs to a token: what else is in a page or a step rounds nothing of it."""
    steps = ([9, 8, 7], [17, 3, 0], [[1, 2], [4], [6]])
    together, alone = int8_pages(weights), int8_pages(weights)
    batched = Transformer(weights, together).decode_step(*steps)
    single = Transformer(weights, alone)
    for index in range(3):
        one = single.decode_step(*([item[index]] for item in steps))
        torch.testing.assert_close(one[0], batched[index], rtol=2e-2, atol=2e-2)


def test_the_class_says_int8_and_pairs_refuse_to_mix(path: Path, weights: ModelWeights) -> None:
    """Nobody who did not ask for int8 ever reads it, nor the other way round."""
    config = weights.config
    model = Transformer(weights, int8_pages(weights))
    text = model.numeric_class()
    assert f"act={weights.dtype.kv_dtype.text} " in text
    assert " kv=int8 " in text
    labels = [
        build_label(
            path,
            config,
            bytes(8),
            config.kv_geometry(BLOCK, kv),
            NumericClass.parse(text),
        )
        for kv in (weights.dtype.kv_dtype, KvDtype.INT8)
    ]
    assert first_mismatch(labels[0], labels[1]) == "kv_dtype"
    with pytest.raises(ServiceError) as caught:
        require_match(labels[1], labels[0])
    assert caught.value.reason is Reason.COMPAT_MISMATCH
    assert labels[0].kv_digest() != labels[1].kv_digest()


def test_prefill_by_torch_and_decode_by_the_kernel_read_each_other() -> None:
    """The usual pair of workers, with int8 KV on both sides; never one side alone."""
    torch_int8, native_int8 = (replace(one, kv="int8") for one in (TORCH_Q4_1, NATIVE_Q4_1))
    assert DEFAULT_POLICY.is_readable(writer=torch_int8.id, reader=native_int8.id)
    assert DEFAULT_POLICY.is_readable(writer=native_int8.id, reader=torch_int8.id)
    for writer, reader in ((torch_int8, NATIVE_Q4_1), (TORCH_Q4_1, native_int8)):
        assert not DEFAULT_POLICY.is_readable(writer=writer.id, reader=reader.id)


def test_exact_weights_with_int8_kv_are_one_class(weights: ModelWeights) -> None:
    """The kernel in float32 and torch in float32 over int8 pages."""
    config = weights.config
    native = kernel_numeric_class(config, WeightMode.FLOAT32, Activation.INT16, KvDtype.INT8)
    is_float32 = weights.dtype is ComputeDtype.FLOAT32
    same = native.text == Transformer(weights, int8_pages(weights)).numeric_class()
    assert same == is_float32


def test_every_answer_of_such_a_worker_is_approximate(weights: ModelWeights) -> None:
    """Whatever it started from: clients that want another class see it in each response."""

    class Parts:
        geometry = weights.config.kv_geometry(BLOCK, KvDtype.INT8)
        label = None

    says = WorkerParts.exactness
    assert says(cast(Any, Parts), None) == APPROXIMATE
    assert says(cast(Any, Parts), "weights=f32 act=f32 acc=f32 kv=f32 invariant=no") == APPROXIMATE


def test_the_golden_check_runs_on_int8_pages(weights: ModelWeights) -> None:
    """With bounds of its own; the second check is the first one's equal."""
    named = own_reference([bytes(32)], weights.config.vocabulary)
    exact = TorchPath(Transformer(weights, float_pages(weights)), named)
    sketches = np.stack([found for found in exact.slices(named) if found is not None])
    reference = replace(named, sketches=sketches)
    check = GoldenCheck(TorchPath(Transformer(weights, int8_pages(weights)), reference), reference)
    first, second = check.run(), check.run()
    assert first.is_passed
    assert first.relative_l2 > 1e-4
    assert second.is_passed

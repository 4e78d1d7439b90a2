"""In float32 the step kernel computes what the torch path computes, whatever the shape of a step.

Torch is the specification. Two things are stricter than "to rounding": neither threads nor the rest
of the batch may change a single bit of a sequence's logits or KV.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from baton.kv.layout import KvDtype
from baton.testing.tiny_models import GQA_TIED, TINY_MODELS, write_directory, write_gguf
from tests.unit.step_kernel.kernels import (
    OTHER_TABLE,
    PAGES,
    TABLE,
    VECTOR_ISAS,
    all_bytes,
    copy_of,
    distance,
    load_model,
    random_tokens,
    require_isa,
    require_library,
)

CLOSE = 1e-5


@pytest.fixture(scope="module", autouse=True)
def library():
    require_library()


@pytest.fixture(scope="module", params=sorted(TINY_MODELS))
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return load_model(write_directory(folder, TINY_MODELS[request.param]))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return load_model(write_directory(tmp_path_factory.mktemp("one"), GQA_TIED))


@pytest.mark.parametrize("isa", VECTOR_ISAS)
def test_decode_equals_torch_at_every_position(model, isa):
    """From an empty context across page borders; KV of either path serves both."""
    require_isa(isa)
    tokens = random_tokens(40)
    ours, theirs = model.pages(), model.pages()
    kernel, torch_path = model.kernel(ours, isa=isa), model.transformer(theirs)
    for position, token in enumerate(tokens):
        logits = kernel.decode_step([token], [position], [TABLE])
        expected = torch_path.decode_step([token], [position], [TABLE]).numpy()
        assert distance(logits, expected) <= CLOSE
        assert logits[0].argmax() == expected[0].argmax()
    for layer in range(ours.geometry.layers):
        torch.testing.assert_close(ours.layer(layer), theirs.layer(layer), rtol=1e-4, atol=1e-5)
    kernel.close()


@pytest.mark.parametrize("isa", VECTOR_ISAS)
def test_decode_continues_what_torch_prefilled(one, isa):
    """The life of every request: chunks by torch, then steps by the kernel."""
    require_isa(isa)
    tokens = random_tokens(150, seed=1)
    pages = one.pages()
    one.transformer(pages).prefill_kv(tokens[:-1], 0, TABLE)
    expected = one.transformer(copy_of(pages)).decode_step([tokens[-1]], [149], [TABLE]).numpy()
    kernel = one.kernel(pages, isa=isa)
    assert distance(kernel.decode_step([tokens[-1]], [149], [TABLE]), expected) <= CLOSE
    kernel.close()


@pytest.mark.parametrize("block_tokens", [8, 16, 24, 64])
@pytest.mark.parametrize("position", [0, 1, 15, 16, 63, 64, 65, 130, 511])
def test_any_context_and_page_size(one, block_tokens, position):
    """Runs of positions, pages and chunks of attention have borders in every place."""
    pages = one.random_pages(block_tokens=block_tokens)
    table = np.random.default_rng(2).permutation(PAGES).tolist()
    expected = one.transformer(copy_of(pages)).decode_step([9], [position], [table]).numpy()
    kernel = one.kernel(pages, threads=2)
    assert distance(kernel.decode_step([9], [position], [table]), expected) <= CLOSE
    kernel.close()


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 6, "kv_heads": 1},
        {"heads": 8, "kv_heads": 1},
        {"heads": 5, "kv_heads": 5, "head_dim": 64},
        {"heads": 2, "kv_heads": 1, "head_dim": 128},
        {"heads": 3, "kv_heads": 1, "head_dim": 20, "hidden": 62, "intermediate": 94},
        {"vocabulary": 275},
    ],
)
def test_any_shape(tmp_path, shape):
    """Groups of heads, head widths off the vector, rows that fill no tile."""
    tiny = write_directory(tmp_path / "model", replace(GQA_TIED, seed=9, **shape))
    odd = load_model(tiny)
    pages = odd.random_pages()
    expected = odd.transformer(copy_of(pages)).decode_step([9], [140], [TABLE]).numpy()
    for isa in VECTOR_ISAS[:2]:
        require_isa(isa)
        kernel = odd.kernel(copy_of(pages), isa=isa)
        assert distance(kernel.decode_step([9], [140], [TABLE]), expected) <= CLOSE
        kernel.close()


def test_long_context_equals_torch(tmp_path):
    """8,192 positions: more than the parts of attention can take at their least size."""
    tiny = replace(GQA_TIED, max_context=8192)
    long = load_model(write_directory(tmp_path / "model", tiny))
    pages = long.random_pages(block_tokens=64)
    # Shared pages are read only; the page that the step writes is the sequence's own.
    table = [*(page % (PAGES - 1) for page in range(127)), PAGES - 1]
    expected = long.transformer(copy_of(pages)).decode_step([7], [8191], [table]).numpy()
    kernel = long.kernel(pages, threads=2)
    assert distance(kernel.decode_step([7], [8191], [table]), expected) <= CLOSE
    kernel.close()


@pytest.mark.parametrize("isa", VECTOR_ISAS)
@pytest.mark.parametrize("batch", [2, 3, 5, 8, 13, 64])
def test_batch_changes_no_bit(one, isa, batch):
    """Who else is in a step must not show: otherwise an answer depends on the load."""
    require_isa(isa)
    pages = one.random_pages()
    positions = [5 + 7 * index % 40 for index in range(batch)]
    tables = [[index, (index + 31) % 64, 64 + index % 16] for index in range(batch)]
    alone, together = copy_of(pages), copy_of(pages)
    single, batched = one.kernel(alone, isa=isa), one.kernel(together, isa=isa, threads=2)
    tokens = random_tokens(batch, seed=3)
    positions = [position % 16 for position in positions]
    logits = batched.decode_step(tokens, positions, tables)
    for index in range(batch):
        expected = single.decode_step([tokens[index]], [positions[index]], [tables[index]])
        np.testing.assert_array_equal(logits[index], expected[0])
    assert all_bytes(alone) == all_bytes(together)
    single.close()
    batched.close()


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_change_no_bit(one, threads):
    """The split over threads is an arrangement of work, not of sums."""
    pages = one.random_pages()
    kernel, other = one.kernel(copy_of(pages)), one.kernel(copy_of(pages), threads=threads)
    step = ([9, 8], [150, 77], [TABLE, OTHER_TABLE])
    for _ in range(20):
        np.testing.assert_array_equal(kernel.decode_step(*step), other.decode_step(*step))
    kernel.close()
    other.close()


def test_gguf_rows_are_put_in_order(tmp_path):
    """llama.cpp's order of Q and K rows is undone here as in the torch path."""
    stored = load_model(write_gguf(tmp_path / "model.gguf", GQA_TIED))
    pages = stored.random_pages()
    expected = stored.transformer(copy_of(pages)).decode_step([9], [100], [TABLE]).numpy()
    kernel = stored.kernel(pages)
    assert distance(kernel.decode_step([9], [100], [TABLE]), expected) <= CLOSE
    kernel.close()


def test_class_is_the_torch_paths(one):
    """In float32 both paths read each other's KV, because they are one class."""
    pages = one.pages(KvDtype.F32)
    kernel = one.kernel(pages)
    assert kernel.numeric_class() == one.transformer(pages).numeric_class()
    kernel.close()

"""Several prompts in one pass: each gets what it gets alone, and writes nobody else's pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from baton.engine.kv_pages import KvPages
from baton.engine.packed_linear import linear, pack
from baton.engine.prompt_chunk import PromptChunk
from baton.engine.transformer import ComputeCancelled, Transformer
from baton.engine.weights import ComputeDtype, ModelWeights, load_weights
from baton.errors import Reason, ServiceError
from baton.testing.tiny_models import TINY_MODELS, write_directory

BLOCK_TOKENS = 16
PAGES = 64
LENGTHS = (1, 15, 16, 17, 90, 300)


@pytest.fixture(scope="module", params=sorted(TINY_MODELS))
def weights(request, tmp_path_factory) -> ModelWeights:
    path = write_directory(tmp_path_factory.mktemp(request.param), TINY_MODELS[request.param])
    return load_weights(path, ComputeDtype.FLOAT32)


def transformer(weights: ModelWeights) -> Transformer:
    geometry = weights.config.kv_geometry(BLOCK_TOKENS, weights.dtype.kv_dtype)
    return Transformer(weights, KvPages.allocate(geometry, PAGES))


def prompts() -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(0, 256, length).tolist() for length in LENGTHS]


def tables() -> list[list[int]]:
    """Shuffled pages, none of two prompts."""
    pages = iter(np.random.default_rng(6).permutation(PAGES).tolist())
    return [[next(pages) for _ in range(-(-length // BLOCK_TOKENS))] for length in LENGTHS]


def alone(weights: ModelWeights, tokens: list[int]) -> torch.Tensor:
    own = transformer(weights)
    return own.prefill_chunk(tokens, 0, list(range(PAGES)))


def test_a_batch_gives_every_prompt_its_own_logits(weights):
    """The same next token whatever else is in the pass: float32, lengths at every seam."""
    batch = [
        PromptChunk(tokens=tokens, first_position=0, page_table=table, wants_logits=True)
        for tokens, table in zip(prompts(), tables(), strict=True)
    ]
    for chunk, logits in zip(batch, transformer(weights).prefill_batch(batch), strict=True):
        expected = alone(weights, list(chunk.tokens))
        assert logits is not None
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert int(logits.argmax()) == int(expected.argmax())


def test_chunks_of_a_batch_stand_at_different_positions(weights):
    """One prompt begins while another is in its middle and a third ends; some want no logits."""
    model = transformer(weights)
    texts, pages = prompts(), tables()
    model.prefill_kv(texts[5][:250], 0, pages[5])
    model.prefill_kv(texts[4][:33], 0, pages[4])
    found = model.prefill_batch(
        [
            PromptChunk(
                tokens=texts[5][250:], first_position=250, page_table=pages[5], wants_logits=True
            ),
            PromptChunk(tokens=texts[4][33:70], first_position=33, page_table=pages[4]),
            PromptChunk(tokens=texts[3], first_position=0, page_table=pages[3], wants_logits=True),
        ]
    )
    assert found[1] is None
    last = model.prefill_chunk(texts[4][70:], 70, pages[4])
    for logits, tokens in ((found[0], texts[5]), (found[2], texts[3]), (last, texts[4])):
        assert logits is not None
        torch.testing.assert_close(logits, alone(weights, tokens), rtol=1e-4, atol=1e-4)


def test_a_batch_ends_early_only_when_all_of_it_is_cancelled(weights):
    """One client's leaving must not cost the others their chunk."""
    model, texts, pages = transformer(weights), prompts(), tables()

    def chunk(index: int, *, is_cancelled: bool) -> PromptChunk:
        return PromptChunk(
            tokens=texts[index],
            first_position=0,
            page_table=pages[index],
            wants_logits=True,
            should_cancel=lambda: is_cancelled,
        )

    both = model.prefill_batch([chunk(3, is_cancelled=False), chunk(4, is_cancelled=True)])
    assert both[0] is not None
    torch.testing.assert_close(both[0], alone(weights, texts[3]), rtol=1e-4, atol=1e-4)
    with pytest.raises(ComputeCancelled):
        model.prefill_batch([chunk(3, is_cancelled=True), chunk(4, is_cancelled=True)])


def test_a_bad_chunk_is_refused_before_any_page_is_written(weights):
    """A batch is checked whole: a page table too short for one prompt changes nobody's pages."""
    model, texts, pages = transformer(weights), prompts(), tables()
    before = model.pages.layer(0).clone()
    with pytest.raises(ServiceError) as caught:
        model.prefill_batch(
            [
                PromptChunk(tokens=texts[3], first_position=0, page_table=pages[3]),
                PromptChunk(tokens=texts[5], first_position=0, page_table=pages[5][:3]),
            ]
        )
    assert caught.value.reason is Reason.INVALID_REQUEST
    assert torch.equal(model.pages.layer(0), before)


@pytest.mark.parametrize("rows", [1, 7, 256, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_matrix_gives_the_bits_of_a_plain_one(rows, has_bias):
    """Packing is a matter of speed only: KV of a worker that packs serves one that does not."""
    random = torch.Generator().manual_seed(7)
    weight = torch.randn(96, 64, generator=random).bfloat16()
    bias = torch.randn(96, generator=random).bfloat16() if has_bias else None
    states = torch.randn(rows, 64, generator=random).bfloat16()
    with torch.inference_mode():
        expected = functional.linear(states, weight, bias)
        assert torch.equal(linear(states, pack(weight), bias), expected)


def test_float32_matrices_stay_as_they_are():
    """The exact class is not touched by packing."""
    weight = torch.randn(8, 8)
    assert pack(weight) is weight

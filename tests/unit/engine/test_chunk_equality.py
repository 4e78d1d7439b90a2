"""Every chunk attends to all earlier KV: however a prompt is cut, its KV and logits are those of
the whole prompt, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from baton.engine.config import read_config
from baton.engine.kv_pages import KvPages
from baton.engine.transformer import Transformer
from baton.engine.weights import ComputeDtype, load_weights
from baton.kv.layout import KvDtype
from baton.testing.tiny_models import GQA_TIED, write_directory
from baton.text.bundle import TextBundle
from baton.worker.chunker import Chunk, plan_chunks, plan_semantic

BLOCK_TOKENS = 16
PAGES = 8
PROMPT_TOKENS = 100
KV_ERROR = 1e-5
LOGITS_ERROR = 1e-4
TEXT = (
    "It rains. 河水很冷。Is it?\n- e\u0301 no!\n- 👩\u200d👧 yes.\n\n```\na. b\n```\nThe end came. "
) * 2

Cut = Sequence[Chunk]


class Model:
    """The tiny model on pages of its own, and one prompt."""

    def __init__(self, path: Path) -> None:
        config = read_config(path)
        self._geometry = config.kv_geometry(BLOCK_TOKENS, KvDtype.F32)
        self._weights = load_weights(path, ComputeDtype.FLOAT32)
        self.tokenizer = TextBundle.load(path).tokenizer
        self.prompt = self.tokenizer.encode(TEXT)[:PROMPT_TOKENS]
        self.pieces = [self.tokenizer.decode_bytes(item) for item in self.prompt]

    def computed(self, cut: Cut) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The KV of all layers, and the logits after the last token."""
        pages = KvPages.allocate(self._geometry, PAGES)
        transformer = Transformer(self._weights, pages)
        table = range(PAGES)
        for chunk in cut[:-1]:
            transformer.prefill_kv(self.prompt[chunk.first : chunk.end], chunk.first, table)
        last = cut[-1]
        logits = transformer.prefill_chunk(self.prompt[last.first :], last.first, table)
        layers = range(self._geometry.layers)
        every = torch.arange(PAGES)
        kv = torch.stack([pages.gather(layer, every, torch.float32) for layer in layers])
        return kv[:, :, :, : len(self.prompt)].numpy().copy(), logits.numpy().copy()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Loaded once."""
    return Model(write_directory(tmp_path_factory.mktemp("tiny"), GQA_TIED))


def error(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """Relative L2."""
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def require_equal(model: Model, cuts: Sequence[Cut]) -> None:
    """Each is as the whole prompt in one chunk."""
    whole = [Chunk(first=0, end=len(model.prompt), is_last=True)]
    kv, logits = model.computed(whole)
    for cut in cuts:
        ours, last = model.computed(cut)
        assert error(ours, kv) < KV_ERROR, cut
        assert error(last, logits) < LOGITS_ERROR, cut
        assert int(last.argmax()) == int(logits.argmax()), cut


def test_semantic_chunks_of_every_size_equal_the_whole_prompt(model: Model) -> None:
    """All targets that cut the prompt at all, for every page size's rounding."""
    assert len(model.prompt) == PROMPT_TOKENS
    cuts = {
        tuple(plan_semantic(0, model.pieces, target, block))
        for block in (8, 16)
        for target in range(1, PROMPT_TOKENS + 1, 4)
    }
    assert len(cuts) > 5
    assert any(chunk.end % BLOCK_TOKENS for cut in cuts for chunk in cut[:-1])
    require_equal(model, sorted(cuts, key=len))


def test_fixed_chunks_of_every_size_equal_the_whole_prompt(model: Model) -> None:
    """Pages of one token would be allowed by the planner: every length of chunk occurs."""
    cuts = {
        tuple(plan_chunks(0, PROMPT_TOKENS, size, 1)) for size in (*range(1, 34, 4), 50, 99, 100)
    }
    require_equal(model, sorted(cuts, key=len))


def test_a_cut_at_every_token_changes_nothing(model: Model) -> None:
    """Two chunks that meet at any position, inside a page and at its end."""
    end = len(model.prompt)
    require_equal(
        model,
        [
            [Chunk(first=0, end=at, is_last=False), Chunk(first=at, end=end, is_last=True)]
            for at in range(1, end)
        ],
    )


def test_a_chunk_that_does_not_see_what_was_before_it_is_found_out(model: Model) -> None:
    """The comparison is sharp: without the earlier chunks' KV nothing of this holds."""
    end = len(model.prompt)
    kv, logits = model.computed([Chunk(first=0, end=end, is_last=True)])
    blind, other = model.computed([Chunk(first=40, end=end, is_last=True)])
    assert error(blind[:, :, :, 40:], kv[:, :, :, 40:]) > 100 * KV_ERROR
    assert error(other, logits) > 100 * LOGITS_ERROR

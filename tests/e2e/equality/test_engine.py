"""Every chunk size and every fork position, in the engine itself: the same logits to rounding.

What the services cut in whole pages, the engine computes in chunks of any size on top of any KV.
Float32; the greedy token is the same wherever the two likeliest are over 1e-3 apart, which they
are at every step here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from baton.engine.kv_pages import KvPages
from baton.engine.transformer import Transformer
from baton.engine.weights import ComputeDtype, load_weights
from baton.testing.tiny_models import GQA_TIED, write_directory
from tests.integration.workers.test_handoff import prompt_of

BLOCK_TOKENS = 16
PROMPT = prompt_of(100, seed=8200)
PAGES = list(range(8))
STEPS = 4
GAP_MIN = 1e-3


class Engine:
    """A model over pages of its own, and what a fresh computation of the prompt gives."""

    def __init__(self, path: Path) -> None:
        weights = load_weights(path, ComputeDtype.FLOAT32)
        geometry = weights.config.kv_geometry(BLOCK_TOKENS, weights.dtype.kv_dtype)
        self.model = Transformer(weights, KvPages.allocate(geometry, len(PAGES)))
        self.expected = self.answer(self.prefill(0, len(PROMPT)))
        for logits in self.expected:
            best, second = logits.topk(2).values.tolist()
            assert best - second > GAP_MIN, "a near tie: draw another prompt"

    def prefill(self, first: int, size: int) -> torch.Tensor:
        """The logits behind the prompt, of which [0, first) has KV, in chunks of `size`."""
        last = first + (len(PROMPT) - 1 - first) // size * size
        for at in range(first, last, size):
            self.model.prefill_kv(PROMPT[at : at + size], at, PAGES)
        return self.model.prefill_chunk(PROMPT[last:], last, PAGES)

    def answer(self, logits: torch.Tensor, steps: int = STEPS) -> list[torch.Tensor]:
        """The logits of the first token and of those that follow it greedily."""
        found = [logits]
        for step in range(steps):
            token = int(found[-1].argmax())
            found.append(self.model.decode_step([token], [len(PROMPT) + step], [PAGES])[0])
        return found

    def check(self, logits: torch.Tensor, what: tuple[int, ...], steps: int = STEPS) -> None:
        """The first logits are those of a fresh computation, and so are the answer's tokens."""
        torch.testing.assert_close(logits, self.expected[0], rtol=1e-4, atol=1e-4)
        answer = [int(one.argmax()) for one in self.answer(logits, steps)]
        assert answer == [int(one.argmax()) for one in self.expected[: steps + 1]], what


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """One for all: each check writes the KV it reads."""
    torch.set_num_threads(1)
    return Engine(write_directory(tmp_path_factory.mktemp("tiny"), GQA_TIED))


@pytest.mark.parametrize("sizes", [range(1, 101)], ids=["1-100"])
def test_every_chunk_size_gives_the_same_answer(engine: Engine, sizes: Sequence[int]) -> None:
    """No token sees less, or more, of what stands before it."""
    for size in sizes:
        engine.check(engine.prefill(0, size), (size,))


def check_forks(engine: Engine, size: int, rest: int, steps: int = STEPS) -> None:
    """KV of chunks of `size` reused up to every position, what is behind it in chunks of `rest`.

    From the back: each computation leaves the KV before its fork as it was.
    """
    engine.prefill(0, size)
    for fork in range(len(PROMPT) - 1, -1, -1):
        engine.check(engine.prefill(fork, rest), (size, fork, rest), steps)


@pytest.mark.parametrize(("size", "rest"), [(7, 33), (64, 16)])
def test_a_fork_at_every_position_gives_the_same_answer(
    engine: Engine, size: int, rest: int
) -> None:
    """0 is all new; 99 is a prompt that is known whole: its last token gives the first logits."""
    check_forks(engine, size, rest)


@pytest.mark.more
@pytest.mark.timeout(300)
def test_every_chunk_size_at_every_fork_position(engine: Engine) -> None:
    """10,000 pairs; the first part's chunks are of another size than the second's."""
    for size in range(1, 101):
        check_forks(engine, 1 + (size * 37) % 100, size, steps=1)

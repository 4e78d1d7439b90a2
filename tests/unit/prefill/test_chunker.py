"""Chunks cover exactly what is missing and cut at absolute multiples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.worker.chunker import chunk_size, plan_chunks, plan_semantic


@given(
    st.integers(0, 500), st.integers(0, 500), st.integers(1, 200), st.sampled_from([8, 16, 32, 64])
)
def test_chunks_cover_the_missing_range_once(
    first: int, more: int, chunk_tokens: int, block_tokens: int
) -> None:
    """No position is left out or computed twice, and inner cuts end full pages."""
    end = first + more
    chunks = list(plan_chunks(first, end, chunk_tokens, block_tokens))
    covered = [position for chunk in chunks for position in range(chunk.first, chunk.end)]
    assert covered == list(range(first, end))
    size = chunk_size(chunk_tokens, block_tokens)
    assert all(chunk.end % size == 0 for chunk in chunks[:-1])
    assert all(0 < chunk.tokens <= size for chunk in chunks)
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True] * bool(more)


@pytest.mark.parametrize(
    ("asked", "block", "size"), [(1, 16, 16), (16, 16, 16), (17, 16, 32), (256, 8, 256)]
)
def test_a_chunk_is_whole_pages(asked: int, block: int, size: int) -> None:
    """Rounded up, so that a tiny setting still works."""
    assert chunk_size(asked, block) == size


def test_a_cached_prefix_shortens_the_first_chunk_only() -> None:
    """Cuts stand at absolute positions whatever was cached."""
    chunks = list(plan_chunks(40, 100, 32, 16))
    assert [(chunk.first, chunk.end) for chunk in chunks] == [(40, 64), (64, 96), (96, 100)]


SENTENCES = [b" One", b" two", b" three", b" four", b" five", b" six", b"."] * 60


@given(st.integers(0, 420), st.integers(1, 200), st.sampled_from([8, 16, 32, 64]))
def test_semantic_chunks_cover_the_missing_range_once(
    first: int, chunk_tokens: int, block_tokens: int
) -> None:
    """As fixed ones do, within half and one and a half times their size."""
    chunks = plan_semantic(first, SENTENCES, chunk_tokens, block_tokens)
    covered = [position for chunk in chunks for position in range(chunk.first, chunk.end)]
    assert covered == list(range(first, len(SENTENCES)))
    size = chunk_size(chunk_tokens, block_tokens)
    assert all(chunk.tokens <= size + size // 2 for chunk in chunks)
    assert len(chunks) < 2 or all(chunk.tokens >= size // 2 for chunk in chunks)
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True] * bool(
        chunks
    )


def test_semantic_chunks_end_with_sentences_wherever_in_a_page_that_is() -> None:
    """Seven tokens a sentence, sixteen a page: no cut is a page's end by chance."""
    chunks = plan_semantic(0, SENTENCES, 64, 16)
    assert [chunk.end for chunk in chunks] == [63, 126, 189, 252, 315, 378, 420]

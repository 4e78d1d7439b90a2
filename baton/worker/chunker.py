"""Cutting a prompt's missing positions into chunks. Pure.

Owns the two ways to cut. *Fixed*: every cut stands at an absolute multiple of the chunk size, which
is a multiple of the page size, so that a chunk ends with full pages whatever was cached before it.
*Semantic*: cuts stand at edges of the text nearest to that size, wherever in a page that is; a
checkpoint states the committed slots of a page that the next chunk goes on in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum, unique

from baton.text.boundaries import ChunkBounds, chunk_ends


@unique
class Chunking(StrEnum):
    """Where chunks end: at multiples of their size, or at edges of the text near it."""

    FIXED = "fixed"
    SEMANTIC = "semantic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Positions [first, end) computed in one go; `is_last` ends the prompt."""

    first: int
    end: int
    is_last: bool

    @property
    def tokens(self) -> int:
        """How many positions it has."""
        return self.end - self.first


def chunk_size(chunk_tokens: int, block_tokens: int) -> int:
    """`chunk_tokens` rounded up to whole pages."""
    assert chunk_tokens >= 1
    assert block_tokens >= 1
    return -(-chunk_tokens // block_tokens) * block_tokens


def plan_chunks(first: int, end: int, chunk_tokens: int, block_tokens: int) -> Iterator[Chunk]:
    """The chunks of positions [first, end), in order; none when first equals end."""
    assert 0 <= first <= end, (first, end)
    size = chunk_size(chunk_tokens, block_tokens)
    position = first
    while position < end:
        cut = min((position // size + 1) * size, end)
        yield Chunk(first=position, end=cut, is_last=cut == end)
        position = cut


def plan_semantic(
    first: int, pieces: Sequence[bytes], chunk_tokens: int, block_tokens: int
) -> list[Chunk]:
    """The chunks of positions [first, len(pieces)), in order; none when first is that.

    `pieces`: the bytes of every token from position 0 on. The target is the size that fixed chunks
    have; the bounds are those of `ChunkBounds.around` it.
    """
    bounds = ChunkBounds.around(chunk_size(chunk_tokens, block_tokens))
    ends = chunk_ends(pieces, bounds, first)
    firsts = [first, *ends]
    return [
        Chunk(first=begin, end=end, is_last=end == len(pieces))
        for begin, end in zip(firsts, ends, strict=False)
    ]

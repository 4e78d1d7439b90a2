"""Cutting a prompt's missing positions into chunks. Pure.

Owns where chunks begin and end: every cut stands at an absolute multiple of the chunk size, which
is a multiple of the page size, so that a chunk ends with full pages whatever was cached before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


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

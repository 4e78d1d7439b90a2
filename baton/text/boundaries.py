"""Where a prompt is cut into chunks: at edges of its text nearest to a target size. Pure.

Owns the choice between edges and what is done where there is none near: behind space, else between
characters. Works on the bytes of tokens, so that every cut is a token's end.

Invariants: chunks follow each other and cover every token once; no chunk is longer than `most`, and
none but an only one shorter than `least`; no cut stands inside a character, nor inside what people
see as one, while any other place within the bounds does not. The same tokens are cut alike always,
in time linear in the bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from baton.text.edges import Strength, edges
from baton.text.graphemes import Graphemes

DETOURS: Final = {
    Strength.BLOCK: 0.0,
    Strength.LINE: 1 / 16,
    Strength.SENTENCE: 1 / 8,
    Strength.CODE: 3 / 16,
}
"""How much further from the target a block's edge may be, in target sizes, and still be taken
before this kind of edge.
"""
CHARACTER_TOKENS_MAX: Final = 4
"""A character of UTF-8 has at most so many bytes, and so many tokens."""

_Utf8Decoder: Final = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBounds:
    """Tokens of a chunk: what is aimed at, and the hard bounds."""

    target: int
    least: int
    most: int

    def __post_init__(self) -> None:
        assert 1 <= self.least <= self.target <= self.most, self
        # Else what is left behind a chunk could be too long for one and too short for two, or a
        # window hold nothing but one character's inside.
        assert self.most >= 2 * self.least, self
        assert self.most - self.least >= CHARACTER_TOKENS_MAX - 1, self

    @classmethod
    def around(cls, target: int) -> ChunkBounds:
        """Half as many to one and a half times as many; `target` is at least 4."""
        return cls(target=target, least=target // 2, most=target + target // 2)


def chunk_ends(pieces: Sequence[bytes], bounds: ChunkBounds, first: int = 0) -> list[int]:
    """The positions where chunks of the tokens [first, len(pieces)) end, ascending.

    `pieces`: the bytes of every token from the prompt's first on, so that what `first` stands in is
    known. The last end is len(pieces); there is none when `first` is that.
    """
    total = len(pieces)
    assert 0 <= first <= total, (first, total)
    if first == total:
        return []
    if total - first <= bounds.most:
        return [total]
    text = _TokenText(pieces)
    cuts = list(text.cuts())
    ends: list[int] = []
    start, near = first, 0
    while total - start > bounds.most:
        # What is left is a chunk, too: not shorter than the least.
        low, high = start + bounds.least, min(start + bounds.most, total - bounds.least)
        while near < len(cuts) and cuts[near][0] < low:
            near += 1
        found = _nearest(cuts, near, high, start + bounds.target, bounds.target)
        start = text.fallback(low, high, start + bounds.target) if found is None else found
        ends.append(start)
    return [*ends, total]


def _nearest(
    cuts: Sequence[tuple[int, Strength]], near: int, high: int, wanted: int, target: int
) -> int | None:
    """The best of the cuts from index `near` on that are at most `high`; None: there is none."""
    best: tuple[float, int] | None = None
    for index in range(near, len(cuts)):
        position, strength = cuts[index]
        if position > high:
            break
        cost = (abs(position - wanted) + DETOURS[strength] * target, position)
        if best is None or cost < best:
            best = cost
    return None if best is None else best[1]


class _TokenText:
    """The text of some tokens, and where in it each of them ends."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        decoder = _Utf8Decoder("surrogateescape")
        texts: list[str] = []
        # For each position: the characters complete before it, and whether one is begun there.
        self._chars = [0]
        self._is_inside = [False]
        chars, is_inside = 0, False
        for piece in pieces:
            if is_inside or not piece.isascii():
                text = decoder.decode(piece)
                is_inside = bool(decoder.getstate()[0])
            else:
                text = piece.decode("ascii")
            texts.append(text)
            chars += len(text)
            self._chars.append(chars)
            self._is_inside.append(is_inside)
        texts.append(decoder.decode(b"", final=True))
        self._text = "".join(texts)
        self._graphemes = Graphemes(self._text)

    def cuts(self) -> Iterator[tuple[int, Strength]]:
        """Positions at which tokens end and edges are, ascending; of two at one the stronger."""
        chars, position = self._chars, 0
        best: tuple[int, Strength] | None = None
        for edge in edges(self._text):
            # Edges ascend, and so do ends of tokens: each is passed once.
            while position < len(chars) and chars[position] < edge.first:
                position += 1
            if position == len(chars):
                break
            if chars[position] > edge.last or not self._is_whole(position):
                continue
            if best is not None and best[0] != position:
                yield best
                best = None
            if best is None or best[1] < edge.strength:
                best = (position, edge.strength)
        if best is not None:
            yield best

    def fallback(self, low: int, high: int, wanted: int) -> int:
        """The nearest position to `wanted` in [low, high] beside space, else between characters,
        as people or as computers see them, else any.
        """
        whole: int | None = None
        between: int | None = None
        middle = min(max(wanted, low), high)
        for position in _outwards(low, high, middle):
            if self._is_inside[position]:
                continue
            if between is None:
                between = position
            if not self._graphemes.breaks_at(self._chars[position]):
                continue
            if self._is_beside_space(position):
                return position
            if whole is None:
                whole = position
        if whole is not None:
            return whole
        return middle if between is None else between

    def _is_whole(self, position: int) -> bool:
        return not self._is_inside[position] and self._graphemes.breaks_at(self._chars[position])

    def _is_beside_space(self, position: int) -> bool:
        at, text = self._chars[position], self._text
        return text[at - 1 : at].isspace() or text[at : at + 1].isspace()


def _outwards(low: int, high: int, middle: int) -> Iterator[int]:
    """All of [low, high], the nearest to `middle` first."""
    yield middle
    for away in range(1, max(middle - low, high - middle) + 1):
        if middle - away >= low:
            yield middle - away
        if middle + away <= high:
            yield middle + away

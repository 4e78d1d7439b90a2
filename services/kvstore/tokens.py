"""A log's token ids, in pieces that forks share.

Owns `Tokens`. Pure. Full pieces are immutable: a fork at any position refers to the same ones and
copies less than one, so that it costs the same at any length.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, overload

TOKEN_TYPECODE: Final = "I"
assert array(TOKEN_TYPECODE).itemsize == 4

PIECE: Final = 4096
"""Ids of a full piece: 16 KiB."""


def token_array(ids: Iterable[int]) -> array[int]:
    """Token ids as an array; one that is an array already stays the same object."""
    return ids if isinstance(ids, array) else array(TOKEN_TYPECODE, ids)


class Tokens(Sequence[int]):
    """Token ids from position 0: reads, grows and is cut at its end as an `array` does.

    Slices are arrays.
    """

    __slots__ = ("_full", "_tail")
    # Compared by content, which changes: not hashable.
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._full: list[array[int]] = []
        self._tail = array(TOKEN_TYPECODE)
        self.extend(ids)

    def head(self, count: int) -> Tokens:
        """The first `count` ids; what this log does later does not change them."""
        head = Tokens()
        full, rest = divmod(count, PIECE)
        head._full = self._full[:full]
        if rest:
            piece = self._full[full] if full < len(self._full) else self._tail
            head._tail = piece[:rest]
        assert len(head) == count, "a head of more ids than there are"
        return head

    def __len__(self) -> int:
        return len(self._full) * PIECE + len(self._tail)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> array[int]: ...

    def __getitem__(self, index: int | slice) -> int | array[int]:
        if isinstance(index, slice):
            return self._slice(index)
        at = index if index >= 0 else index + len(self)
        piece, offset = divmod(at, PIECE)
        if at < 0 or piece > len(self._full):
            raise IndexError(index)
        return (self._full[piece] if piece < len(self._full) else self._tail)[offset]

    def _slice(self, index: slice) -> array[int]:
        first, end, step = index.indices(len(self))
        assert step == 1, "slices of consecutive ids only"
        found = array(TOKEN_TYPECODE)
        while first < end:
            number, offset = divmod(first, PIECE)
            piece = self._full[number] if number < len(self._full) else self._tail
            count = min(end - first, PIECE - offset)
            found += piece[offset : offset + count]
            first += count
        return found

    def __iter__(self) -> Iterator[int]:
        return chain(*self._full, self._tail)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and self.begins_with(other)

    def begins_with(self, ids: Sequence[int], count: int | None = None) -> bool:
        """Whether the first `count` (None: all) of `ids` are the first ids here."""
        wanted = token_array(ids)
        end = len(wanted) if count is None else count
        if not len(wanted) >= end <= len(self):
            return False
        full, rest = divmod(end, PIECE)
        for number in range(full):
            if wanted[number * PIECE : (number + 1) * PIECE] != self._full[number]:
                return False
        piece = self._full[full] if full < len(self._full) else self._tail
        return wanted[full * PIECE : end] == piece[:rest]

    def __repr__(self) -> str:
        return f"Tokens({list(self)!r})"

    @property
    def newest(self) -> int:
        """The last id; there is one."""
        return self._tail[-1] if self._tail else self._full[-1][-1]

    def append(self, token_id: int) -> None:
        """One more."""
        tail = self._tail
        tail.append(token_id)
        if len(tail) == PIECE:
            self._full.append(tail)
            self._tail = array(TOKEN_TYPECODE)

    def extend(self, ids: Iterable[int]) -> None:
        """More of them."""
        self._tail.extend(token_array(ids))
        self._split()

    def frombytes(self, data: bytes | memoryview) -> None:
        """More of them, as u32 of this machine."""
        self._tail.frombytes(data)
        self._split()

    def _split(self) -> None:
        tail = self._tail
        if len(tail) < PIECE:
            return
        full = len(tail) // PIECE * PIECE
        self._full += [tail[first : first + PIECE] for first in range(0, full, PIECE)]
        self._tail = tail[full:]

    def __delitem__(self, index: slice) -> None:
        """Only `del tokens[count:]`."""
        assert index.stop is None
        assert index.step is None
        count = index.start
        if count < len(self):
            head = self.head(count)
            self._full, self._tail = head._full, head._tail

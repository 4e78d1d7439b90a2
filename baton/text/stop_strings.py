"""Matching many stop strings in a text that arrives in pieces (Aho and Corasick's automaton).

Owns the matcher only: pure, no I/O, no tokens. It works character by character, so that where a
match is found depends on the text alone and never on how tokens cut it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

_ROOT: Final = 0


class StopMatcher:
    """The automaton of a set of stop strings. Immutable after construction; states are ints.

    The state after some text stands for the longest suffix of it that begins a stop string;
    `depth(state)` is the length of that suffix. Time and memory to build: linear in the total
    length of the strings, which `SamplingParameters.validate` bounds.
    """

    ROOT: Final = _ROOT

    def __init__(self, stop_strings: Sequence[str]) -> None:
        assert all(stop_strings), "an empty stop string stops everything; validate() refuses it"
        self._next: list[dict[str, int]] = [{}]
        self._depth: list[int] = [0]
        self._found: list[str | None] = [None]
        for stop in stop_strings:
            self._insert(stop)
        self._fail = self._link()

    def _insert(self, stop: str) -> None:
        node = _ROOT
        for char in stop:
            child = self._next[node].get(char)
            if child is None:
                child = len(self._next)
                self._next[node][char] = child
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._found.append(None)
            node = child
        self._found[node] = stop

    def _link(self) -> list[int]:
        """The fail links, breadth first; a node also finds what its suffixes find."""
        fail = [_ROOT] * len(self._next)
        queue = deque(self._next[_ROOT].values())
        while queue:
            node = queue.popleft()
            if self._found[node] is None:
                self._found[node] = self._found[fail[node]]
            for char, child in self._next[node].items():
                shorter = fail[node]
                while shorter != _ROOT and char not in self._next[shorter]:
                    shorter = fail[shorter]
                fail[child] = self._next[shorter].get(char, _ROOT)
                queue.append(child)
        return fail

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while True:
            child = self._next[state].get(char)
            if child is not None:
                return child
            if state == _ROOT:
                return _ROOT
            state = self._fail[state]

    def depth(self, state: int) -> int:
        """How many of the last characters may still become a stop string."""
        return self._depth[state]

    def found(self, state: int) -> str | None:
        """The longest stop string that ends exactly here, if any."""
        return self._found[state]

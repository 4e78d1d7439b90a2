"""Where the beginnings of prompts lie: what this gateway saw of the stores' caches, for routing.

Owns a bounded memory of (scope, beginning) -> kvstores, and one request's words to and from it.
Pure. A hint that is wrong costs speed: what a log begins with is what the store's Open answers, and
each answer corrects what is remembered here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from blake3 import blake3

from baton.kv.digests import ids_bytes
from services.gateway.request import CacheMode, SequenceRequest

ENTRIES_MAX: Final = 131_072
"""Beginnings remembered; with two stores each about 40 MB of memory at most."""

STEP_TOKENS: Final = 16
KEY_BYTES: Final = 16


def cuts(tokens: int) -> Iterator[int]:
    """Positions at which beginnings are remembered: the same of every prompt, wider apart behind.

    A prompt of 32,768 tokens has 144 of them, so that looking for one costs well under a
    millisecond. What is found may be short of the truth by one step.
    """
    steps = chain(
        range(STEP_TOKENS, 512, STEP_TOKENS),
        range(512, 4096, 64),
        range(4096, max(tokens, 4096) + 1, 512),
    )
    for position in steps:
        if position > tokens:
            return
        yield position


class ReuseHints:
    """Which kvstore has which beginnings; the least lately used are forgotten first."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries_max = entries_max
        self._stores: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stores)

    def found(self, beginning: Beginning) -> dict[str, int]:
        """Tokens of a prompt by the address of the kvstore that should have them."""
        found: dict[str, int] = {}
        for position, key in reversed(beginning.keys):
            stores = self._stores.get(key)
            if stores is None:
                continue
            for address in stores:
                if address not in found:
                    found[address] = position
                    self._stores.move_to_end(key)
        return found

    def noted(self, beginning: Beginning, address: str) -> None:
        """All of it lies at the kvstore of that address."""
        for _, key in beginning.keys:
            stores = self._stores.get(key, ())
            if address not in stores:
                self._stores[key] = (*stores, address)
            self._stores.move_to_end(key)
        while len(self._stores) > self._entries_max:
            self._stores.popitem(last=False)

    def limited(self, beginning: Beginning, address: str, tokens: int) -> None:
        """The kvstore said that it has so many tokens of it and no more."""
        for position, key in beginning.keys:
            stores = self._stores.get(key, ())
            if position <= tokens or address not in stores:
                continue
            left = tuple(one for one in stores if one != address)
            if left:
                self._stores[key] = left
            else:
                del self._stores[key]


class Beginning:
    """A prompt's beginnings as keys, each with its position; only its own scope has the same."""

    def __init__(self, scope: bytes, token_ids: Sequence[int]) -> None:
        hasher, data, done = blake3(scope), ids_bytes(token_ids), 0
        keys: list[tuple[int, bytes]] = []
        for position in cuts(len(token_ids)):
            hasher.update(data[4 * done : 4 * position])
            keys.append((position, hasher.digest(KEY_BYTES)))
            done = position
        self.keys: tuple[tuple[int, bytes], ...] = tuple(keys)


class RequestReuse:
    """One request's part: what is expected for it, and what its log turned out to be."""

    def __init__(self, hints: ReuseHints, request: SequenceRequest) -> None:
        self._hints = hints
        self._request = request
        self._prompt: Beginning | None = None
        if request.cache_mode is not CacheMode.OFF:
            self._prompt = Beginning(self._scope(), request.prompt.token_ids)

    def expected(self) -> Mapping[str, int]:
        """Tokens that would not have to be computed, by kvstore address."""
        parent = self._request.parent
        found = {} if self._prompt is None else self._hints.found(self._prompt)
        if parent is not None:
            found[parent.address] = max(parent.position, found.get(parent.address, 0))
        usable = max(len(self._request.prompt.token_ids) - 1, 0)
        return {address: min(tokens, usable) for address, tokens in found.items()}

    def opened(self, address: str, cached_tokens: int) -> None:
        """A store's word on what it has of the prompt."""
        if self._prompt is not None and self._request.parent is None:
            self._hints.limited(self._prompt, address, cached_tokens)

    def sealed(self, address: str) -> None:
        """The whole prompt has KV there that lookups find."""
        if self._prompt is not None and not self._request.is_dropped_at_end:
            self._hints.noted(self._prompt, address)

    def moved(self, before: str, address: str, cached_tokens: int) -> None:
        """The log left one kvstore for another; what it had begun with is others' too."""
        if self._prompt is not None and not self._request.is_dropped_at_end:
            self._hints.limited(self._prompt, before, cached_tokens)
            self._hints.noted(self._prompt, address)

    def ended(self, address: str, answer: Sequence[int]) -> None:
        """The answer is complete: all but its last token has KV, and is the next turn's prefix."""
        if self._prompt is not None and not self._request.is_dropped_at_end and answer:
            ids = (*self._request.prompt.token_ids, *answer[:-1])
            self._hints.noted(Beginning(self._scope(), ids), address)

    def _scope(self) -> bytes:
        return self._request.tenant.scope(self._request.cache_salt).canonical_bytes()

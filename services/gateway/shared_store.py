"""What gateways share through a store that may be slow, wrong, empty or gone: its shape.

Owns the commands' type and the names of keys. Whatever stands in such a store is a hint: losing it
costs speed or a limit's sharpness, never truth. Never does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from blake3 import blake3

SECRET_CONTEXT: Final = "baton 2026-01 gateway shared store v1"
ASK_WITHIN_S: Final = 0.05
"""Longer than this no request waits for what other gateways say."""

MAC_BYTES: Final = 32
NAME_CHARS: Final = 32

Command = tuple[str | bytes | int, ...]
Replies = Sequence[object]


class SharedStore(Protocol):
    """Where commands go. Nothing here raises: a store that cannot answer is as good as none."""

    @property
    def is_up(self) -> bool:
        """Whether it would be asked now."""
        ...

    async def ask(
        self, commands: Sequence[Command], within_s: float = ASK_WITHIN_S
    ) -> Replies | None:
        """Run the commands as one transaction; a reply each, an error as an exception object.

        None when no answer came in time: the commands may have run all the same.
        """
        ...

    def post(self, commands: Sequence[Command]) -> bool:
        """The same without waiting; False when they were dropped."""
        ...

    def on_up(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the store is found, first and after each loss."""
        ...


class KeySpace:
    """Names and signatures of one cluster, from its key: clusters may share a store unharmed.

    Names are hashes: of one length, and silent about tenants and workers.
    """

    def __init__(self, cluster_key: bytes) -> None:
        self._secret = blake3(cluster_key, derive_key_context=SECRET_CONTEXT).digest()
        self._prefix = "baton:v1:" + blake3(b"space", key=self._secret).hexdigest(length=8)

    def key(self, kind: str, name: str) -> str:
        """The key of something with a name."""
        digest = blake3(f"{kind}:{name}".encode(), key=self._secret)
        return f"{self._prefix}:{kind}:{digest.hexdigest(length=NAME_CHARS // 2)}"

    def pattern(self, kind: str) -> str:
        """Matches every key of a kind and nothing that is longer."""
        return f"{self._prefix}:{kind}:" + "[0-9a-f]" * NAME_CHARS

    def mac(self, value: bytes) -> bytes:
        """Who can write to the store but does not hold the cluster key cannot make this."""
        return blake3(b"value:" + value, key=self._secret).digest()

"""How this worker cuts prompts: by its settings, its profile, its model and its machine.

Owns the order in which they count. The cuts themselves are `baton.worker.chunker`'s.
"""

from __future__ import annotations

from baton.heartbeat import Role
from baton.kv.label import PairLabel
from baton.text.boundaries import ChunkBounds
from baton.worker.chunk_profile import (
    chunk_tokens_for,
    load_profile,
    most_chunk_tokens,
    this_machine,
)
from baton.worker.chunker import Chunking, chunk_size
from services.prefill.config import PrefillConfig

BLOCK_TOKENS_MAX = 64
"""The largest page: before a kvstore was asked, a chunk may be rounded up to so many tokens."""


class ChunkPlanning:
    """The chunk size of one worker. StartupError for a profile that is none."""

    def __init__(self, config: PrefillConfig) -> None:
        self._config = config
        self._profile = load_profile(config.chunk_profile)

    @property
    def chunk_tokens_most(self) -> int:
        """Tokens of the longest chunk that could come, known before the model's label is."""
        config = self._config
        most = most_chunk_tokens(Role.PREFILL.value, self._profile, config.chunk_tokens)
        if config.chunking is Chunking.FIXED:
            return most
        return ChunkBounds.around(chunk_size(most, BLOCK_TOKENS_MAX)).most

    def chunk_tokens(self, label: PairLabel) -> int:
        """The size aimed at by a worker of this label, here."""
        config = self._config
        ours = (label, this_machine(config.threads))
        return chunk_tokens_for(Role.PREFILL.value, self._profile, config.chunk_tokens, ours)

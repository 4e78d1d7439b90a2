"""One prompt's part of a forward pass. Data only, without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """Consecutive tokens of one prompt.

    `tokens` stand at `first_position` and on; all earlier KV must be in the pages that `page_table`
    names (page i holds positions i * block_tokens and on). `wants_logits`: those after the chunk's
    last token. `should_cancel` is asked between layers (None: never). `owner` is the same number
    for all chunks of one run, and no other's: a device keeps their KV (None: it keeps nothing).
    """

    tokens: Sequence[int]
    first_position: int
    page_table: Sequence[int]
    wants_logits: bool = False
    should_cancel: Callable[[], bool] | None = None
    owner: int | None = None

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.first_position + len(self.tokens)

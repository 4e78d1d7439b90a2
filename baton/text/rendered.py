"""The rendered prompt: text, and where the template itself wrote control tokens.

Owns the value that the template writes and the tokenizer reads, and how control tokens are found in
text. Never holds a token id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """What a chat template made of a conversation.

    `control_spans` are half-open character ranges of `text`, ascending and disjoint. Each holds
    exactly one control token (such as `<|im_start|>`) that the template wrote. Every other
    character, whatever it spells, is plain text: a control token typed by a user is in no span.
    """

    text: str
    control_spans: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        end = 0
        for start, stop in self.control_spans:
            assert end <= start < stop <= len(self.text), (start, stop)
            end = stop


def control_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Match any of `texts`, the longest first, as the tokenizers library does."""
    ordered = sorted(texts, key=lambda text: (-len(text), text))
    # An empty alternation would match everywhere; this one matches nowhere.
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")

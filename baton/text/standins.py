"""Telling apart, in a rendered prompt, what the template wrote and what users wrote.

Owns the stand-ins: before rendering, the characters of which control tokens are made are replaced,
in everything a user sent, by private-use characters that occur nowhere else. One stands for one,
so lengths, slices and trimming are unchanged. After rendering, a control token that still reads as
such can only be the template's; then the stand-ins are turned back. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final

from baton.text.messages import Message, refuse
from baton.text.rendered import control_pattern

_PRIVATE_PLANES: Final = ((0xF0000, 0xFFFFD), (0x100000, 0x10FFFD), (0xE000, 0xF8FF))

# Keys and words of the chat and JSON-schema vocabulary: templates look them up and compare them,
# and none is part of a control token unless a template builds one around it.
_KNOWN_WORDS: Final = frozenset(
    {
        "additionalProperties",
        "anyOf",
        "arguments",
        "array",
        "auto",
        "boolean",
        "content",
        "default",
        "description",
        "enum",
        "function",
        "functions",
        "id",
        "integer",
        "items",
        "maximum",
        "minimum",
        "name",
        "null",
        "number",
        "object",
        "parameters",
        "properties",
        "reasoning_content",
        "required",
        "return",
        "role",
        "strict",
        "string",
        "text",
        "title",
        "tool",
        "tool_call_id",
        "tool_calls",
        "type",
    }
)


class ControlTexts:
    """The texts of a tokenizer's control tokens, prepared once for many renders."""

    def __init__(self, control_tokens: Collection[str]) -> None:
        # White space is never masked, so a token of nothing else cannot be told from content.
        self.tokens: Final = tuple(sorted(item for item in control_tokens if not item.isspace()))
        self.alphabet: Final = sorted(set("".join("".join(self.tokens).split())))
        self.pattern: Final = control_pattern(self.tokens)
        self._longest = max(map(len, self.tokens), default=0)
        self._beginnings = {token[:n] for token in self.tokens for n in range(1, len(token))}
        self._endings = {token[-n:] for token in self.tokens for n in range(1, len(token))}
        # A look-ahead finds overlapping occurrences as well.
        self._anywhere = re.compile(f"(?=({self.pattern.pattern}))")

    def dangerous(self, text: str) -> Iterator[tuple[int, int]]:
        """Whole tokens; the end of `text` as a token's start; its start as a token's end."""
        if len(text) <= self._longest and any(text in token for token in self.tokens):
            yield 0, len(text)
        yield from (match.span(1) for match in self._anywhere.finditer(text))
        for size in range(1, min(self._longest, len(text) + 1)):
            if text[-size:] in self._beginnings:
                yield len(text) - size, len(text)
            if text[:size] in self._endings:
                yield 0, size


class StandIns:
    """The stand-in characters of one render, chosen so that no input holds any of them."""

    def __init__(self, controls: ControlTexts, texts: Iterable[str]) -> None:
        first = _free_block(len(controls.alphabet) + 1, texts)
        self._controls = controls
        self._to: dict[int, str] = {
            ord(char): chr(first + index) for index, char in enumerate(controls.alphabet)
        }
        self._back = {ord(stand_in): chr(char) for char, stand_in in self._to.items()}
        self.end_mark: Final = chr(first + len(controls.alphabet))

    def restore(self, text: str) -> str:
        """Turn every stand-in back; positions are unchanged."""
        return text.translate(self._back)

    def replace_all(self, text: str) -> str:
        """Replace every character that any control token holds."""
        return text.translate(self._to)

    def replace_dangerous(self, text: str) -> str:
        """Replace only where `text` spells a control token, or could be a part of one."""
        spans = list(self._controls.dangerous(text))
        if not spans:
            return text
        chars = list(text)
        for start, end in spans:
            chars[start:end] = text[start:end].translate(self._to)
        return "".join(chars)


def _free_block(size: int, texts: Iterable[str]) -> int:
    """The first of `size` neighbouring private-use characters that no text holds."""
    used = sorted({ord(char) for text in texts for char in _PRIVATE_CHARS.findall(text)})
    for low, high in _PRIVATE_PLANES:
        free = low
        for code in used:
            if low <= code <= high:
                if code - free >= size:
                    break
                free = code + 1
        if free + size - 1 <= high:
            return free
    raise refuse("messages", "hold too many private-use characters")


_PRIVATE_CHARS: Final = re.compile(
    "[" + "".join(f"{chr(low)}-{chr(high)}" for low, high in _PRIVATE_PLANES) + "]"
)


def map_messages(messages: Sequence[Message], transform: Callable[[str], str]) -> list[Message]:
    """Apply `transform` to every string of every message but its role.

    The role stays: it is one of a fixed set, templates branch on it, and some build a control
    token from it.
    """
    return [{**map_strings(item, transform), "role": item["role"]} for item in messages]


def map_strings(value: Any, transform: Callable[[str], str]) -> Any:
    """Apply `transform` to every string inside a plain value, unknown keys included.

    The value of a key `type` stays when it is a known word: templates compare it.
    """
    if isinstance(value, str):
        return transform(value)
    if isinstance(value, list):
        return [map_strings(item, transform) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        (key if key in _KNOWN_WORDS else transform(key)): (
            item
            if key == "type" and isinstance(item, str) and item in _KNOWN_WORDS
            else map_strings(item, transform)
        )
        for key, item in value.items()
    }


def all_strings(value: Any) -> Iterator[str]:
    """Every string inside a plain value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from all_strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from all_strings(item)
